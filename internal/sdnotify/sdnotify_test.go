package sdnotify_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/sdnotify"
)

// fakeManager listens like systemd, and reads one message at a time.
func fakeManager(t *testing.T, name string) (read func() string) {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: name, Net: "unixgram"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return func() string {
		buf := make([]byte, 100)
		n, err := conn.Read(buf)
		assert.NoError(t, err)
		return string(buf[:n])
	}
}

func env(values map[string]string) func(string) string {
	return func(name string) string { return values[name] }
}

func TestTell(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	read := fakeManager(t, socket)
	m := sdnotify.New(env(map[string]string{"NOTIFY_SOCKET": socket}))
	for _, state := range []string{sdnotify.Ready, sdnotify.Stopping} {
		require.NoError(t, m.Tell(state))
		assert.Equal(t, state, read())
	}
}

func TestWatchdogRunsUntilContextEnds(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "notify")
	read := fakeManager(t, socket)
	m := sdnotify.New(env(map[string]string{
		"NOTIFY_SOCKET": socket, "WATCHDOG_USEC": "2000", "WATCHDOG_PID": strconv.Itoa(os.Getpid()),
	}))
	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() { m.Watchdog(ctx) })
	for range 3 {
		assert.Equal(t, "WATCHDOG=1", read())
	}
	stop()
	group.Wait()
}

func TestWithoutNotifySocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "nobody")
	for name, values := range map[string]map[string]string{
		"no socket":            {"WATCHDOG_USEC": "1000"},
		"no watchdog":          {"NOTIFY_SOCKET": socket},
		"another's watchdog":   {"NOTIFY_SOCKET": socket, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
		"a watchdog like none": {"NOTIFY_SOCKET": socket, "WATCHDOG_USEC": "soon"},
	} {
		t.Run(name, func(t *testing.T) {
			sdnotify.New(env(values)).Watchdog(t.Context()) // returns at once
		})
	}
	assert.NoError(t, sdnotify.New(env(nil)).Tell(sdnotify.Ready))
	err := sdnotify.New(env(map[string]string{"NOTIFY_SOCKET": socket})).Tell(sdnotify.Ready)
	assert.Error(t, err, "an absent manager was notified")
}
