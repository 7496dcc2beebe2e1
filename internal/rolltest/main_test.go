//go:build unix

package rolltest_test

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

// rounds is how often each replica is replaced.
func rounds() int {
	if os.Getenv("AGENT_ROLL") == "long" {
		return 10
	}
	return 1
}

func TestMain(m *testing.M) {
	pgserver.GuardMain() // before the build: the guard of the test server is this binary, started again
	var err error
	if program, err = proctest.Build("rolltest"); err != nil {
		fmt.Fprintln(os.Stderr, "rolltest:", err)
		os.Exit(1)
	}
	pgtest.Main(m)
}
