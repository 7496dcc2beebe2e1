//go:build unix

package failover_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// agent is a running process of the program, which logs JSON.
type agent struct{ *proctest.Process }

// launch starts the program in a folder with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, args ...string) *agent {
	t.Helper()
	return &agent{proctest.Start(t, patience, dir, proctest.Environ(environ...), append([]string{program}, args...)...)}
}

// line is what the tests read of a log line.
type line struct {
	Message string      `json:"msg"`
	Listen  string      `json:"listen"`
	Lane    string      `json:"lane"`
	Token   json.Number `json:"fencing_token"`
}

// lines reads what the process has logged.
func (a *agent) lines() []line {
	var all []line
	for text := range strings.Lines(a.Err.String()) {
		var l line
		if json.Unmarshal([]byte(text), &l) == nil {
			all = append(all, l)
		}
	}
	return all
}
