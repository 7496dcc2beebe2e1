//go:build unix

package proctest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// buildLimit is how long a build may take on a busy machine that has compiled nothing yet.
const buildLimit = 15 * time.Minute

// Main builds the program into *path, runs the tests of a package and exits: what TestMain does, whole. With
// AGENT_TEST_PROGRAM in the environment that program is taken: scripts/test builds one for all packages.
func Main(m interface{ Run() int }, name string, path *string) {
	pgserver.GuardMain() // before the build: the guard of the test server is this binary, started again
	*path = os.Getenv("AGENT_TEST_PROGRAM")
	if *path == "" {
		var err error
		if *path, err = Build(name); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			os.Exit(1)
		}
	}
	pgtest.Main(m)
}

// Build makes the program, with further flags of go build, and returns its path. The name of the package under test, and of
// the variant if there are several, tells its programs from those of others. What earlier runs have left is removed: a
// TestMain that exits removes nothing. The file is called agent, in a folder of its own.
func Build(name string, flags ...string) (string, error) {
	prefix := "lanekeeper-" + name + "-"
	if err := removeOld(prefix); err != nil {
		return "", fmt.Errorf("build agent: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), buildLimit)
	defer cancel()
	path := filepath.Join(os.TempDir(), prefix+strconv.Itoa(os.Getpid()), "agent")
	args := append([]string{"build", "-race=false", "-o", path}, flags...)
	if out, err := exec.CommandContext(ctx, "go", append(args, "github.com/lanekeeper/lanekeeper/cmd/agent")...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("build agent: %w\n%s", err, out)
	}
	return path, nil
}

// removeOld removes the programs of test binaries that have ended.
func removeOld(prefix string) error {
	old, err := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*"))
	if err != nil {
		return err
	}
	for _, path := range old {
		pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(path), prefix))
		if err != nil || !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			continue
		}
		if err := os.RemoveAll(path); err != nil && !errors.Is(err, os.ErrPermission) { // another user's
			return err
		}
	}
	return nil
}
