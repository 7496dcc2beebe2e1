package resourcefaults_test

import (
	"os"
	"syscall"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// mount makes a file system in memory of a size; false where the tests may not. It is for as long as the test, and for
// no other user's eyes than those of a server that root starts.
func mount(t *testing.T, size string) (dir string, ok bool) {
	t.Helper()
	dir, err := os.MkdirTemp("", "faults-disk-") //nolint:usetesting // the test's own folder is closed to the server's user
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
