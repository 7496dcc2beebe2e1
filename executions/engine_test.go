package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// timeout bounds each wait of a test. It is long, for slow machines.
const timeout = 90 * time.Second

// testEngine is the part of an agent process that runs executions.
type testEngine struct {
	*executions.Engine
	pool  *pgxpool.Pool
	stop  func()
	flows map[string]executions.Func
}

// startEngine runs an engine until the end of the test, or until the caller calls stop.
func startEngine(
	t *testing.T, pool *pgxpool.Pool, flows map[string]executions.Func, change ...func(*executions.Options),
) *testEngine {
	t.Helper()
	p := newEngine(t, pool, flows, change...)
	p.stop = testkit.Run(t, p.Run)
	return p
}

// tick starts the due executions. A commit with a notification takes a lock of the whole server and may time out on a
// busy one. Then the next tick starts them.
func (p *testEngine) tick(ctx context.Context) error {
	for {
		if err := p.Tick(ctx); !postgres.Locked(err) {
			return err
		}
	}
}

// newEngine creates an engine without running it.
func newEngine(
	t *testing.T, pool *pgxpool.Pool, flows map[string]executions.Func, change ...func(*executions.Options),
) *testEngine {
	t.Helper()
	opts := executions.Options{
		Keeper:     lanes.NewKeeper(pool, lanes.Options{}),
		SweepEvery: 100 * time.Millisecond,
		LeaseTTL:   10 * time.Second,
	}
	for _, c := range change {
		c(&opts)
	}
	engine, err := executions.New(pool, opts)
	require.NoError(t, err)
	for name, fn := range flows {
		require.NoError(t, engine.Register(name, fn))
	}
	return &testEngine{Engine: engine, pool: pool, flows: flows}
}

// startFlow starts an execution of a flow.
func (p *testEngine) startFlow(t *testing.T, flow string) string {
	t.Helper()
	x, created, err := p.Start(t.Context(), p.pool, executions.Spec{Flow: flow, Surface: trace.Flow})
	require.Truef(t, err == nil && created, "start %s: created %v, %v", flow, created, err)
	return x.ID
}

// An engine whose context has ended before its start returns no error and leaves no lease.
func TestRunWithEndedContextReturns(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, run := range map[string]func(*executions.Engine) error{
		"run":  func(e *executions.Engine) error { return e.Run(ended) },
		"beat": func(e *executions.Engine) error { return e.KeepAlive(ended) },
	} {
		e, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
		require.NoError(t, err)
		assert.NoError(t, run(e), name)
	}
	assert.Equal(t, 0,
		pgtest.Value[int](t, pool, `select count(*) from agent_workers where expires_at > clock_timestamp()`))
}

func TestRunTwiceFails(t *testing.T) {
	t.Parallel()
	p := startEngine(t, pgtest.DB(t), flowMap(noop))
	enginetest.Await(t, p.pool, p.startFlow(t, "flow"), executions.Completed)
	assert.Error(t, p.Run(t.Context()), "a second Run during the first")
	enginetest.Await(t, p.pool, p.startFlow(t, "flow"), executions.Completed)
	p.stop()
	assert.Error(t, p.Run(t.Context()), "a Run after the shutdown returned no error")
}

func TestNewRejectsInvalidOptions(t *testing.T) {
	t.Parallel()
	keeper := lanes.NewKeeper(nil, lanes.Options{})
	for _, opts := range []executions.Options{
		{},
		{Keeper: keeper, Workers: -1},
		{Keeper: keeper, LeaseTTL: 100 * 365 * 24 * time.Hour},
	} {
		_, err := executions.New(pgtest.DB(t), opts)
		assert.Error(t, err, "an engine with", opts.Workers, "workers and a lease of", opts.LeaseTTL)
	}
}

// stopInBackground stops a process in the background.
func stopInBackground(p *testEngine) (wait func()) {
	var group errgroup.Group
	group.Go(func() error { p.stop(); return nil })
	return func() { _ = group.Wait() }
}

