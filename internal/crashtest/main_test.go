//go:build unix

package crashtest_test

import (
	"errors"
	"flag"
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

// program is the program under test, built once for all tests.
var program string

func TestMain(m *testing.M) {
	pgserver.GuardMain() // before the build: the guard of the test server is this binary, started again
	flag.Parse()
	err := setParallel()
	if err == nil {
		program, err = build()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "crashtest:", err)
		os.Exit(1)
	}
	pgtest.Main(m)
}

// setParallel lets more tests run at once than there are processors, because they wait for processes more
// than they compute; -parallel still decides where it is given.
func setParallel() error {
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if given {
		return nil
	}
	return flag.Set("test.parallel", "4")
}

const buildPrefix = "lanekeeper-crashtest-"

// build makes the program, and removes what earlier runs built: pgtest.Main exits, so nothing can be
// removed after it.
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
