package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
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
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// stepLog records the steps that ran, by execution.
type stepLog struct {
	mu        sync.Mutex
	stepsByID map[string][]string
}

func (d *stepLog) add(ctx context.Context, what string) {
	x, _ := executions.Current(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stepsByID == nil {
		d.stepsByID = map[string][]string{}
	}
	d.stepsByID[x.ID] = append(d.stepsByID[x.ID], what)
}

func (d *stepLog) steps(id string) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return strings.Join(d.stepsByID[id], " ")
}

// sorted returns the steps that ran, sorted, for parallel branches.
func (d *stepLog) sorted(id string) string {
	words := strings.Fields(d.steps(id))
	slices.Sort(words)
	return strings.Join(words, " ")
}

// step runs a step that appends its name to the log.
func (d *stepLog) step(ctx context.Context, name string, opts ...executions.Option) error {
	_, err := executions.Step(ctx, name, func(ctx context.Context) (string, error) {
		d.add(ctx, name)
		return name, nil
	}, opts...)
	return err
}

// dumpExecution returns everything that the tables contain about an execution.
func dumpExecution(t *testing.T, db postgres.DB, id string) string {
	t.Helper()
	return pgtest.Value[string](t, db, `
		select jsonb_build_object(
		  'row', (select jsonb_agg(x) from agent_executions x where x.id = @id),
		  'steps', (select jsonb_agg(c order by c.step) from agent_checkpoints c where c.execution_id = @id),
		  'activity', (select jsonb_agg(a order by a.id) from agent_activity a where a.execution_id = @id),
		  'events', (select jsonb_agg(v order by v.id) from agent_events v where v.execution_id = @id or v.consumed_by = @id),
		  'approvals', (select jsonb_agg(a order by a.id) from agent_approvals a where a.execution_id = @id),
		  'requests', (select jsonb_agg(r order by r.id) from agent_requests r where r.execution_id = @id),
		  'messages', (select jsonb_agg(m order by m.id) from agent_messages m where m.execution_id = @id),
		  'lanes', (select jsonb_agg(to_jsonb(l) - 'expires_at' order by l.lane)
		              from agent_locks l where l.execution_id = @id),
		  'children', (select jsonb_agg(x order by x.id) from agent_executions x where x.parent_id = @id))::text`,
		postgres.Strict{"id": id})
}

// fork forks an execution and waits for the fork's end. It checks that the original has not changed.
func (p *testEngine) fork(t *testing.T, s executions.ForkSpec, want executions.Status) executions.Execution {
	t.Helper()
	before := dumpExecution(t, p.pool, s.ID)
	x, err := p.Fork(t.Context(), p.pool, s)
	require.NoError(t, err)
	forked := enginetest.Await(t, p.pool, x.ID, want)
	assert.Equal(t, before, dumpExecution(t, p.pool, s.ID), s.From)
	assert.Truef(t, strings.HasPrefix(forked.TraceID, "fl_") && postgres.Deref(forked.ForkedFrom) == s.ID &&
		postgres.Deref(forked.ForkedStep) == s.From && forked.ParentID == nil, "the fork is %+v", forked)
	return forked
}

// allStepKinds is a flow with one step of every kind.
func allStepKinds(d *stepLog) flowFunc {
	return func(ctx context.Context) (executions.Result, error) {
		if err := d.step(ctx, "a"); err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Phase(ctx, "phase", func(ctx context.Context, _ *executions.Effect) (string, error) {
			return "phase", errors.Join(d.step(ctx, "p1"), d.step(ctx, "p2"))
		})
		if err != nil {
			return executions.Result{}, err
		}
		var branches errgroup.Group
		for _, branch := range []string{"left", "right"} {
			branches.Go(func() error {
				ctx := executions.Scope(ctx, branch)
				return errors.Join(d.step(ctx, branch+"1"), d.step(ctx, branch+"2"))
			})
		}
		if err := branches.Wait(); err != nil {
			return executions.Result{}, err
		}
		sum, err := executions.Loop(ctx, "count", 0, func(ctx context.Context, n int) (int, bool, error) {
			return n + 1, n == 19, d.step(ctx, fmt.Sprint("n", n))
		})
		if err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "pause", executions.Delay(time.Millisecond)); err != nil {
			return executions.Result{}, err
		}
		return executions.Result{Summary: "arrived", Value: sum}, d.step(ctx, "z")
	}
}

