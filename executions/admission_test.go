package executions_test

import (
	"context"
	"encoding/json"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// never makes sure that what is seen to happen was not done by a sweep.
func never(o *executions.Options) { o.SweepEvery, o.LeaseTTL = time.Hour, time.Minute }

// limit sets a limit by plain SQL.
func limit(t *testing.T, db postgres.DB, kind, name string, running int) {
	t.Helper()
	exec(t, db, `
		insert into agent_limits (kind, name, running) values (@kind, @name, @running)
		on conflict (kind, name) do update set running = excluded.running`,
		postgres.Strict{"kind": kind, "name": name, "running": running})
}

// tryReady claims from the queue as a process does, and returns the ids, by priority and age.
func tryReady(ctx context.Context, db postgres.DB, worker string, n int) ([]string, error) {
	rows, err := db.Query(ctx, `
		select (c.execution).id::text from lanekeeper.claim_agent_executions('background', @worker, @n) c where not c.missed
		 order by (c.execution).priority, (c.execution).id`, postgres.Strict{"worker": worker, "n": n})
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func claimReady(t *testing.T, db postgres.DB, worker string, n int) []string {
	t.Helper()
	ids, err := tryReady(t.Context(), db, worker, n)
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

// queued inserts a pending execution by plain SQL.
func queued(t *testing.T, pool *pgxpool.Pool, flow, surface string, priority int) string {
	t.Helper()
	return value[string](t, pool, `
		insert into agent_executions (trace_id, surface, flow, priority) values (@trace, @surface, @flow, @priority) returning id::text`,
		postgres.Strict{"trace": string(trace.New(trace.Flow)), "surface": surface, "flow": flow, "priority": priority})
}

func TestTwoProcessesTogetherKeepALimit(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var now, most, surplus atomic.Int32
	flows := flow(func(ctx context.Context) (executions.Result, error) {
		n := now.Add(1)
		defer now.Add(-1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		if n > 3 {
			surplus.Add(1)
		}
		return ends(executions.Step(ctx, "work", func(ctx context.Context) (int, error) {
			return asked[int](ctx, pool, `select 1 from pg_sleep(0.005)`)
		}))
	})
	heard := listener(t, pool)
	with := func(o *executions.Options) { never(o); o.Listener = heard }
	p := start(t, pool, flows, with)
	start(t, pool, flows, with)
	pgtest.Eventually(t, patience, func() bool { return p.Live() == nil }, "the engine lives")
	if err := p.SetLimits(t.Context(), []executions.Admission{{Kind: "flow", Name: "flow", Running: 3}}); err != nil {
		t.Fatal(err)
	}
	for range 60 {
		p.begin(t, "flow")
	}
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, pool, `select count(*) from agent_executions where status <> 'completed'`) == 0
	}, "all get a place, one after the other, without a sweep")
	if surplus.Load() != 0 || most.Load() < 2 {
		t.Errorf("%d ran at once", most.Load())
	}
}

// asked reads one value in a flow.
func asked[T any](ctx context.Context, db postgres.DB, sql string) (v T, err error) {
	err = db.QueryRow(ctx, sql).Scan(&v)
	return v, err
}

func TestRacingClaimsNeverExceedALimit(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	limit(t, pool, "flow", "flow", 5)
	limit(t, pool, "surface", "flow", 7)
	workers := make([]string, 6)
	for i := range workers {
		workers[i] = worker(t, pool)
	}
	for range 15 {
		exec(t, pool, `delete from agent_executions`)
		ids := make([]string, 30)
		for i := range ids {
			ids[i] = queued(t, pool, []string{"flow", "other"}[i%2], "flow", 2)
		}
		group, ctx := errgroup.WithContext(t.Context())
		for i, w := range workers {
			group.Go(func() error {
				if i%2 == 0 {
					_, err := tryReady(ctx, pool, w, 4)
					return err
				}
				_, err := claim(ctx, pool, ids[i], w)
				return err
			})
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
		one := value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null and flow = 'flow'`)
		all := value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null`)
		if one > 5 || all > 7 {
			t.Fatalf("%d of the flow and %d of the surface are claimed", one, all)
		}
	}
	claimReady(t, pool, workers[0], 30)
	if n := value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null`); n != 7 {
		t.Errorf("%d are claimed, want all 7 places taken", n)
	}
}

func TestTheQueueGoesByPriorityAndAge(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := worker(t, pool)
	old, urgent, late := queued(t, pool, "a", "flow", 2), queued(t, pool, "b", "chat", 1), queued(t, pool, "c", "flow", 3)
	young, gone := queued(t, pool, "a", "flow", 2), queued(t, pool, "a", "flow", 1)
	if _, err := executions.Cancel(t.Context(), pool, gone, "test", "not needed"); err != nil {
		t.Fatal(err)
	}
	if got, want := claimReady(t, pool, w, 2), []string{urgent, old}; !slices.Equal(got, want) {
		t.Errorf("first %v, want %v", got, want)
	}
	if got, want := claimReady(t, pool, w, 5), []string{young, late}; !slices.Equal(got, want) {
		t.Errorf("then %v, want %v", got, want)
	}
}

// What is held back is neither claimed nor named by the sweep, and what stands behind it is not held up.
func TestALimitHoldsBackNothingElse(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := worker(t, pool)
	limit(t, pool, "flow", "full", 1)
	limit(t, pool, "surface", "webhook", 0)
	held := queued(t, pool, "full", "flow", 1)
	for range 20 {
		queued(t, pool, "full", "flow", 1)
		queued(t, pool, "any", "webhook", 1)
	}
	free := queued(t, pool, "any", "flow", 4)
	if got, want := claimReady(t, pool, w, 10), []string{held, free}; !slices.Equal(got, want) {
		t.Errorf("claimed %v, want %v", got, want)
	}
	const places = `select count(*) from lanekeeper.agent_ready_kinds k where (k.places > 0) is not false`
	if n := value[int](t, pool, places); n != 0 {
		t.Errorf("%d kinds are said to be ready that cannot start", n)
	}
	if _, err := executions.Cancel(t.Context(), pool, held, "test", ""); err != nil {
		t.Fatal(err)
	}
	if n := value[int](t, pool, places); n == 0 {
		t.Error("a place is free, and nothing is ready")
	}
	if got := claimReady(t, pool, w, 10); len(got) != 1 {
		t.Errorf("claimed %d, want 1", len(got))
	}
}

// A run gives its place up while it waits, and needs one to go on.
func TestAWaitingRunHoldsNoPlace(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := worker(t, pool)
	limit(t, pool, "flow", "flow", 1)
	first := pending(t, pool)
	n := mustClaim(t, pool, first, w)
	second := pending(t, pool)
	if n, err := claim(t.Context(), pool, second, w); n != 0 || err != nil {
		t.Fatalf("claim %d, %v beyond the limit", n, err)
	}
	exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event', 'k', '1 hour', null)`, postgres.Strict{"id": first, "claim": n})
	mustClaim(t, pool, second, w)
	exec(t, pool, `select deliver_agent_event('EVENT_COMPLETED', 'k')`)
	if got := claimReady(t, pool, w, 5); len(got) != 0 {
		t.Errorf("%v went on beyond the limit", got)
	}
	if _, err := executions.Cancel(t.Context(), pool, second, "test", ""); err != nil {
		t.Fatal(err)
	}
	if got := claimReady(t, pool, w, 5); !slices.Equal(got, []string{first}) {
		t.Errorf("claimed %v, want %s", got, first)
	}
}

