package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// triggers is a flow that triggers a child and ends with what it learned of it, and the child.
func triggers(c executions.Child, child body) map[string]executions.Func {
	c.Flow = "child"
	return map[string]executions.Func{
		"flow": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return ends(executions.Trigger(ctx, "child", c))
		},
		"child": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) { return child(ctx) },
	}
}

func hang(ctx context.Context) (executions.Result, error) {
	return ends(executions.Wait(ctx, "for ever", executions.Event("never", 0)))
}

func triggered(t *testing.T, parent executions.Execution) executions.Triggered {
	t.Helper()
	var got executions.Triggered
	if err := json.Unmarshal(parent.Result, &got); err != nil {
		t.Fatalf("result %s: %v", parent.Result, err)
	}
	return got
}

// childOf waits for the child that an execution started.
func childOf(t *testing.T, pool *pgxpool.Pool, parent string) (id string) {
	t.Helper()
	pgtest.Eventually(t, patience, func() bool {
		return pool.QueryRow(t.Context(), `select id::text from agent_executions where parent_id = @id`, postgres.Strict{"id": parent}).Scan(&id) == nil
	}, "it has a child")
	return id
}

func TestTriggerLearnsHowItsChildEnded(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		child body
		want  executions.Triggered
	}{
		"done": {func(ctx context.Context) (executions.Result, error) {
			return executions.Result{Summary: "fine", Value: 7}, executions.SetVariables(ctx, map[string]any{"name": "Ana"})
		}, executions.Triggered{Status: "completed", Success: true, Summary: "fine", Result: json.RawMessage("7"), Variables: json.RawMessage(`{"name":"Ana"}`)}},
		"failed": {
			func(context.Context) (executions.Result, error) { return executions.Result{}, errors.New("no") },
			executions.Triggered{Status: "failed", Error: "no"},
		},
		"timed out": {
			func(context.Context) (executions.Result, error) { return executions.Result{}, executions.ErrTimedOut },
			executions.Triggered{Status: "timeout", Error: executions.ErrTimedOut.Error()},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			p := start(t, pool, triggers(executions.Child{Wait: true}, c.child))
			got := triggered(t, until(t, pool, p.begin(t, "flow"), executions.Completed))
			if got.Status != c.want.Status || got.Success != c.want.Success || got.Summary != c.want.Summary || got.Error != c.want.Error || got.TimedOut {
				t.Errorf("learned %+v", got)
			}
			if c.want.Result != nil && (string(got.Result) != string(c.want.Result) || !sameJSON(t, got.Variables, c.want.Variables)) {
				t.Errorf("result %s, variables %s", got.Result, got.Variables)
			}
		})
	}
}

func sameJSON(t *testing.T, one, two json.RawMessage) bool {
	t.Helper()
	a, err := compact(one)
	if err != nil {
		t.Fatal(err)
	}
	b, err := compact(two)
	return err == nil && string(a) == string(b)
}

func TestTriggerWithoutWaitGoesOn(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, triggers(executions.Child{}, hang))
	parent := until(t, pool, p.begin(t, "flow"), executions.Completed)
	child := until(t, pool, triggered(t, parent).ExecutionID, executions.Waiting)
	if str(child.ParentID) != parent.ID || child.TraceID != parent.TraceID {
		t.Errorf("child of %s in trace %s", str(child.ParentID), child.TraceID)
	}
}

func TestAChildThatIsCancelledIsAResult(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, triggers(executions.Child{Wait: true}, hang))
	parent := p.begin(t, "flow")
	child := childOf(t, pool, parent)
	until(t, pool, child, executions.Waiting)
	if _, err := p.Cancel(t.Context(), child, "admin", "enough"); err != nil {
		t.Fatal(err)
	}
	if got := triggered(t, until(t, pool, parent, executions.Completed)); got.Status != "cancelled" || got.Success {
		t.Errorf("learned %+v", got)
	}
}

