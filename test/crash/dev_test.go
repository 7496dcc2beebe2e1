//go:build unix

package crash_test

import (
	"errors"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// TestDevLeavesNoServerBehind: kill -9 of `agent dev` ends its PostgreSQL within seconds, and the next
// start finds the data.
func TestDevLeavesNoServerBehind(t *testing.T) {
	t.Parallel()
	dir := pgtest.OpenDir(t)
	environ := []string{"AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=" + never}
	const greeting = "^C stops"

	first := launch(t, dir, environ, "dev")
	first.Says(greeting)
	pid := pgtest.Postmaster(t, filepath.Join(dir, ".agent", "pg", "*"))
	first.Kill()
	pgtest.Eventually(t, 90*time.Second, func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) },
		"the server goes with its process")

	began := time.Now()
	second := launch(t, dir, environ, "dev")
	second.Says(greeting)
	t.Logf("the second start, with its heartbeat, took %s", time.Since(began).Round(time.Millisecond))
	list := launch(t, dir, environ, "executions", "ls", "--json")
	require.Equal(t, 0, list.Exit())
	var got struct {
		Items []struct{ Flow, Status string }
	}
	list.decode(&got)
	beats := 0
	for _, x := range got.Items {
		if x.Flow == "heartbeat" && x.Status == "completed" {
			beats++
		}
	}
	assert.Equal(t, 2, beats, got.Items)
	second.Signal(syscall.SIGTERM)
	assert.Equal(t, 0, second.Exit())
	files, err := filepath.Glob(filepath.Join(dir, ".agent", "pg", "*", "data", "postmaster.pid"))
	assert.Truef(t, err == nil && len(files) == 0, "after an orderly stop there is %v (%v)", files, err)
}
