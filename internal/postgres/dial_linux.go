package postgres

import (
	"strings"
	"syscall"
)

const tcpUserTimeout = 0x12 // of linux/tcp.h

// setUserTimeout sets TCP_USER_TIMEOUT: the kernel ends a connection if the peer does not acknowledge data in time.
func setUserTimeout(network, _ string, conn syscall.RawConn) error {
	if !strings.HasPrefix(network, "tcp") {
		return nil
	}
	var failed error
	err := conn.Control(func(fd uintptr) {
		failed = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(userTimeout.Milliseconds()))
	})
	if err != nil {
		return err
	}
	return failed
}
