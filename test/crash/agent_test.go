//go:build unix

package crash_test

import (
	"encoding/json"
	"net"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// patience is how long anything may take on a busy machine before the test gives up. It is more than twice as long as
// the server lets a stopped process keep a transaction open.
const patience = 150 * time.Second

// agent is a running process of the program.
type agent struct {
	*proctest.Process

	t testing.TB
}

// launch starts the program in a folder with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, args ...string) *agent {
	t.Helper()
	return &agent{proctest.Start(t, patience, dir, proctest.Environ(environ...), append([]string{program}, args...)...), t}
}

// eventually polls a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	pgtest.Eventually(t, patience, condition, what)
}

var listens = regexp.MustCompile(`listen=http://(\S+)`)

// address is where a process that serves listens.
func (a *agent) address() string {
	a.t.Helper()
	found := listens.FindStringSubmatch(a.Err.String())
	require.True(a.t, found != nil, "the process does not say where it listens")
	return found[1]
}

// answers reports whether somebody accepts connections at an address.
func answers(t testing.TB, address string) bool {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// pid is the process id, as text.
func (a *agent) pid() string { return strconv.Itoa(a.Cmd.Process.Pid) }

// decode reads the JSON document that a process has printed.
func (a *agent) decode(into any) {
	a.t.Helper()
	require.NoError(a.t, json.Unmarshal([]byte(a.Out.String()), into), "in", a.Out.String())
}
