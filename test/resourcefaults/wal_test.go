package resourcefaults_test

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// TestFullWriteAheadLog: PostgreSQL ends itself at once, and may not start again before there is space. The program
// stays up and rejects requests. After there is space and PostgreSQL runs, all confirmed work exists.
func TestFullWriteAheadLog(t *testing.T) {
	t.Parallel()
	if !isLong() {
		return // writes a hundred megabytes
	}
	disk, ok := mount(t, "112m")
	if !ok {
		t.Log("no file system can be mounted here: the write-ahead log cannot be filled")
		return
	}
	dir, err := os.MkdirTemp("", "faults-server-") //nolint:usetesting // a server started by root belongs to another user
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // the rest is in the temporary folder
	require.NoError(t, os.Chmod(dir, 0o755))
	own := durable(t, dir)
	migrate(t, own.URL())
	apply(t, own.URL())
	stop(t, own)
	moveLog(t, own.Dir(), disk)
	own = durable(t, dir)
	url := own.URL()
	a := serve(t, "", environ(url))
	var yes acknowledged
	if refused := yes.send(a); refused != nil {
		t.Fatalf("before: %+v", refused)
	}
	ballast := filepath.Join(disk, "ballast")
	fill(t, ballast)
	var refused *answer
	for i := 0; i < 400 && refused == nil; i++ {
		refused = yes.send(a)
	}
	assert.Truef(t, refused != nil && refused.status == http.StatusServiceUnavailable, "refused: %+v", refused)
	require.True(t, a.Running(), "the process has ended")
	require.NoError(t, os.Remove(ballast))
	eventually(t, "everything is taken again", func() bool {
		select {
		case <-own.Done(): // it could not start without space; a supervisor would start it again
			own = durable(t, dir)
		default:
		}
		return yes.send(a) == nil
	})
	require.Equal(t, url, own.URL())
	yes.checkStored(t, url)
}

// durable returns a server with durable commits.
func durable(t *testing.T, dir string) *pgserver.Server {
	t.Helper()
	own, err := pgserver.Start(t.Context(), pgserver.Config{Dir: dir, Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { _ = own.Stop(context.WithoutCancel(t.Context())) }) // it may have ended itself
	return own
}

func stop(t *testing.T, own *pgserver.Server) {
	t.Helper()
	require.NoError(t, own.Stop(t.Context()))
	<-own.Done()
}

// moveLog moves the write-ahead log of a stopped server to another file system.
func moveLog(t *testing.T, server, disk string) {
	t.Helper()
	from, to := filepath.Join(server, "data", "pg_wal"), filepath.Join(disk, "pg_wal")
	out, err := exec.CommandContext(t.Context(), "cp", "-a", from, to).CombinedOutput()
	require.NoError(t, err, out)
	require.NoError(t, os.RemoveAll(from))
	require.NoError(t, os.Symlink(to, from))
}
