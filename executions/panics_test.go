package executions_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// declined is an error type of which code returns a nil pointer as an error.
type declined struct{ by string }

func (d *declined) Error() string { return d.by }

// unfolded has a cause, for which nothing is asked but by errors.Is.
type unfolded struct{ cause error }

func (*unfolded) Error() string   { return "unfolded" }
func (u *unfolded) Unwrap() error { return u.cause }

// explosive is a value whose own method panics.
type explosive struct{}

func (explosive) MarshalJSON() ([]byte, error) { panic("out of order") }

// What the code hands over is asked by the engine where nothing above it would catch a panic: it would end the process, and each one that
// goes on with the execution.
func TestMethodsOfWhatTheCodeReturnsMayPanic(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	call := executions.Call{Entry: activity.Entry{Skill: "call"}}
	flows := map[string]executions.Func{
		"nil error": func(context.Context, json.RawMessage) (executions.Result, error) {
			var err *declined
			return executions.Result{}, err
		},
		"nil cause": func(context.Context, json.RawMessage) (executions.Result, error) {
			var err *unfolded
			return executions.Result{}, err
		},
		"nil error of a step": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return ends(executions.Step(ctx, "a", func(context.Context) (int, error) {
				var err *declined
				return 0, err
			}))
		},
		"result": func(context.Context, json.RawMessage) (executions.Result, error) { return ends(explosive{}, nil) },
		"result of a step": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return ends(executions.Step(ctx, "a", func(context.Context) (explosive, error) { return explosive{}, nil }))
		},
		"result of a transaction": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return ends(executions.StepTx(ctx, "a", func(context.Context, pgx.Tx) (explosive, error) { return explosive{}, nil }))
		},
		"result of a call": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return ends(executions.Do(ctx, "a", call, func(context.Context, *executions.Effect) (explosive, error) { return explosive{}, nil }))
		},
	}
	p := start(t, pool, flows)
	for name := range flows {
		got, err := p.RunNow(t.Context(), executions.Spec{Flow: name, Surface: trace.Flow})
		if err != nil || got.Status != executions.Failed || got.ErrorMessage == nil || !strings.Contains(*got.ErrorMessage, "panic") {
			t.Errorf("%s: %s, %v, %v", name, got.Status, got.ErrorMessage, err)
		}
		if named := got.FailedStep != nil && *got.FailedStep == "a"; named != strings.Contains(name, " of a ") {
			t.Errorf("%s: the failed step is %v", name, got.FailedStep)
		}
	}
	if got := value[string](t, pool, `select status from agent_activity where skill_name = 'call'`); got != string(activity.Error) {
		t.Errorf("the call whose result cannot be stored is %s", got)
	}
}

type classed struct{ class string }

func (classed) Error() string        { return "declined" }
func (c classed) ErrorClass() string { return c.class }

// Such words come from other services.
func TestWhatACallSaysOfItselfMayBeNoText(t *testing.T) {
	t.Parallel()
	got, pool := replayed(t, func(ctx context.Context, _ bool) (any, error) {
		call := executions.Call{Entry: activity.Entry{Skill: "call"}}
		_, err := executions.Do(ctx, "fails", call, func(_ context.Context, effect *executions.Effect) (int, error) {
			effect.Model = "a\x00\xff"
			return 0, classed{"c\x00\xff"}
		})
		n, failed := executions.Do(ctx, "works", call, func(_ context.Context, effect *executions.Effect) (int, error) {
			effect.Model = "a\x00\xff"
			return 7, nil
		})
		if failed != nil {
			return nil, failed
		}
		return []any{err.Error(), n}, nil
	})
	if string(got.Result) != `["declined", 7]` {
		t.Errorf("%s %s", got.Status, got.Result)
	}
	args := postgres.Strict{"id": got.ID}
	if text := value[string](t, pool, `
		select string_agg(concat_ws(' ', step, status, model, error_class), ', ' order by step) from agent_activity where execution_id = @id`, args); text !=
		"fails error a\ufffd c\ufffd, works success a\ufffd " {
		t.Errorf("%q", text)
	}
}

// One such row would make each sum that it is in no number either, of which there is no JSON.
func TestACostThatIsNoAmountIsAnError(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	got, pool := replayed(t, func(ctx context.Context, _ bool) (any, error) {
		var said []string
		for _, cost := range []float64{math.NaN(), math.Inf(1), -1e300, 99_999_999} {
			_, err := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "call"}, Idempotent: true},
				func(_ context.Context, effect *executions.Effect) (int, error) {
					calls.Add(1)
					effect.CostUSD = cost
					return 1, nil
				})
			said = append(said, fmt.Sprint(err))
		}
		return said, nil
	})
	if said := string(got.Result); strings.Count(said, "cannot be recorded") != 3 || !strings.HasSuffix(said, `"<nil>"]`) || calls.Load() != 4 {
		t.Errorf("%s %s after %d calls", got.Status, said, calls.Load())
	}
	if sums := value[string](t, pool, `select string_agg(status, ' ' order by id) || ' ' || sum(cost_usd) from agent_activity`); sums != "error error error success 99999999.000000" {
		t.Error(sums)
	}
}

func TestAResultThatCannotBeReadBackNamesItsType(t *testing.T) {
	t.Parallel()
	got, _ := replayed(t, func(ctx context.Context, _ bool) (any, error) {
		return executions.Step(ctx, "a", func(context.Context) (fmt.Stringer, error) { return time.Second, nil })
	})
	if got.ErrorMessage == nil || !strings.Contains(*got.ErrorMessage, "does not fit fmt.Stringer") {
		t.Errorf("%s %v", got.Status, got.ErrorMessage)
	}
}
