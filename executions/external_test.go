package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// startExternal starts a run for external workers.
func (p *testEngine) startExternal(t *testing.T, change ...func(*executions.Spec)) string {
	t.Helper()
	s := executions.Spec{Flow: "external:test", Surface: trace.Flow, Input: map[string]int{"n": 1}}
	for _, c := range change {
		c(&s)
	}
	x, _, err := p.Start(t.Context(), p.pool, s)
	require.NoError(t, err)
	return x.ID
}

func onLostHandOn(s *executions.Spec) { s.OnLost = "hand_on" }

func (p *testEngine) lock(t *testing.T, id, owner string) executions.RunLock {
	t.Helper()
	got, err := p.LockRun(t.Context(), id, owner, 30*time.Second)
	require.NoError(t, err)
	return got
}

func (p *testEngine) checkpoint(t *testing.T, id, lock, step, output string) bool {
	t.Helper()
	_, created, err := p.CheckpointRun(t.Context(), id, lock, step, json.RawMessage(output))
	require.NoError(t, err)
	return created
}

// wantVoid checks that every operation under a lock fails with the given text.
func (p *testEngine) wantVoid(t *testing.T, id, lock, text string) {
	t.Helper()
	_, beat := p.RenewLock(t.Context(), id, lock)
	_, _, record := p.CheckpointRun(t.Context(), id, lock, "late", json.RawMessage(`1`))
	_, _, unlock := p.UnlockRun(t.Context(), id, lock, executions.UnlockParams{Status: executions.Completed})
	for what, err := range map[string]error{"beat": beat, "checkpoint": record, "unlock": unlock} {
		assert.Truef(t, errors.Is(err, executions.ErrVoid) && strings.Contains(fmt.Sprint(err), text) &&
			!strings.Contains(fmt.Sprint(err), lock), "%s with a void lock: %v, want %q", what, err, text)
	}
}

// countExternalWorkers counts the rows of agent_workers.
func countExternalWorkers(t *testing.T, db postgres.DB) int {
	t.Helper()
	return pgtest.Value[int](t, db, `select count(*)::int from agent_workers where kind = 'outside'`)
}

func TestRunLockLifecycle(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	id := p.startExternal(t)
	first := p.lock(t, id, "worker 1")
	assert.Truef(t, first.Execution.Status == executions.Running && first.Execution.Claim == 1 &&
		len(first.Checkpoints) == 0 && string(first.Execution.Input) == `{"n": 1}`, "lock is %+v", first)
	again := p.lock(t, id, "worker 1")
	assert.Truef(t, again.LockID == first.LockID && !again.ExpiresAt.Before(first.ExpiresAt) && again.Execution.Claim == 1,
		"the same owner got %+v after %+v", again, first)
	var refused *executions.RunError
	_, err := p.LockRun(t.Context(), id, "worker 2", time.Minute)
	assert.Truef(t, errors.Is(err, executions.ErrHeld) && errors.As(err, &refused) && refused.Holder == "worker 1" &&
		refused.TraceID == first.Execution.TraceID, "another got %v", err)
	assert.True(t, p.checkpoint(t, id, first.LockID, "a", `{"x": 1, "y": [1.0]}`) &&
		!p.checkpoint(t, id, first.LockID, "a", ` {"y":[1.0],"x":1}`), "the step is not recorded once")
	_, _, err = p.CheckpointRun(t.Context(), id, first.LockID, "a", json.RawMessage(`{"x": 2}`))
	assert.ErrorIs(t, err, executions.ErrOutputConflict, "another output")
	beat, err := p.RenewLock(t.Context(), id, first.LockID)
	assert.Truef(t, err == nil && beat.Live && !beat.CancelRequested && *beat.Status == executions.Running &&
		beat.ExpiresAt.After(again.ExpiresAt), "beat is %+v, %v", beat, err)
	status, traceID, err := p.UnlockRun(t.Context(), id, first.LockID, executions.UnlockParams{
		Status: executions.Completed, Summary: "done", Result: json.RawMessage(`[1]`),
	})
	assert.Truef(t, err == nil && status == executions.Completed && traceID == first.Execution.TraceID,
		"unlock: %s %s %v", status, traceID, err)
	x := getExecution(t, p.pool, id)
	assert.Truef(t, x.ResultSummary == "done" && string(x.Result) == "[1]", "ended as %+v", x)
	assert.Equal(t, 0, countExternalWorkers(t, p.pool))
	p.wantVoid(t, id, first.LockID, "the run has ended: completed")
	_, err = p.LockRun(t.Context(), id, "worker 1", time.Minute)
	assert.ErrorIs(t, err, executions.ErrEnded, "lock after the end")
}

