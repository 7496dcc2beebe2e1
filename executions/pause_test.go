package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

func pauseAll(t *testing.T, db postgres.DB) executions.PauseChange {
	t.Helper()
	got, err := executions.PauseAll(t.Context(), db, "ana", "prices look wrong")
	require.NoError(t, err)
	return got
}

func resumeAll(t *testing.T, db postgres.DB) executions.PauseChange {
	t.Helper()
	got, err := executions.ResumeAll(t.Context(), db, "ben", "they were right")
	require.NoError(t, err)
	return got
}

// twoStepFlow is a flow whose first step waits at a gate. It counts the runs of each step.
func twoStepFlow(first *gate, counts *[2]atomic.Int32) flowFunc {
	return func(ctx context.Context) (executions.Result, error) {
		for i, name := range []string{"first", "second"} {
			_, err := executions.Step(ctx, name, func(ctx context.Context) (int32, error) {
				if i == 0 {
					first.enter(ctx)
				}
				return counts[i].Add(1), nil
			})
			if err != nil {
				return executions.Result{}, err
			}
		}
		return executions.Result{}, nil
	}
}

func TestPauseStopsUnattendedStarts(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	heard := newListener(t, pool)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Step(ctx, "one", func(context.Context) (int, error) { return 1, nil }))
	}), func(o *executions.Options) { neverSweep(o); o.Listener, o.Workers = heard, 2 })
	pgtest.Eventually(t, func() bool { return p.Live() == nil }, "the engine lives")
	got := pauseAll(t, pool)
	require.Truef(t, got.Changed && got.Paused && got.PausedBy == "ana" && got.ActivityID != "", "pause: %+v", got)
	var held []string
	for range 9 { // more than the workers can claim
		held = append(held, p.startFlow(t, "flow"))
	}
	for _, surface := range []trace.Surface{trace.Heartbeat, trace.Webhook} {
		x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "flow", Surface: surface, Priority: 1})
		require.NoError(t, err)
		held = append(held, x.ID)
	}
	for _, surface := range []trace.Surface{trace.Chat, trace.Operate} {
		x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "flow", Surface: surface, Priority: 4})
		require.NoError(t, err)
		enginetest.Await(t, pool, x.ID, executions.Completed)
	}
	require.Equal(t, len(held), pgtest.Value[int](t, pool,
		`select count(*) from agent_executions where status = 'pending' and claim = 0`))
	require.NoError(t, p.Sweep(t.Context()))
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from lanekeeper.agent_ready_kinds`))
	got = resumeAll(t, pool)
	require.Truef(t, got.Changed && !got.Paused && got.PausedBy == "ana" && got.ResumedAt != nil, "resume: %+v", got)
	for _, id := range held { // no sweep runs
		enginetest.Await(t, pool, id, executions.Completed)
	}
}

func TestPauseReleasesRunBeforeNextStep(t *testing.T) {
	t.Parallel()
	for _, announced := range []bool{true, false} {
		t.Run(map[bool]string{true: "by notification", false: "by polling"}[announced], func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			first := newGate(t)
			var counts [2]atomic.Int32
			with := func(*executions.Options) {}
			if announced {
				heard := newListener(t, pool)
				with = func(o *executions.Options) { neverSweep(o); o.Listener = heard }
			}
			p := startEngine(t, pool, flowMap(twoStepFlow(first, &counts)), with)
			p.startFlow(t, "flow")
			id := first.awaitFirst(t)
			pauseAll(t, pool)
			pgtest.Eventually(t, p.Paused, "the process knows")
			first.open()
			pgtest.Eventually(t, func() bool { return getExecution(t, pool, id).ClaimedBy == nil }, "the run is handed back")
			got := getExecution(t, pool, id)
			checkpoints, err := executions.Checkpoints(t.Context(), pool, id)
			require.Truef(t, got.Status == executions.Running && got.Attempt == 0 && err == nil && len(checkpoints) == 1 &&
				counts[1].Load() == 0, "status %s, attempt %d, recorded %v, %v; the second step ran %d times", got.Status,
				got.Attempt, checkpoints, err, counts[1].Load())
			resumeAll(t, pool)
			enginetest.Await(t, pool, id, executions.Completed)
			assert.Truef(t, counts[0].Load() == 1 && counts[1].Load() == 1,
				"the steps ran %d and %d times", counts[0].Load(), counts[1].Load())
		})
	}
}

func TestPauseContinuesAttendedRuns(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	first := newGate(t)
	var counts [2]atomic.Int32
	p := startEngine(t, pool, flowMap(twoStepFlow(first, &counts)))
	x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "flow", Surface: trace.Operate})
	require.NoError(t, err)
	first.awaitFirst(t)
	pauseAll(t, pool)
	pgtest.Eventually(t, p.Paused, "the process knows")
	first.open()
	enginetest.Await(t, pool, x.ID, executions.Completed)
}

// A claim in progress either precedes the pause, which waits for it, or fails.
func TestPauseSerializesWithClaims(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	w := newWorker(t, pool)
	before, after := insertPending(t, pool), insertPending(t, pool)
	inTx := func(sql string, args ...any) pgx.Tx {
		tx := pgtest.Begin(t, pool)
		pgtest.Exec(t, tx, sql, args...)
		return tx
	}
	claiming := inTx(`select lanekeeper.claim_agent_execution(@id, @worker)`, postgres.Strict{"id": before, "worker": w})
	assert.True(t, !pgtest.Value[bool](t, pool, `select pg_try_advisory_xact_lock(hashtextextended('agent pause', 0))`),
		"a pause would not wait for the claim")
	require.NoError(t, claiming.Commit(t.Context()))
	pausing := inTx(`select pause_agent('prices look wrong')`)
	n, err := claim(t.Context(), pool, after, w)
	assert.Truef(t, n == 0 && err == nil, "claimed during the pause: %d, %v", n, err)
	ids := claimReady(t, pool, w, 5)
	assert.Truef(t, len(ids) == 0, "claimed during the pause: %v", ids)
	pid := pgtest.Value[int](t, pausing, `select pg_backend_pid()`)
	_, err = pool.Exec(t.Context(), `select lock_agent_execution(start_agent_execution('external'), 'worker 1')`)
	assert.Truef(t, postgres.IsCode(err, "LK003"), "locked during the pause: %v", err)
	assert.ErrorContains(t, err, fmt.Sprintf("by the session with pid %d", pid))
	require.NoError(t, pausing.Rollback(t.Context()))
	mustClaim(t, pool, after, w)
}

func TestNoClaimSucceedsAfterPauseAll(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	workers := make([]string, 4)
	for i := range workers {
		workers[i] = newWorker(t, pool)
	}
	for range 5 {
		pgtest.Exec(t, pool, `delete from agent_executions`)
		pgtest.Exec(t, pool, `
			insert into agent_executions (trace_id, surface, flow) select lanekeeper.agent_trace_id('fl'), 'flow', 'flow'
			  from generate_series(1, 200)`)
		stop := make(chan struct{})
		halt := sync.OnceFunc(func() { close(stop) })
		group, ctx := errgroup.WithContext(t.Context())
		for _, w := range workers {
			group.Go(func() error {
				for {
					select {
					case <-stop:
						return nil
					default:
					}
					if _, err := tryClaimReady(ctx, pool, w, 3); err != nil {
						return err
					}
				}
			})
		}
		pauseAll(t, pool)
		claimed := func() int {
			return pgtest.Value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null`)
		}
		then := claimed()
		pgtest.Exec(t, pool, `select pg_sleep(0.02)`) // time for a wrong claim
		now := claimed()
		halt()
		require.NoError(t, group.Wait())
		require.Equal(t, then, now)
		resumeAll(t, pool)
	}
}

func TestConcurrentPausesChangeOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	several := func(fn func(ctx context.Context) (executions.PauseChange, error)) (changed int,
		all []executions.PauseChange,
	) {
		var mu sync.Mutex
		group, ctx := errgroup.WithContext(t.Context())
		for range 6 {
			group.Go(func() error {
				got, err := fn(ctx)
				mu.Lock()
				defer mu.Unlock()
				all = append(all, got)
				if got.Changed {
					changed++
				}
				return err
			})
		}
		require.NoError(t, group.Wait())
		return changed, all
	}
	n, all := several(func(ctx context.Context) (executions.PauseChange, error) {
		return executions.PauseAll(ctx, pool, "ana", "why")
	})
	for _, got := range all {
		require.Truef(t, n == 1 && got.TraceID == all[0].TraceID && got.Paused, "%d paused it: %+v", n, all)
	}
	n, _ = several(func(ctx context.Context) (executions.PauseChange, error) {
		return executions.ResumeAll(ctx, pool, "ana", "")
	})
	assert.Equal(t, 1, n)
	pgtest.Equal(t, pool, "pause_agent ana why, resume_agent ana ", `
		select string_agg(skill_name || ' ' || agent || ' ' || purpose, ', ' order by id) from agent_activity
		 where skill_name in ('pause_agent', 'resume_agent')`)
}

