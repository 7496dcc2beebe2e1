package debian_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/debian"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func write(t *testing.T, path, script string) string {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o700))
	return path
}

func TestFindUpdatesListsAndInstalls(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root installs packages")
	}
	dir := t.TempDir()
	t.Setenv("PATH", dir+":/usr/bin:/bin")
	program := filepath.Join(dir, "stork")
	write(t, filepath.Join(dir, "apt-get"), `cd "`+dir+`" && echo "$*" >>log
case "$*" in
*update) touch lists ;;
*) test -e lists && echo >stork && chmod +x stork ;;
esac`)
	var lines []string
	wanted := debian.Program{Package: "storks", Names: []string{"stork", "stork2"}, Setting: "TEST_STORK"}
	path, err := wanted.Find(t.Context(), func(line string) { lines = append(lines, line) })
	require.NoError(t, err)
	assert.Equal(t, program, path)
	assert.NoDiff(t, []string{"no stork found: installing Debian's package storks (apt-get)"}, lines)
	log, err := os.ReadFile(filepath.Join(dir, "log"))
	require.NoError(t, err)
	const install, wait = "install -y --no-install-recommends storks\n", "-o DPkg::Lock::Timeout=300 "
	assert.Equal(t, wait+install+wait+"update\n"+wait+install, string(log))

	t.Setenv("TEST_STORK", "/elsewhere/stork")
	path, err = wanted.Find(t.Context(), nil)
	require.NoError(t, err)
	assert.Equal(t, "/elsewhere/stork", path)
}

func TestErrorWithoutAptGetNamesPackage(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := debian.Program{Package: "storks", Names: []string{"stork"}, Setting: "TEST_STORK"}.Find(t.Context(), nil)
	require.Truef(t, err != nil, "it was found")
	assert.Contains(t, err.Error(), "sudo apt-get install -y storks", "TEST_STORK")
}
