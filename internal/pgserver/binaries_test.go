package pgserver_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// environment returns a getenv with only the given variables.
func environment(variables map[string]string) func(string) string {
	return func(name string) string { return variables[name] }
}

// fakePostgres creates a folder whose postgres program reports the given version. Tests that use it are not parallel: a
// child that starts meanwhile would hold the script open, and the script could not run.
func fakePostgres(t *testing.T, version string) string {
	t.Helper()
	dir := t.TempDir()
	script := "#!/bin/sh\necho 'postgres (PostgreSQL) " + version + " (Test)'\n"
	for _, name := range []string{"postgres", "initdb"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
	}
	return dir
}

func TestBinDirExcludesOthers(t *testing.T) {
	good := fakePostgres(t, "16.9")
	prefix := t.TempDir()
	require.NoError(t, os.Symlink(good, filepath.Join(prefix, "bin")))
	oldPrefix := t.TempDir()
	require.NoError(t, os.Symlink(fakePostgres(t, "13.4"), filepath.Join(oldPrefix, "bin")))
	for name, test := range map[string]struct {
		dir  string
		want string // the version, or a part of the error
	}{
		"folder":            {good, "16.9"},
		"its parent":        {prefix, "16.9"},
		"nothing there":     {t.TempDir(), "set it to the folder that holds postgres and initdb"},
		"too old":           {fakePostgres(t, "13.4"), "use a version from 14 to 18"},
		"parent of too old": {oldPrefix, "use a version from 14 to 18"},
		"too new":           {fakePostgres(t, "19beta1"), "19beta1 is not supported"},
		"another tool":      {fakePostgres(t, "x"), "unexpected answer"},
	} {
		bin, err := pgserver.FindBinaries(environment(map[string]string{"AGENT_PG_BIN": test.dir}))
		assert.Truef(t, err != nil || bin.Version == test.want, "%s: version %s, want %s", name, bin.Version, test.want)
		assert.Truef(t, err == nil || strings.Contains(err.Error(), test.want) && strings.Contains(err.Error(), test.dir),
			"%s: error %q does not say %q and %q", name, err, test.want, test.dir)
	}
}

func TestBinariesOnPathThroughLinks(t *testing.T) {
	links := t.TempDir()
	newest := fakePostgres(t, "18.99")
	require.NoError(t, os.Symlink(filepath.Join(newest, "postgres"), filepath.Join(links, "postgres")))
	bin, err := pgserver.FindBinaries(environment(map[string]string{"PATH": "/nowhere:" + links}))
	require.NoError(t, err)
	assert.Truef(t, bin.Major == 18 && (bin.Version == "18.99" || strings.HasPrefix(bin.Dir, "/usr/")),
		"found %+v, want the newest, in %s", bin, newest)
}
