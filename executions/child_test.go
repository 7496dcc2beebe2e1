package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// triggerFlows returns a flow that triggers a child, and the child. The result of the flow is the outcome of the child.
func triggerFlows(spec executions.Child, child flowFunc) map[string]executions.Func {
	spec.Flow = "child"
	return map[string]executions.Func{
		"flow": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return resultOf(executions.Trigger(ctx, "child", spec))
		},
		"child": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) { return child(ctx) },
	}
}

func waitForever(ctx context.Context) (executions.Result, error) {
	return resultOf(executions.Wait(ctx, "for ever", executions.Event("never", 0)))
}

// childResult returns the result of a parent that [triggerFlows] made.
func childResult(t *testing.T, parent executions.Execution) executions.ChildResult {
	t.Helper()
	var got executions.ChildResult
	require.NoError(t, json.Unmarshal(parent.Result, &got), "result", parent.Result)
	return got
}

// awaitChild waits for the child that an execution started.
func awaitChild(t *testing.T, pool *pgxpool.Pool, parent string) (id string) {
	t.Helper()
	pgtest.Eventually(t, func() bool {
		return pool.QueryRow(t.Context(), `select id::text from agent_executions where parent_id = @id`,
			postgres.Strict{"id": parent}).Scan(&id) == nil
	}, "it has a child")
	return id
}

// The sweep resumes the parent of a child that plain SQL cancelled.
func TestSweepResumesParents(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, triggerFlows(executions.Child{Wait: true}, waitForever))
	parent := p.startFlow(t, "flow")
	child := *enginetest.Await(t, pool, parent, executions.Waiting).WaitingKey
	enginetest.Await(t, pool, child, executions.Waiting)
	pgtest.Exec(t, pool, `select cancel_agent_execution(@id, 'somebody', 'by hand')`, postgres.Strict{"id": child})
	got := childResult(t, enginetest.Await(t, pool, parent, executions.Completed))
	assert.Equal(t, executions.Cancelled, got.Status)
	assert.True(t, !got.Success, "a cancelled child counts as a success")
}

func TestCancelOfParentCancelsAwaitedChildren(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, triggerFlows(executions.Child{Wait: true}, waitForever))
	parent := p.startFlow(t, "flow")
	awaited := awaitChild(t, pool, parent)
	enginetest.Await(t, pool, awaited, executions.Waiting)
	enginetest.Await(t, pool, parent, executions.Waiting)
	unawaited, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "child", Surface: trace.Flow, ParentID: parent})
	require.NoError(t, err)
	enginetest.Await(t, pool, unawaited.ID, executions.Waiting)
	_, err = p.Cancel(t.Context(), parent, "admin", "enough")
	require.NoError(t, err)
	x := enginetest.Await(t, pool, awaited, executions.Cancelled)
	assert.Equal(t, "its parent was cancelled: enough", postgres.Deref(x.CancelReason))
	assert.Equal(t, executions.Waiting, getExecution(t, pool, unawaited.ID).Status, "the child without a wait")
}

// sameJSON compares JSON texts without their spaces.
var sameJSON = cmp.Comparer(func(a, b json.RawMessage) bool {
	x, _ := compact(a)
	y, _ := compact(b)
	return string(x) == string(y)
})

func TestTriggerReturnsChildResult(t *testing.T) {
	t.Parallel()
	null, empty := json.RawMessage("null"), json.RawMessage("{}")
	for name, c := range map[string]struct {
		child flowFunc
		want  executions.ChildResult
	}{
		"done": {func(ctx context.Context) (executions.Result, error) {
			return executions.Result{Summary: "fine", Value: 7}, executions.SetVariables(ctx, map[string]any{"name": "Ana"})
		}, executions.ChildResult{
			Status: "completed", Success: true, Summary: "fine", Result: json.RawMessage("7"),
			Variables: json.RawMessage(`{"name":"Ana"}`),
		}},
		"failed": {
			func(context.Context) (executions.Result, error) { return executions.Result{}, errors.New("no") },
			executions.ChildResult{Status: "failed", Error: "no", Result: null, Variables: empty},
		},
		"timed out": {
			func(context.Context) (executions.Result, error) { return executions.Result{}, executions.ErrTimedOut },
			executions.ChildResult{
				Status: "timeout", Error: executions.ErrTimedOut.Error(), Result: null, Variables: empty,
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			p := startEngine(t, pool, triggerFlows(executions.Child{Wait: true}, c.child))
			got := childResult(t, enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed))
			assert.True(t, got.ExecutionID != "", "the result has no id")
			c.want.ExecutionID = got.ExecutionID
			assert.NoDiff(t, c.want, got, sameJSON)
		})
	}
}

func TestTriggerWithoutWaitReturnsAtOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, triggerFlows(executions.Child{}, waitForever))
	parent := enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	child := enginetest.Await(t, pool, childResult(t, parent).ExecutionID, executions.Waiting)
	assert.Equal(t, parent.ID, postgres.Deref(child.ParentID))
	assert.Equal(t, parent.TraceID, child.TraceID)
}

