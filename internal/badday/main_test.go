//go:build unix

package badday_test

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
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// patience is how long anything may take on a busy machine before a test gives up.
const patience = 90 * time.Second

// program is the program under test, built once for all tests.
var program string

func TestMain(m *testing.M) {
	pgserver.GuardMain() // before the build: the guard of the test server is this binary, started again
	var err error
	if program, err = build("", nil); err != nil {
		fmt.Fprintln(os.Stderr, "badday:", err)
		os.Exit(1)
	}
	pgtest.Main(m)
}

const buildPrefix = "lanekeeper-badday-"

// build makes the program, and removes what earlier runs built: pgtest.Main exits, so nothing can be removed after it.
func build(name string, flags []string) (string, error) {
	old, err := filepath.Glob(filepath.Join(os.TempDir(), buildPrefix+"*"))
	if err != nil {
		return "", err
	}
	for _, path := range old {
		owner, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), buildPrefix), "-")
		pid, err := strconv.Atoi(owner)
		if err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrPermission) { // another user's
				return "", err
			}
		}
	}
	path := filepath.Join(os.TempDir(), buildPrefix+strconv.Itoa(os.Getpid())+name)
	args := append([]string{"build", "-race=false", "-o", path}, flags...)
	ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "go", append(args, "github.com/lanekeeper/lanekeeper/cmd/agent")...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build agent: %w\n%s", err, out)
	}
	return path, nil
}

// atLength reports whether the long run was asked for.
func atLength() bool { return os.Getenv("AGENT_BADDAYS_ALL") != "" }

// eventually polls a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	pgtest.Eventually(t, patience, condition, what)
}
