//go:build unix

package failover_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// program is the program under test, built once.
var program string

// long reports whether the long form is wanted.
func long() bool { return os.Getenv("AGENT_OUTAGES") == "long" }

func TestMain(m *testing.M) {
	pgserver.GuardMain() // before the build: the guard of the test server is this binary, started again
	var err error
	if program, err = build(); err != nil {
		fmt.Fprintln(os.Stderr, "failover:", err)
		os.Exit(1)
	}
	pgtest.Main(m)
}

const buildPrefix = "lanekeeper-failover-"

// build makes the program, and removes what earlier runs built: pgtest.Main exits, so nothing can be removed
// after it.
func build() (string, error) {
	old, err := filepath.Glob(filepath.Join(os.TempDir(), buildPrefix+"*"))
	if err != nil {
		return "", err
	}
	for _, path := range old {
		pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(path), buildPrefix))
		if err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrPermission) { // another user's
				return "", err
			}
		}
	}
	path := filepath.Join(os.TempDir(), buildPrefix+strconv.Itoa(os.Getpid()))
	out, err := exec.Command("go", "build", "-race=false", "-o", path, "github.com/lanekeeper/lanekeeper/cmd/agent").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build agent: %w\n%s", err, out)
	}
	return path, nil
}
