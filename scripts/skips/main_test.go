package main

import (
	"io"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

func TestSkipNeedsListedReason(t *testing.T) {
	for reason, want := range map[string]bool{"needs root": true, "not today": false} {
		events := `{"Action":"run","Package":"p","Test":"T"}
{"Action":"output","Package":"p","Test":"T","Output":"=== RUN   T\n"}
{"Action":"output","Package":"p","Test":"T","Output":"    a_test.go:7: ` + reason + `\n"}
{"Action":"skip","Package":"p","Test":"T"}
{"Action":"skip","Package":"without-tests"}`
		var out strings.Builder
		err := check(strings.NewReader(events), &out)
		assert.Equal(t, want, err == nil, reason, err)
		assert.Contains(t, out.String(), "p T: a_test.go:7: "+reason)
	}
}

func TestTruncatedEventIsError(t *testing.T) {
	assert.Error(t, check(strings.NewReader(`{"Action":"run"`), io.Discard), "no error")
}