func TestTriggerReturnsCancelledChild(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, triggerFlows(executions.Child{Wait: true}, waitForever))
	parent := p.startFlow(t, "flow")
	child := awaitChild(t, pool, parent)
	enginetest.Await(t, pool, child, executions.Waiting)
	_, err := p.Cancel(t.Context(), child, "admin", "enough")
	require.NoError(t, err)
	got := childResult(t, enginetest.Await(t, pool, parent, executions.Completed))
	assert.Equal(t, executions.Cancelled, got.Status)
	assert.True(t, !got.Success, "a cancelled child counts as a success")
	assert.Equal(t, "enough", got.Error)
}

// After the parent's wait timed out, the child continues alone. It has no lanes of the parent, and a cancel of the
// parent does not cancel it.
func TestChildContinuesAfterParentTimeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	flows := triggerFlows(executions.Child{Wait: true, Timeout: 50 * time.Millisecond}, waitForever)
	trigger := flows["flow"]
	flows["flow"] = func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		result, err := trigger(ctx, input)
		if err != nil {
			return result, err
		}
		if _, err := waitForever(ctx); err != nil {
			return executions.Result{}, err
		}
		return result, nil
	}
	p := startEngine(t, pool, flows)
	parent := p.startFlow(t, "flow")
	child := awaitChild(t, pool, parent)
	enginetest.Await(t, pool, child, executions.Waiting)
	pgtest.Until(t, pool, 1, `select count(*) from agent_executions where id = @id and waiting_for = 'event'`,
		postgres.Strict{"id": parent})
	var got executions.ChildResult
	require.NoError(t, json.Unmarshal(pgtest.Value[json.RawMessage](t, pool, `
		select output from agent_checkpoints where execution_id = @id and step = 'child result'`,
		postgres.Strict{"id": parent}), &got))
	assert.True(t, got.TimedOut, "the wait did not time out")
	assert.True(t, !got.Success, "a running child counts as a success")
	pgtest.Equal(t, pool, "inherits false, awaited false", `
		select format('inherits %s, awaited %s', inherits::text, awaited::text) from agent_executions where id = @id`,
		postgres.Strict{"id": child})
	_, err := p.Cancel(t.Context(), parent, "admin", "enough")
	require.NoError(t, err)
	enginetest.Await(t, pool, parent, executions.Cancelled)
	assert.Equal(t, executions.Waiting, getExecution(t, pool, child).Status)
}

// The child ends after the parent's wait timed out, and before the parent reads the result. The result counts.
func TestChildThatEndsBeforeItsResultIsReadDidNotTimeOut(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	flows := triggerFlows(executions.Child{Wait: true, Timeout: 50 * time.Millisecond}, waitForever)
	trigger := flows["flow"]
	flows["flow"] = func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		return trigger(executions.Gate(ctx, func(ctx context.Context) error {
			if executions.StepKey(ctx) != "before child result" {
				return nil
			}
			_, err := pool.Exec(ctx, `select cancel_agent_execution(id, 'test', '') from agent_executions where flow = 'child'`)
			return err
		}), input)
	}
	parent := startEngine(t, pool, flows).startFlow(t, "flow")
	got := childResult(t, enginetest.Await(t, pool, parent, executions.Completed))
	assert.Equal(t, executions.Cancelled, got.Status)
	assert.True(t, !got.TimedOut, "the wait timed out")
}

// A process dies between the start of the child and the wait. The next process starts no second child. The flow calls
// Trigger without Wait, and waits itself, so that a gate fits between the two.
func TestChildIsStartedOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	g := newGate(t)
	flows := map[string]executions.Func{
		"flow": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			// The replayed input has its members in another order than the original.
			input, err := executions.Step(ctx, "input", func(context.Context) (json.RawMessage, error) {
				return json.RawMessage(`{"zebra": 1, "ant": {"b": 2, "a": 3}}`), nil
			})
			if err != nil {
				return executions.Result{}, err
			}
			spec := executions.Child{Flow: "child", Input: input, Timeout: time.Hour}
			if g.callers.Load() > 0 {
				spec.Timeout = 2 * time.Hour // new code may change the timeout of a running execution
			}
			gated := executions.Gate(ctx, func(ctx context.Context) error { g.enter(ctx); return nil })
			child, err := executions.Trigger(ctx, "child", spec)
			if err != nil {
				return executions.Result{}, err
			}
			if _, err := executions.Step(gated, "between", func(context.Context) (int, error) { return 1, nil }); err != nil {
				return executions.Result{}, err
			}
			return resultOf(executions.Wait(ctx, "end", executions.Agent(child.ExecutionID, spec.Timeout)))
		},
		"child": func(context.Context, json.RawMessage) (executions.Result, error) { return executions.Result{}, nil },
	}
	paused := newEngine(t, pool, flows)
	join := paused.runInBackground(t)
	id := g.awaitFirst(t)
	expireLease(t, pool, id)
	startEngine(t, pool, flows)
	x := enginetest.Await(t, pool, id, executions.Completed)
	g.open()
	join()
	pgtest.Equal(t, pool, 1, `select count(*) from agent_executions where parent_id = @id`, postgres.Strict{"id": x.ID})
}

