package postgres

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// slowServer reads its input. Until answer is closed, it answers one kind of request only; then it answers all.
type slowServer struct {
	net.Listener
	talks  atomic.Bool
	asked  chan struct{} // receives once for each probe
	answer chan struct{} // closed: answer all requests
	over   chan struct{} // closed: the test is over
}

func newSlowServer(t *testing.T) *slowServer {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &slowServer{
		Listener: listener, asked: make(chan struct{}, 100), answer: make(chan struct{}),
		over: make(chan struct{}),
	}
	t.Cleanup(func() {
		close(s.over)
		listener.Close()
	})
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // closed
			}
			go s.serve(conn)
		}
	}()
	return s
}

func (s *slowServer) serve(conn net.Conn) {
	defer conn.Close()
	request := make([]byte, 8)
	if _, err := io.ReadFull(conn, request); err != nil {
		return // closed
	}
	if !bytes.Equal(request, sslRequest) {
		select {
		case <-s.answer:
		case <-s.over:
		}
	} else {
		s.asked <- struct{}{}
	}
	if s.talks.Load() {
		_, _ = conn.Write([]byte("N"))
	}
	_, _ = conn.Read(request) // until the test closes it
}

// fastProber returns a prober that probes at once.
func fastProber() *livenessProber {
	p := newLivenessProber()
	p.delay, p.timeout, p.interval = time.Millisecond, 50*time.Millisecond, time.Millisecond
	return p
}

func (s *slowServer) conn(t *testing.T, p *livenessProber, sends string) net.Conn {
	t.Helper()
	conn, err := p.DialContext(t.Context(), "tcp", s.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	if sends == "" {
		return conn
	}
	_, err = conn.Write([]byte(sends))
	require.NoError(t, err)
	return conn
}

// A server may be stopped and replaced while its machine's kernel still acknowledges packets.
func TestUnresponsiveServerEndsConnections(t *testing.T) {
	t.Parallel()
	s, p := newSlowServer(t), fastProber()
	idle := s.conn(t, p, "")
	for name, conn := range map[string]net.Conn{"one that waits": s.conn(t, p, "question"), "one in the same pool": idle} {
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, errUnresponsive) || !Broken(err) {
			t.Errorf("%s: got %v, want a broken connection, since the server does not answer", name, err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	assert.Equal(t, 0, len(p.conns))
}

func TestLongStatementOnResponsiveServer(t *testing.T) {
	t.Parallel()
	s, p := newSlowServer(t), fastProber()
	s.talks.Store(true)
	p.timeout = time.Minute
	conn := s.conn(t, p, "question")
	for range 3 {
		<-s.asked
	}
	close(s.answer)
	_, err := conn.Read(make([]byte, 1))
	assert.NoError(t, err, "the answer did not come")
}

func TestRefusingServerIsResponsive(t *testing.T) {
	t.Parallel()
	s, p := newSlowServer(t), fastProber()
	p.timeout = time.Minute
	address := s.Addr()
	s.Close()
	assert.True(t, p.probe(address), "a rejection counted as silence")
}

func TestUnresponsiveIdleConnectionIsClosed(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]time.Duration{
		"postgres://one.example/b":                      probeTimeout,
		"postgres://one.example/b?pool_ping_timeout=7s": 7 * time.Second,
	} {
		config, err := parse(url, Options{})
		assert.Truef(t, err == nil && config.PingTimeout == want,
			"%s: it waits %s, want %s (%v)", url, config.PingTimeout, want, err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	_, err := newLivenessProber().DialContext(ended, "tcp", "127.0.0.1:1")
	assert.Error(t, err, "connected to nobody")
}
