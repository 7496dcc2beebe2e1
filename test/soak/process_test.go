//go:build unix

package soak_test

import (
	"bufio"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// patience is how long anything may take on a busy machine before the test gives up.
const patience = 90 * time.Second

// agent is a running process of the program, which logs JSON.
type agent struct{ *proctest.Process }

// launch starts the program in a folder with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, args ...string) *agent {
	t.Helper()
	return &agent{proctest.Start(t, patience, dir, proctest.Environ(environ...), append([]string{program}, args...)...)}
}

// line is what the tests read of a log line.
type line struct {
	Level   string      `json:"level"`
	Message string      `json:"msg"`
	Listen  string      `json:"listen"`
	Lane    string      `json:"lane"`
	Owner   string      `json:"owner"`
	Token   json.Number `json:"fencing_token"`
	raw     string
}

// lines reads what the process has logged.
func (a *agent) lines() []line {
	var all []line
	scanner := bufio.NewScanner(strings.NewReader(a.Err.String()))
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		var l line
		if json.Unmarshal(scanner.Bytes(), &l) == nil {
			l.raw = scanner.Text()
			all = append(all, l)
		}
	}
	return all
}
