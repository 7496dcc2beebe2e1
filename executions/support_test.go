package executions_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
)

// flowFunc is a durable function without input, enough for most tests.
type flowFunc = func(ctx context.Context) (executions.Result, error)

// flowMap registers one body under the name "flow".
func flowMap(fn flowFunc) map[string]executions.Func {
	return map[string]executions.Func{"flow": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		return fn(ctx)
	}}
}

// resultOf returns the result of a flow that has nothing more to do.
func resultOf(value any, err error) (executions.Result, error) {
	if err != nil {
		return executions.Result{}, err
	}
	return executions.Result{Value: value}, nil
}

// gate stops the first caller until the test opens it. Others pass.
type gate struct {
	callers atomic.Int32
	firstID chan string // the id of the first execution
	opened  chan struct{}
	once    sync.Once
}

func newGate(t *testing.T) *gate {
	g := &gate{firstID: make(chan string, 1), opened: make(chan struct{})}
	t.Cleanup(g.open)
	return g
}

func (g *gate) open() { g.once.Do(func() { close(g.opened) }) }

// enter blocks even after ctx ended, like a paused process. It reports whether the caller was the first.
func (g *gate) enter(ctx context.Context) bool {
	if g.callers.Add(1) > 1 {
		return false
	}
	x, _ := executions.Current(ctx)
	g.firstID <- x.ID
	<-g.opened
	return true
}

// awaitFirst waits for the first caller.
func (g *gate) awaitFirst(t *testing.T) string {
	t.Helper()
	return testkit.Receive(t, g.firstID)
}

// runInBackground runs the flow in a process that renews no lease and receives no notifications, like a paused one. The
// returned function waits for its end.
func (p *testEngine) runInBackground(t *testing.T) (wait func() executions.Execution) {
	t.Helper()
	var got executions.Execution
	var group errgroup.Group
	group.Go(func() (err error) {
		got, err = p.RunSync(context.WithoutCancel(t.Context()), executions.Spec{Flow: "flow", Surface: trace.Flow})
		return err
	})
	return func() executions.Execution {
		t.Helper()
		assert.NoError(t, group.Wait(), "run")
		return got
	}
}

// expireLease ends the lease of the worker that runs an execution.
func expireLease(t *testing.T, db postgres.DB, id string) {
	t.Helper()
	pgtest.Exec(t, db, `
		update agent_workers set expires_at = clock_timestamp() - interval '1 second'
		 where id = (select claimed_by from agent_executions where id = @id)`, postgres.Strict{"id": id})
}

// countCompletions counts the AGENT_COMPLETED events of an execution.
func countCompletions(t *testing.T, db postgres.DB, id string) int {
	t.Helper()
	return pgtest.Value[int](t, db, `select count(*) from agent_events where event = 'AGENT_COMPLETED' and key = @id`,
		postgres.Strict{"id": id})
}

// newListener runs a notification listener until the test ends.
func newListener(t *testing.T, pool *pgxpool.Pool) *postgres.Listener {
	t.Helper()
	l := postgres.NewListener(pgtest.Dialer(t, pool), slog.New(slog.DiscardHandler))
	testkit.Run(t, l.Run)
	return l
}

// runAndReplay runs a body, then waits briefly, so the engine calls the body again as a replay.
func runAndReplay(
	t *testing.T, fn func(ctx context.Context, again bool) (any, error),
) (executions.Execution, *pgxpool.Pool) {
	t.Helper()
	pool := pgtest.DB(t)
	var calls atomic.Int32
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		v, err := fn(ctx, calls.Add(1) > 1)
		if err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "pause", executions.Delay(1)); err != nil {
			return executions.Result{}, err
		}
		return executions.Result{Value: v}, nil
	}))
	id := p.startFlow(t, "flow")
	var got executions.Execution
	pgtest.Eventually(t, func() bool {
		var err error
		got, err = executions.Get(t.Context(), pool, id)
		return err == nil && got.Status.Ended()
	}, "the execution ends")
	return got, pool
}

func TestMain(m *testing.M) {
	pgtest.AtOnce(6)
	pgtest.Main(leaks.Tests{M: m})
}
