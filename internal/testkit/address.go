package testkit

import (
	"math/rand/v2"
	"net"
	"strconv"
	"testing"
)

// FreeAddress returns an unused address of this machine. Its port is below the system's ephemeral range (from 32768 on
// Linux), so the system does not give it to another server before the caller listens. Another caller of FreeAddress
// may, rarely, choose the same port.
func FreeAddress(tb testing.TB) string {
	tb.Helper()
	for range 100 {
		address := net.JoinHostPort("127.0.0.1", strconv.Itoa(20000+rand.IntN(12000)))
		listener, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", address)
		if err != nil {
			continue
		}
		if err := listener.Close(); err != nil {
			tb.Fatal(err)
		}
		return address
	}
	tb.Fatal("no port is free")
	return ""
}
