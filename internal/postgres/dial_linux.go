package postgres

import (
	"strings"
	"syscall"
)

const tcpUserTimeout = 0x12 // of linux/tcp.h

// confirmWithin has the kernel end a connection on which what was sent is not confirmed.
func confirmWithin(network, _ string, conn syscall.RawConn) error {
	if !strings.HasPrefix(network, "tcp") {
		return nil
	}
	var failed error
	err := conn.Control(func(fd uintptr) {
		failed = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(goneAfter.Milliseconds()))
	})
	if err != nil {
		return err
	}
	return failed
}