func TestARunThatSomebodyWaitsForIsCountedAndNotHeldUp(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	limit(t, pool, "surface", "flow", 1)
	p := prepare(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		return executions.Result{}, func() error {
			got, err := tryReady(ctx, pool, worker(t, pool), 1)
			if err == nil && len(got) != 0 {
				t.Error("a place was free")
			}
			return err
		}()
	}))
	queued(t, pool, "other", "flow", 1)
	exec(t, pool, `
		with w as (insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 hour') returning id)
		insert into agent_executions (trace_id, surface, flow, status, claim, claimed_by) select 'x', 'flow', 'x', 'running', 1, id from w`)
	got, err := p.RunNow(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
	if err != nil || got.Status != executions.Completed {
		t.Errorf("status %s, %v", got.Status, err)
	}
}

func TestLimitsAreSetAsAWhole(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, map[string]executions.Func{"flow": func(context.Context, json.RawMessage) (executions.Result, error) {
		return executions.Result{}, nil
	}})
	one, two := executions.Admission{Kind: "flow", Name: "a", Running: 1}, executions.Admission{Kind: "surface", Name: "chat", Running: 2}
	more := one
	more.Running = 3
	for _, want := range [][]executions.Admission{{one, two}, {more}, {}} {
		if err := p.SetLimits(t.Context(), want); err != nil {
			t.Fatal(err)
		}
		rows, err := pool.Query(t.Context(), `select kind, name, running from agent_limits order by kind, name`)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[executions.Admission]); err != nil || !slices.Equal(got, want) {
			t.Errorf("the limits are %v, want %v, %v", got, want, err)
		}
	}
	if err := p.SetLimits(t.Context(), []executions.Admission{{Kind: "page", Name: "x", Running: 1}}); !postgres.IsCode(err, "23514") {
		t.Errorf("a limit of a page: %v", err)
	}
}
