package cuts_test

import (
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
)

// newProxy makes a proxy for the database of a URL, whose ledger says what is cut. It stands between the parts of a
// process and the database.
func newProxy(t testing.TB, target string, ledger *ledger) *pgproxy.Proxy {
	t.Helper()
	return pgproxy.Listen(t, target, func(client, server net.Conn) pgproxy.Link {
		return &link{ledger: ledger, client: client, server: server}
	})
}

// link is one connection through the proxy.
type link struct {
	ledger         *ledger
	client, server net.Conn
	last           string      // the last statement of the transaction that is open
	cut            atomic.Bool // at the server's next readiness, before the client hears of it
}

// Upstream carries what the client says, up to where it waits for an answer.
func (l *link) Upstream() {
	requests, first, err := pgproxy.NewRequests(l.client)
	if err != nil {
		return
	}
	name := "connect"
	if pgproxy.IsCancel(first) {
		name = ""
	}
	for raw := first; l.send(name, raw); {
		r, err := requests.Next()
		if err != nil {
			return
		}
		name, raw = l.name(r), r.Raw
	}
}

// name is what a request is called, but for how often it came before; empty for one that asks for nothing.
func (l *link) name(r pgproxy.Request) string {
	if len(r.Bound) == 0 {
		if len(r.Prepared) == 0 {
			return ""
		}
		return "prepare: " + tidy(r.Prepared)
	}
	name := tidy(slices.Compact(r.Bound))
	switch word, _, _ := strings.Cut(name, " "); word {
	case "commit", "rollback":
		name += " after: " + l.last
	default:
		l.last = name
	}
	return name
}

// send passes what has a name on, unless it is to be cut, and all else.
func (l *link) send(name string, raw []byte) bool {
	if name != "" {
		switch l.ledger.note(name) {
		case before:
			return false
		case after:
			l.cut.Store(true)
		case pass:
		}
	}
	_, err := l.server.Write(raw)
	return err == nil
}

// Downstream carries what the server answers.
func (l *link) Downstream() { pgproxy.Answers(l.server, l.client, l.cut.Load) }

// tidy is statements on one line.
func tidy(statements []string) string {
	lines := make([]string, len(statements))
	for i, sql := range statements {
		lines[i] = strings.Join(strings.Fields(sql), " ")
	}
	return strings.Join(lines, "; ")
}
