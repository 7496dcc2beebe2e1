package main

import (
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// wire is an address behind which another one is. What goes through it can be cut.
type wire struct {
	net.Listener
	mu   sync.Mutex
	open map[net.Conn]struct{}
	over bool // the test has ended
}

// newWire leads to an address until the test ends.
func newWire(t *testing.T, to string) *wire {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{Listener: listener, open: map[net.Conn]struct{}{}}
	var group sync.WaitGroup
	group.Go(func() {
		for {
			near, err := w.Accept()
			if err != nil {
				return // the test ends
			}
			far, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", to)
			if err != nil {
				_ = near.Close()
				continue
			}
			w.keep(near, far)
			group.Go(func() { w.carry(near, far) })
			group.Go(func() { w.carry(far, near) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		w.mu.Lock()
		w.over = true
		w.mu.Unlock()
		w.cut()
		group.Wait()
	})
	return w
}

func (w *wire) keep(ends ...net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, end := range ends {
		w.open[end] = struct{}{}
		if w.over {
			_ = end.Close()
		}
	}
}

// carry copies until one of the two ends.
func (w *wire) carry(to, from net.Conn) {
	_, _ = io.Copy(to, from) // an end that goes away ends it
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, end := range []net.Conn{to, from} {
		_ = end.Close()
		delete(w.open, end)
	}
}

// cut breaks every connection that there is.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for end := range w.open {
		_ = end.Close()
	}
}

// freeAddress is an address that stays free while nobody listens there: its port is none that the system gives to who
// does not ask for it.
func freeAddress(t *testing.T) string {
	t.Helper()
	for range 1000 {
		at := net.JoinHostPort("127.0.0.1", strconv.Itoa(20000+rand.IntN(12000))) // any will do
		if l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", at); err == nil {
			_ = l.Close()
			return at
		}
	}
	t.Fatal("no port from 20000 to 31999 is free")
	return ""
}
