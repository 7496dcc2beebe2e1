package executions_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
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
