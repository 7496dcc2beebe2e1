package postgres

import (
	"net"
	"syscall"
	"testing"
)

// A connection to a machine that vanishes without a word must not wait for ever.
func TestConnectionsNoticeThatTheOtherSideIsGone(t *testing.T) {
	t.Parallel()
	config, err := parse("postgres://a@one.example,two.example/b?target_session_attrs=read-write", Options{})
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := config.ConnConfig.DialFunc(t.Context(), "tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*asking).Conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for option, want := range map[int]int{
		tcpUserTimeout: 30_000, syscall.TCP_KEEPIDLE: 15, syscall.TCP_KEEPINTVL: 5, syscall.TCP_KEEPCNT: 3,
	} {
		var got int
		if err := raw.Control(func(fd uintptr) {
			got,
				err = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, option)
		}); err != nil {
			t.Fatal(err)
		}
		if err != nil || got != want {
			t.Errorf("option %d is %d, want %d (%v)", option, got, want, err)
		}
	}
}
