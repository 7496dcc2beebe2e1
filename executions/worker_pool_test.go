package executions_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
)

// neverSweep rules out that a sweep caused what the test sees.
func neverSweep(o *executions.Options) { o.SweepEvery, o.LeaseTTL = time.Hour, time.Minute }

// setLimit sets a limit by plain SQL.
func setLimit(t *testing.T, db postgres.DB, kind, name string, running int) {
	t.Helper()
	pgtest.Exec(t, db, `
		insert into agent_limits (kind, name, running) values (@kind, @name, @running)
		on conflict (kind, name) do update set running = excluded.running`,
		postgres.Strict{"kind": kind, "name": name, "running": running})
}

// tryClaimReady claims from the queue like a process. It returns the ids by priority and age.
func tryClaimReady(ctx context.Context, db postgres.DB, worker string, n int) ([]string, error) {
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
	ids, err := tryClaimReady(t.Context(), db, worker, n)
	require.NoError(t, err)
	return ids
}

// insertQueued inserts a pending execution by plain SQL.
func insertQueued(t *testing.T, pool *pgxpool.Pool, flow, surface string, priority int) string {
	t.Helper()
	return pgtest.Value[string](t, pool, `
		insert into agent_executions (trace_id, surface, flow, priority) values (@trace, @surface, @flow, @priority)
		  returning id::text`,
		postgres.Strict{"trace": string(trace.New(trace.Flow)), "surface": surface, "flow": flow, "priority": priority})
}

func TestLimitHoldsAcrossProcesses(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var now, most, surplus atomic.Int32
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		n := now.Add(1)
		defer now.Add(-1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		if n > 3 {
			surplus.Add(1)
		}
		return resultOf(executions.Step(ctx, "work", func(ctx context.Context) (int, error) {
			return queryValue[int](ctx, pool, `select 1 from pg_sleep(0.005)`)
		}))
	})
	heard := newListener(t, pool)
	with := func(o *executions.Options) { neverSweep(o); o.Listener = heard }
	p := startEngine(t, pool, flows, with)
	startEngine(t, pool, flows, with)
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	require.NoError(t, p.SetLimits(t.Context(), []executions.Admission{{Kind: "flow", Name: "flow", Running: 3}}))
	for range 60 {
		p.startFlow(t, "flow")
	}
	pgtest.Until(t, pool, 0, `select count(*) from agent_executions where status <> 'completed'`)
	assert.Truef(t, surplus.Load() == 0 && most.Load() >= 2, "%d ran concurrently", most.Load())
}

// queryValue queries one value inside a flow.
func queryValue[T any](ctx context.Context, db postgres.DB, sql string) (v T, err error) {
	err = db.QueryRow(ctx, sql).Scan(&v)
	return v, err
}

