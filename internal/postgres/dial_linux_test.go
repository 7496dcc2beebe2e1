package postgres

import (
	"net"
	"syscall"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A connection must not wait for ever for a machine that has vanished.
func TestConnectionDetectsDeadPeer(t *testing.T) {
	t.Parallel()
	config, err := parse("postgres://a@one.example,two.example/b?target_session_attrs=read-write", Options{})
	require.NoError(t, err)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	conn, err := config.ConnConfig.DialFunc(t.Context(), "tcp", listener.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	raw, err := conn.(*probedConn).Conn.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	for option, want := range map[int]int{
		tcpUserTimeout: 30_000, syscall.TCP_KEEPIDLE: 15, syscall.TCP_KEEPINTVL: 5, syscall.TCP_KEEPCNT: 3,
	} {
		var got int
		require.NoError(t, raw.Control(func(fd uintptr) {
			got, err = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, option)
		}))
		assert.NoError(t, err, option)
		assert.Equal(t, want, got, option)
	}
}