func TestShutdownFinishesStepAndReleasesRun(t *testing.T) {
	t.Parallel()
	for _, now := range []bool{false, true} {
		name := map[bool]string{false: "taken from the queue", true: "run now"}[now]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			first := newGate(t)
			var firsts, seconds atomic.Int32
			p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
				if _, err := executions.Lane(ctx, "automation:a"); err != nil {
					return executions.Result{}, err
				}
				_, err := executions.Step(ctx, "first", func(ctx context.Context) (int, error) {
					first.enter(ctx)
					return int(firsts.Add(1)), ctx.Err()
				})
				if err != nil {
					return executions.Result{}, err
				}
				return resultOf(executions.Step(ctx, "second",
					func(context.Context) (int, error) { return int(seconds.Add(1)), nil }))
			}))
			ran := func() {}
			if now {
				pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
				wait := p.runInBackground(t)
				ran = func() { wait() }
			} else {
				p.startFlow(t, "flow")
			}
			id := first.awaitFirst(t)
			wait := stopInBackground(p)
			pgtest.Eventually(t, func() bool { return p.Live() != nil }, "the shutdown has started")
			first.open()
			wait()
			ran()
			got := getExecution(t, pool, id)
			checkpoints, err := executions.Checkpoints(t.Context(), pool, id)
			assert.Truef(t, err == nil && len(checkpoints) == 1 && checkpoints[0].Step == "first" && seconds.Load() == 0,
				"recorded %v, %v; the second step ran %d times", checkpoints, err, seconds.Load())
			assert.Truef(t, got.Status == executions.Running && got.ClaimedBy == nil && got.Attempt == 0,
				"status %s, claimed by %q, attempt %d", got.Status, postgres.Deref(got.ClaimedBy), got.Attempt)
			assert.True(t, !pgtest.Value[bool](t, pool, `select is_agent_lock_held('automation:a')`), "its lane is held")
			if pgtest.Value[bool](t, pool, `select exists (select from agent_workers where expires_at > clock_timestamp())`) {
				t.Error("the worker's lease has not ended")
			}
			startEngine(t, pool, p.flows)
			enginetest.Await(t, pool, id, executions.Completed)
			assert.Truef(t, firsts.Load() == 1 && seconds.Load() == 1,
				"first ran %d times, second %d times", firsts.Load(), seconds.Load())
		})
	}
}

func TestStopTimeoutCancelsStep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	entered := make(chan string, 1)
	var calls atomic.Int32
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Do(ctx, "pay", executions.Call{Entry: activity.Entry{Skill: "pay"}, Idempotent: true},
			func(ctx context.Context, _ *executions.Effect) (int32, error) {
				if n := calls.Add(1); n > 1 {
					return n, nil
				}
				x, _ := executions.Current(ctx)
				entered <- x.ID
				<-ctx.Done()
				return 0, ctx.Err()
			}))
	})
	p := startEngine(t, pool, flows, func(o *executions.Options) { o.StopTimeout = 200 * time.Millisecond })
	p.startFlow(t, "flow")
	id := testkit.Receive(t, entered)
	began := time.Now()
	p.stop()
	took := time.Since(began)
	assert.Truef(t, took <= 25*time.Second, "the shutdown took %s", took)
	got := getExecution(t, pool, id)
	assert.Equal(t, executions.Running, got.Status)
	assert.Equal(t, "", postgres.Deref(got.ClaimedBy), "worker with the claim")
	assert.Equal(t, 0, got.Attempt, "attempt")
	startEngine(t, pool, flows)
	got = enginetest.Await(t, pool, id, executions.Completed)
	assert.Truef(t, string(got.Result) == "2", "result %s", got.Result)
}

// TestInterruptedRunSyncIsCancelled also checks that its claim is never released: another process could take it.
func TestInterruptedRunSyncIsCancelled(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		create table releases (id uuid);
		create function record_release() returns trigger language plpgsql as $$
		begin insert into releases values (new.id); return new; end $$;
		create trigger record_release after update on agent_executions for each row
		  when (old.claimed_by is not null and new.claimed_by is null and new.status = 'running')
		  execute function record_release()`)
	ctx, cancel := context.WithCancel(t.Context())
	p := newEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		cancel()
		<-ctx.Done()
		return executions.Result{}, ctx.Err()
	}))
	got, err := p.RunSync(ctx, executions.Spec{Flow: "flow", Surface: trace.Flow})
	assert.Truef(t, err == nil && got.Status == executions.Cancelled && postgres.Deref(got.CancelledBy) == "interrupt",
		"status %s by %q, %v", got.Status, postgres.Deref(got.CancelledBy), err)
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from releases`))
}

func TestKeepAliveRenewsLeaseWithoutClaims(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(noop))
	assert.Equal(t, "the worker has no lease", p.Live().Error(), "before its first lease, as after a lost one")
	ctx, cancel := context.WithCancel(t.Context())
	var group errgroup.Group
	group.Go(func() error { return p.KeepAlive(ctx) })
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	first := pgtest.Value[time.Time](t, pool, `select expires_at from agent_workers`)
	id := p.startFlow(t, "flow")
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[time.Time](t, pool, `select expires_at from agent_workers`).After(first)
	}, "the lease is renewed")
	cancel()
	err := group.Wait()
	assert.True(t, err == nil || errors.Is(err, context.Canceled), err)
	assert.Equal(t, executions.Pending, getExecution(t, pool, id).Status)
	if pgtest.Value[bool](t, pool, `select exists (select from agent_workers where expires_at > clock_timestamp())`) {
		t.Error("the lease has not ended")
	}
}