func TestRunContinuesAfterUnnoticedResume(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pauseAll(t, pool)
	first := newGate(t)
	first.open()
	var counts [2]atomic.Int32
	p := startEngine(t, pool, flowMap(twoStepFlow(first, &counts)), neverSweep)
	pgtest.Eventually(t, p.Paused, "the process knows of the pause")
	resumeAll(t, pool) // the process reads the change within the hour, not at once
	enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	assert.True(t, p.Paused(), "the process was notified of the end of the pause")
}

// A process may poll the queue before a pause and claim after it. The end of a pause also notifies processes that did
// not know of it.
func TestPauseDuringClaim(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	second := newGate(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		for _, name := range []string{"one", "two"} {
			_, err := executions.Step(ctx, name, func(ctx context.Context) (string, error) {
				if name == "two" {
					second.enter(ctx)
				}
				return name, nil
			})
			if err != nil {
				return executions.Result{}, err
			}
		}
		return executions.Result{}, nil
	}))
	p.startFlow(t, "flow")
	id := second.awaitFirst(t)
	pgtest.Exec(t, pool, `
		create or replace view lanekeeper.agent_ready_kinds as
		select 'background'::text as queue, 'flow'::text as flow, 'flow'::text as surface, null::int as places`)
	pauseAll(t, pool)
	expireLease(t, pool, id)
	second.open()
	pgtest.Eventually(t, func() bool { return getExecution(t, pool, id).ClaimedBy == nil }, "its claim is lost")
	for range 3 {
		require.NoError(t, p.Sweep(t.Context()))
	}
	conn, err := pgtest.Dialer(t, pool)(t.Context())
	require.NoError(t, err)
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, conn, `listen agent_ready`)
	resumeAll(t, pool)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	_, err = conn.WaitForNotification(ctx)
	assert.NoError(t, err, "no notification was received")
	enginetest.Await(t, pool, id, executions.Completed)
}

func TestPauseOutlivesProcess(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	first := newGate(t)
	var counts [2]atomic.Int32
	p := startEngine(t, pool, flowMap(twoStepFlow(first, &counts)))
	p.startFlow(t, "flow")
	id := first.awaitFirst(t)
	pauseAll(t, pool)
	expireLease(t, pool, id) // the process dies in the middle of its step
	second := startEngine(t, pool, flowMap(twoStepFlow(first, &counts)))
	pgtest.Eventually(t, func() bool { return getExecution(t, pool, id).ClaimedBy == nil }, "its claim is lost")
	for range 3 {
		require.NoError(t, second.Sweep(t.Context()))
	}
	if got := getExecution(t, pool, id); got.ClaimedBy != nil || got.Status != executions.Running {
		t.Fatalf("status %s, claimed by %q", got.Status, postgres.Deref(got.ClaimedBy))
	}
	first.open()
	resumeAll(t, pool)
	enginetest.Await(t, pool, id, executions.Completed)
}

func TestTickDuringPauseIsRecordedAsSkipped(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, nil)
	err := p.PutSchedule(t.Context(), executions.Schedule{
		Name: "beat", Flow: "heartbeat", Surface: trace.Heartbeat,
		Cron: "*/30 * * * *",
	})
	require.NoError(t, err)
	due := func() {
		pgtest.Exec(t, pool, `update agent_schedules set next_run_at = clock_timestamp() - interval '3 hours'`)
	}
	was := pauseAll(t, pool)
	for range 2 {
		due()
		for range 2 { // the second finds nothing due
			require.NoError(t, p.tick(t.Context()))
		}
	}
	log := pgtest.Value[string](t, pool, `
		select count(*) || ' ' || count(distinct trace_id) || ' ' || min(left(trace_id,
		  3)) || ' ' || min(surface) || ' ' || min(output #>> '{}')
		  from agent_activity where skill_name = 'heartbeat' and status = 'skipped' and input ->> 'schedule' = 'beat'`)
	assert.Truef(t, strings.HasPrefix(log, "2 2 hb_ heartbeat autonomous work is paused since ") &&
		strings.HasSuffix(log, "by ana: "+was.Reason), "recorded: %s", log)
	resumeAll(t, pool)
	require.NoError(t, p.tick(t.Context()))
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_executions`))
	due()
	require.NoError(t, p.tick(t.Context()))
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_executions`))
}