func loopSteps() string {
	var all []string
	for n := range 20 {
		all = append(all, fmt.Sprint("n", n))
	}
	return strings.Join(all, " ")
}

func TestForkRunsStepsFromStep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var d stepLog
	p := startEngine(t, pool, flowMap(allStepKinds(&d)))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Completed)
	branches := "left1 left2 right1 right2"
	for from, want := range map[string]string{
		"":         "",
		"z":        "z",
		"pause":    "z",
		"count":    loopSteps() + " z",
		"phase/p2": "p2 " + branches + " " + loopSteps() + " z",
		"phase":    "p1 p2 " + branches + " " + loopSteps() + " z",
		"a":        "a p1 p2 " + branches + " " + loopSteps() + " z",
	} {
		got := p.fork(t, executions.ForkSpec{ID: id, From: from}, executions.Completed)
		words := strings.Fields(want)
		slices.Sort(words)
		done := d.sorted(got.ID)
		assert.Truef(t, done == strings.Join(words, " ") && string(got.Result) == "20" && got.ResultSummary == "arrived",
			"from %q: did %s\nwant %s; result %s %q", from, done, words, got.Result, got.ResultSummary)
		again := replay(t, p, got.ID)
		assert.Truef(t, again.Equal, "the fork from %q is not replayed: %+v", from, again.Divergence)
	}
	// A fork from one branch repeats that branch from there. The other branch keeps its results.
	got := p.fork(t, executions.ForkSpec{ID: id, From: "left"}, executions.Completed)
	done := d.sorted(got.ID)
	assert.Truef(t, strings.Contains(done, "left1 left2") && strings.Contains(done, "z") && !strings.Contains(done, "p1"),
		"from a scope: did %s", done)
}

func TestForkRejectsUnknownStep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var d stepLog
	p := startEngine(t, pool, flowMap(allStepKinds(&d)))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Completed)
	for _, from := range []string{"nothing", "phas", "phase/", "count@3"} {
		_, err := p.Fork(t.Context(), pool, executions.ForkSpec{ID: id, From: from})
		assert.ErrorIs(t, err, executions.ErrNoStep, "from", from)
	}
	_, err := p.Fork(t.Context(), pool, executions.ForkSpec{ID: "0198c0de-0000-7000-8000-000000000000"})
	assert.ErrorIs(t, err, executions.ErrNotFound, "of nothing")
	p.Unforkable("flow", "do otherwise")
	_, err = p.Fork(t.Context(), pool, executions.ForkSpec{ID: id})
	assert.Truef(t, errors.Is(err, executions.ErrNoFork) && strings.Contains(err.Error(), "do otherwise"),
		"of an execution that cannot be forked: %v", err)
}

