//go:build unix

package failover_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
)

// program is the program under test, built once.
var program string

// long reports whether the long form is wanted.
func long() bool { return os.Getenv("AGENT_OUTAGES") == "long" }

func TestMain(m *testing.M) {
	pgserver.GuardMain() // before the build: the guard of the test server is this binary, started again
	var err error
	if program, err = proctest.Build("failover"); err != nil {
		fmt.Fprintln(os.Stderr, "failover:", err)
		os.Exit(1)
	}
	pgtest.Main(m)
}
