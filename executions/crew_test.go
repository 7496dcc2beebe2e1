package executions_test

import (
	"context"
	"encoding/json"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// jobs counts the hints that River was given.
func jobs(t *testing.T, db postgres.DB) int {
	t.Helper()
	return value[int](t, db, `select count(*) from river.river_job where kind = 'execution_wake'`)
}

func TestAProcessThatDeliversAttendsAtOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		return ends(executions.Wait(ctx, "go", executions.Event(x.ID, 0)))
	}), never)
	pgtest.Eventually(t, patience, func() bool { return p.Live() == nil }, "the engine lives")
	before := jobs(t, pool)
	for range 10 { // one at a time: a worker is free for each
		id := p.begin(t, "flow")
		until(t, pool, id, executions.Waiting)
		if got, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", id, nil, id); err != nil || len(got.Resumed) != 1 {
			t.Fatalf("resumed %v, %v", got.Resumed, err)
		}
		until(t, pool, id, executions.Completed)
	}
	if n := jobs(t, pool) - before; n > 1 { // a start may come before the workers do
		t.Errorf("%d hints by way of River", n)
	}
}

func TestInATransactionTheHintIsPartOfIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		return ends(executions.Wait(ctx, "go", executions.Event(x.ID, 0)))
	}), never)
	id := p.begin(t, "flow")
	until(t, pool, id, executions.Waiting)
	before := jobs(t, pool)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Deliver(t.Context(), tx, "EVENT_COMPLETED", id, nil, ""); err != nil {
		t.Error(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	until(t, pool, id, executions.Completed)
	if jobs(t, pool) != before+1 {
		t.Errorf("%d hints", jobs(t, pool)-before)
	}
}

// What a process has no worker for goes to another one, though nobody sweeps.
func TestAFullProcessTellsOthers(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	heard := listener(t, pool)
	block := newGate(t)
	full := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		block.pass(ctx)
		return executions.Result{}, nil
	}), never, func(o *executions.Options) { o.Listener, o.Workers = heard, 1 })
	pgtest.Eventually(t, patience, func() bool { return full.Live() == nil }, "the engine lives")
	full.begin(t, "flow")
	block.arrival(t)
	var ran atomic.Int32
	start(t, pool, flow(func(context.Context) (executions.Result, error) {
		ran.Add(1)
		return executions.Result{}, nil
	}), never, func(o *executions.Options) { o.Listener = heard })
	for range 30 {
		full.begin(t, "flow")
	}
	pgtest.Eventually(t, patience, func() bool { return ran.Load() == 30 }, "the other process runs them")
}

// A flow that one process does not know is left to one that does, and stands in nobody's way.
func TestAnUnknownFlowIsLeftToOthers(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	heard := listener(t, pool)
	with := func(o *executions.Options) { o.Listener, o.Workers = heard, 2 }
	p := start(t, pool, flow(nothing), never, with)
	pgtest.Eventually(t, patience, func() bool { return p.Live() == nil }, "the engine lives")
	strange := make([]string, 10)
	for i := range strange {
		strange[i] = p.begin(t, "strange")
	}
	until(t, pool, p.begin(t, "flow"), executions.Completed)
	start(t, pool, map[string]executions.Func{"strange": func(context.Context, json.RawMessage) (executions.Result, error) {
		return executions.Result{}, nil
	}}, never, with)
	for _, id := range strange {
		until(t, pool, id, executions.Completed)
	}
}

// Lanes of an earlier claim are the new claim's before its function runs, when many are claimed at once.
func TestAClaimFromTheQueueTakesItsLanesOver(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		if _, err := executions.Lane(ctx, "thread:"+x.ID); err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "go", executions.Event(x.ID, 0)); err != nil {
			return executions.Result{}, err
		}
		return ends(asked[string](ctx, pool, `select locked_by from agent_locks where lane = 'thread:`+x.ID+`'`))
	}), never)
	pgtest.Eventually(t, patience, func() bool { return p.Live() == nil }, "the engine lives")
	id := p.begin(t, "flow")
	until(t, pool, id, executions.Waiting)
	if _, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", id, nil, ""); err != nil {
		t.Fatal(err)
	}
	got := until(t, pool, id, executions.Completed)
	if want := `"` + id + "#" + value[string](t, pool, `select claim::text from agent_executions where id = @id`, postgres.Strict{"id": id}) + `"`; string(got.Result) != want {
		t.Errorf("the lane was held by %s, want %s", got.Result, want)
	}
}

// The end of a child wakes its parent at once.
func TestAParentGoesOnWithoutASweep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, map[string]executions.Func{
		"child": func(context.Context, json.RawMessage) (executions.Result, error) { return executions.Result{}, nil },
		"flow": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return ends(executions.Trigger(ctx, "child", executions.Child{Flow: "child", Wait: true}))
		},
	}, never)
	pgtest.Eventually(t, patience, func() bool { return p.Live() == nil }, "the engine lives")
	for range 5 {
		x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "flow", Surface: trace.Flow})
		if err != nil {
			t.Fatal(err)
		}
		until(t, pool, x.ID, executions.Completed)
	}
}

// One that somebody had locked when the workers looked is looked for again.
func TestAReadyExecutionThatWasLockedIsNotForgotten(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(nothing), never)
	pgtest.Eventually(t, patience, func() bool { return p.Live() == nil }, "the engine lives")
	var tx pgx.Tx
	var locked string
	pgtest.Eventually(t, patience, func() bool { // a worker may take it before it is locked
		var err error
		if tx, err = pool.Begin(t.Context()); err != nil {
			t.Fatal(err)
		}
		locked = pending(t, pool)
		exec(t, tx, `select from agent_executions where id = @id for no key update`, postgres.Strict{"id": locked})
		until(t, pool, p.begin(t, "flow"), executions.Completed) // the workers have looked
		if get(t, pool, locked).Status == executions.Pending {
			return true
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		return false
	}, "a ready execution is locked before a worker takes it")
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	until(t, pool, locked, executions.Completed)
}
