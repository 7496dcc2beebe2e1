package resourcefaults_test

import (
	"os"
	"syscall"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// mount mounts a file system in memory for the test, which only root and its server can read. It returns false if the
// tests may not mount.
func mount(t *testing.T, size string) (dir string, ok bool) {
	t.Helper()
	dir, err := os.MkdirTemp("", "faults-disk-") //nolint:usetesting // the server's user cannot read the test's own folder
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, os.Remove(dir))
	})
	require.NoError(t, os.Chmod(dir, 0o755))
	if err := syscall.Mount("faults", dir, "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV,
		"mode=0755,size="+size); err != nil {
		t.Logf("mount: %v", err)
		return "", false
	}
	t.Cleanup(func() {
		assert.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH))
	})
	return dir, true
}
