//go:build unix

package failover_test

import (
	"os"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// program is the program under test, built once.
var program string

// long reports whether the long form is wanted.
func long() bool { return os.Getenv("AGENT_OUTAGES") == "long" }

func TestMain(m *testing.M) { proctest.Main(m, "failover", &program) }

// launch starts the program in a folder with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, args ...string) *proctest.Process {
	t.Helper()
	return proctest.Start(t, patience, dir, proctest.Environ(environ...), append([]string{program}, args...)...)
}
