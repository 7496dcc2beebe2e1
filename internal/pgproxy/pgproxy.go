// Package pgproxy stands between a process and its database, for tests that break what goes between them.
//
// A Proxy accepts connections and makes one to the server for each; what is done with the two is the test's affair,
// and both are closed when either direction has ended. Requests and Answers read the protocol for it: what a client
// sends before it waits for an answer, and when the answer is whole. There is no encryption.
package pgproxy

import (
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Link carries what goes over one connection: each function is called once, in a goroutine of its own, and returns
// when its direction has ended.
type Link interface {
	Upstream()
	Downstream()
}

// Proxy is a proxy before one database.
type Proxy struct {
	listener net.Listener
	target   *pgx.ConnConfig
	link     func(client, server net.Conn) Link
	group    sync.WaitGroup

	mu     sync.Mutex
	conns  map[net.Conn]struct{}
	closed bool
}

// Listen makes a proxy before the database of a URL, which is closed when the test ends. link is called for each
// connection, one at a time.
func Listen(tb testing.TB, target string, link func(client, server net.Conn) Link) *Proxy {
	tb.Helper()
	config, err := pgx.ParseConfig(target)
	require.NoError(tb, err)
	listener, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	p := &Proxy{listener: listener, target: config, link: link, conns: map[net.Conn]struct{}{}}
	p.group.Go(p.accept)
	tb.Cleanup(p.Close)
	return p
}

// URL is where a process finds the database. Its connections have an application_name, unless that is empty.
func (p *Proxy) URL(name string) string {
	query := url.Values{"sslmode": {"disable"}}
	if name != "" {
		query.Set("application_name", name)
	}
	u := url.URL{
		Scheme: "postgres", Host: p.listener.Addr().String(), Path: "/" + p.target.Database,
		User: url.UserPassword(p.target.User, p.target.Password), RawQuery: query.Encode(),
	}
	return u.String()
}

// Close ends all connections, and returns when nothing more is carried.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	p.listener.Close()
	for c := range p.conns {
		c.Close()
	}
	p.mu.Unlock()
	p.group.Wait()
}

func (p *Proxy) accept() {
	network, address := "tcp", net.JoinHostPort(p.target.Host, strconv.Itoa(int(p.target.Port)))
	if strings.HasPrefix(p.target.Host, "/") {
		network, address = "unix", p.target.Host+"/.s.PGSQL."+strconv.Itoa(int(p.target.Port))
	}
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial(network, address) //nolint:noctx // it takes no time, and Close waits for it
		if err != nil {
			client.Close()
			continue
		}
		p.keep(client, server)
		l := p.link(client, server)
		p.group.Go(func() { defer p.drop(client, server); l.Upstream() })
		p.group.Go(func() { defer p.drop(client, server); l.Downstream() })
	}
}

// keep makes sure that connections are closed at the end.
func (p *Proxy) keep(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		p.conns[c] = struct{}{}
		if p.closed {
			c.Close()
		}
	}
}

// drop closes connections.
func (p *Proxy) drop(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		c.Close()
		delete(p.conns, c)
	}
}
