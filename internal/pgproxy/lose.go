package pgproxy

import (
	"net"
	"strings"
	"sync/atomic"
	"testing"
)

// LoseCommit starts a proxy that loses the response to the next commit after the test sets lose, and resets lose. The
// commit takes effect, and its connection breaks.
func LoseCommit(tb testing.TB, target string, lose *atomic.Bool) *Proxy {
	tb.Helper()
	return Listen(tb, target, func(client, server net.Conn) Link {
		return &commitLink{client: client, server: server, lose: lose}
	})
}

type commitLink struct {
	client, server net.Conn
	lose           *atomic.Bool
	lost           atomic.Bool // the next response of the server
}

func (l *commitLink) Upstream() {
	Forward(l.client, l.server, func(r Request) bool {
		if r.Simple && strings.HasPrefix(r.Bound[0], "commit") && l.lose.CompareAndSwap(true, false) {
			l.lost.Store(true)
		}
		_, err := l.server.Write(r.Raw)
		return err == nil
	})
}

func (l *commitLink) Downstream() { Answers(l.server, l.client, l.lost.Load) }
