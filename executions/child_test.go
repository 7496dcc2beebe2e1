package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// A child that plain SQL cancelled does not resume its parent; the sweep does.
func TestSweepResumesParents(t *testing.T) {
	pool := pgtest.DB(t)
	p := startEngine(t, pool, triggerFlows(executions.Child{Wait: true}, waitForever))
	parent := p.startFlow(t, "flow")
	child := *awaitStatus(t, pool, parent, executions.Waiting).WaitingKey
	awaitStatus(t, pool, child, executions.Waiting)
	pgtest.Exec(t, pool, `select cancel_agent_execution(@id, 'somebody', 'by hand')`, postgres.Strict{"id": child})
	got := childResult(t, awaitStatus(t, pool, parent, executions.Completed))
	assert.Truef(t, got.Status == executions.Cancelled && !got.Success, "the parent learned %+v", got)
}

func TestCancelOfParentCancelsAwaitedChildren(t *testing.T) {
	pool := pgtest.DB(t)
	p := startEngine(t, pool, triggerFlows(executions.Child{Wait: true}, waitForever))
	parent := p.startFlow(t, "flow")
	awaited := awaitChild(t, pool, parent)
	awaitStatus(t, pool, awaited, executions.Waiting)
	awaitStatus(t, pool, parent, executions.Waiting)
	free, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "child", Surface: trace.Flow, ParentID: parent})
	require.NoError(t, err)
	awaitStatus(t, pool, free.ID, executions.Waiting)
	_, err = p.Cancel(t.Context(), parent, "admin", "enough")
	require.NoError(t, err)
	x := awaitStatus(t, pool, awaited, executions.Cancelled)
	assert.Truef(t, x.CancelReason != nil && *x.CancelReason == "its parent was cancelled: enough",
		"the child was cancelled because of %v", x.CancelReason)
	x, err = executions.Get(t.Context(), pool, free.ID)
	assert.Truef(t, err == nil && x.Status == executions.Waiting, "an unawaited child is %s, %v", x.Status, err)
}

func TestInsertClaimedRunsAfterCommit(t *testing.T) {
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(context.Context) (executions.Result, error) {
		return executions.Result{Summary: "ran"}, nil
	}))
	spec := executions.Spec{Flow: "flow", Surface: trace.Chat, DedupeKey: "once"}
	undone := errors.New("undone")
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		_, created, err := p.InsertClaimed(t.Context(), tx, spec)
		require.Truef(t, err == nil && created, "created %v, %v", created, err)
		return undone
	})
	require.Truef(t, errors.Is(err, undone) && pgtest.Value[int](t, pool, `select count(*) from agent_executions`) == 0,
		"a rolled back insert left something: %v", err)
	var claimed executions.Execution
	for i := range 2 {
		err = postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
			got, created, err := p.InsertClaimed(t.Context(), tx, spec)
			if i == 0 {
				claimed = got
			} else if got.ID != claimed.ID {
				t.Errorf("the key led to %s and %s", claimed.ID, got.ID)
			}
			assert.Equal(t, i == 0, created, i)
			return err
		})
		require.NoError(t, err)
	}
	x, err := p.RunClaimed(t.Context(), &claimed)
	assert.Truef(t, err == nil && x.Status == executions.Completed && x.ResultSummary == "ran",
		"%s %q, %v", x.Status, x.ResultSummary, err)
}

// If the caller of ClaimAndRun leaves, its run continues in another process.
func TestClaimAndRunReleasesRunWhenCallerLeaves(t *testing.T) {
	pool := pgtest.DB(t)
	ctx, leave := context.WithCancel(t.Context())
	p := newEngine(t, pool, flowMap(func(inner context.Context) (executions.Result, error) {
		leave()
		<-inner.Done()
		return executions.Result{}, context.Cause(inner)
	}))
	id := p.startFlow(t, "flow")
	require.NoError(t, p.ClaimAndRun(ctx, id))
	startEngine(t, pool, flowMap(noop))
	awaitStatus(t, pool, id, executions.Completed)
}

func TestOnResultCommitsWithResult(t *testing.T) {
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `create table settled (what text primary key)`)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		for i, fail := range []error{nil, errors.New("no")} {
			_, err := executions.Do(ctx, fmt.Sprint("call ", i), executions.Call{},
				func(_ context.Context, effect *executions.Effect) (bool, error) {
					effect.OnResult = func(b *pgx.Batch) {
						b.Queue(`insert into settled values (@what) on conflict do nothing`, postgres.Strict{"what": fmt.Sprint(i)})
					}
					return true, fail
				})
			if err != nil && fail == nil {
				return executions.Result{}, err
			}
		}
		return executions.Result{}, nil
	}))
	awaitStatus(t, pool, p.startFlow(t, "flow"), executions.Completed)
	assert.Equal(t, 2, pgtest.Value[int](t, pool, `select count(*) from settled`))
}