// A cancel that the lease's renewal finds needs a connection of the runs' pool. Renewals do not wait for it.
func TestBusyPoolDoesNotDelayRenewals(t *testing.T) {
	t.Parallel()
	lease := pgtest.DB(t)
	config := lease.Config()
	config.MaxConns = 3
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	started := make(chan struct{})
	p := newEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		close(started)
		<-ctx.Done()
		return executions.Result{}, context.Cause(ctx)
	}), func(o *executions.Options) { o.Lease, o.LeaseTTL = lease, 3*time.Second })
	ctx, stop := context.WithCancel(t.Context())
	var group errgroup.Group
	group.Go(func() error { return p.KeepAlive(ctx) })
	group.Go(func() error {
		_, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
		return err
	})
	<-started
	var busy []*pgxpool.Conn
	for range config.MaxConns {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		busy = append(busy, conn)
	}
	pgtest.Exec(t, lease, `
		insert into agent_cancel_requests (execution_id, cancelled_by) select id, 'admin' from agent_executions`)
	worker, expires := pgtest.Value[string](t, lease, `select id::text from agent_workers`),
		pgtest.Value[time.Time](t, lease, `select expires_at from agent_workers`)
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[bool](t, lease, `
			select exists (select from agent_workers where id::text <> $1 or expires_at > $2)`, worker,
			expires.Add(5*time.Second))
	}, "the lease is renewed, or lost")
	assert.Equal(t, worker, pgtest.Value[string](t, lease, `select string_agg(id::text, ' ') from agent_workers`))
	for _, conn := range busy {
		conn.Release()
	}
	pgtest.Eventually(t, func() bool { // on a slow server, the sweep completes the cancel
		return p.Sweep(t.Context()) == nil &&
			pgtest.Value[string](t, lease, `select status from agent_executions`) == "cancelled"
	}, "the execution is cancelled")
	stop()
	assert.NoError(t, group.Wait())
}

// finishObserver is called when a run is over.
type finishObserver func()

func (f finishObserver) RunFinished(executions.Execution)                             { f() }
func (finishObserver) RunStarted(executions.Execution)                                {}
func (finishObserver) ClaimLost(executions.Execution)                                 {}
func (finishObserver) ExecutionEnded(executions.Execution, executions.Status)         {}
func (finishObserver) ActivityClosed(activity.Entry, activity.Outcome, time.Duration) {}

// The engine stops working for a caller who left, even if the database does not answer.
func TestUnresponsiveDatabaseDoesNotBlockDepartedCaller(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ctx, leave := context.WithCancel(t.Context())
	var locked pgx.Tx
	hang := finishObserver(func() {
		leave()
		var err error
		if locked, err = pool.Begin(t.Context()); err == nil {
			_, err = locked.Exec(t.Context(), `lock table agent_executions in access exclusive mode`)
		}
		assert.NoError(t, err)
	})
	p := newEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		_, err := executions.Wait(ctx, "long", executions.Delay(time.Hour))
		return executions.Result{}, err
	}), func(o *executions.Options) { o.LeaseTTL, o.Observer = time.Second, hang })
	returned := make(chan error, 1)
	go func() {
		_, err := p.RunSync(ctx, executions.Spec{Flow: "flow", Surface: trace.Flow})
		returned <- err
	}()
	assert.ErrorIs(t, testkit.Receive(t, returned), context.DeadlineExceeded)
	assert.NoError(t, locked.Rollback(t.Context()))
}

// newWorker registers a worker by plain SQL, like an external worker.
func newWorker(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return pgtest.Value[string](t, pool, `
		insert into agent_workers (name, expires_at) values ('test', clock_timestamp() + interval '10 minutes')
		  returning id::text`)
}

// insertPending inserts an execution by plain SQL.
func insertPending(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return pgtest.Value[string](t, pool, `
		insert into agent_executions (trace_id, surface, flow) values (@trace, 'flow', 'flow') returning id::text`,
		postgres.Strict{"trace": string(trace.New(trace.Flow))})
}

