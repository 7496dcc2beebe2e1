package executions_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

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