func TestLockRunRejectsInvalidRequests(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t),
		flowMap(noop))
	id := p.startExternal(t)
	const nobody = "018f0000-0000-7000-8000-000000000000"
	for name, c := range map[string]struct {
		id, owner string
		ttl       time.Duration
		want      error
	}{
		"unknown":       {nobody, "w", time.Minute, executions.ErrNotFound},
		"inside":        {p.startFlow(t, "flow"), "w", time.Minute, executions.ErrNotExternal},
		"no owner":      {id, "", time.Minute, executions.ErrMalformed},
		"blank owner":   {id, "  ", time.Minute, executions.ErrMalformed},
		"control":       {id, "a\nb", time.Minute, executions.ErrMalformed},
		"NUL":           {id, "a\x00b", time.Minute, executions.ErrMalformed},
		"long owner":    {id, strings.Repeat("x", 256), time.Minute, executions.ErrMalformed},
		"no time":       {id, "w", 0, executions.ErrMalformed},
		"negative time": {id, "w", -time.Minute, executions.ErrMalformed},
		"long time":     {id, "w", 25 * time.Hour, executions.ErrMalformed},
	} {
		_, err := p.LockRun(t.Context(), c.id, c.owner, c.ttl)
		assert.ErrorIs(t, err, c.want, name)
	}
	_, err := p.RenewLock(t.Context(), nobody, "x")
	assert.ErrorIs(t, err, executions.ErrNotFound, "heartbeat without a lock")
	lock, other := p.lock(t, id, "w"), p.startExternal(t)
	_, err = p.RenewLock(t.Context(), other, lock.LockID)
	assert.ErrorIs(t, err, executions.ErrVoid, "another run's lock")
	for step, output := range map[string]string{
		"": "1", "a\nb": "1", strings.Repeat("x", 501): "1", "nul": `"\u0000"`,
		"half": `"\ud800"`,
	} {
		_, _, err := p.CheckpointRun(t.Context(), id, lock.LockID, step, json.RawMessage(output))
		assert.ErrorIs(t, err, executions.ErrMalformed, "step", step, "with", output)
	}
}

func TestConcurrentLockRunSucceedsOnce(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	id := p.startExternal(t, onLostHandOn)
	for round := range 3 {
		var won atomic.Int32
		var winner atomic.Value
		group, ctx := errgroup.WithContext(t.Context())
		for i := range 50 {
			group.Go(func() error {
				got, err := p.LockRun(ctx, id, fmt.Sprint("worker ", i), 30*time.Second)
				if err == nil {
					won.Add(1)
					winner.Store(got.LockID)
				} else if !errors.Is(err, executions.ErrHeld) {
					return err
				}
				return nil
			})
		}
		err := group.Wait()
		require.Truef(t, err == nil && won.Load() == 1, "round %d: %d won, %v", round, won.Load(), err)
		p.checkpoint(t, id, winner.Load().(string), fmt.Sprint("step ", round), "1")
		expireLease(t, p.pool, id)
	}
}

func TestRenewalsAndCheckpointsDoNotBlockEachOther(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	id := p.startExternal(t)
	lock := p.lock(t, id, "w")
	checkpoint := pgtest.Begin(t, p.pool)
	pgtest.Exec(t, checkpoint, `select checkpoint_agent_execution($1, $2, 'slow', '1')`, id, lock.LockID)
	if _, err := p.RenewLock(t.Context(), id, lock.LockID); err != nil { // while the transaction of the checkpoint is open
		t.Errorf("beat: %v", err)
	}
	got, err := p.RenewLocks(t.Context(), []string{lock.LockID})
	assert.Truef(t, err == nil && got[0].Live, "beat of many: %+v, %v", got, err)
	again := p.lock(t, id, "w")
	assert.Truef(t, again.LockID == lock.LockID, "the same owner: %+v", again)
	require.NoError(t, checkpoint.Commit(t.Context()))
	beat := pgtest.Begin(t, p.pool)
	pgtest.Exec(t, beat, `select beat_agent_locks($1)`, []string{lock.LockID})
	if !p.checkpoint(t, id, lock.LockID, "next", "1") { // while the transaction of the heartbeat is open
		t.Error("not recorded")
	}
}

// A lock whose row another transaction holds delays the renewal of no other lock of the worker.
func TestRenewalSkipsLockInUse(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	used, other := p.lock(t, p.startExternal(t), "w"), p.lock(t, p.startExternal(t), "w")
	releasing := pgtest.Begin(t, p.pool)
	pgtest.Exec(t, releasing, `select from agent_workers where lock_id = $1 for update`, used.LockID)
	got, err := p.RenewLocks(t.Context(), []string{used.LockID, other.LockID})
	require.NoError(t, err)
	assert.Truef(t, got[0].Live && got[0].ExpiresAt.Equal(used.ExpiresAt), "the lock in use: %+v", got[0])
	assert.Truef(t, got[1].Live && got[1].ExpiresAt.After(other.ExpiresAt), "the other lock: %+v", got[1])
}

