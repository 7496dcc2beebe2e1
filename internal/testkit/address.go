package testkit

import (
	"math/rand/v2"
	"net"
	"strconv"
	"testing"
)

// FreeAddress returns an address of this machine that nothing listens at. Its port is below those that the system
// gives to whoever asks for any (from 32768 on Linux), so that no other server gets it before the caller listens.
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