func TestConcurrentClaimsKeepLimit(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	setLimit(t, pool, "flow", "flow", 5)
	setLimit(t, pool, "surface", "flow", 7)
	workers := make([]string, 6)
	for i := range workers {
		workers[i] = newWorker(t, pool)
	}
	for range 15 {
		pgtest.Exec(t, pool, `delete from agent_executions`)
		ids := make([]string, 30)
		for i := range ids {
			ids[i] = insertQueued(t, pool, []string{"flow", "other"}[i%2], "flow", 2)
		}
		group, ctx := errgroup.WithContext(t.Context())
		for i, w := range workers {
			group.Go(func() error {
				if i%2 == 0 {
					_, err := tryClaimReady(ctx, pool, w, 4)
					return err
				}
				_, err := claim(ctx, pool, ids[i], w)
				return err
			})
		}
		require.NoError(t, group.Wait())
		one := pgtest.Value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null
			and flow = 'flow'`)
		all := pgtest.Value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null`)
		require.Truef(t, one <= 5 && all <= 7, "%d of the flow and %d of the surface are claimed", one, all)
	}
	claimReady(t, pool, workers[0], 30)
	assert.Equal(t, 7, pgtest.Value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null`))
}

func TestQueueIsOrderedByPriorityAndAge(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := newWorker(t, pool)
	old := insertQueued(t, pool, "a", "flow", 2)
	urgent := insertQueued(t, pool, "b", "chat", 1)
	late := insertQueued(t, pool, "c", "flow", 3)
	young, cancelled := insertQueued(t, pool, "a", "flow", 2), insertQueued(t, pool, "a", "flow", 1)
	_, err := cancelElsewhere(t.Context(), pool, cancelled, "test", "not needed")
	require.NoError(t, err)
	if got, want := claimReady(t, pool, w, 2), []string{urgent, old}; !slices.Equal(got, want) {
		t.Errorf("first %v, want %v", got, want)
	}
	if got, want := claimReady(t, pool, w, 5), []string{young, late}; !slices.Equal(got, want) {
		t.Errorf("then %v, want %v", got, want)
	}
}

// Executions beyond a limit are neither claimed nor announced by the sweep, and do not delay others.
func TestLimitDelaysNoOtherFlow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := newWorker(t, pool)
	setLimit(t, pool, "flow", "full", 1)
	setLimit(t, pool, "surface", "webhook", 0)
	held := insertQueued(t, pool, "full", "flow", 1)
	for range 20 {
		insertQueued(t, pool, "full", "flow", 1)
		insertQueued(t, pool, "any", "webhook", 1)
	}
	free := insertQueued(t, pool, "any", "flow", 4)
	if got, want := claimReady(t, pool, w, 10), []string{held, free}; !slices.Equal(got, want) {
		t.Errorf("claimed %v, want %v", got, want)
	}
	const places = `select count(*) from lanekeeper.agent_ready_kinds k where (k.places > 0) is not false`
	assert.Equal(t, 0, pgtest.Value[int](t, pool, places))
	_, err := cancelElsewhere(t.Context(), pool, held, "test", "")
	require.NoError(t, err)
	assert.True(t, pgtest.Value[int](t, pool, places) != 0, "a place is free, and nothing is ready")
	assert.Equal(t, 1, len(claimReady(t, pool, w, 10)), "claimed", "want 1")
}

// A run frees its slot while it waits, and needs one to continue.
func TestWaitingExecutionHoldsNoSlot(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := newWorker(t, pool)
	setLimit(t, pool, "flow", "flow", 1)
	first := insertPending(t, pool)
	n := mustClaim(t, pool, first, w)
	second := insertPending(t, pool)
	if n, err := claim(t.Context(), pool, second, w); n != 0 || err != nil {
		t.Fatalf("claim %d, %v beyond the limit", n, err)
	}
	pgtest.Exec(t, pool, `select lanekeeper.wait_agent_execution(@id, @claim, 'wait', 'event', 'k', '1 hour', null)`,
		postgres.Strict{"id": first, "claim": n})
	mustClaim(t, pool, second, w)
	pgtest.Exec(t, pool, `select deliver_agent_event('EVENT_COMPLETED', 'k')`)
	got := claimReady(t, pool, w, 5)
	assert.Truef(t, len(got) == 0, "%v went on beyond the limit", got)
	_, err := cancelElsewhere(t.Context(), pool, second, "test", "")
	require.NoError(t, err)
	got = claimReady(t, pool, w, 5)
	assert.Truef(t, slices.Equal(got, []string{first}), "claimed %v, want %s", got, first)
}

func TestRunSyncIsCountedButNotLimited(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	setLimit(t, pool, "surface", "flow", 1)
	p := newEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return executions.Result{}, func() error {
			got, err := tryClaimReady(ctx, pool, newWorker(t, pool), 1)
			assert.True(t, err != nil || len(got) == 0, "a place was free")
			return err
		}()
	}))
	insertQueued(t, pool, "other", "flow", 1)
	pgtest.Exec(t, pool, `
		with w as (insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 hour') returning id)
		insert into agent_executions (trace_id, surface, flow, status, claim, claimed_by) select 'x', 'flow', 'x', 'running',
		  1, id from w`)
	got, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
	assert.Truef(t, err == nil && got.Status == executions.Completed, "status %s, %v", got.Status, err)
}

func TestSetLimitsReplacesAll(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, map[string]executions.Func{"flow": func(context.Context, json.RawMessage) (executions.Result,
		error,
	) {
		return executions.Result{}, nil
	}})
	one, two := executions.Admission{Kind: "flow", Name: "a", Running: 1},
		executions.Admission{Kind: "surface", Name: "chat", Running: 2}
	more := one
	more.Running = 3
	for _, want := range [][]executions.Admission{{one, two}, {more}, {}} {
		require.NoError(t, p.SetLimits(t.Context(), want))
		rows, err := pool.Query(t.Context(), `select kind, name, running from agent_limits order by kind, name`)
		require.NoError(t, err)
		got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[executions.Admission])
		assert.Truef(t, err == nil && slices.Equal(got, want), "the limits are %v, want %v, %v", got, want, err)
	}
	err := p.SetLimits(t.Context(), []executions.Admission{{Kind: "page", Name: "x", Running: 1}})
	assert.Truef(t, postgres.IsCode(err, "22023"), "a limit of a page: %v", err)
}

// countWakeJobs counts the hints sent to River.
func countWakeJobs(t *testing.T, db postgres.DB) int {
	t.Helper()
	return pgtest.Value[int](t, db, `select count(*) from river.river_job where kind = 'execution_wake'`)
}

func TestDeliverRunsExecutionWithoutRiverJob(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		return resultOf(executions.Wait(ctx, "go", executions.Event(x.ID, 0)))
	}), neverSweep)
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	before := countWakeJobs(t, pool)
	for range 10 { // one at a time, so each finds a free worker
		id := p.startFlow(t, "flow")
		enginetest.Await(t, pool, id, executions.Waiting)
		got, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", id, nil, id)
		require.Truef(t, err == nil && len(got.Resumed) == 1, "resumed %v, %v", got.Resumed, err)
		enginetest.Await(t, pool, id, executions.Completed)
	}
	if n := countWakeJobs(t, pool) - before; n > 1 { // the first may start before the workers do
		t.Errorf("%d hints by way of River", n)
	}
}

func TestDeliverInTransactionInsertsRiverJob(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		return resultOf(executions.Wait(ctx, "go", executions.Event(x.ID, 0)))
	}), neverSweep)
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Waiting)
	before := countWakeJobs(t, pool)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = p.Deliver(t.Context(), tx, "EVENT_COMPLETED", id, nil, "")
	assert.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	enginetest.Await(t, pool, id, executions.Completed)
	assert.Equal(t, before+1, countWakeJobs(t, pool), countWakeJobs(t, pool)-before)
}

// Work beyond the free workers moves to another process without a sweep.
func TestBusyProcessNotifiesOthers(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	heard := newListener(t, pool)
	block := newGate(t)
	full := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		block.enter(ctx)
		return executions.Result{}, nil
	}), neverSweep, func(o *executions.Options) { o.Listener, o.Workers = heard, 1 })
	pgtest.Eventually(t, func() bool { return full.Live() == nil }, "the engine lives")
	full.startFlow(t, "flow")
	block.awaitFirst(t)
	var ran atomic.Int32
	startEngine(t, pool, flowMap(func(context.Context) (executions.Result, error) {
		ran.Add(1)
		return executions.Result{}, nil
	}), neverSweep, func(o *executions.Options) { o.Listener = heard })
	for range 30 {
		full.startFlow(t, "flow")
	}
	pgtest.Eventually(t, func() bool { return ran.Load() == 30 }, "the other process runs them")
}

// A process leaves an unknown flow to others, and claims the executions behind it.
func TestUnknownFlowIsLeftToOthers(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	heard := newListener(t, pool)
	with := func(o *executions.Options) { o.Listener, o.Workers = heard, 2 }
	log := &testkit.Log{}
	p := startEngine(t, pool, flowMap(noop), neverSweep, with, func(o *executions.Options) {
		o.Logger = slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	strange := make([]string, 10)
	for i := range strange {
		strange[i] = p.startFlow(t, "strange")
	}
	x, _, err := p.Start(t.Context(), pool,
		executions.Spec{Flow: "strange", Surface: trace.Flow, Queue: executions.Interactive})
	require.NoError(t, err)
	strange = append(strange, x.ID)
	enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	pgtest.Eventually(t, func() bool { return len(log.Lines("flow unknown here")) >= 2 }, "each queue meets the flow")
	if warned := log.Lines("flow unknown here", `"WARN"`); len(warned) > 1 {
		t.Errorf("the flow is reported more than once: %q", warned)
	}
	startEngine(t, pool, map[string]executions.Func{"strange": func(context.Context, json.RawMessage) (executions.Result,
		error,
	) {
		return executions.Result{}, nil
	}}, neverSweep, with)
	for _, id := range strange {
		enginetest.Await(t, pool, id, executions.Completed)
	}
	for range 3 { // by now this process skips the flow
		enginetest.Await(t, pool, p.startFlow(t, "strange"), executions.Completed)
	}
}

// The end of a child wakes its parent at once.
func TestParentResumesWithoutSweep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, map[string]executions.Func{
		"child": func(context.Context, json.RawMessage) (executions.Result, error) { return executions.Result{}, nil },
		"flow": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return resultOf(executions.Trigger(ctx, "child", executions.Child{Flow: "child", Wait: true}))
		},
	}, neverSweep)
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	for range 5 {
		x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "flow", Surface: trace.Flow})
		require.NoError(t, err)
		enginetest.Await(t, pool, x.ID, executions.Completed)
	}
}

// A ready execution is locked while the workers poll. They poll for it again.
func TestLockedReadyExecutionIsPolledAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(noop), neverSweep)
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	var tx pgx.Tx
	var locked string
	pgtest.Eventually(t, func() bool { // a worker may claim it before the lock
		var err error
		tx, err = pool.Begin(t.Context())
		require.NoError(t, err)
		locked = insertPending(t, pool)
		pgtest.Exec(t, tx, `select from agent_executions where id = @id for no key update`, postgres.Strict{"id": locked})
		enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed) // the workers have polled
		if getExecution(t, pool, locked).Status == executions.Pending {
			return true
		}
		require.NoError(t, tx.Rollback(t.Context()))
		return false
	}, "a ready execution is locked before a worker takes it")
	require.NoError(t, tx.Commit(t.Context()))
	enginetest.Await(t, pool, locked, executions.Completed)
}

// A thousand executions in two processes wait for one event each. Every event comes several times, in any order, by
// program and by SQL, and sweeps run in between. Each wait ends once, with the first event of its id.
func TestAThousandWaitsResumeOnce(t *testing.T) {
	t.Parallel()
	const many = 1000
	pool := pgtest.DB(t)
	one, two := startEngine(t, pool, eventFlow()), startEngine(t, pool, eventFlow())
	pgtest.Exec(t, pool, `
		insert into agent_executions (trace_id, surface, flow, input)
		select 'fl_storm', 'flow', 'flow', to_jsonb('key ' || n)
		  from generate_series(1, @many::int) n`, postgres.Strict{"many": many})
	var sent []int
	for n := range many {
		for range 1 + n%3 {
			sent = append(sent, n+1)
		}
	}
	rand.Shuffle(len(sent), func(i, j int) { sent[i], sent[j] = sent[j], sent[i] })
	group, ctx := errgroup.WithContext(t.Context())
	const senders = 4
	for s := range senders {
		group.Go(func() error {
			for i := s; i < len(sent); i += senders {
				if err := deliverWithID(ctx, []*testEngine{one, two}[s%2], fmt.Sprint("key ", sent[i]), s); err != nil {
					return err
				}
				if i%97 == s {
					if err := two.Sweep(ctx); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
	require.NoError(t, group.Wait())
	pgtest.Until(t, pool, 0, `select count(*) from agent_executions where status <> 'completed'`)
	for what, sql := range map[string]string{
		"events without a consumer": `select count(*) from agent_events where event = 'EVENT_COMPLETED' and consumed_by is null`,
		"duplicate events": `
			select count(*) - (select count(distinct key) from agent_events where event = 'EVENT_COMPLETED')
			  from agent_events where event = 'EVENT_COMPLETED'`,
		"waits with the outcome of another event": `
			select count(*)
			  from agent_executions x
			  join agent_checkpoints c on c.execution_id = x.id and c.step = 'event'
			  join agent_events v on v.id = (c.output ->> 'event_id')::uuid
			 where v.key <> x.input #>> '{}' or v.consumed_by <> x.id`,
		"executions with a second wait": `select count(*) from agent_executions where wait_number > 1`,
		"results of other events": `
			select count(*) from agent_executions
			 where result ->> 'event' <> 'EVENT_COMPLETED' or (result ->> 'timed_out')::boolean`,
		"ends with two events": `
			select count(*) - count(distinct key) from agent_events where event = 'AGENT_COMPLETED'`,
	} {
		assert.Equal(t, 0, pgtest.Value[int](t, pool, sql), what)
	}
	assert.Equal(t, many, pgtest.Value[int](t, pool, `select count(*) from agent_checkpoints where step = 'event'`))
}

// deliverWithID delivers an event under its id, by the engine or by plain SQL.
func deliverWithID(ctx context.Context, p *testEngine, key string, sender int) error {
	if sender%2 == 0 {
		_, err := p.Deliver(ctx, p.pool, "EVENT_COMPLETED", key, json.RawMessage(`{}`), "id of "+key)
		return err
	}
	return deliver(ctx, p.pool, key, `{}`, "id of "+key)
}
