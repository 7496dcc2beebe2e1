//go:build unix

package rollout_test

import (
	"os"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// program is the program under test, built once.
var program string

// rounds is how often each replica is replaced.
func rounds() int {
	if os.Getenv("AGENT_ROLL") == "long" {
		return 10
	}
	return 1
}

func TestMain(m *testing.M) { proctest.Main(m, "rollout", &program) }

// patience is how long something may take that takes a moment.
const patience = 90 * time.Second

// launch starts a program with exactly the given environment.
func launch(t testing.TB, program string, environ []string, args ...string) *proctest.Process {
	t.Helper()
	return proctest.Start(t, patience, t.TempDir(), proctest.Environ(environ...), append([]string{program}, args...)...)
}