// A running loop is forked from its last snapshot, also from a step inside it.
func TestForkOfUnfinishedLoop(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var d stepLog
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Loop(ctx, "count", 0, func(ctx context.Context, n int) (int, bool, error) {
			if err := d.step(ctx, fmt.Sprint("n", n)); err != nil {
				return n, false, err
			}
			if n == 18 {
				if _, err := executions.Wait(ctx, "go", executions.Event("go "+fmt.Sprint(n), 0)); err != nil {
					return n, false, err
				}
			}
			return n + 1, n == 19, nil
		}))
	}))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Waiting)
	for from, want := range map[string]string{
		"":             "n19",
		"count@18/go":  "n19",
		"count@18":     "n18 n19",
		"count@17/n17": "n17 n18 n19",
	} {
		got := p.fork(t, executions.ForkSpec{ID: id, From: from}, executions.Waiting)
		assert.Truef(t, replay(t, p, got.ID).Equal, "the waiting fork from %q is not replayed", from)
		_, err := cancelElsewhere(t.Context(), pool, got.ID, "test", "enough")
		require.NoError(t, err)
		if first, _, _ := strings.Cut(want, " n19"); d.steps(got.ID) != strings.TrimSuffix(first, "n19") {
			t.Errorf("from %q: did %q", from, d.steps(got.ID))
		}
	}
	_, err := p.Fork(t.Context(), pool, executions.ForkSpec{ID: id, From: "count@3/n3"})
	assert.ErrorIs(t, err, executions.ErrNoStep, "from before the snapshot")
	x, err := p.Fork(t.Context(), pool, executions.ForkSpec{ID: id})
	require.NoError(t, err)
	enginetest.Await(t, pool, x.ID, executions.Waiting)
	_, err = p.Deliver(t.Context(), pool, "EVENT_COMPLETED", "go 18", nil, "")
	require.NoError(t, err)
	for _, id := range []string{id, x.ID} { // both branches wait for it
		got := enginetest.Await(t, pool, id, executions.Completed)
		assert.Truef(t, string(got.Result) == "20", "result %s", got.Result)
	}
}

func TestForkOfRunningExecution(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var d stepLog
	g := newGate(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if err := d.step(ctx, "a"); err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Phase(ctx, "phase", func(ctx context.Context, _ *executions.Effect) (int, error) {
			if err := d.step(ctx, "b"); err != nil {
				return 0, err
			}
			_, err := executions.Step(ctx, "slow", func(ctx context.Context) (int, error) { g.enter(ctx); return 0, nil })
			return 0, err
		})
		return executions.Result{Summary: "done"}, err
	}), func(o *executions.Options) { o.LeaseTTL = time.Minute })
	id := p.startFlow(t, "flow")
	g.awaitFirst(t)
	_, err := p.Replay(t.Context(), id)
	assert.ErrorIs(t, err, executions.ErrRunning, "replay of a running execution")
	_, err = newEngine(t, pool, nil).Replay(t.Context(), id)
	assert.ErrorIs(t, err, executions.ErrRunning, "replay by another process")
	if got := p.fork(t, executions.ForkSpec{ID: id}, executions.Completed); d.steps(got.ID) != "" {
		t.Errorf("did %s", d.steps(got.ID))
	}
	if got := p.fork(t, executions.ForkSpec{ID: id, From: "phase"}, executions.Completed); d.steps(got.ID) != "b" {
		t.Errorf("from the phase under way: did %s", d.steps(got.ID))
	}
	g.open()
	assert.Equal(t, "done", enginetest.Await(t, pool, id, executions.Completed).ResultSummary)
}

