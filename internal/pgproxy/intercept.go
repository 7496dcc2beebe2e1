package pgproxy

import (
	"net"
	"strings"
	"sync/atomic"
	"testing"
)

// Verdict is the fate of a request. Every verdict except Pass breaks the connection.
type Verdict int32

// These are the verdicts.
const (
	Pass       Verdict = iota
	Refuse             // the server does not get it
	Half               // the server gets all but the request's last message: it executes a batch, but does not commit
	LoseAnswer         // the server executes and commits it, and the client gets no answer
)

// Intercept starts a proxy that calls decide for each request, in parallel for parallel connections. It calls onLost,
// unless nil, for each lost answer before the connection ends.
func Intercept(tb testing.TB, target string, decide func(Request) Verdict, onLost func()) *Proxy {
	tb.Helper()
	return Listen(tb, target, func(client, server net.Conn) Link {
		return &interceptor{client: client, server: server, decide: decide, onLost: onLost}
	})
}

type interceptor struct {
	client, server net.Conn
	decide         func(Request) Verdict
	onLost         func()
	lost           atomic.Bool // drop the server's next answer
}

func (l *interceptor) Upstream() {
	Forward(l.client, l.server, func(r Request) bool {
		verdict := l.decide(r)
		switch verdict {
		case Refuse:
			return false
		case Half:
			r.Raw = r.Raw[:r.Last]
		case LoseAnswer:
			l.lost.Store(true)
		case Pass:
		}
		_, err := l.server.Write(r.Raw)
		return err == nil && verdict != Half
	})
}

func (l *interceptor) Downstream() {
	if Answers(l.server, l.client, l.lost.Load) && l.onLost != nil {
		l.onLost()
	}
}

// LoseCommit starts a proxy that loses the response to one commit. The test sets lose; the next commit takes effect,
// resets lose and breaks its connection.
func LoseCommit(tb testing.TB, target string, lose *atomic.Bool) *Proxy {
	tb.Helper()
	return Intercept(tb, target, func(r Request) Verdict {
		if r.Simple && strings.HasPrefix(r.Bound[0], "commit") && lose.CompareAndSwap(true, false) {
			return LoseAnswer
		}
		return Pass
	}, nil)
}