// The child of a parent whose wait timed out goes on by itself: without the lanes, and not cancelled with the parent.
func TestAChildOutlivesAWaitThatTimedOut(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, triggers(executions.Child{Wait: true, Timeout: 50 * time.Millisecond}, hang))
	parent := until(t, pool, p.begin(t, "flow"), executions.Completed)
	got := triggered(t, parent)
	if !got.TimedOut || got.Success {
		t.Errorf("learned %+v", got)
	}
	free := value[bool](t, pool, `select not inherits and not awaited from agent_executions where id = @id`, postgres.Strict{"id": got.ExecutionID})
	if child := until(t, pool, got.ExecutionID, executions.Waiting); !free || child.Status != executions.Waiting {
		t.Errorf("the child is %s, free %v", child.Status, free)
	}
}

// A process dies between the start of the child and the wait: the next one starts no second child.
func TestAChildIsStartedOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	g := newGate(t)
	flows := map[string]executions.Func{
		"flow": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			// The input comes from a record in another order of its members than it had at first.
			input, err := executions.Step(ctx, "input", func(context.Context) (json.RawMessage, error) {
				return json.RawMessage(`{"zebra": 1, "ant": {"b": 2, "a": 3}}`), nil
			})
			if err != nil {
				return executions.Result{}, err
			}
			c := executions.Child{Flow: "child", Input: input, Wait: true, Timeout: time.Hour}
			if g.passed.Load() > 0 {
				c.Timeout = 2 * time.Hour // the code has changed, but not what is done
			}
			gated := executions.Gate(ctx, func(ctx context.Context) error { g.pass(ctx); return nil })
			id, err := executions.Trigger(ctx, "child", executions.Child{Flow: c.Flow, Input: c.Input, Timeout: c.Timeout})
			if err != nil {
				return executions.Result{}, err
			}
			if _, err := executions.Step(gated, "between", func(context.Context) (int, error) { return 1, nil }); err != nil {
				return executions.Result{}, err
			}
			return ends(executions.Wait(ctx, "end", executions.Agent(id.ExecutionID, c.Timeout)))
		},
		"child": func(context.Context, json.RawMessage) (executions.Result, error) { return executions.Result{}, nil },
	}
	asleep := prepare(t, pool, flows)
	wait := asleep.runAside(t)
	id := g.arrival(t)
	expire(t, pool, id)
	start(t, pool, flows)
	x := until(t, pool, id, executions.Completed)
	g.open()
	wait()
	if n := value[int](t, pool, `select count(*) from agent_executions where parent_id = @id`, postgres.Strict{"id": x.ID}); n != 1 {
		t.Errorf("%d children", n)
	}
}

// A child that ends where no process runs makes its parent ready, whoever tells it.
func TestAParentIsResumedWithoutAProcess(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, tell := range map[string]func(child string){
		"told": func(child string) {
			exec(t, pool, `select lanekeeper.deliver_agent_completion(@child)`, postgres.Strict{"child": child})
		},
		"swept": func(string) { sweep(t, pool) },
	} {
		parent, child := newWaiter(t, pool), newWaiter(t, pool)
		if parent.park("child", "agent", child.id) != nil {
			t.Fatal("it has ended already")
		}
		exec(t, pool, `select lanekeeper.complete_agent_execution(@id, @claim, 'completed', 'fine', null, null, null)`, postgres.Strict{"id": child.id, "claim": child.n})
		if n := value[int](t, pool, `select count(*) from agent_untold_ends where execution_id = @id`, postgres.Strict{"id": child.id}); n != 1 {
			t.Errorf("%s: the end is not noted as one to be told", name)
		}
		if parent.status() != executions.Waiting {
			t.Errorf("%s: the end itself woke the parent", name)
		}
		tell(child.id)
		if out := parent.goOn("child"); out.Event != "AGENT_COMPLETED" || out.TimedOut {
			t.Errorf("%s: %+v", name, out)
		}
	}
	if n := value[int](t, pool, `select count(*) from agent_untold_ends`); n != 0 {
		t.Errorf("%d ends are noted for ever", n)
	}
}

