//go:build unix

package crash_test

import (
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
)

// verdict is what the proxy does with one request of the client.
type verdict int

const (
	pass       verdict = iota
	killBefore         // the server never sees it
	killAfter          // it takes effect, and the client never hears of it
	terminate          // it is passed on, and the process is asked to stop
	interrupt          // it is passed on, and ^C is pressed
	hold               // it is kept back until Proxy.release, and its answer is delivered
)

// proxy stands between a process and the database.
type proxy struct {
	*pgproxy.Proxy

	t        testing.TB
	signal   func(syscall.Signal) // to the client's process; returns when a killed one is gone
	decide   func(request) verdict
	held     chan request  // what is being kept back
	released chan struct{} // closed: let it go
	ended    chan struct{} // closed: the test is over

	mu sync.Mutex
	n  int
}

// request is one request: its number, and the statements it executes.
type request struct {
	n   int
	sql string
}

// newProxy makes a proxy for the database of a URL. decide is called for each request, one at a time,
// with numbers from 1; set signal before anything connects.
func newProxy(t testing.TB, target string, decide func(request) verdict) *proxy {
	t.Helper()
	p := &proxy{
		t: t, decide: decide, held: make(chan request, 1), released: make(chan struct{}), ended: make(chan struct{}),
	}
	p.Proxy = pgproxy.Listen(t, target, func(client, server net.Conn) pgproxy.Link {
		return &link{proxy: p, client: client, server: server}
	})
	t.Cleanup(func() { close(p.ended) }) // before the proxy is closed, which waits for what is held
	return p
}

// holds waits until a request is kept back.
func (p *proxy) holds() {
	p.t.Helper()
	select {
	case <-p.held:
	case <-time.After(patience):
		p.t.Fatal("the request that is to be held up was not made")
	}
}

// release lets go what is held, and everything after it.
func (p *proxy) release() { close(p.released) }

// step counts a request and asks what to do with it.
func (p *proxy) step(sql string) (request, verdict) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n++
	r := request{p.n, sql}
	return r, p.decide(r)
}

// link is one connection through the proxy.
type link struct {
	proxy          *proxy
	client, server net.Conn
	killed         atomic.Bool // the process is killed at the next answer
}

// Upstream carries what the client says, whole requests at a time.
func (l *link) Upstream() { pgproxy.Forward(l.client, l.server, l.send) }

// send passes one request on, unless the process dies of it.
func (l *link) send(said pgproxy.Request) bool {
	if said.Executes {
		switch r, v := l.proxy.step(strings.Join(said.Bound, ";\n")); v {
		case killBefore:
			l.proxy.signal(syscall.SIGKILL)
			return false
		case killAfter:
			l.killed.Store(true)
		case hold:
			l.proxy.held <- r
			select {
			case <-l.proxy.released:
			case <-l.proxy.ended:
				return false
			}
		case terminate:
			l.proxy.signal(syscall.SIGTERM)
		case interrupt:
			l.proxy.signal(syscall.SIGINT)
		case pass:
		}
	}
	_, err := l.server.Write(said.Raw)
	return err == nil
}

// Downstream carries what the server answers.
func (l *link) Downstream() {
	if pgproxy.Answers(l.server, l.client, l.killed.Load) {
		l.proxy.signal(syscall.SIGKILL)
	}
}