func TestRunSyncFailsDuringPause(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(noop))
	pauseAll(t, pool)
	_, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Heartbeat})
	var refused *executions.PausedError
	assert.Truef(t, errors.Is(err, executions.ErrPaused) && errors.As(err, &refused) && refused.Pause.PausedBy == "ana",
		"run: %v", err)
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_executions`))
	x, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Operate})
	assert.Truef(t, err == nil && x.Status == executions.Completed, "attended: %s, %v", x.Status, err)
}

func TestLockRunFailsDuringPause(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, nil)
	begin := func() string {
		x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: executions.External, Surface: trace.Flow})
		require.NoError(t, err)
		return x.ID
	}
	running, waiting := begin(), begin()
	lock, err := p.LockRun(t.Context(), running, "worker 1", time.Minute)
	require.NoError(t, err)
	pauseAll(t, pool)
	var refused *executions.RunError
	_, err = p.LockRun(t.Context(), waiting, "worker 2", time.Minute)
	assert.Truef(t, errors.Is(err, executions.ErrPaused) && errors.As(err, &refused) &&
		strings.Contains(refused.Detail, "by ana: prices look wrong"), "lock: %v", err)
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_workers`))
	// The owner of a lock continues.
	again, err := p.LockRun(t.Context(), running, "worker 1", time.Minute)
	assert.Truef(t, err == nil && again.LockID == lock.LockID, "the same lock: %v", err)
	_, _, err = p.CheckpointRun(t.Context(), running, lock.LockID, "step", []byte(`1`))
	assert.NoError(t, err)
	resumeAll(t, pool)
	_, err = p.LockRun(t.Context(), waiting, "worker 2", time.Minute)
	assert.NoError(t, err)
}

func TestEventsDuringPauseAreKept(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, map[string]executions.Func{
		"event": waitFlow(executions.Event("order 7", 0)), "timer": waitFlow(executions.Delay(time.Hour)),
	})
	event := p.startFlow(t, "event")
	timer := p.startFlow(t, "timer")
	enginetest.Await(t, pool, event, executions.Waiting)
	enginetest.Await(t, pool, timer, executions.Waiting)
	pauseAll(t, pool)
	pgtest.Eventually(t, p.Paused, "the process knows")
	pgtest.Exec(t, pool, `update agent_executions set waiting_until = clock_timestamp() where id = @id`,
		postgres.Strict{"id": timer})
	require.NoError(t, p.Sweep(t.Context()))
	_, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", "order 7", nil, "")
	require.NoError(t, err)
	for what, id := range map[string]string{"event": event, "timer": timer} {
		enginetest.Await(t, pool, id, executions.Running)
		if got := getExecution(t, pool, id); got.Status != executions.Running || got.ClaimedBy != nil {
			t.Errorf("%s: status %s, claimed by %q", what, got.Status, postgres.Deref(got.ClaimedBy))
		}
	}
	resumeAll(t, pool)
	enginetest.Await(t, pool, event, executions.Completed)
	enginetest.Await(t, pool, timer, executions.Completed)
}

// waitFlow is a flow that waits for one thing.
func waitFlow(w executions.WaitFor) executions.Func {
	return func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		return resultOf(executions.Wait(ctx, "wait", w))
	}
}

// Logical replication does not copy sequences, so the next id may be taken.
func TestPauseIsNotLostToATakenID(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `select pause_agent('first'); select resume_agent()`)
	pgtest.Exec(t, pool, `alter table agent_pauses alter column id restart`)
	_, err := pool.Exec(t.Context(), `select pause_agent('second')`)
	assert.Truef(t, postgres.IsCode(err, "23505"), "got %v", err)
	pgtest.Exec(t, pool, `select pause_agent('third')`)
	assert.True(t, pgtest.Value[bool](t, pool, `select exists (select from agent_pauses where resumed_at is null)`), "paused")
}

func TestPauseRequiresReasonAndAuthor(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, sql := range map[string]string{
		"no reason": `select pause_agent(null)`, "a blank one": `select pause_agent(E' \n')`,
		"a long one":          `select pause_agent(repeat('x', 1001))`,
		"a control character": `select pause_agent(E'a\x07')`, "nobody": `select pause_agent('why', '')`,
		"nobody resumes": `select resume_agent(' ')`,
	} {
		_, err := pool.Exec(t.Context(), sql)
		assert.Truef(t, postgres.IsCode(err, "22023"), "%s: %v", name, err)
	}
	assert.True(t, !pgtest.Value[bool](t, pool, `select exists (select from agent_pauses where resumed_at is null)`),
		"it is paused all the same")
	for surface, attended := range map[trace.Surface]bool{
		trace.Operate: true, trace.Chat: true, trace.Heartbeat: false, trace.Webhook: false, trace.Flow: false,
	} {
		assert.Equal(t, attended, executions.Attended(surface), surface)
	}
}
