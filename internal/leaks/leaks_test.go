package leaks

import (
	"strings"
	"testing"
)

func TestAGoroutineThatIsLeftIsFound(t *testing.T) {
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		<-end
	}()
	err := Tests{}.find(0)
	if err == nil || !strings.Contains(err.Error(), "TestAGoroutineThatIsLeftIsFound") {
		t.Errorf("a goroutine that waits: %v", err)
	}
	allowed := Tests{Allowed: []string{
		"github.com/lanekeeper/lanekeeper/internal/leaks.TestAGoroutineThatIsLeftIsFound.func1",
	}}
	if err := allowed.find(0); err != nil {
		t.Errorf("one that is allowed: %v", err)
	}
	close(end)
	<-ended
	if err := (Tests{}).find(patience); err != nil {
		t.Errorf("one that has ended: %v", err)
	}
}
