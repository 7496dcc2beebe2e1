//go:build unix

package rolltest_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
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
	pgtest.Main(built{m})
}

// built are tests that have the program.
type built struct{ *testing.M }

// Run builds the program, runs the tests, and removes it.
func (b built) Run() int {
	dir, err := os.MkdirTemp("", "lanekeeper-roll-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "rolltest:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "agent")
	if out, err := exec.Command("go", "build", "-race=false", "-o", program, "github.com/lanekeeper/lanekeeper/cmd/agent").CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "rolltest: build agent: %v\n%s", err, out)
		return 1
	}
	return b.M.Run()
}