// If a child ends without a running process, resume_agent_waiters or the sweep makes its parent ready.
func TestParentBecomesReadyWithoutEngine(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, resume := range map[string]func(child string){
		"function": func(child string) {
			pgtest.Exec(t, pool, `select lanekeeper.resume_agent_waiters('agent', @child)`, postgres.Strict{"child": child})
		},
		"sweep": func(string) { sweep(t, pool) },
	} {
		parent, child := newWaiter(t, pool), newWaiter(t, pool)
		require.True(t, parent.park("child", "agent", child.id) == nil, "the child has ended already")
		pgtest.Exec(t, pool, `select lanekeeper.complete_agent_execution(@id, @claim, 'completed', 'fine', null, null, null)`,
			postgres.Strict{"id": child.id, "claim": child.claim})
		assert.Equal(t, 1, pgtest.Value[int](t, pool,
			`select count(*) from agent_unpublished_completions where execution_id = @id`,
			postgres.Strict{"id": child.id}), name)
		assert.Equal(t, executions.Waiting, parent.status(), name)
		resume(child.id)
		out := parent.resume("child")
		assert.Equal(t, "AGENT_COMPLETED", out.Event, name)
		assert.True(t, !out.TimedOut, name, "the wait timed out")
	}
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_unpublished_completions`))
}

// A wait without a timeout lasts as long as the waits of the child and of the child's children.
func TestParentWaitExtendsWithChildWait(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	grandparent, parent, child := newWaiter(t, pool), newWaiter(t, pool), newWaiter(t, pool)
	grandparent.park("child", "agent", parent.id)
	parent.park("child", "agent", child.id)
	child.park("event", "event", "never")
	pgtest.Exec(t, pool, `update agent_executions set waiting_until = clock_timestamp() - interval '1 second'
		where waiting_for = 'agent'`)
	sweep(t, pool)
	for _, w := range []*waiter{grandparent, parent} {
		extended := pgtest.Value[bool](t, pool, `select coalesce(waiting_until > clock_timestamp() + interval '7 days', false)
			from agent_executions where id = @id`,
			postgres.Strict{"id": w.id})
		assert.True(t, extended, "the wait was not extended")
		assert.Equal(t, executions.Waiting, w.status())
	}
	pgtest.Exec(t, pool, `select cancel_agent_execution(@id, 'test', '')`, postgres.Strict{"id": child.id})
	parent.expireTimer()
	out := parent.resume("child")
	assert.Truef(t, !out.TimedOut, "the wait for a cancelled child timed out: %+v", out)
	grandparent.expireTimer()
	out = grandparent.resume("child")
	assert.Truef(t, out.TimedOut, "the wait for a running child did not time out: %+v", out)
}

// The end of a child and the parent's wait are written concurrently. The parent resumes in either order.
func TestConcurrentCompletionAndWaitResumeParent(t *testing.T) {
	t.Parallel()
	for name, endFirst := range map[string]bool{"end before wait": true, "wait before end": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			parent, child := newWaiter(t, pool), newWaiter(t, pool)
			end := func(ctx context.Context, db postgres.DB) error {
				_, err := db.Exec(ctx, `select lanekeeper.complete_agent_execution(@id, @claim, 'completed', '', null, null, null)`,
					postgres.Strict{"id": child.id, "claim": child.claim})
				return err
			}
			wait := func(ctx context.Context, db postgres.DB) error {
				_, err := db.Exec(ctx, `select lanekeeper.wait_agent_execution(@id, @claim, 'child', 'agent', @child, null, null)`,
					postgres.Strict{"id": parent.id, "claim": parent.claim, "child": child.id})
				return err
			}
			first, second := wait, end
			if endFirst {
				first, second = end, wait
			}
			tx, err := pool.Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, first(t.Context(), tx))
			var done atomic.Bool
			group, ctx := errgroup.WithContext(t.Context())
			group.Go(func() error { defer done.Store(true); return second(ctx, pool) })
			pgtest.Eventually(t, func() bool {
				return done.Load() || pgtest.Value[bool](t, pool, `
					select exists (
					  select from pg_stat_activity
					   where datname = current_database() and cardinality(pg_blocking_pids(pid)) > 0)`)
			}, "the second write is done, or waits for the first one")
			require.NoError(t, errors.Join(tx.Commit(t.Context()), group.Wait()))
			sweep(t, pool)
			assert.Equal(t, executions.Running, parent.status())
		})
	}
}
