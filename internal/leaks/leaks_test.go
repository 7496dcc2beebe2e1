package leaks

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

func TestLeakedGoroutineIsFound(t *testing.T) {
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		<-end
	}()
	err := Tests{}.find(0)
	assert.ErrorContains(t, err, "TestLeakedGoroutineIsFound")
	allowed := Tests{Allowed: []string{
		"github.com/lanekeeper/lanekeeper/internal/leaks.TestLeakedGoroutineIsFound.func1",
	}}
	assert.NoError(t, allowed.find(0), "one that is allowed")
	close(end)
	<-ended
	assert.NoError(t, (Tests{}).find(waitTimeout), "one that has ended")
}
