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

// buildLimit bounds a build on a busy machine with an empty cache.
const buildLimit = 15 * time.Minute

// Main builds the program into *path, runs the tests of a package and exits. It is the whole body of TestMain. With
// AGENT_TEST_PROGRAM in the environment, Main uses that program: scripts/test builds one program for all packages.
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

// Build makes the program, with further flags of go build, and returns its path. The names of the package under test,
// and of the variant if there are several, distinguish its programs from others. Build removes the programs of earlier
// runs, because a TestMain that exits removes nothing. The file's name is agent, in a folder of its own.
func Build(name string, flags ...string) (string, error) { return buildIn("", name, flags...) }

// ErrNoCommit reports that neither the repository nor its remote has a commit.
var ErrNoCommit = errors.New("the commit is not in the history of this clone")

// BuildCommit is Build of the source at a commit: the program of an earlier release.
func BuildCommit(name, commit string) (string, error) {
	if exec.Command("git", "cat-file", "-e", commit+"^{commit}").Run() != nil { // a shallow clone
		if out, err := exec.Command("git", "fetch", "--quiet", "--depth=1", "origin", commit).CombinedOutput(); err != nil {
			return "", fmt.Errorf("build agent of commit %s: %w, and git fetch: %w: %s", commit, ErrNoCommit, err, out)
		}
	}
	dir, err := os.MkdirTemp("", "lanekeeper-source-")
	if err != nil {
		return "", fmt.Errorf("build agent of commit %s: %w", commit, err)
	}
	path, err := buildArchive(dir, name, commit)
	if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
		return "", fmt.Errorf("build agent of commit %s: %w", commit, err)
	}
	return path, nil
}

// buildArchive unpacks a commit into a directory and builds there. Without the directory's name in it, Go's cache
// serves the next run.
func buildArchive(dir, name, commit string) (string, error) {
	root, err := exec.Command("git", "rev-parse", "--show-toplevel").Output()
	if err != nil {
		return "", fmt.Errorf("find the repository: %w", err)
	}
	archive := filepath.Join(dir, "source.tar")
	if out, err := exec.Command("git", "-C", strings.TrimSpace(string(root)), "archive", "--output", archive,
		commit).CombinedOutput(); err != nil {
		return "", fmt.Errorf("git archive: %w: %s", err, out)
	}
	if out, err := exec.Command("tar", "-xf", archive, "-C", dir).CombinedOutput(); err != nil {
		return "", fmt.Errorf("tar: %w: %s", err, out)
	}
	return buildIn(dir, name, "-trimpath")
}

// buildIn builds the program of the module in a directory, or of this one.
func buildIn(dir, name string, flags ...string) (string, error) {
	prefix := "lanekeeper-" + name + "-"
	if err := removeOld(prefix); err != nil {
		return "", fmt.Errorf("build agent: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), buildLimit)
	defer cancel()
	path := filepath.Join(os.TempDir(), prefix+strconv.Itoa(os.Getpid()), "agent")
	args := append([]string{"build", "-race=false", "-o", path}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, "github.com/lanekeeper/lanekeeper/cmd/agent")...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build agent: %w\n%s", err, out)
	}
	return path, nil
}

// removeOld removes the programs of ended test binaries.
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