// A release waits a second at most for a write under the claim: it holds the row of the lock meanwhile.
func TestBlockedReleaseReportsLockedExecution(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	id := p.startExternal(t, onLostHandOn)
	lock := p.lock(t, id, "w")
	writing := pgtest.Begin(t, p.pool)
	pgtest.Exec(t, writing, `select fence_agent_execution($1, $2)`, id, lock.Execution.Claim)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	_, _, err := p.UnlockRun(ctx, id, lock.LockID, executions.UnlockParams{Status: executions.Completed})
	assert.Truef(t, postgres.Locked(err), "release: %v", err)
}

func TestLockRunWaitsForCheckpointSweepDoesNot(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	id, other := p.startExternal(t, onLostHandOn), p.startExternal(t)
	lock := p.lock(t, id, "first")
	p.lock(t, other, "w")
	checkpoint := pgtest.Begin(t, p.pool)
	pgtest.Exec(t, checkpoint, `select checkpoint_agent_execution($1, $2, 'slow', '1')`, id, lock.LockID)
	expireLease(t, p.pool, id)
	expireLease(t, p.pool, other)
	sweep(t, p.pool)
	x := getExecution(t, p.pool, other)
	assert.Truef(t, x.Status == executions.Failed, "the sweep was held up: %+v", x)
	assert.True(t, getExecution(t, p.pool, id).ClaimedBy != nil, "the claim was taken during a write")
	var group errgroup.Group
	var second executions.RunLock
	group.Go(func() (err error) {
		second, err = p.LockRun(context.WithoutCancel(t.Context()), id, "second", time.Minute)
		return err
	})
	pgtest.AwaitBlocked(t, p.pool, 1, "lock_agent_execution")
	require.NoError(t, checkpoint.Commit(t.Context()))
	require.NoError(t, group.Wait())
	assert.Truef(t, len(second.Checkpoints) == 1 && second.Checkpoints[0].Step == "slow" && second.Execution.Claim == 3,
		"who took over saw %+v", second)
	p.wantVoid(t, id, lock.LockID, "locked by second")
}

func TestLockRunSettlesExpiredLock(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	failing := p.startExternal(t)
	lock := p.lock(t, failing, "first")
	expireLease(t, p.pool, failing)
	p.wantVoid(t, failing, lock.LockID, "it expired or was released")
	_, err := p.LockRun(t.Context(), failing, "second", time.Minute)
	assert.Truef(t, errors.Is(err, executions.ErrEnded) && strings.Contains(err.Error(), "lease expired"),
		"lock of an execution with OnLost fail after its lease: %v", err)
	x := getExecution(t, p.pool, failing)
	assert.Truef(t, x.Status == executions.Failed && x.OnLost == "fail", "the execution is %+v", x)
	handedOn := p.startExternal(t, onLostHandOn)
	lock = p.lock(t, handedOn, "first")
	p.checkpoint(t, handedOn, lock.LockID, "a", `"mine"`)
	expireLease(t, p.pool, handedOn)
	again := p.lock(t, handedOn, "first")
	assert.Truef(t, again.LockID != lock.LockID && again.Execution.Claim == 3, "the same owner, too late, got %+v", again)
	p.wantVoid(t, handedOn, lock.LockID, "locked by first")
	assert.Equal(t, 1, countExternalWorkers(t, p.pool))
}

func TestSweepAppliesOnLostAndMaxAttempts(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	failing := p.startExternal(t)
	handedOn := p.startExternal(t, onLostHandOn, func(s *executions.Spec) { s.MaxAttempts = 3 })
	p.lock(t, failing, "w")
	lock := p.lock(t, handedOn, "w 0")
	p.checkpoint(t, handedOn, lock.LockID, "a", "1")
	expireLease(t, p.pool, failing)
	expireLease(t, p.pool, handedOn)
	sweep(t, p.pool)
	x := getExecution(t, p.pool, failing)
	assert.Truef(t, x.Status == executions.Failed && *x.ErrorMessage == "the worker's lease expired",
		"the execution with OnLost fail is %+v", x)
	x = getExecution(t, p.pool, handedOn)
	wantHandedOn(t, x)
	assert.Equal(t, 0, countExternalWorkers(t, p.pool), "locks after the handover")
	for i := range 2 { // no further step is recorded
		p.lock(t, handedOn, fmt.Sprint("w ", i+1))
		expireLease(t, p.pool, handedOn)
		sweep(t, p.pool)
	}
	x = getExecution(t, p.pool, handedOn)
	assert.Truef(t, x.Status == executions.Failed && strings.Contains(*x.ErrorMessage, "3 workers"),
		"after three handovers the execution is %+v", x)
}

// wantHandedOn expects an execution that its worker lost once, with OnLost hand_on: it runs on and waits for a worker.
func wantHandedOn(t *testing.T, x executions.Execution) {
	t.Helper()
	assert.Equal(t, executions.Running, x.Status)
	assert.Equal(t, "", postgres.Deref(x.ClaimedBy), "worker with the claim")
	assert.Equal(t, 1, x.Attempt, "attempt")
}

