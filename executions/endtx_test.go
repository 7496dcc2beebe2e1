package executions_test

import (
	"context"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// commitLink carries one connection. The answer to a commit is lost, and the connection with it, when lose is set.
type commitLink struct {
	client, server net.Conn
	lose           *atomic.Bool
	mute           atomic.Bool
}

func (l *commitLink) Upstream() {
	requests, first, err := pgproxy.NewRequests(l.client)
	if err == nil {
		_, err = l.server.Write(first)
	}
	for err == nil {
		var r pgproxy.Request
		if r, err = requests.Next(); err != nil {
			return
		}
		if r.Simple && strings.HasPrefix(r.Bound[0], "commit") && l.lose.CompareAndSwap(true, false) {
			l.mute.Store(true)
		}
		_, err = l.server.Write(r.Raw)
	}
}

func (l *commitLink) Downstream() { pgproxy.Answers(l.server, l.client, l.mute.Load) }

func opened(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := postgres.Open(t.Context(), url, postgres.Options{MaxConns: 8})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// The commit that ends an execution may take effect though its answer is lost. The effect is there once then, and the
// caller gets the end.
func TestAnEndInATransactionIsKnownWhenTheAnswerToItsCommitIsLost(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := opened(t, url)
	exec(t, pool, `create table effects (n int)`)
	var lose atomic.Bool
	through := pgproxy.Listen(t, url, func(client, server net.Conn) pgproxy.Link {
		return &commitLink{client: client, server: server, lose: &lose}
	})
	calls := 0
	p := start(t, opened(t, through.URL("engine")), flow(func(ctx context.Context) (executions.Result, error) {
		n, err := executions.EndTx(ctx, "end", func(ctx context.Context, tx pgx.Tx) (int, error) {
			calls++
			if _, err := tx.Exec(ctx, `insert into effects values (7)`); err != nil {
				return 0, err
			}
			lose.Store(true)
			return 7, nil
		}, func(n int) executions.Result { return executions.Result{Summary: "seven", Value: n} })
		if n != 7 || err != nil {
			t.Errorf("the step has %d, %v", n, err)
		}
		return executions.Result{}, err
	}), never)
	x, err := p.RunNow(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
	if err != nil || x.Status != executions.Completed || x.ResultSummary != "seven" || string(x.Result) != "7" || x.Claim != 1 {
		t.Errorf("it ended as %s with %q, %s: %v", x.Status, x.ResultSummary, x.Result, err)
	}
	if lose.Load() || calls != 1 {
		t.Errorf("the answer was lost: %v; the transaction was made %d times", !lose.Load(), calls)
	}
	if n := value[int](t, pool, `select count(*) from effects`); n != 1 {
		t.Errorf("%d effects", n)
	}
	if n := value[int](t, pool, `select count(*) from agent_events where external_id = 'completed ' || @id`, postgres.Strict{"id": x.ID}); n != 1 {
		t.Errorf("%d ends", n)
	}
}
