//go:build unix

package resourcefaults_test

import (
	"os"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// patience is how long anything may take on a busy machine before a test gives up.
const patience = 90 * time.Second

// program is the program under test, built once for all tests.
var program string

func TestMain(m *testing.M) { proctest.Main(m, "faults", &program) }

// atLength reports whether the long run was asked for.
func atLength() bool { return os.Getenv("AGENT_FAULTS_ALL") != "" }

// eventually polls a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	pgtest.Eventually(t, patience, condition, what)
}
