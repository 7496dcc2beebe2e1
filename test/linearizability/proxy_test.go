//go:build unix

package linearizability_test

import (
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
)

// cut is where the proxy breaks a connection.
type cut int32

const (
	uncut       cut = iota
	unseen          // the server never sees the request
	uncommitted     // the server has done what was asked, and learns that nobody is there before it commits
	unanswered      // it is committed, and the answer is lost
	cuts
)

// proxy stands between processes and a database, and breaks connections when it is asked to.
type proxy struct {
	*pgproxy.Proxy

	next atomic.Int32 // a cut: what happens to the next request about lanes
	done [cuts]atomic.Int64
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	p := &proxy{}
	p.Proxy = pgproxy.Listen(t, target, func(client, server net.Conn) pgproxy.Link {
		return &link{proxy: p, client: client, server: server}
	})
	return p
}

// url is where processes find the database.
func (p *proxy) url() string { return p.URL("lanetest") }

// link is one connection through the proxy.
type link struct {
	proxy          *proxy
	client, server net.Conn
	inside         bool        // a transaction has begun
	mute           atomic.Bool // the answer that comes next is lost, and the connection with it
}

// Upstream carries what the client says, whole requests at a time.
func (l *link) Upstream() { pgproxy.Forward(l.client, l.server, l.send) }

// aboutLanes reports a request that asks for a lane, gives one back, or ends a transaction.
func (l *link) aboutLanes(r pgproxy.Request) bool {
	if r.Simple {
		begins := strings.HasPrefix(r.Bound[0], "begin")
		ends := l.inside && !begins // a commit, or a rollback
		l.inside = begins
		return ends
	}
	for _, sql := range r.Bound {
		if strings.Contains(sql, "agent_lock") || strings.Contains(sql, "agent_execution") {
			return r.Executes
		}
	}
	return false
}

// send passes a request on, or breaks the connection at it.
func (l *link) send(r pgproxy.Request) bool {
	if l.aboutLanes(r) {
		c := cut(l.proxy.next.Swap(int32(uncut)))
		l.proxy.done[c].Add(1)
		switch c {
		case unseen:
			return false
		case uncommitted:
			_, _ = l.server.Write(r.Raw[:r.Last]) // it is broken in any case
			return false
		case unanswered:
			l.mute.Store(true)
		case uncut, cuts:
		}
	}
	_, err := l.server.Write(r.Raw)
	return err == nil
}

// Downstream carries what the server answers.
func (l *link) Downstream() { pgproxy.Answers(l.server, l.client, l.mute.Load) }
