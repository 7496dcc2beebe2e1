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

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// family is a parent that starts a child in a step and waits for it. The engine is known only after the flows.
type family struct {
	engine *executions.Engine
	child  body
	before func(ctx context.Context, childID string) // between the child's start and the wait
}

func (f *family) flows() map[string]executions.Func {
	return map[string]executions.Func{
		"parent": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			me, _ := executions.Current(ctx)
			child, err := executions.StepTx(ctx, "start child", func(ctx context.Context, tx pgx.Tx) (string, error) {
				x, _, err := f.engine.StartTx(ctx, tx, executions.Spec{
					Flow: "child", Surface: trace.Flow, TraceID: trace.ID(me.TraceID), ParentID: me.ID, Awaited: true,
				})
				return x.ID, err
			})
			if err != nil {
				return executions.Result{}, err
			}
			if f.before != nil {
				f.before(ctx, child)
			}
			return ends(executions.Wait(ctx, "child", executions.Agent(child, time.Minute)))
		},
		"child": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return f.child(ctx)
		},
	}
}

// childStatus is what a parent learned of its child.
func childStatus(t *testing.T, parent executions.Execution) string {
	t.Helper()
	out := outcome(t, parent)
	var end struct {
		Status string `json:"status"`
	}
	if err := json.Unmarshal(out.Data, &end); err != nil {
		t.Fatal(err)
	}
	return end.Status
}

func TestAParentLearnsHowItsChildEnded(t *testing.T) {
	for name, c := range map[string]struct {
		child body
		want  string
	}{
		"done":   {func(context.Context) (executions.Result, error) { return executions.Result{Summary: "fine"}, nil }, "completed"},
		"failed": {func(context.Context) (executions.Result, error) { return executions.Result{}, errors.New("no") }, "failed"},
	} {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.DB(t)
			f := &family{child: c.child}
			p := start(t, pool, f.flows())
			f.engine = p.Engine
			parent := until(t, pool, p.begin(t, "parent"), executions.Completed)
			if got := childStatus(t, parent); got != c.want {
				t.Errorf("the child is %s, want %s", got, c.want)
			}
		})
	}
}

// A child may end before its parent waits, at that very moment, or after: the parent goes on once.
func TestAChildsEndIsNeverMissed(t *testing.T) {
	pool := pgtest.DB(t)
	f := &family{child: func(context.Context) (executions.Result, error) { return executions.Result{}, nil }}
	var waits atomic.Int32
	f.before = func(ctx context.Context, id string) {
		if waits.Add(1)%3 == 0 { // every third parent comes late
			deadline := time.Now().Add(patience)
			for time.Now().Before(deadline) {
				if x, err := executions.Get(ctx, pool, id); err == nil && x.Status.Ended() {
					return
				}
			}
		}
	}
	p := start(t, pool, f.flows())
	f.engine = p.Engine
	var parents []string
	for range 12 {
		parents = append(parents, p.begin(t, "parent"))
	}
	for _, id := range parents {
		x := until(t, pool, id, executions.Completed)
		if got := childStatus(t, x); got != "completed" {
			t.Errorf("parent %s learned %s", id, got)
		}
	}
}

// Nobody tells the parent of a child that was cancelled by plain SQL: the sweep does.
func TestTheSweepTellsParents(t *testing.T) {
	pool := pgtest.DB(t)
	hang := func(ctx context.Context) (executions.Result, error) {
		return ends(executions.Wait(ctx, "for ever", executions.Event("never", 0)))
	}
	f := &family{child: hang}
	p := start(t, pool, f.flows())
	f.engine = p.Engine
	parent := p.begin(t, "parent")
	child := *until(t, pool, parent, executions.Waiting).WaitingKey
	until(t, pool, child, executions.Waiting)
	exec(t, pool, `select cancel_agent_execution(@id, 'somebody', 'by hand')`, postgres.Strict{"id": child})
	if got := childStatus(t, until(t, pool, parent, executions.Completed)); got != "cancelled" {
		t.Errorf("the child is %s", got)
	}
}

