//go:build unix

package flowcheck_test

import (
	"io"
	"math/rand/v2"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// proxy stands between a process and the database, and breaks connections when it is asked to.
type proxy struct {
	listener net.Listener
	target   *pgx.ConnConfig
	group    sync.WaitGroup

	mu     sync.Mutex
	links  map[*link]struct{}
	closed bool
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	config, err := pgx.ParseConfig(target)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: listener, target: config, links: map[*link]struct{}{}}
	p.group.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// url is where a process finds the database.
func (p *proxy) url() string {
	u := url.URL{
		Scheme: "postgres", Host: p.listener.Addr().String(), Path: "/" + p.target.Database,
		User: url.UserPassword(p.target.User, p.target.Password), RawQuery: url.Values{"sslmode": {"disable"}}.Encode(),
	}
	return u.String()
}

func (p *proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.listener.Close()
	for l := range p.links {
		l.end()
	}
	p.mu.Unlock()
	p.group.Wait()
}

func (p *proxy) accept() {
	network, address := "tcp", net.JoinHostPort(p.target.Host, strconv.Itoa(int(p.target.Port)))
	if strings.HasPrefix(p.target.Host, "/") {
		network, address = "unix", p.target.Host+"/.s.PGSQL."+strconv.Itoa(int(p.target.Port))
	}
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial(network, address)
		if err != nil {
			client.Close()
			continue
		}
		l := &link{client: client, server: server}
		p.mu.Lock()
		if p.closed {
			l.end()
		}
		p.links[l] = struct{}{}
		p.mu.Unlock()
		p.group.Go(func() { p.carry(l, client, server, false) })
		p.group.Go(func() { p.carry(l, server, client, true) })
	}
}

// carry copies what one side says to the other, until one of them has left.
func (p *proxy) carry(l *link, from io.Reader, to io.Writer, answers bool) {
	defer func() {
		l.end()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.links, l)
	}()
	buf := make([]byte, 1<<16)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		switch {
		case !answers && l.doomed.CompareAndSwap(unheard, broken), answers && l.doomed.CompareAndSwap(unanswered, broken):
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
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
	client, server net.Conn
	doomed         atomic.Int32
}

func (l *link) end() {
	l.client.Close()
	l.server.Close()
}

// rest waits for about so long.
func rest(d time.Duration) { time.Sleep(d/2 + rand.N(max(d, 1))) }
