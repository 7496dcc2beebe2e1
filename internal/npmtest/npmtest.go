// Package npmtest runs scripts of Node in tests, with packages from npm. A set of packages is installed once for each
// user, in the cache folder of that user; later tests need no network. Name exact versions: name@1.2.3.
//
// A test is skipped where npm or node is missing, or npm cannot install.
package npmtest

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

const (
	installLimit = 4 * time.Minute
	scriptLimit  = 5 * time.Minute
)

// Install returns a folder whose node_modules have the packages.
func Install(t *testing.T, packages ...string) (dir string) {
	t.Helper()
	for _, tool := range []string{"npm", "node"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is not installed: %s is not tried", tool, packages[0])
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	cache = filepath.Join(cache, "lanekeeper-test")
	dir = filepath.Join(cache, strings.ReplaceAll(strings.Join(packages, "+"), "/", "_"))
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	require.NoError(t, os.MkdirAll(cache, 0o755))
	fresh, err := os.MkdirTemp(cache, "installing-") //nolint:usetesting // renamed later, within one file system
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(fresh) })
	ctx, cancel := context.WithTimeout(t.Context(), installLimit)
	defer cancel()
	install := exec.CommandContext(ctx, "npm", append([]string{
		"install", "--no-audit", "--no-fund", "--no-save", "--prefer-offline", "--prefix", fresh,
	}, packages...)...)
	install.Dir = fresh
	if out, err := install.CombinedOutput(); err != nil {
		t.Skipf("npm cannot install %s (offline?): %v\n%s", packages[0], err, out)
	}
	if err := os.Rename(fresh, dir); err != nil && !errors.Is(err, fs.ErrExist) { // another test may have been first
		t.Fatal(err)
	}
	return dir
}

// Command returns a command that runs a script with the packages. It ends with the test, at the latest.
func Command(t *testing.T, script string, packages ...string) *exec.Cmd {
	t.Helper()
	modules, dir := Install(t, packages...), t.TempDir()
	require.NoError(t, os.Symlink(filepath.Join(modules, "node_modules"), filepath.Join(dir, "node_modules")))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "script.mjs"), []byte(script), 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), scriptLimit)
	t.Cleanup(cancel)
	run := exec.CommandContext(ctx, "node", "script.mjs")
	run.Dir, run.Env, run.Stderr = dir, os.Environ(), os.Stderr
	return run
}