func TestForkRejectsInputOfOtherCheckpoint(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var d stepLog
	flows := map[string]executions.Func{"greet": func(ctx context.Context, raw json.RawMessage) (executions.Result,
		error,
	) {
		var in struct{ Name, Tone string }
		if err := json.Unmarshal(raw, &in); err != nil {
			return executions.Result{}, err
		}
		if err := d.step(ctx, "look up", executions.Input(in.Name)); err != nil {
			return executions.Result{}, err
		}
		err := d.step(ctx, "say", executions.Input(in))
		return executions.Result{Summary: in.Tone + " " + in.Name}, err
	}}
	p := startEngine(t, pool, flows)
	x, _, err := p.Start(t.Context(), pool, executions.Spec{
		Flow: "greet", Surface: trace.Flow,
		Input: map[string]string{"name": "Ana", "tone": "hello"},
	})
	require.NoError(t, err)
	enginetest.Await(t, pool, x.ID, executions.Completed)
	n := pgtest.Value[int](t, pool, `select count(*) from agent_executions`)
	_, err = p.Fork(t.Context(), pool,
		executions.ForkSpec{ID: x.ID, From: "say", Input: json.RawMessage(`{"name": "Eva", "tone": "hello"}`)})
	assert.Truef(t, errors.Is(err, executions.ErrChanged) && strings.Contains(err.Error(), "step look up"),
		"another name: %v", err)
	assert.Equal(t, n, pgtest.Value[int](t, pool, `select count(*) from agent_executions`))
	got := p.fork(t, executions.ForkSpec{ID: x.ID, From: "say", Input: json.RawMessage(`{"name": "Ana", "tone": "bye"}`)},
		executions.Completed)
	if got.ResultSummary != "bye Ana" || d.steps(got.ID) != "say" {
		t.Errorf("another tone: %q, did %s", got.ResultSummary, d.steps(got.ID))
	}
	// A process without the flow cannot check the fork in advance, so the fork itself fails.
	other := newEngine(t, pool, nil)
	blind, err := other.Fork(t.Context(), pool,
		executions.ForkSpec{ID: x.ID, From: "say", Input: json.RawMessage(`{"name": "Eva"}`)})
	require.NoError(t, err)
	got = enginetest.Await(t, pool, blind.ID, executions.Failed)
	assert.Contains(t, postgres.Deref(got.ErrorMessage), "step look up")
	assert.Equal(t, "look up", postgres.Deref(got.FailedStep))
}

func TestRetryStartsAtFailedStep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var d stepLog
	var broken sync.Map
	fails := func(ctx context.Context, name string) error {
		_, err := executions.Step(ctx, name, func(ctx context.Context) (int, error) {
			d.add(ctx, name)
			if _, is := broken.Load(name); is {
				return 0, errors.New(name + " is out of order")
			}
			return 1, nil
		})
		return err
	}
	flows := map[string]executions.Func{
		"nested": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			_ = fails(ctx, "optional")
			_, err := executions.Phase(ctx, "phase", func(ctx context.Context, _ *executions.Effect) (int, error) {
				if err := d.step(ctx, "p1"); err != nil {
					return 0, err
				}
				return 0, fails(ctx, "p2")
			})
			return executions.Result{}, err
		},
		"joined": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return executions.Result{}, errors.Join(fails(ctx, "one"), d.step(ctx, "two"), fails(ctx, "three"))
		},
		"between": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			if err := errors.Join(d.step(ctx, "a"), d.step(ctx, "b")); err != nil {
				return executions.Result{}, err
			}
			if _, is := broken.Load("between"); is {
				return executions.Result{}, errors.New("b was no good")
			}
			return executions.Result{}, nil
		},
		"timeout": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			if err := d.step(ctx, "a"); err != nil {
				return executions.Result{}, err
			}
			out, err := executions.Wait(ctx, "news", executions.Event("news", 10*time.Millisecond))
			if err == nil && out.TimedOut {
				err = executions.ErrTimedOut
			}
			return executions.Result{}, err
		},
		"parent": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			if err := d.step(ctx, "a"); err != nil {
				return executions.Result{}, err
			}
			got, err := executions.Trigger(ctx, "child", executions.Child{Flow: "child", Wait: true})
			if err == nil && !got.Success {
				err = errors.New("child: " + got.Error)
			}
			return executions.Result{}, err
		},
		"child": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return executions.Result{}, fails(ctx, "inner")
		},
	}
	p := startEngine(t, pool, flows)
	broke := []string{"optional", "p2", "one", "three", "between", "inner"}
	for _, b := range broke {
		broken.Store(b, true)
	}
	failed := map[string]string{}
	for name, want := range map[string]executions.Status{
		"nested": executions.Failed, "joined": executions.Failed, "between": executions.Failed, "timeout": executions.Timeout,
		"parent": executions.Failed,
	} {
		failed[name] = p.startFlow(t, name)
		got := enginetest.Await(t, pool, failed[name], want)
		if !replay(t, p, got.ID).Equal {
			t.Errorf("the failure of %s is not replayed: %+v", name, replay(t, p, got.ID).Divergence)
		}
	}
	for _, b := range broke {
		broken.Delete(b)
	}
	_, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", "news", nil, "")
	require.NoError(t, err)
	for name, want := range map[string]struct{ from, did string }{
		"nested":  {"phase/p2", "p2"},
		"joined":  {"one", "one two three"},
		"between": {"b", "b"},
		"timeout": {"news", ""},
		"parent":  {"child", ""},
	} {
		before := dumpExecution(t, pool, failed[name])
		x, from, err := p.Retry(t.Context(), pool, failed[name])
		if err != nil || from != want.from {
			t.Errorf("%s: from %q, %v; want %q", name, from, err, want.from)
			continue
		}
		enginetest.Await(t, pool, x.ID, executions.Completed)
		assert.Equal(t, want.did, d.steps(x.ID), name)
		assert.Equal(t, before, dumpExecution(t, pool, failed[name]), name)
		_, _, err = p.Retry(t.Context(), pool, x.ID)
		assert.ErrorIs(t, err, executions.ErrNotFailed, name, "retry of a completed execution")
	}
}