func TestCancellingAParentCancelsWhatItWaitsFor(t *testing.T) {
	pool := pgtest.DB(t)
	f := &family{child: func(ctx context.Context) (executions.Result, error) {
		return ends(executions.Wait(ctx, "for ever", executions.Event("never", 0)))
	}}
	p := start(t, pool, f.flows())
	f.engine = p.Engine
	parent := p.begin(t, "parent")
	awaited := *until(t, pool, parent, executions.Waiting).WaitingKey
	until(t, pool, awaited, executions.Waiting)
	free, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "child", Surface: trace.Flow, ParentID: parent})
	if err != nil {
		t.Fatal(err)
	}
	until(t, pool, free.ID, executions.Waiting)
	if _, err := p.Cancel(t.Context(), parent, "admin", "enough"); err != nil {
		t.Fatal(err)
	}
	if x := until(t, pool, awaited, executions.Cancelled); x.CancelReason == nil || *x.CancelReason != "its parent was cancelled: enough" {
		t.Errorf("the child was cancelled because of %v", x.CancelReason)
	}
	if x, err := executions.Get(t.Context(), pool, free.ID); err != nil || x.Status != executions.Waiting {
		t.Errorf("a child that nobody waits for is %s, %v", x.Status, err)
	}
}

func TestWhatACallersTransactionInsertsIsRunAfterItsCommit(t *testing.T) {
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(context.Context) (executions.Result, error) { return executions.Result{Summary: "ran"}, nil }))
	spec := executions.Spec{Flow: "flow", Surface: trace.Chat, DedupeKey: "once"}
	undone := errors.New("undone")
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		if _, created, err := p.InsertClaimed(t.Context(), tx, spec); err != nil || !created {
			t.Fatalf("created %v, %v", created, err)
		}
		return undone
	})
	if !errors.Is(err, undone) || value[int](t, pool, `select count(*) from agent_executions`) != 0 {
		t.Fatalf("a rolled back insert left something: %v", err)
	}
	var claimed executions.Execution
	for i := range 2 {
		err = postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
			got, created, err := p.InsertClaimed(t.Context(), tx, spec)
			if i == 0 {
				claimed = got
			} else if got.ID != claimed.ID {
				t.Errorf("the key led to %s and %s", claimed.ID, got.ID)
			}
			if created != (i == 0) {
				t.Errorf("insert %d: created %v", i, created)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	x, err := p.RunClaimed(t.Context(), claimed)
	if err != nil || x.Status != executions.Completed || x.ResultSummary != "ran" {
		t.Errorf("%s %q, %v", x.Status, x.ResultSummary, err)
	}
}

// A process that dies between the commit and the run leaves a claim; another process takes it over.
func TestAClaimThatIsNeverRunGoesElsewhere(t *testing.T) {
	pool := pgtest.DB(t)
	flows := flow(func(context.Context) (executions.Result, error) { return executions.Result{}, nil })
	dead := prepare(t, pool, flows)
	var claimed executions.Execution
	err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) (err error) {
		claimed, _, err = dead.InsertClaimed(t.Context(), tx, executions.Spec{Flow: "flow", Surface: trace.Chat})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	expire(t, pool, claimed.ID)
	start(t, pool, flows)
	until(t, pool, claimed.ID, executions.Completed)
}

// RunHere leaves what its caller has no time for to others; RunClaimed, as RunNow, cancels it.
func TestRunHereHandsBackWhatItsCallerLeft(t *testing.T) {
	pool := pgtest.DB(t)
	ctx, leave := context.WithCancel(t.Context())
	first := true
	p := start(t, pool, flow(func(inner context.Context) (executions.Result, error) {
		if first {
			first = false
			leave()
			<-inner.Done()
			return executions.Result{}, context.Cause(inner)
		}
		return executions.Result{Summary: "elsewhere"}, nil
	}))
	x, err := p.RunHere(ctx, executions.Spec{Flow: "flow", Surface: trace.Chat})
	if err != nil {
		t.Fatal(err)
	}
	if end := until(t, pool, x.ID, executions.Completed); end.ResultSummary != "elsewhere" {
		t.Errorf("ended with %q", end.ResultSummary)
	}
}

func TestASettlementCommitsWithTheResult(t *testing.T) {
	pool := pgtest.DB(t)
	exec(t, pool, `create table settled (what text primary key)`)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		for i, fail := range []error{nil, errors.New("no")} {
			_, err := executions.Do(ctx, fmt.Sprint("call ", i), executions.Call{},
				func(_ context.Context, effect *executions.Effect) (bool, error) {
					effect.Settle = func(b *pgx.Batch) {
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
	until(t, pool, p.begin(t, "flow"), executions.Completed)
	if n := value[int](t, pool, `select count(*) from settled`); n != 2 {
		t.Errorf("%d of 2 calls were settled", n)
	}
}

func TestLaneWaitTakesTheLaneWhenItsTurnComes(t *testing.T) {
	pool := pgtest.DB(t)
	keeper := lanes.NewKeeper(pool, lanes.Options{})
	first, err := keeper.Acquire(t.Context(), "thread:x")
	if err != nil {
		t.Fatal(err)
	}
	waits := make(chan struct{})
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.LaneWait(ctx, "thread:x", 50*time.Millisecond); !errors.Is(err, lanes.ErrBusy) {
			return executions.Result{}, fmt.Errorf("beyond its patience: %w", err)
		}
		close(waits)
		hold, err := executions.LaneWait(ctx, "thread:x", patience)
		if err != nil {
			return executions.Result{}, err
		}
		if err := hold.Context().Err(); err != nil {
			return executions.Result{}, fmt.Errorf("the hold has ended before it began: %w", err)
		}
		return executions.Result{Value: hold.Token()}, nil
	}))
	id := p.begin(t, "flow")
	receive(t, waits)
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	x := until(t, pool, id, executions.Completed)
	var token int64
	if err := json.Unmarshal(x.Result, &token); err != nil || token <= first.Token() {
		t.Errorf("token %d after %d, %v", token, first.Token(), err)
	}
}

// A process that wakes after its claim was taken over may still ask for a lane. It must not keep it: the
// successor does not know of it.
func TestAStaleClaimKeepsNoLane(t *testing.T) {
	pool := pgtest.DB(t)
	g := newGate(t)
	lanes := make(chan error, 1)
	flows := flow(func(ctx context.Context) (executions.Result, error) {
		if !g.pass(ctx) {
			return executions.Result{}, nil // the successor takes no lane
		}
		_, err := executions.Lane(ctx, "pipeline:late")
		lanes <- err
		return executions.Result{}, err
	})
	asleep := prepare(t, pool, flows)
	wait := asleep.runAside(t)
	id := g.arrival(t)
	expire(t, pool, id)
	start(t, pool, flows)
	until(t, pool, id, executions.Completed)
	g.open()
	if err := receive(t, lanes); !errors.Is(err, executions.ErrStale) {
		t.Errorf("a lost claim took a lane: %v", err)
	}
	wait()
	if value[bool](t, pool, `select is_agent_lock_held('pipeline:late')`) {
		t.Error("a lost claim keeps a lane")
	}
}

// A wait for a lane ends neither while somebody stands in its queue, nor never because the execution has it itself.
func TestALaneIsWaitedForBehindItsQueue(t *testing.T) {
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.Lane(ctx, "thread:own"); err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "own", executions.LaneFree("thread:own", time.Minute)); err != nil {
			return executions.Result{}, err
		}
		return ends(executions.Wait(ctx, "queued", executions.LaneFree("thread:queued", time.Minute)))
	}))
	exec(t, pool, `select await_agent_lock('thread:queued', 'first', 60)`)
	exec(t, pool, `select await_agent_lock('thread:queued', 'second', 60, 60)`)
	exec(t, pool, `select release_agent_lock('thread:queued', 'first')`)
	id := p.begin(t, "flow")
	until(t, pool, id, executions.Waiting)
	if n := value[int](t, pool, `select wait_number from agent_executions where id = @id`, postgres.Strict{"id": id}); n != 1 {
		t.Errorf("%d waits, want 1: it waits for itself, or over and over", n)
	}
	exec(t, pool, `select leave_agent_lock_queue('thread:queued', 'second')`)
	until(t, pool, id, executions.Completed)
}
