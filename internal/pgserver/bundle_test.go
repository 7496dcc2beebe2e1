package pgserver

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha512"
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// archive writes an npm archive of the given files and returns its path and hash.
func archive(t *testing.T, files map[string]string) (path, integrity string) {
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
	for _, c := range []interface{ Close() error }{w, gz} {
		require.NoError(t, c.Close())
	}
	path = filepath.Join(t.TempDir(), "bundle.tgz")
	require.NoError(t, os.WriteFile(path, packed.Bytes(), 0o600))
	sum := sha512.Sum512(packed.Bytes())
	return path, base64.StdEncoding.EncodeToString(sum[:])
}

func TestUnpackBundleCreatesLinks(t *testing.T) {
	t.Parallel()
	path, integrity := archive(t, map[string]string{
		"package/package.json":             "{}",
		"package/native/bin/postgres":      "#!/bin/sh\n",
		"package/native/lib/libx.so.1.2":   "library",
		"package/native/pg-symlinks.json":  `[{"source":"native/lib/libx.so.1.2","target":"native/lib/libx.so"}]`,
		"package/native/share/postgres.md": "text",
	})
	into := filepath.Join(t.TempDir(), "out")
	require.NoError(t, unpackBundle(path, into, integrity))
	got, err := os.ReadFile(filepath.Join(into, "lib", "libx.so"))
	assert.Truef(t, err == nil && string(got) == "library", "the link leads to %q, %v", got, err)
	info, err := os.Stat(filepath.Join(into, "bin", "postgres"))
	assert.Truef(t, err == nil && info.Mode().Perm()&0o111 == 0o111, "the program is not executable: %v, %v", info, err)
	assert.True(t, !exists(filepath.Join(into, "package.json")), "a file outside native/ was unpacked")
}

func TestWrongBundleIsRejected(t *testing.T) {
	t.Parallel()
	_, other := archive(t, map[string]string{"package/native/bin/postgres": "other"})
	path, _ := archive(t, map[string]string{"package/native/bin/postgres": "changed"})
	into := filepath.Join(t.TempDir(), "out")
	assert.ErrorContains(t, unpackBundle(path, into, other), "not used")
	assert.True(t, !exists(into), "the archive was unpacked")
}

func TestBundleCannotWriteOutside(t *testing.T) {
	t.Parallel()
	for name, files := range map[string]map[string]string{
		"file": {"package/native/../../../evil": "x"},
		"link": {"package/native/pg-symlinks.json": `[{"source":"native/lib/x","target":"../../evil"}]`},
	} {
		path, integrity := archive(t, files)
		dir := t.TempDir()
		assert.Error(t, unpackBundle(path, filepath.Join(dir, "a", "out"), integrity), name, "unpacked")
		require.NoError(t, os.Mkdir(filepath.Join(dir, "b"), 0o700))
		err := unpackBundle(path, filepath.Join(dir, "b", "out"), integrity)
		_, statErr := os.Lstat(filepath.Join(dir, "evil"))
		assert.Truef(t, err != nil && statErr != nil, "%s: unpacked with %v, outside file: %v", name, err, statErr)
	}
}

func TestDebianCreatesNoCluster(t *testing.T) {
	t.Parallel()
	for name, conf := range map[string]string{
		"none":      "",
		"commented": "# Create a \"main\" cluster\n#create_main_cluster = true\n#start_conf = 'auto'\n",
		"set":       "create_main_cluster = true\n",
	} {
		got := string(withoutMainCluster([]byte(conf)))
		assert.Truef(t, strings.Count(got, "create_main_cluster") == 1 &&
			strings.Contains("\n"+got, "\ncreate_main_cluster = false\n"), "%s: %q", name, got)
	}
}