// claim returns the number of a new claim, or 0 if the execution was not ready.
func claim(ctx context.Context, db postgres.DB, id, worker string) (n int64, err error) {
	err = db.QueryRow(ctx, `select coalesce(max(claim), 0) from lanekeeper.claim_agent_execution(@id, @worker)`,
		postgres.Strict{"id": id, "worker": worker}).Scan(&n)
	return n, err
}

func mustClaim(t *testing.T, db postgres.DB, id, worker string) int64 {
	t.Helper()
	n, err := claim(t.Context(), db, id, worker)
	require.Truef(t, err == nil && n != 0, "claim: %d, %v", n, err)
	return n
}

func getExecution(t *testing.T, db postgres.DB, id string) executions.Execution {
	t.Helper()
	x, err := executions.Get(t.Context(), db, id)
	require.NoError(t, err)
	return x
}

// sweepOnce sweeps once, from a process that runs nothing.
func sweepOnce(ctx context.Context, pool *pgxpool.Pool) error {
	e, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	if err != nil {
		return err
	}
	return e.Sweep(ctx)
}

func sweep(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	require.NoError(t, sweepOnce(t.Context(), pool))
}

func TestConcurrentClaimsSucceedOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	workers := make([]string, 8)
	for i := range workers {
		workers[i] = newWorker(t, pool)
	}
	for range 20 {
		id := insertPending(t, pool)
		var won atomic.Int32
		group, ctx := errgroup.WithContext(t.Context())
		for _, w := range workers {
			group.Go(func() error {
				n, err := claim(ctx, pool, id, w)
				if n > 0 {
					won.Add(1)
				}
				return err
			})
		}
		err := group.Wait()
		require.Truef(t, err == nil && won.Load() == 1, "%d racers claimed the execution, %v", won.Load(), err)
	}
}

func TestExpiredWorkerRegistersNewID(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	middle := newGate(t)
	lost := make(chan error, 1)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Step(ctx, "work", func(ctx context.Context) (int, error) {
			if middle.callers.Add(1) > 1 {
				return 2, nil
			}
			x, _ := executions.Current(ctx)
			middle.firstID <- x.ID
			<-ctx.Done()
			lost <- context.Cause(ctx)
			return 0, ctx.Err()
		}))
	}))
	p.startFlow(t, "flow")
	id := middle.awaitFirst(t)
	before := postgres.Deref(getExecution(t, pool, id).ClaimedBy)
	expireLease(t, pool, id)
	got := enginetest.Await(t, pool, id, executions.Completed)
	assert.ErrorIs(t, testkit.Receive(t, lost), executions.ErrLost)
	assert.Truef(t, string(got.Result) == "2" && got.Claim >= 2, "claim %d, result %s", got.Claim, got.Result)
	after := pgtest.Value[string](t, pool, `select string_agg(id::text, ' ') from agent_workers`)
	assert.Truef(t, after != before && len(after) == len(before), "worker before %s, after %s", before, after)
	assert.NoError(t, p.Live())
}

func TestExpiredWorkerIsNotRenewed(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := newWorker(t, pool)
	pgtest.Exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 ms'`)
	id := insertPending(t, pool)
	n, err := claim(t.Context(), pool, id, w)
	assert.Truef(t, n == 0 && err == nil, "an expired worker got claim %d, %v", n, err)
	alive, err := executions.RenewWorker(t.Context(), pool, w)
	assert.Truef(t, err == nil && !alive, "an expired worker was renewed: %v, %v", alive, err)
}

// loseWorker lets a worker claim an execution and die.
func loseWorker(t *testing.T, pool *pgxpool.Pool, id, checkpoint string) {
	t.Helper()
	w := newWorker(t, pool)
	n := mustClaim(t, pool, id, w)
	if checkpoint != "" {
		pgtest.Exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim) values (@id, @step, @claim)`,
			postgres.Strict{"id": id, "step": checkpoint, "claim": n})
	}
	expireLease(t, pool, id)
	sweep(t, pool)
}

func TestCheckpointResetsAttempts(t *testing.T) {
	t.Parallel()
	cases := map[string]func(t *testing.T, pool *pgxpool.Pool, id string){
		"of a claim that is lost": func(t *testing.T, pool *pgxpool.Pool, id string) { loseWorker(t, pool, id, "progress") },
		"of a claim that is handed back": func(t *testing.T, pool *pgxpool.Pool, id string) {
			n := mustClaim(t, pool, id, newWorker(t, pool))
			pgtest.Exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim) values (@id, 'progress', @claim)`,
				postgres.Strict{"id": id, "claim": n})
			pgtest.Exec(t, pool, `select lanekeeper.release_agent_claim(@id, @claim)`, postgres.Strict{"id": id, "claim": n})
		},
	}
	for name, progress := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			id := insertPending(t, pool)
			for range 4 {
				loseWorker(t, pool, id, "")
			}
			progress(t, pool, id)
			for range 3 {
				loseWorker(t, pool, id, "")
			}
			if got := getExecution(t, pool, id); got.Status != executions.Running {
				t.Errorf("status %s, attempt %d: %s", got.Status, got.Attempt, postgres.Deref(got.ErrorMessage))
			}
		})
	}
}

