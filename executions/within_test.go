package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Whoever waits is called again from the top, which neither a transaction nor a call that must not be repeated can be.
func TestThereAreNoWaitsWithinWhatCannotBeBegunAgain(t *testing.T) {
	t.Parallel()
	waits := map[string]func(ctx context.Context) error{
		"wait": func(ctx context.Context) error {
			_, err := executions.Wait(ctx, "pause", executions.Delay(time.Millisecond))
			return err
		},
		"child": func(ctx context.Context) error {
			_, err := executions.Trigger(ctx, "child", executions.Child{Flow: "none", Wait: true})
			return err
		},
	}
	for name, wait := range waits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var failed []error
			got, pool := replayed(t, func(ctx context.Context, _ bool) (any, error) {
				_, first := executions.StepTx(ctx, "write", func(ctx context.Context, _ pgx.Tx) (int, error) { return 0, wait(ctx) })
				_, second := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "call"}},
					func(ctx context.Context, _ *executions.Effect) (int, error) { return 0, wait(ctx) })
				failed = append(failed, first, second)
				return nil, nil
			})
			for _, err := range failed {
				if err == nil || !strings.Contains(err.Error(), "there are no waits within") {
					t.Errorf("the wait answered %v", err)
				}
			}
			if n := value[int](t, pool, `select count(*) from agent_executions`); n != 1 || got.Status != executions.Completed {
				t.Errorf("%d executions, and the status is %s", n, got.Status)
			}
		})
	}
}

func TestRowsThatAreLeftOpenAreAnErrorOfTheTransaction(t *testing.T) {
	t.Parallel()
	got, _ := replayed(t, func(ctx context.Context, _ bool) (any, error) {
		_, err := executions.StepTx(ctx, "read", func(ctx context.Context, tx pgx.Tx) (bool, error) {
			rows, err := tx.Query(ctx, `select generate_series(1, 1000)`)
			return err == nil && rows.Next(), err
		})
		return fmt.Sprint(err), nil
	})
	if want := `"the transaction is still being read from: close the rows of its queries"`; string(got.Result) != want {
		t.Errorf("%s", got.Result)
	}
}

// A run that a step has called for goes on elsewhere with the keys that it has there, and waits where the step may not.
func TestARunThatIsCalledForWithinAStepIsARunOfItsOwn(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var effects atomic.Int32
	var p *process
	p = start(t, pool, map[string]executions.Func{
		"outer": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			closed := executions.Gate(executions.Scope(ctx, "branch"), func(ctx context.Context) error {
				if x, _ := executions.Current(ctx); x.Flow != "outer" {
					return errors.New("the gate is that of the outer run")
				}
				return nil
			})
			return ends(executions.Do(closed, "call", executions.Call{Entry: activity.Entry{Skill: "call"}},
				func(ctx context.Context, _ *executions.Effect) (string, error) {
					x, err := p.RunHere(ctx, executions.Spec{Flow: "inner", Surface: trace.Flow})
					return x.ID, err
				}))
		},
		"inner": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			n, err := executions.Step(ctx, "effect", func(context.Context) (int32, error) { return effects.Add(1), nil })
			if err != nil {
				return executions.Result{}, err
			}
			if _, err := executions.Wait(ctx, "pause", executions.Delay(time.Millisecond)); err != nil {
				return executions.Result{}, err
			}
			return ends(n, nil)
		},
	})
	outer, err := p.RunNow(t.Context(), executions.Spec{Flow: "outer", Surface: trace.Flow})
	if err != nil || outer.Status != executions.Completed {
		t.Fatalf("%s, %v, %v", outer.Status, outer.ErrorMessage, err)
	}
	var id string
	if err := json.Unmarshal(outer.Result, &id); err != nil {
		t.Fatal(err)
	}
	var inner executions.Execution
	pgtest.Eventually(t, patience, func() bool {
		inner, err = executions.Get(t.Context(), pool, id)
		return err == nil && inner.Status.Ended()
	}, "the inner run ends")
	if inner.Status != executions.Completed || string(inner.Result) != "1" || effects.Load() != 1 {
		t.Errorf("%s with %s, %v, after %d effects", inner.Status, inner.Result, inner.ErrorMessage, effects.Load())
	}
}

func TestTransactionsLeaveAConnectionToTheStepsWithinThem(t *testing.T) {
	t.Parallel()
	config := pgtest.DB(t).Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = 3, 0, 0
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		return ends(executions.StepTx(ctx, "write", func(ctx context.Context, _ pgx.Tx) (int, error) {
			for range 3 {
				if _, err := executions.Step(ctx, "within", func(context.Context) (int, error) { return 1, nil }); err != nil {
					return 0, err
				}
			}
			return executions.StepTx(ctx, "write too", func(context.Context, pgx.Tx) (int, error) { return 1, nil })
		}))
	}))
	for range 30 {
		p.begin(t, "flow")
	}
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, pool, `select count(*) from agent_executions where status = 'completed'`) == 30
	}, "all end")
}