func TestRetryContinuesCancelledExecution(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var d stepLog
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if err := d.step(ctx, "a"); err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Wait(ctx, "news", executions.Event("news", 0))
		return executions.Result{Summary: "done"}, err
	}))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Waiting)
	if _, _, err := p.Retry(t.Context(), pool, id); !errors.Is(err, executions.ErrNotFailed) {
		t.Errorf("retry of a waiting execution: %v", err)
	}
	_, err := p.Cancel(t.Context(), id, "test", "a mistake")
	require.NoError(t, err)
	assert.True(t, replay(t, p, id).Equal, "the replay of the cancelled execution differs")
	x, from, err := p.Retry(t.Context(), pool, id)
	require.Truef(t, err == nil && from == "", "from %q, %v", from, err)
	enginetest.Await(t, pool, x.ID, executions.Waiting)
	_, err = p.Deliver(t.Context(), pool, "EVENT_COMPLETED", "news", nil, "")
	require.NoError(t, err)
	enginetest.Await(t, pool, x.ID, executions.Completed)
	assert.Equal(t, "", d.steps(x.ID))
}

// A stalled execution fails because of its worker, not because of its code.
func TestRetryContinuesStalledExecution(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var d stepLog
	var works atomic.Bool
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		err := d.step(ctx, "a")
		if err == nil {
			_, err = executions.Step(ctx, "b", func(ctx context.Context) (bool, error) {
				if !works.Load() {
					<-ctx.Done()
				}
				return true, ctx.Err()
			})
		}
		return executions.Result{}, err
	}))
	x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "flow", Surface: trace.Flow, ProgressSeconds: 60})
	require.NoError(t, err)
	id := postgres.Strict{"id": x.ID}
	pgtest.Until(t, pool, 1, `select count(*)::int from agent_checkpoints where execution_id = @id`, id)
	pgtest.Exec(t, pool, `
		update agent_checkpoints set created_at = created_at - interval '61 seconds' where execution_id = @id`, id)
	pgtest.Exec(t, pool, `update agent_executions set updated_at = updated_at - interval '61 seconds' where id = @id`, id)
	sweep(t, pool)
	got := enginetest.Await(t, pool, x.ID, executions.Failed)
	assert.Contains(t, postgres.Deref(got.ErrorMessage), "no progress")
	assert.True(t, replay(t, p, x.ID).Equal, "the replay of the stalled execution differs")
	works.Store(true)
	forked, from, err := p.Retry(t.Context(), pool, x.ID)
	require.NoError(t, err)
	assert.Equal(t, "", from, "the retry repeats a recorded step")
	enginetest.Await(t, pool, forked.ID, executions.Completed)
	assert.Equal(t, "", d.steps(forked.ID))
}

