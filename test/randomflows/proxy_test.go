//go:build unix

package randomflows_test

import (
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
)

// proxy stands between a process and the database, and breaks connections when it is asked to.
type proxy struct {
	*pgproxy.Proxy

	mu    sync.Mutex
	links map[*link]struct{}
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	p := &proxy{links: map[*link]struct{}{}}
	p.Proxy = pgproxy.Listen(t, target, func(client, server net.Conn) pgproxy.Link {
		l := &link{proxy: p, client: client, server: server}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.links[l] = struct{}{}
		return l
	})
	return p
}

// cut breaks some of the connections at what they say next, or at the answer to it.
func (p *proxy) cut() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.links {
		if rand.IntN(3) == 0 && l.doomed.CompareAndSwap(whole, []int32{unheard, unanswered}[rand.IntN(2)]) {
			n++
		}
	}
	return n
}

// What is to become of a link.
const (
	whole      int32 = iota
	unheard          // the server does not get what is said next
	unanswered       // the client does not get the next answer
	broken
)

// link is one connection through the proxy.
type link struct {
	proxy          *proxy
	client, server net.Conn
	doomed         atomic.Int32
}

// Upstream carries what the client says.
func (l *link) Upstream() { l.carry(l.client, l.server, unheard) }

// Downstream carries what the server answers.
func (l *link) Downstream() { l.carry(l.server, l.client, unanswered) }

// carry copies what one side says to the other, until one of them has left or the link is to be broken so.
func (l *link) carry(from io.Reader, to io.Writer, doom int32) {
	defer func() {
		l.proxy.mu.Lock()
		defer l.proxy.mu.Unlock()
		delete(l.proxy.links, l)
	}()
	buf := make([]byte, 1<<16)
	for {
		n, err := from.Read(buf)
		if err != nil || l.doomed.CompareAndSwap(doom, broken) {
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

// rest waits for about so long.
func rest(d time.Duration) { time.Sleep(d/2 + rand.N(max(d, 1))) }