func TestLaneWaitAcquiresLaneInTurn(t *testing.T) {
	pool := pgtest.DB(t)
	keeper := lanes.NewKeeper(pool, lanes.Options{})
	first, err := keeper.Acquire(t.Context(), "thread:x")
	require.NoError(t, err)
	waits := make(chan struct{})
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.LaneWait(ctx, "thread:x", 50*time.Millisecond); !errors.Is(err, lanes.ErrBusy) {
			return executions.Result{}, fmt.Errorf("beyond its patience: %w", err)
		}
		close(waits)
		hold, err := executions.LaneWait(ctx, "thread:x", timeout)
		if err != nil {
			return executions.Result{}, err
		}
		if err := hold.Context().Err(); err != nil {
			return executions.Result{}, fmt.Errorf("the hold has ended before it began: %w", err)
		}
		return executions.Result{Value: hold.Token()}, nil
	}))
	id := p.startFlow(t, "flow")
	testkit.Receive(t, waits)
	require.NoError(t, first.Release(t.Context()))
	x := awaitStatus(t, pool, id, executions.Completed)
	var token int64
	if err := json.Unmarshal(x.Result, &token); err != nil || token <= first.Token() {
		t.Errorf("token %d after %d, %v", token, first.Token(), err)
	}
}

// A process may wake after another took over its claim, and still request a lane. It must not keep the lane, since its
// successor does not know of it.
func TestStaleClaimKeepsNoLane(t *testing.T) {
	pool := pgtest.DB(t)
	g := newGate(t)
	lanes := make(chan error, 1)
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		if !g.enter(ctx) {
			return executions.Result{}, nil // the successor takes no lane
		}
		_, err := executions.Lane(ctx, "pipeline:late")
		lanes <- err
		return executions.Result{}, err
	})
	paused := newEngine(t, pool, flows)
	wait := paused.runInBackground(t)
	id := g.awaitFirst(t)
	expireLease(t, pool, id)
	startEngine(t, pool, flows)
	awaitStatus(t, pool, id, executions.Completed)
	g.open()
	assert.ErrorIs(t, testkit.Receive(t, lanes), executions.ErrStale)
	wait()
	assert.True(t, !pgtest.Value[bool](t, pool, `select is_agent_lock_held('pipeline:late')`), "a lost claim keeps a lane")
}