// An approval belongs to the original's call. A fork without that call requests another.
func TestForkRequestsOwnApproval(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_skills (name, handler, tool_definition) values ('pay', 'builtin:pay', '{}')`)
	var d stepLog
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		id, err := executions.StepTx(ctx, "ask pay", func(ctx context.Context, tx pgx.Tx) (string, error) {
			d.add(ctx, "ask")
			x, _ := executions.Current(ctx)
			var id string
			return id, tx.QueryRow(ctx, `
				insert into agent_approvals (trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
				  arguments_hash, expires_at)
				values (@trace, @id, @step, true, 'pay', 1, '{}', 'x', clock_timestamp() + interval '1 day') returning id::text`,
				postgres.Strict{"trace": x.TraceID, "id": x.ID, "step": executions.StepKey(ctx)}).Scan(&id)
		})
		if err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "decision on "+id, executions.Approval(id, 0)); err != nil {
			return executions.Result{}, err
		}
		x, _ := executions.Current(ctx)
		_, err = executions.StepTx(ctx, "approved "+id, func(ctx context.Context, tx pgx.Tx) (int, error) {
			d.add(ctx, "pay")
			_, err := tx.Exec(ctx, `select lanekeeper.use_agent_approval(@id, @execution, @step)`,
				postgres.Strict{"id": id, "execution": x.ID, "step": "approved " + id})
			return 1, err
		})
		if err != nil {
			return executions.Result{}, err
		}
		return executions.Result{}, d.step(ctx, "after")
	}))
	approve := func(id string) string {
		enginetest.Await(t, pool, id, executions.Waiting)
		asked := pgtest.Value[string](t, pool, `
			select id::text from agent_approvals where execution_id = @id and status = 'pending'`, postgres.Strict{"id": id})
		pgtest.Exec(t, pool, `update agent_approvals set status = 'approved', decided_at = clock_timestamp() where id = @id`,
			postgres.Strict{"id": asked})
		_, err := p.Deliver(t.Context(), pool, "APPROVAL_DECIDED", asked, json.RawMessage(`{"status": "approved"}`),
			"approval "+asked)
		require.NoError(t, err)
		return asked
	}
	id := p.startFlow(t, "flow")
	asked := approve(id)
	enginetest.Await(t, pool, id, executions.Completed)
	for from, want := range map[string]string{
		"after": "after", "approved " + asked: "ask pay after",
		"decision on " + asked: "ask pay after",
	} {
		x, err := p.Fork(t.Context(), pool, executions.ForkSpec{ID: id, From: from})
		require.NoError(t, err)
		if strings.HasPrefix(want, "ask") {
			approve(x.ID)
		}
		pgtest.Eventually(t, func() bool { return getExecution(t, pool, x.ID).Status.Ended() }, "the fork ends")
		if got := getExecution(t, pool, x.ID); got.Status != executions.Completed {
			t.Errorf("from %q: %s %s", from, got.Status, postgres.Deref(got.ErrorMessage))
		}
		assert.Equal(t, want, d.steps(x.ID), from)
	}
}

// A fork takes its lanes under its own claim. It has no lanes of the original.
func TestForkAcquiresOwnLanes(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.Step(ctx, "a", func(context.Context) (int, error) { return 1, nil }); err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Lane(ctx, "thread:t"); errors.Is(err, lanes.ErrBusy) {
			return executions.Result{Summary: "busy"}, nil
		} else if err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Wait(ctx, "news", executions.Event("news", 0))
		return executions.Result{Summary: "held"}, err
	}))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Waiting)
	if got := p.fork(t, executions.ForkSpec{ID: id}, executions.Completed); got.ResultSummary != "busy" {
		t.Errorf("the fork ended with %q", got.ResultSummary)
	} else if again := replay(t, p, got.ID); !again.Equal {
		t.Errorf("a run with a busy lane is not replayed: %+v", again.Divergence)
	}
	again := replay(t, p, id)
	assert.Truef(t, again.Equal && again.EndedAt == "news", "a run with its lane is not replayed: %+v", again)
}

// A worker that locks a fork of an external execution gets the copied checkpoints.
func TestForkOfExternalExecution(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, nil)
	x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "external", Surface: trace.Flow, OnLost: "hand_on"})
	require.NoError(t, err)
	lock := pgtest.Value[string](t, pool, `select lock_id from lock_agent_execution(@id, 'worker')`,
		postgres.Strict{"id": x.ID})
	for _, step := range []string{"one", "two"} {
		pgtest.Exec(t, pool, `select checkpoint_agent_execution(@id, @lock, @step, '1')`,
			postgres.Strict{"id": x.ID, "lock": lock, "step": step})
	}
	fork, err := p.Fork(t.Context(), pool, executions.ForkSpec{ID: x.ID, From: "two"})
	require.NoError(t, err)
	checkpoints, err := executions.Checkpoints(t.Context(), pool, fork.ID)
	assert.Truef(t, err == nil && len(checkpoints) == 1 && checkpoints[0].Step == "one",
		"checkpoints %v, %v", checkpoints, err)
	assert.Equal(t, "running", pgtest.Value[string](t, pool, `select status from lock_agent_execution(@id, 'another')`,
		postgres.Strict{"id": fork.ID}))
}

// The workers of external executions look for the outcome of their second wait as step "wait KIND 2".
func TestForkOfExternalExecutionCountsKeptWaits(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, nil)
	x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "external", Surface: trace.Flow, OnLost: "hand_on"})
	require.NoError(t, err)
	lock := func(id string) string {
		t.Helper()
		return pgtest.Value[string](t, pool, `select lock_id from lock_agent_execution(@id, 'worker')`,
			postgres.Strict{"id": id})
	}
	wait := func(id, key string) {
		t.Helper()
		mustDeliver(t, pool, key, `{}`)
		require.Equal(t, "running", pgtest.Value[string](t, pool, `
			select unlock_agent_execution(@id, @lock, 'waiting', p_kind => 'event', p_key => @key)`,
			postgres.Strict{"id": id, "lock": lock(id), "key": key}))
	}
	wait(x.ID, "paid")
	pgtest.Exec(t, pool, `select unlock_agent_execution(@id, @lock, 'failed', p_error => 'no money')`,
		postgres.Strict{"id": x.ID, "lock": lock(x.ID)})
	fork, err := p.Fork(t.Context(), pool, executions.ForkSpec{ID: x.ID})
	require.NoError(t, err)
	wait(fork.ID, "shipped")
	pgtest.Equal(t, pool, "wait event 1, wait event 2", `
		select string_agg(step, ', ' order by step) from agent_checkpoints where execution_id = @id`,
		postgres.Strict{"id": fork.ID})
}

// Code that queries the database between steps cannot be replayed to its end. The check still finds an earlier step
// with a changed input.
func TestForkChecksInputOfFlowWithQueries(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, map[string]executions.Func{"flow": func(ctx context.Context,
		input json.RawMessage,
	) (executions.Result, error) {
		_, err := executions.Step(ctx, "first", func(context.Context) (int, error) { return 1, nil },
			executions.Input(string(input)))
		if _, asked := pool.Exec(ctx, `select 1`); asked != nil {
			return executions.Result{}, asked
		}
		if err != nil {
			return executions.Result{}, err
		}
		return resultOf(executions.Step(ctx, "second", func(context.Context) (int, error) { return 2, nil }))
	}})
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Completed)
	_, err := p.Fork(t.Context(), pool,
		executions.ForkSpec{ID: id, From: "second", Input: json.RawMessage(`{"other": true}`)})
	assert.Truef(t, errors.Is(err, executions.ErrChanged) &&
		strings.Contains(err.Error(), "step first has a record for another input"), "fork: %v", err)
}
