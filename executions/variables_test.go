package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// shown are the variables that everybody sees.
func shown(t *testing.T, pool *pgxpool.Pool, id string) string {
	t.Helper()
	text, err := compact(get(t, pool, id).Variables)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

type vars = map[string]any

func set(ctx context.Context, v any, errs *error) {
	*errs = errors.Join(*errs, executions.SetVariables(ctx, v))
}

func TestVariablesTravelWithTheNextWrite(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	seen := make(chan string, 10)
	look := func(ctx context.Context) (int, error) {
		x, _ := executions.Current(ctx)
		now, err := executions.Get(ctx, pool, x.ID)
		text, wrong := compact(now.Variables)
		seen <- string(text)
		return 0, errors.Join(err, wrong)
	}
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		var wrong error
		set(ctx, vars{"a": 1}, &wrong)
		_, one := executions.Step(ctx, "first", look)  // not written yet
		_, two := executions.Step(ctx, "second", look) // with the first's checkpoint
		set(ctx, vars{"a": 2, "nul": "\x00"}, &wrong)
		_, three := executions.StepTx(ctx, "third", func(context.Context, pgx.Tx) (int, error) { return 0, nil })
		_, four := executions.Step(ctx, "fourth", look) // with the transaction
		set(ctx, vars{"a": 3}, &wrong)
		if err := errors.Join(wrong, one, two, three, four); err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "event", executions.Event("go", 0)); err != nil {
			return executions.Result{}, err
		}
		return executions.Result{}, executions.SetVariables(ctx, vars{"a": 4})
	}))
	id := p.begin(t, "flow")
	until(t, pool, id, executions.Waiting)
	for i, want := range []string{`{}`, `{"a":1}`, "{\"a\":2,\"nul\":\"\ufffd\"}"} {
		if got := receive(t, seen); got != want {
			t.Errorf("look %d: %s, want %s", i, got, want)
		}
	}
	if got := shown(t, pool, id); got != `{"a":3}` {
		t.Errorf("while it waits: %s", got)
	}
	mustDeliver(t, pool, "go", `{}`)
	until(t, pool, id, executions.Completed)
	if got := shown(t, pool, id); got != `{"a":4}` {
		t.Errorf("after its end: %s", got)
	}
}

// A crash loses what was staged; the replay sets it again, and what the row shows never goes back meanwhile.
func TestAReplaySetsVariablesAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	g := newGate(t)
	flows := flow(func(ctx context.Context) (executions.Result, error) {
		for i := range 3 {
			if err := executions.SetVariables(ctx, vars{"i": i}); err != nil {
				return executions.Result{}, err
			}
			if i < 2 {
				// Written at once, with what is set until then.
				if _, err := executions.StepTx(ctx, "step", func(context.Context, pgx.Tx) (int, error) { return i, nil }); err != nil {
					return executions.Result{}, err
				}
			}
		}
		g.pass(ctx)
		return ends(executions.Step(ctx, "last", func(context.Context) (int, error) { return 0, nil }))
	})
	asleep := prepare(t, pool, flows)
	wait := asleep.runAside(t)
	id := g.arrival(t)
	if got := shown(t, pool, id); got != `{"i":1}` {
		t.Errorf("staged variables are shown before they are written: %s", got)
	}
	expire(t, pool, id)
	start(t, pool, flows)
	until(t, pool, id, executions.Completed)
	if got := shown(t, pool, id); got != `{"i":2}` {
		t.Errorf("after the replay: %s", got)
	}
	g.open()
	wait()
}

// A claim that was lost writes no variables.
func TestAStaleClaimWritesNoVariables(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	g := newGate(t)
	flows := flow(func(ctx context.Context) (executions.Result, error) {
		who := "successor"
		if g.pass(ctx) {
			who = "ghost"
		}
		if err := executions.SetVariables(ctx, vars{"by": who}); err != nil {
			return executions.Result{}, err
		}
		if who == "ghost" {
			_, wait := executions.Wait(ctx, "event", executions.Event("key", 0))
			return executions.Result{}, wait
		}
		return executions.Result{}, nil
	})
	asleep := prepare(t, pool, flows)
	wait := asleep.runAside(t)
	id := g.arrival(t)
	expire(t, pool, id)
	start(t, pool, flows)
	until(t, pool, id, executions.Completed)
	g.open()
	wait()
	if got := shown(t, pool, id); got != `{"by":"successor"}` {
		t.Errorf("shown %s", got)
	}
}