func TestSweepOfReadyExecutionsKeepsAttempts(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	ids := make([]string, 20)
	for i := range ids {
		ids[i] = insertPending(t, pool)
	}
	for range 10 {
		sweep(t, pool)
	}
	assert.Equal(t, len(ids), pgtest.Value[int](t, pool,
		`select count(*) from agent_executions where status = 'pending' and attempt = 0`))
}

func TestSweepReleasesClaimsOfUnknownWorker(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := insertPending(t, pool)
	mustClaim(t, pool, id, newWorker(t, pool))
	pgtest.Exec(t, pool, `delete from agent_workers`)
	startEngine(t, pool, flowMap(noop))
	enginetest.Await(t, pool, id, executions.Completed)
}

// A claim whose response was lost with the connection belongs to a live worker that does not know of it.
func TestOrphanedClaimIsReleased(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(noop))
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	id := pgtest.Value[string](t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim, started_at)
		select lanekeeper.agent_trace_id('fl'), 'flow', 'flow', 'running', w.id, 1, clock_timestamp() from agent_workers w
		  returning id::text`)
	assert.Equal(t, 0, enginetest.Await(t, pool, id, executions.Completed).Attempt)
}

func TestEngineOptionsHaveMinimums(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(noop),
		func(o *executions.Options) { o.LeaseTTL, o.SweepEvery = time.Millisecond, time.Nanosecond })
	enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	assert.Error(t, p.Register("flow", nil), "a flow without a function was registered")
}

func TestDedupeKeyStartsOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, nil)
	var created atomic.Int32
	ids := make([]string, 16)
	var group errgroup.Group
	for i := range ids {
		group.Go(func() error {
			x, fresh, err := p.Start(t.Context(), pool, executions.Spec{Flow: "flow", Surface: trace.Flow, DedupeKey: "order 7"})
			if fresh {
				created.Add(1)
			}
			ids[i] = x.ID
			return err
		})
	}
	err := group.Wait()
	require.Truef(t, err == nil && created.Load() == 1, "created %d, %v", created.Load(), err)
	for _, id := range ids {
		assert.Equal(t, ids[0], id, fmt.Sprint(ids))
	}
}

func TestExpiredLeaseRejectsWritesBeforeSweep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := insertPending(t, pool)
	args := postgres.Strict{"id": id, "claim": mustClaim(t, pool, id, newWorker(t, pool))}
	expireLease(t, pool, id)
	for name, sql := range map[string]string{
		"checkpoint": `insert into agent_checkpoints (execution_id, step, claim) values (@id, 'late', @claim)`,
		"finish":     `select lanekeeper.complete_agent_execution(@id, @claim, 'completed', '', null, null, null)`,
		"park":       `select lanekeeper.wait_agent_execution(@id, @claim, 'late', 'event', 'key', '1 hour', null)`,
	} {
		_, err := pool.Exec(t.Context(), sql, args)
		assert.Truef(t, postgres.IsCode(err, "LK001"), "%s: %v", name, err)
	}
	assert.Equal(t, executions.Running, getExecution(t, pool, id).Status)
}

// A program that embeds the runtime may have flows of its own. All processes know the flows of a live one.
func TestFlowsOfOtherProcessesAreKnown(t *testing.T) {
	pool := pgtest.DB(t)
	agent := startEngine(t, pool, nil)
	known := func() bool {
		has, err := agent.HasFlow(t.Context(), "pay")
		require.NoError(t, err)
		return has
	}
	assert.True(t, !known(), "a flow without a process is known")
	program := startEngine(t, pool, map[string]executions.Func{
		"pay": func(context.Context, json.RawMessage) (executions.Result, error) { return executions.Result{}, nil },
	})
	pgtest.Eventually(t, known, "the flow of another process is unknown")
	names, err := agent.Flows(t.Context())
	assert.Truef(t, err == nil && slices.Contains(names, "pay"), "the flows are %v, %v", names, err)
	program.stop()
	assert.True(t, !known(), "the flow of a process that has ended is known")
}
