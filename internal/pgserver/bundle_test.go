package pgserver

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"os"
	"path/filepath"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// writeArchive writes an npm archive of the given files and returns its path and hash.
func writeArchive(t *testing.T, files map[string]string) (path, integrity string) {
	t.Helper()
	var packed bytes.Buffer
	gz := gzip.NewWriter(&packed)
	w := tar.NewWriter(gz)
	for name, content := range files {
		header := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content))}
		require.NoError(t, w.WriteHeader(header))
		_, err := w.Write([]byte(content))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	require.NoError(t, gz.Close())
	path = filepath.Join(t.TempDir(), "bundle.tgz")
	require.NoError(t, os.WriteFile(path, packed.Bytes(), 0o600))
	sum := sha512.Sum512(packed.Bytes())
	return path, base64.StdEncoding.EncodeToString(sum[:])
}

func TestUnpackBundle(t *testing.T) {
	t.Parallel()
	path, integrity := writeArchive(t, map[string]string{
		"package/package.json":             "{}",
		"package/native/bin/postgres":      "#!/bin/sh\n",
		"package/native/lib/libx.so.1.2":   "library",
		"package/native/pg-symlinks.json":  `[{"source":"native/lib/libx.so.1.2","target":"native/lib/libx.so"}]`,
		"package/native/share/postgres.md": "text",
	})
	dir := filepath.Join(t.TempDir(), "out")
	require.NoError(t, unpackBundle(path, dir, integrity))
	target, err := os.Readlink(filepath.Join(dir, "lib", "libx.so"))
	require.NoError(t, err)
	assert.Equal(t, "libx.so.1.2", target)
	info, err := os.Stat(filepath.Join(dir, "bin", "postgres"))
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o755), info.Mode().Perm())
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	assert.NoDiff(t, []string{"bin", "lib", "pg-symlinks.json", "share"}, names) // files outside native/ are left out
}

func TestWrongBundleIsRejected(t *testing.T) {
	t.Parallel()
	_, wrongIntegrity := writeArchive(t, map[string]string{"package/native/bin/postgres": "other"})
	path, _ := writeArchive(t, map[string]string{"package/native/bin/postgres": "changed"})
	dir := filepath.Join(t.TempDir(), "out")
	assert.ErrorContains(t, unpackBundle(path, dir, wrongIntegrity), "SHA-512")
	assert.True(t, !exists(dir), "the archive was unpacked")
}

func TestBundleCannotWriteOutside(t *testing.T) {
	t.Parallel()
	for name, files := range map[string]map[string]string{
		"file": {"package/native/../outside": "x"},
		"link": {"package/native/pg-symlinks.json": `[{"source":"native/lib/x","target":"../outside"}]`},
	} {
		t.Run(name, func(t *testing.T) {
			path, integrity := writeArchive(t, files)
			dir := t.TempDir()
			assert.Error(t, unpackBundle(path, filepath.Join(dir, "out"), integrity))
			_, err := os.Lstat(filepath.Join(dir, "outside"))
			assert.ErrorIs(t, err, os.ErrNotExist)
		})
	}
}