func TestProgressTimeoutVoidsLock(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	slow := func(s *executions.Spec) { s.ProgressSeconds = 60 }
	failing, handedOn, works := p.startExternal(t, slow), p.startExternal(t, slow, onLostHandOn), p.startExternal(t, slow)
	locks := map[string]executions.RunLock{}
	for _, id := range []string{failing, handedOn, works} {
		locks[id] = p.lock(t, id, "w")
	}
	pgtest.Exec(t, p.pool, `update agent_executions set updated_at = updated_at - interval '61 seconds'`)
	p.checkpoint(t, works, locks[works].LockID, "a", "1")
	for _, lock := range locks {
		got, err := p.RenewLocks(t.Context(), []string{lock.LockID})
		require.Truef(t, err == nil && got[0].Live, "%+v, %v", got, err)
	}
	sweep(t, p.pool)
	x := getExecution(t, p.pool, works)
	assert.Truef(t, x.Status == executions.Running && x.ClaimedBy != nil, "an execution with recorded steps is %+v", x)
	x = getExecution(t, p.pool, failing)
	assert.Truef(t, x.Status == executions.Failed && strings.Contains(*x.ErrorMessage, "no progress"),
		"an execution with OnLost fail is %+v", x)
	wantHandedOn(t, getExecution(t, p.pool, handedOn))
	p.wantVoid(t, handedOn, locks[handedOn].LockID, "lock the run again")
	p.lock(t, handedOn, "another")
	pgtest.Exec(t, p.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'
		where owner = 'w'`)
	sweep(t, p.pool)
	if x, n := getExecution(t, p.pool, handedOn), countExternalWorkers(t, p.pool); x.ClaimedBy == nil || n != 1 {
		t.Errorf("with the second worker the execution is %+v, %d locks", x, n)
	}
}

func TestFailureWithoutReasonHasText(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	id := p.startExternal(t)
	lock := p.lock(t, id, "w")
	_, _, err := p.UnlockRun(t.Context(), id, lock.LockID, executions.UnlockParams{Status: executions.Failed})
	require.NoError(t, err)
	x := getExecution(t, p.pool, id)
	assert.Equal(t, "the worker gave no reason", postgres.Deref(x.ErrorMessage))
}

func TestFaultAfterTriesWithoutProgress(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	id := p.startExternal(t, onLostHandOn, func(s *executions.Spec) { s.ProgressSeconds, s.MaxAttempts = 60, 2 })
	for _, owner := range []string{"first", "second"} {
		p.lock(t, id, owner)
		pgtest.Exec(t, p.pool, `update agent_executions set updated_at = updated_at - interval '61 seconds'`)
		sweep(t, p.pool)
	}
	x := getExecution(t, p.pool, id)
	assert.Equal(t, "given up after 2 tries without a checkpoint between; the last made no progress within "+
		"progress_seconds (60)", postgres.Deref(x.ErrorMessage))
}

func TestRenewalReportsCancelOnce(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	id, before := p.startExternal(t), p.startExternal(t)
	lock := p.lock(t, id, "w")
	for _, x := range []string{id, before} {
		_, err := p.Cancel(t.Context(), x, "admin", "not wanted")
		require.NoError(t, err)
	}
	_, _, err := p.CheckpointRun(t.Context(), id, lock.LockID, "a", json.RawMessage("1"))
	assert.ErrorIs(t, err, executions.ErrVoid, "checkpoint after a cancel")
	got, err := p.RenewLock(t.Context(), id, lock.LockID)
	assert.Truef(t, err == nil && got.CancelRequested && *got.Status == executions.Cancelled && got.ExpiresAt != nil,
		"beat after a cancel: %+v, %v", got, err)
	p.wantVoid(t, id, lock.LockID, "not wanted")
	assert.Equal(t, 0, countExternalWorkers(t, p.pool))
	_, err = p.LockRun(t.Context(), before, "w", time.Minute)
	assert.ErrorIs(t, err, executions.ErrEnded, "an execution that was cancelled before its start")
}

func TestRenewLocksRenewsIndependently(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	var locks []string
	for range 3 {
		id := p.startExternal(t)
		locks = append(locks, p.lock(t, id, "w").LockID)
	}
	expired := p.startExternal(t)
	locks = append(locks, p.lock(t, expired, "w").LockID, "unknown")
	expireLease(t, p.pool, expired)
	sweeping := pgtest.Begin(t, p.pool) // like the sweep
	pgtest.Exec(t, sweeping, `select from agent_workers where expires_at < clock_timestamp() for update`)
	got, err := p.RenewLocks(t.Context(), locks)
	require.Truef(t, err == nil && len(got) == 5, "%+v, %v", got, err)
	for i, b := range got {
		assert.Truef(t, b.LockID == locks[i] && b.Live == (i < 3) && (!b.Live || b.ExpiresAt != nil) &&
			(b.ExecutionID == nil) == (i == 4), "beat %d is %+v", i, b)
	}
}

func TestLockRunReturnsWaitOutcome(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	id := p.startExternal(t, func(s *executions.Spec) { s.ThreadID = "t-1" })
	lock := p.lock(t, id, "w")
	wait := func(r executions.UnlockParams) executions.Status {
		t.Helper()
		r.Status = executions.Waiting
		status, _, err := p.UnlockRun(t.Context(), id, lock.LockID, r)
		require.NoError(t, err)
		return status
	}
	for name, r := range map[string]executions.UnlockParams{
		"unknown":  {For: "godot", Key: "k"},
		"a lane":   {For: "lane", Key: "x"},
		"no kind":  {Key: "k"},
		"no key":   {For: "event"},
		"no delay": {For: "delay"},
		"too long": {For: "response", Key: "t", Timeout: 8 * 24 * time.Hour},
	} {
		r.Status = executions.Waiting
		_, _, err := p.UnlockRun(t.Context(), id, lock.LockID, r)
		assert.ErrorIs(t, err, executions.ErrMalformed, name)
	}
	if status := wait(executions.UnlockParams{
		For: "event", Key: "paid",
		Timeout: time.Hour,
	}); status != executions.Waiting || countExternalWorkers(t, p.pool) != 0 {
		t.Fatalf("status %s, %d locks", status, countExternalWorkers(t, p.pool))
	}
	p.wantVoid(t, id, lock.LockID, "waits for event paid")
	if _, err := p.LockRun(t.Context(), id, "w", time.Minute); !errors.Is(err, executions.ErrNotReady) ||
		!strings.Contains(err.Error(), "event paid") {
		t.Errorf("lock of a waiting execution: %v", err)
	}
	_, err := p.Deliver(t.Context(), p.pool, "EVENT_COMPLETED", "paid", json.RawMessage(`{"amount": 3}`), "")
	require.NoError(t, err)
	lock = p.lock(t, id, "another")
	var out executions.Outcome
	assert.Truef(t, len(lock.Checkpoints) == 1 && lock.Checkpoints[0].Step == "wait event 1" &&
		json.Unmarshal(lock.Checkpoints[0].Output, &out) == nil && string(out.Data) == `{"amount": 3}` && !out.TimedOut,
		"it goes on with %+v", lock.Checkpoints)
	_, err = p.Deliver(t.Context(), p.pool, "EVENT_COMPLETED", "early", nil, "")
	require.NoError(t, err)
	status := wait(executions.UnlockParams{For: "event", Key: "early"})
	assert.Equal(t, executions.Running, status, "after an unlock for an earlier event")
	assert.Equal(t, 0, countExternalWorkers(t, p.pool))
	for i, r := range []executions.UnlockParams{
		{For: "response"},
		{For: "agent", Key: p.startExternal(t)},
		{For: "document", Key: "d"},
		{For: "signature", Key: "s"},
		{For: "test", Key: "t"},
		{For: "approval", Key: "a"},
		{For: "delay", Timeout: time.Millisecond},
	} {
		lock = p.lock(t, id, "w")
		assert.Equal(t, executions.Waiting, wait(r), r.For)
		standard, _ := executions.Limits(r.For)
		until := pgtest.Value[float64](t, p.pool, `select extract(epoch from waiting_until - clock_timestamp())::float8
			from agent_executions where id = $1`, id)
		want := max(standard, r.Timeout).Seconds()
		assert.Truef(t, until <= want && until >= want-120, "%s waits %v s, want %v", r.For, until, want)
		pgtest.Exec(t, p.pool, `update agent_executions set waiting_until = clock_timestamp() where id = $1`, id)
		sweep(t, p.pool)
		step := fmt.Sprintf("wait %s %d", r.For, i+3)
		last := p.lock(t, id, "w").Checkpoints
		assert.Truef(t, last[len(last)-1].Step == step, "the outcome is %+v, want %s", last[len(last)-1], step)
	}
	_, _, err = p.UnlockRun(t.Context(), id, p.lock(t, id, "w").LockID, executions.UnlockParams{
		Status: executions.Waiting, For: "agent", Key: "0198f8a0-0000-7000-8000-000000000000",
	})
	assert.ErrorIs(t, err, executions.ErrWaitingKey, "a wait for an execution that does not exist")
	keys := pgtest.Value[string](t, p.pool, `select string_agg(waiting_for, ' ' order by n) from agent_status_changes
		where execution_id = $1 and status = 'waiting'`, id)
	assert.Equal(t, "event response agent document signature test approval delay", keys, "kinds of waits")
}

func TestEngineClaimsNoExternalExecution(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, nil)
	id := p.startExternal(t, onLostHandOn)
	never := func(when string) {
		t.Helper()
		w := newWorker(t, pool)
		n, err := claim(t.Context(), pool, id, w)
		assert.Truef(t, err == nil && n == 0, "claimed %s: %d, %v", when, n, err)
		for range 2 {
			sweep(t, pool)
			n := pgtest.Value[int](t, pool, `select count(*)::int from lanekeeper.agent_ready_executions where id = $1`, id)
			assert.Equal(t, 0, n, when, "the execution is ready for a process")
		}
	}
	never("new")
	p.lock(t, id, "w")
	expireLease(t, pool, id)
	sweep(t, pool)
	never("handed on")
	lock := p.lock(t, id, "w")
	_, _, err := p.UnlockRun(t.Context(), id, lock.LockID, executions.UnlockParams{
		Status: executions.Waiting,
		For:    "event", Key: "k",
	})
	require.NoError(t, err)
	_, err = p.Deliver(t.Context(), pool, "EVENT_COMPLETED", "k", nil, "")
	require.NoError(t, err)
	never("resumed")
	claimed := p.lock(t, id, "w").Execution.Claim
	pgtest.Exec(t, pool, `select lanekeeper.release_agent_claim($1, $2)`, id, claimed)
	never("given up")
	_, err = pool.Exec(t.Context(), `insert into agent_executions (trace_id, surface, flow, status)
		values ('fl_1', 'flow', 'external', 'running')`)
	assert.Truef(t, postgres.IsCode(err, "LK002"), "an insert with status running: %v", err)
}

func TestExternalCompletionResumesParent(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Trigger(ctx, "child", executions.Child{Flow: executions.External, Wait: true}))
	}))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Waiting)
	child := pgtest.Value[string](t, pool, `select id::text from agent_executions where parent_id = $1`, id)
	lock := p.lock(t, child, "w")
	_, _, err := p.UnlockRun(t.Context(), child, lock.LockID,
		executions.UnlockParams{Status: executions.Failed, Error: "no paper"})
	require.NoError(t, err)
	var got executions.ChildResult
	require.NoError(t, json.Unmarshal(enginetest.Await(t, pool, id, executions.Completed).Result, &got))
	assert.Truef(t, got.ExecutionID == child && !got.Success && got.Error == "no paper" && got.Status == executions.Failed,
		"the parent saw %+v", got)
}

// Late writes of a worker appear in the activity log and in the output of why. Each lock has a few rows; its last row
// counts the remaining writes.
func TestRejectedExternalWritesAreRecorded(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	l := &logLines{}
	p := newEngine(t, pool, nil, l.capture)
	id := p.startExternal(t, onLostHandOn)
	late := p.lock(t, id, "late")
	p.checkpoint(t, id, late.LockID, "first", `1`)
	expireLease(t, pool, id)
	next := p.lock(t, id, "next")
	for i := range 26 {
		_, _, err := p.CheckpointRun(t.Context(), id, late.LockID, fmt.Sprint("step ", i),
			json.RawMessage(`{"api_key": "sk-secret", "n": 1}`))
		require.ErrorIs(t, err, executions.ErrVoid)
	}
	p.wantVoid(t, id, late.LockID, "next") // a heartbeat, a step and a release
	_, err := p.LockClaim(t.Context(), id, late.LockID)
	assert.ErrorIs(t, err, executions.ErrVoid, "a message")
	_, err = p.RenewLock(t.Context(), id, "another")
	assert.ErrorIs(t, err, executions.ErrVoid, "a beat of another lock")
	type refused struct {
		Write, Step, Status, Class string
		More                       int
		Output                     string
	}
	got := pgtest.Rows[refused](t, pool, `
		select input ->> 'rejected_write', step, status, error_class, coalesce((input ->> 'more')::int, 0),
		       coalesce((output -> 'output')::text, '')
		  from agent_activity where execution_id = @id and skill_name = 'stale_write' order by id`, postgres.Strict{"id": id})
	assert.Truef(t, len(got) == 6 && got[4].Write == "checkpoint" && got[4].Step == "step 4" && got[4].More == 25 &&
		got[5].Write == "beat" && got[0].Status == "error" && got[0].Class == "stale", "recorded %+v", got)
	for _, r := range got {
		assert.Truef(t, !strings.Contains(r.Output, "sk-secret"), "the output has a secret: %s", r.Output)
	}
	logged := l.Records(t, "stale write rejected")
	assert.True(t, len(logged) > 0, "no line")
	for _, record := range logged {
		assert.Equal[any](t, late.Execution.TraceID, record["trace_id"])
	}
	n := pgtest.Value[int](t, pool, `select count(*) from agent_activity a where position(@lock in a::text) > 0`,
		postgres.Strict{"lock": late.LockID})
	assert.Equal(t, 0, n, "the lock is in the log")
	why := pgtest.Value[string](t, pool, `select string_agg((reason).what, '; ')
		from lanekeeper.agent_why_log(@trace, 100, 1000) where part = 'trouble'`,
		postgres.Strict{"trace": late.Execution.TraceID})
	assert.Contains(t, why, "a write under a void lock was refused: checkpoint in step step 4, and 25 more")
	assert.True(t, p.checkpoint(t, id, next.LockID, "second", `2`), "the step of the next owner is not recorded")
	for _, other := range []string{"018f0000-0000-7000-8000-000000000000", insertPending(t, pool)} {
		assert.True(t, !pgtest.Value[bool](t, pool, `select record_stale_agent_write(@id, 'x', 'checkpoint')`,
			postgres.Strict{"id": other}), "a write of no execution for workers outside is recorded")
	}
}

// An external worker that waits for a child lends its thread to the child until the child ends. It gets the outcome of
// the child, like a flow in a process.
func TestExternalParentLendsThread(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, nil)
	pgtest.Exec(t, pool, `insert into agent_threads (id, channel) values ('t', 'chat')`)
	sendMessage := func(id, lock, text string) (queued bool) {
		t.Helper()
		claim, err := p.LockClaim(t.Context(), id, lock)
		require.NoError(t, err)
		return pgtest.Value[bool](t, pool, `select queued from lanekeeper.send_agent_message('t', @id, @claim, @text)`,
			postgres.Strict{"id": id, "claim": claim, "text": text})
	}
	id := p.startExternal(t, func(s *executions.Spec) { s.ThreadID = "t" })
	for n, ends := range []string{"while it waits", "before it waits"} {
		lock := p.lock(t, id, "coordinator")
		assert.True(t, !sendMessage(id, lock.LockID, "I ask"), "the coordinator's message queues")
		child := p.startExternal(t, func(s *executions.Spec) {
			s.ParentID, s.ThreadID, s.Awaited, s.Inherits = id, "t", true, true
		})
		work := func() {
			t.Helper()
			mine := p.lock(t, child, "child")
			assert.True(t, !sendMessage(child, mine.LockID, "I answer"), "the child's message queues")
			pgtest.Exec(t, pool, `update agent_executions set variables = '{"color": "red"}' where id = @id`,
				postgres.Strict{"id": child})
			_, _, err := p.UnlockRun(t.Context(), child, mine.LockID, executions.UnlockParams{
				Status: executions.Completed, Summary: "done", Result: json.RawMessage(`{"n": 7}`),
			})
			require.NoError(t, err)
		}
		if ends == "before it waits" {
			work()
		}
		status, _, err := p.UnlockRun(t.Context(), id, lock.LockID,
			executions.UnlockParams{Status: executions.Waiting, For: "agent", Key: child})
		require.NoError(t, err)
		if ends == "while it waits" {
			assert.Equal(t, executions.Waiting, status)
			work()
		}
		enginetest.Await(t, pool, id, executions.Running)
		lock = p.lock(t, id, "coordinator")
		var out struct {
			Data struct {
				Status    string
				Variables map[string]any
				Result    map[string]any
			}
		}
		point := lock.Checkpoints[len(lock.Checkpoints)-1]
		err = json.Unmarshal(point.Output, &out)
		assert.Truef(t, err == nil && out.Data.Status == "completed" && out.Data.Variables["color"] == "red" &&
			out.Data.Result["n"] == 7.0, "%s: %s is %s, %v", ends, point.Step, point.Output, err)
		assert.True(t, !sendMessage(id, lock.LockID, fmt.Sprint("thanks ", n)), "the coordinator's message queues")
	}
}

func TestCircularWaitsTimeOut(t *testing.T) {
	t.Parallel()
	p := newEngine(t, pgtest.DB(t), nil)
	first, second := p.startExternal(t), p.startExternal(t)
	for id, awaited := range map[string]string{first: second, second: first} {
		_, _, err := p.UnlockRun(t.Context(), id, p.lock(t, id, "w").LockID,
			executions.UnlockParams{Status: executions.Waiting, For: "agent", Key: awaited})
		require.NoError(t, err)
	}
	pgtest.Exec(t, p.pool, `update agent_executions set waiting_until = clock_timestamp() - interval '1 second'`)
	sweep(t, p.pool)
	assert.Equal(t, executions.Running, getExecution(t, p.pool, first).Status)
	assert.Equal(t, executions.Running, getExecution(t, p.pool, second).Status)
}

// Many concurrent operations on a few runs. Every rejection has a documented reason, none is a deadlock. Each step
// keeps its first output, and no step is recorded under a stale claim.
func TestWorkersSweepsAndCancelsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, nil)
	const runs, actors, rounds = 4, 12, 40
	ids := make([]string, runs)
	for i := range ids {
		ids[i] = p.startExternal(t, onLostHandOn, func(s *executions.Spec) {
			s.MaxAttempts, s.ProgressSeconds = 1000, 1
			if i > 0 {
				s.ParentID, s.Awaited = ids[0], true
			}
		})
	}
	var recorded atomic.Int32
	began := time.Now()
	// run on until a step is recorded, even on a slow machine
	hopeful := func() bool { return recorded.Load() == 0 && time.Since(began) < timeout }
	group, ctx := errgroup.WithContext(t.Context())
	for a := range actors {
		group.Go(func() error {
			locks := map[string]string{}
			for n := 0; n < rounds || hopeful(); n++ {
				id := ids[rand.IntN(runs)]
				var err error
				switch what := rand.IntN(12); {
				case what < 4:
					var lock executions.RunLock
					if lock, err = p.LockRun(ctx, id, fmt.Sprint("actor ", a), time.Second); err == nil {
						locks[id] = lock.LockID
					}
				case what < 6:
					var created bool
					_, created, err = p.CheckpointRun(ctx, id, locks[id], fmt.Sprint("step ", a, " ", n), json.RawMessage(`1`))
					if created {
						recorded.Add(1)
					}
				case what < 8:
					all := []string{"none"}
					for _, l := range locks {
						all = append(all, l)
					}
					_, err = p.RenewLocks(ctx, all)
				case what == 8:
					_, _, err = p.UnlockRun(ctx, id, locks[id], executions.UnlockParams{
						Status: executions.Waiting, For: "event",
						Key: "k", Timeout: 50 * time.Millisecond,
					})
				case what == 9:
					_, err = p.Deliver(ctx, pool, "EVENT_COMPLETED", "k", nil, "")
				case what == 10:
					_, err = pool.Exec(ctx, `update agent_workers set expires_at = clock_timestamp() - interval '1 ms'
						where execution_id = @id`,
						postgres.Strict{"id": id})
				default:
					err = p.Sweep(ctx)
				}
				if refused := new(executions.RunError); err != nil && !errors.As(err, &refused) && !postgres.Locked(err) {
					return fmt.Errorf("actor %d, round %d: %w", a, n, err)
				}
			}
			return nil
		})
	}
	group.Go(func() error {
		for wait := true; wait && ctx.Err() == nil; wait = hopeful() {
			select {
			case <-ctx.Done():
			case <-time.After(500 * time.Millisecond):
			}
		}
		_, err := p.Cancel(ctx, ids[0], "admin", "enough")
		for postgres.IsCode(err, "55P03") && ctx.Err() == nil { // a lock timeout, not a deadlock
			_, err = p.Cancel(ctx, ids[0], "admin", "enough")
		}
		return err
	})
	require.NoError(t, group.Wait())
	n := pgtest.Value[int](t, pool, `select count(*)::int from agent_checkpoints where step like 'step %'`)
	assert.Truef(t, n == int(recorded.Load()) && n != 0, "%d steps are recorded, %d were confirmed", n, recorded.Load())
	for _, id := range ids {
		x := getExecution(t, pool, id)
		assert.Truef(t, x.Status == executions.Cancelled, "the execution is %+v", x)
	}
}

// The log has each grant of a lock once, also if the owner asks for the lock again.
func TestGrantedLocksAreLoggedOnce(t *testing.T) {
	t.Parallel()
	for name, lock := range map[string]func(p *testEngine, id string) ([]executions.RunLock, error){
		"by id": func(p *testEngine, id string) ([]executions.RunLock, error) {
			lock, err := p.LockRun(t.Context(), id, "w", time.Minute)
			return []executions.RunLock{lock}, err
		},
		"by flow": func(p *testEngine, _ string) ([]executions.RunLock, error) {
			return p.ClaimRuns(t.Context(), executions.ClaimParams{
				Flows: []string{"external:test"}, Owner: "w", TTL: time.Minute, Max: 1, Known: []string{},
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := &logLines{}
			p := newEngine(t, pgtest.DB(t), nil, l.capture)
			id := p.startExternal(t)
			mustLock := func() string {
				locks, err := lock(p, id)
				require.NoError(t, err)
				require.Equal(t, 1, len(locks))
				return locks[0].LockID
			}
			first := mustLock()
			assert.Equal(t, first, mustLock())
			p.checkpoint(t, id, first, "one", "1")
			_, _, err := p.UnlockRun(t.Context(), id, first, executions.UnlockParams{
				Status: executions.Waiting, For: "event", Key: "k",
			})
			require.NoError(t, err)
			pgtest.Exec(t, p.pool, `select deliver_agent_event('EVENT_COMPLETED', 'k', '{}')`)
			second := mustLock()
			assert.Equal(t, second, mustLock())
			var seen []string
			for _, record := range l.Records(t, "execution started", "execution resumed", "continuing from checkpoint") {
				assert.Equal(t, id, record["execution_id"].(string))
				seen = append(seen, record["msg"].(string))
			}
			assert.NoDiff(t, []string{"execution started", "execution resumed", "continuing from checkpoint"}, seen)
		})
	}
}