// A wait for a lane does not end while its queue has earlier waiters. It does end if the execution itself holds the
// lane.
func TestLaneFreeWaitsForEarlierWaiters(t *testing.T) {
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.Lane(ctx, "thread:own"); err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "own", executions.LaneFree("thread:own", time.Minute)); err != nil {
			return executions.Result{}, err
		}
		return resultOf(executions.Wait(ctx, "queued", executions.LaneFree("thread:queued", time.Minute)))
	}))
	pgtest.Exec(t, pool, `select await_agent_lock('thread:queued', 'first', 60)`)
	pgtest.Exec(t, pool, `select await_agent_lock('thread:queued', 'second', 60, 60)`)
	pgtest.Exec(t, pool, `select release_agent_lock('thread:queued', 'first')`)
	id := p.startFlow(t, "flow")
	awaitStatus(t, pool, id, executions.Waiting)
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select wait_number from agent_executions where id = @id`,
		postgres.Strict{"id": id}))
	pgtest.Exec(t, pool, `select leave_agent_lock_queue('thread:queued', 'second')`)
	awaitStatus(t, pool, id, executions.Completed)
}

// triggerFlows returns a flow that triggers a child, and the child. The result of the flow is the outcome of the child.
func triggerFlows(c executions.Child, child flowFunc) map[string]executions.Func {
	c.Flow = "child"
	return map[string]executions.Func{
		"flow": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return resultOf(executions.Trigger(ctx, "child", c))
		},
		"child": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) { return child(ctx) },
	}
}

func waitForever(ctx context.Context) (executions.Result, error) {
	return resultOf(executions.Wait(ctx, "for ever", executions.Event("never", 0)))
}

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

func TestTriggerReturnsChildResult(t *testing.T) {
	t.Parallel()
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
			executions.ChildResult{Status: "failed", Error: "no"},
		},
		"timed out": {
			func(context.Context) (executions.Result, error) { return executions.Result{}, executions.ErrTimedOut },
			executions.ChildResult{Status: "timeout", Error: executions.ErrTimedOut.Error()},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			p := startEngine(t, pool, triggerFlows(executions.Child{Wait: true}, c.child))
			got := childResult(t, awaitStatus(t, pool, p.startFlow(t, "flow"), executions.Completed))
			assert.Truef(t, got.Status == c.want.Status && got.Success == c.want.Success && got.Summary == c.want.Summary &&
				got.Error == c.want.Error && !got.TimedOut, "learned %+v", got)
			assert.Truef(t, c.want.Result == nil || string(got.Result) == string(c.want.Result) &&
				equalJSON(t, got.Variables, c.want.Variables), "result %s, variables %s", got.Result, got.Variables)
		})
	}
}

func equalJSON(t *testing.T, one, two json.RawMessage) bool {
	t.Helper()
	a, err := compact(one)
	require.NoError(t, err)
	b, err := compact(two)
	return err == nil && string(a) == string(b)
}

func TestTriggerWithoutWaitReturnsAtOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, triggerFlows(executions.Child{}, waitForever))
	parent := awaitStatus(t, pool, p.startFlow(t, "flow"), executions.Completed)
	child := awaitStatus(t, pool, childResult(t, parent).ExecutionID, executions.Waiting)
	assert.Truef(t, postgres.Deref(child.ParentID) == parent.ID && child.TraceID == parent.TraceID,
		"child of %s in trace %s", postgres.Deref(child.ParentID), child.TraceID)
}

func TestTriggerReturnsCancelledChild(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, triggerFlows(executions.Child{Wait: true}, waitForever))
	parent := p.startFlow(t, "flow")
	child := awaitChild(t, pool, parent)
	awaitStatus(t, pool, child, executions.Waiting)
	_, err := p.Cancel(t.Context(), child, "admin", "enough")
	require.NoError(t, err)
	got := childResult(t, awaitStatus(t, pool, parent, executions.Completed))
	assert.Truef(t, got.Status == "cancelled" && !got.Success, "learned %+v", got)
}

// After the parent's wait timed out, the child continues alone. It has no lanes of the parent, and a cancel of the
// parent does not reach it.
func TestChildContinuesAfterParentTimeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, triggerFlows(executions.Child{Wait: true, Timeout: 50 * time.Millisecond}, waitForever))
	parent := awaitStatus(t, pool, p.startFlow(t, "flow"), executions.Completed)
	got := childResult(t, parent)
	assert.Truef(t, got.TimedOut && !got.Success, "learned %+v", got)
	free := pgtest.Value[bool](t, pool, `select not inherits and not awaited from agent_executions where id = @id`,
		postgres.Strict{"id": got.ExecutionID})
	child := awaitStatus(t, pool, got.ExecutionID, executions.Waiting)
	assert.Truef(t, free && child.Status == executions.Waiting, "the child is %s, free %v", child.Status, free)
}

// A process dies between the start of the child and the wait. The next process starts no second child.
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
			c := executions.Child{Flow: "child", Input: input, Wait: true, Timeout: time.Hour}
			if g.callers.Load() > 0 {
				c.Timeout = 2 * time.Hour // the code has changed, its effect has not
			}
			gated := executions.Gate(ctx, func(ctx context.Context) error { g.enter(ctx); return nil })
			id, err := executions.Trigger(ctx, "child", executions.Child{Flow: c.Flow, Input: c.Input, Timeout: c.Timeout})
			if err != nil {
				return executions.Result{}, err
			}
			if _, err := executions.Step(gated, "between", func(context.Context) (int, error) { return 1, nil }); err != nil {
				return executions.Result{}, err
			}
			return resultOf(executions.Wait(ctx, "end", executions.Agent(id.ExecutionID, c.Timeout)))
		},
		"child": func(context.Context, json.RawMessage) (executions.Result, error) { return executions.Result{}, nil },
	}
	paused := newEngine(t, pool, flows)
	wait := paused.runInBackground(t)
	id := g.awaitFirst(t)
	expireLease(t, pool, id)
	startEngine(t, pool, flows)
	x := awaitStatus(t, pool, id, executions.Completed)
	g.open()
	wait()
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_executions where parent_id = @id`,
		postgres.Strict{"id": x.ID}))
}

// A child that ends without a running process makes its parent ready.
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
		assert.Truef(t, out.Event == "AGENT_COMPLETED" && !out.TimedOut, "%s: %+v", name, out)
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
		ahead := pgtest.Value[bool](t, pool, `select coalesce(waiting_until > clock_timestamp() + interval '7 days', false)
			from agent_executions where id = @id`,
			postgres.Strict{"id": w.id})
		if !ahead || w.status() != executions.Waiting {
			t.Errorf("the execution is %s, ahead %v", w.status(), ahead)
		}
	}
	pgtest.Exec(t, pool, `select cancel_agent_execution(@id, 'test', '')`, postgres.Strict{"id": child.id})
	parent.expireTimer()
	out := parent.resume("child")
	assert.Truef(t, !out.TimedOut, "the wait ended by a timeout: %+v", out)
	grandparent.expireTimer()
	if out := grandparent.resume("child"); !out.TimedOut { // its child still runs, past the time of the wait
		t.Errorf("%+v", out)
	}
}

// The end of a child and the parent's wait are written concurrently. One waits for the other's commit, so the parent
// resumes.
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
			}, "the second is done, or waits for the first")
			require.NoError(t, errors.Join(tx.Commit(t.Context()), group.Wait()))
			sweep(t, pool)
			assert.Equal(t, executions.Running, parent.status())
		})
	}
}