// Who did not say how long it waits for a child waits as long as the child does, and those that it waits for.
func TestAParentIsPatient(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	grandparent, parent, child := newWaiter(t, pool), newWaiter(t, pool), newWaiter(t, pool)
	grandparent.park("child", "agent", parent.id)
	parent.park("child", "agent", child.id)
	child.park("event", "event", "never")
	exec(t, pool, `update agent_executions set waiting_until = clock_timestamp() - interval '1 second' where waiting_for = 'agent'`)
	sweep(t, pool)
	for _, w := range []*waiter{grandparent, parent} {
		ahead := value[bool](t, pool, `select coalesce(waiting_until > clock_timestamp() + interval '7 days', false) from agent_executions where id = @id`,
			postgres.Strict{"id": w.id})
		if !ahead || w.status() != executions.Waiting {
			t.Errorf("it is %s, ahead %v", w.status(), ahead)
		}
	}
	exec(t, pool, `select cancel_agent_execution(@id, 'test', '')`, postgres.Strict{"id": child.id})
	parent.due()
	if out := parent.goOn("child"); out.TimedOut {
		t.Errorf("told of the end by a timeout: %+v", out)
	}
	grandparent.due()
	if out := grandparent.goOn("child"); !out.TimedOut { // its child runs, and has had its time
		t.Errorf("%+v", out)
	}
}

func TestCancellingAParentCancelsTheChildItTriggered(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var calls atomic.Int32
	p := start(t, pool, triggers(executions.Child{Wait: true}, func(ctx context.Context) (executions.Result, error) {
		calls.Add(1)
		return hang(ctx)
	}))
	parent := p.begin(t, "flow")
	until(t, pool, parent, executions.Waiting)
	child := childOf(t, pool, parent)
	until(t, pool, child, executions.Waiting)
	if _, err := p.Cancel(t.Context(), parent, "admin", "enough"); err != nil {
		t.Fatal(err)
	}
	until(t, pool, child, executions.Cancelled)
}

// The end of a child and the wait for it are written at the same moment, and neither sees the other: one of them waits for
// the other's commit, so that the end is told.
func TestAnEndAndTheWaitForItMeet(t *testing.T) {
	t.Parallel()
	for name, endFirst := range map[string]bool{"the end comes first": true, "the wait comes first": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			parent, child := newWaiter(t, pool), newWaiter(t, pool)
			end := func(ctx context.Context, db postgres.DB) error {
				_, err := db.Exec(ctx, `select lanekeeper.complete_agent_execution(@id, @claim, 'completed', '', null, null, null)`,
					postgres.Strict{"id": child.id, "claim": child.n})
				return err
			}
			wait := func(ctx context.Context, db postgres.DB) error {
				_, err := db.Exec(ctx, `select lanekeeper.wait_agent_execution(@id, @claim, 'child', 'agent', @child, null, null)`,
					postgres.Strict{"id": parent.id, "claim": parent.n, "child": child.id})
				return err
			}
			first, second := wait, end
			if endFirst {
				first, second = end, wait
			}
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := first(t.Context(), tx); err != nil {
				t.Fatal(err)
			}
			var done atomic.Bool
			group, ctx := errgroup.WithContext(t.Context())
			group.Go(func() error { defer done.Store(true); return second(ctx, pool) })
			pgtest.Eventually(t, patience, func() bool {
				return done.Load() || value[bool](t, pool, `
					select exists (select from pg_stat_activity where datname = current_database() and cardinality(pg_blocking_pids(pid)) > 0)`)
			}, "the second is done, or waits for the first")
			if err := errors.Join(tx.Commit(t.Context()), group.Wait()); err != nil {
				t.Fatal(err)
			}
			sweep(t, pool)
			if got := parent.status(); got != executions.Running {
				t.Errorf("the parent is %s", got)
			}
		})
	}
}
