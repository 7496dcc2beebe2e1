package operate_test

import (
	"context"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// outage refuses connections to a database while it lasts.
type outage struct {
	on      atomic.Bool
	refused atomic.Int64
}

type outageLink struct {
	client, server net.Conn
	refuse         bool
}

func (l outageLink) Upstream() {
	if !l.refuse {
		_, _ = io.Copy(l.server, l.client)
	}
}

func (l outageLink) Downstream() {
	if !l.refuse {
		_, _ = io.Copy(l.client, l.server)
	}
}

func (o *outage) link(client, server net.Conn) pgproxy.Link {
	refuse := o.on.Load()
	if refuse {
		o.refused.Add(1)
	}
	return outageLink{client, server, refuse}
}

// An outage that outlasts the worker's lease ends the run, not the turn: another run continues the turn, so the client
// must not be told to try again.
func TestTurnOutlastsOutage(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	direct := pgtest.Pool(t, url, postgres.Options{MaxConns: 4})
	var away outage
	through := pgproxy.Listen(t, url, away.link)
	w := newTestDatabaseOn(t, pgtest.Pool(t, through.URL("operate"), postgres.Options{MaxConns: 8}),
		modeltest.ToolCall("look", `{}`), modeltest.Text("Done."))
	w.lease = 3 * time.Second
	var calls, lost atomic.Int64
	w.builtin(t, "look", "auto", func(ctx context.Context, _ skills.Call) (any, error) {
		if calls.Add(1) > 1 {
			return "nothing", nil
		}
		away.on.Store(true)
		pgtest.Exec(t, direct, `select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'operate'`)
		<-ctx.Done()
		lost.Store(away.refused.Load() + 1)
		return nil, context.Cause(ctx)
	})
	pgtest.Exec(t, direct, `update agent_skills set idempotent = true`)
	p := w.process(t, true)
	b := p.send(t, p.open(t, ""), "Look.", false)
	pgtest.Eventually(t, func() bool { return lost.Load() > 0 && away.refused.Load() > lost.Load()+10 },
		"the outage outlasts the run")
	away.on.Store(false)
	done, err := b.wait(t)
	assert.Truef(t, err == nil && done.Text == "Done.", "the turn ended with %q, %v", done.Text, err)
	assert.True(t, !strings.Contains(b.names(), "error"), b.names())
}