func TestVariablesAreAnObject(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, v := range map[string]any{"list": []int{1}, "null": nil, "channel": make(chan int), "huge": json.RawMessage(`{"n": 1e999}`), "nan": math.NaN()} {
		p := prepare(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
			return executions.Result{}, executions.SetVariables(ctx, v)
		}))
		if got, err := p.RunNow(t.Context(), executions.Spec{Flow: "flow", Surface: "flow"}); err != nil || got.Status != executions.Failed {
			t.Errorf("%s: %s, %v", name, got.Status, err)
		}
	}
	if err := executions.SetVariables(t.Context(), vars{}); !errors.Is(err, executions.ErrOutside) {
		t.Errorf("outside: %v", err)
	}
}

// What the database cannot hold is left out, and does not keep the execution from its end.
func TestVariablesThatCannotBeStoredStopNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		if err := executions.SetVariables(ctx, json.RawMessage(`{"n": 0.`+strings.Repeat("0", 20000)+`1}`)); err != nil {
			return executions.Result{}, err
		}
		return ends(executions.Step(ctx, "step", func(context.Context) (int, error) { return 1, nil }))
	}))
	until(t, pool, p.begin(t, "flow"), executions.Completed)
}

// The record of an end names the step that ended it, and none that failed and was dealt with.
func TestTheEndNamesTheStepThatFailed(t *testing.T) {
	t.Parallel()
	fails := func(ctx context.Context, name string) error {
		_, err := executions.Step(ctx, name, func(context.Context) (int, error) { return 0, errors.New(name + " broke") })
		return err
	}
	for name, c := range map[string]struct {
		flow body
		end  executions.Status
		want string
	}{
		"by itself": {func(ctx context.Context) (executions.Result, error) { return executions.Result{}, fails(ctx, "b") }, executions.Failed, "b"},
		"after one that was handled": {func(ctx context.Context) (executions.Result, error) {
			if fails(ctx, "a") == nil {
				return executions.Result{}, errors.New("a did not fail")
			}
			return executions.Result{}, fails(ctx, "b")
		}, executions.Failed, "b"},
		"before a step that tidied up": {func(ctx context.Context) (executions.Result, error) {
			broken := fails(ctx, "b")
			_, err := executions.Step(ctx, "tidy", func(context.Context) (int, error) { return 0, nil })
			return executions.Result{}, errors.Join(err, broken)
		}, executions.Failed, "b"},
		"none": {func(ctx context.Context) (executions.Result, error) {
			if fails(ctx, "a") == nil {
				return executions.Result{}, errors.New("a did not fail")
			}
			_, err := executions.Step(ctx, "fine", func(context.Context) (int, error) { return 0, nil })
			return executions.Result{}, errors.Join(err, errors.New("something else"))
		}, executions.Failed, ""},
		"a wait": {func(ctx context.Context) (executions.Result, error) {
			out, err := executions.Wait(ctx, "reply", executions.Event("never", 30*time.Millisecond))
			if err == nil && out.TimedOut {
				err = executions.ErrTimedOut
			}
			return executions.Result{}, err
		}, executions.Timeout, "reply"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := start(t, pgtest.DB(t), flow(c.flow))
			x := until(t, p.pool, p.begin(t, "flow"), c.end)
			if str(x.FailedStep) != c.want || str(x.ErrorMessage) == "" {
				t.Errorf("failed step %q, %q", str(x.FailedStep), str(x.ErrorMessage))
			}
		})
	}
}

// A StepTx may hold lanes, so it does not wait for who has locked the execution, and may wait for them. Its variables go with the next write.
func TestVariablesOfATransactionWaitForNobody(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	other, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = other.Rollback(context.WithoutCancel(t.Context())) }()
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		if err := executions.SetVariables(ctx, vars{"a": 1}); err != nil {
			return executions.Result{}, err
		}
		bounded, cancel := context.WithTimeout(ctx, patience/2)
		defer cancel()
		if _, err := executions.StepTx(bounded, "step", func(ctx context.Context, _ pgx.Tx) (int, error) {
			_, err := other.Exec(ctx, `select from agent_executions where id = @id for no key update`, postgres.Strict{"id": x.ID})
			return 1, err
		}); err != nil {
			return executions.Result{}, err
		}
		if got := shown(t, pool, x.ID); got != `{}` {
			t.Errorf("beside who has the row: %s", got)
		}
		return executions.Result{}, other.Rollback(ctx)
	}))
	id := p.begin(t, "flow")
	x := until(t, pool, id, executions.Completed)
	if got := shown(t, pool, x.ID); got != `{"a":1}` {
		t.Errorf("in the end: %s", got)
	}
}
