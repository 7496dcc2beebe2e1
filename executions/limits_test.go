package executions_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
)

// untilOver is a call, or a step, that goes on until its context ends.
func untilOver(ctx context.Context, _ *executions.Effect) (int, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

// A step that the code itself ends, by a limit of time or because another branch has failed, has an error for a result, as any other
// that fails: the same in every run.
func TestAStepThatItsOwnCodeEndsIsRecorded(t *testing.T) {
	t.Parallel()
	call := executions.Call{Entry: activity.Entry{Skill: "call"}}
	cases := map[string]struct {
		fn   func(ctx context.Context) error
		want executions.StepError
	}{
		"a step with a limit": {func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			_, err := executions.Step(ctx, "slow", func(ctx context.Context) (int, error) { return untilOver(ctx, nil) })
			return err
		}, executions.StepError{Step: "slow", Class: "timeout", Message: "context deadline exceeded"}},
		"a call with a limit": {func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			_, err := executions.Do(ctx, "slow", call, untilOver)
			return err
		}, executions.StepError{Step: "slow", Class: "timeout", Message: "context deadline exceeded"}},
		"a transaction with a limit": {func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			_, err := executions.StepTx(ctx, "slow", func(ctx context.Context, tx pgx.Tx) (int, error) {
				_, err := tx.Exec(ctx, `select pg_sleep(60)`)
				return 0, err
			})
			return err
		}, executions.StepError{Step: "slow", Class: "timeout", Message: "context deadline exceeded"}},
		"a transaction whose function looks at its limit alone": {func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			_, err := executions.StepTx(ctx, "slow", func(ctx context.Context, _ pgx.Tx) (int, error) { return untilOver(ctx, nil) })
			return err
		}, executions.StepError{Step: "slow", Class: "timeout", Message: "context deadline exceeded"}},
		"a call beside one that fails": {func(ctx context.Context) (err error) {
			group, ctx := errgroup.WithContext(ctx)
			begun := make(chan struct{})
			group.Go(func() error {
				defer close(begun)
				_, err = executions.Do(executions.Scope(ctx, "one"), "slow", call, func(ctx context.Context, effect *executions.Effect) (int, error) {
					begun <- struct{}{}
					return untilOver(ctx, effect)
				})
				return nil
			})
			group.Go(func() error {
				<-begun
				return errors.New("failed")
			})
			if failed := group.Wait(); failed == nil {
				return errors.New("the group did not fail")
			}
			return err
		}, executions.StepError{Step: "one/slow", Class: "error", Message: "context canceled"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var seen []executions.StepError
			got, pool := replayed(t, func(ctx context.Context, again bool) (any, error) {
				err := c.fn(ctx)
				failure, ok := errors.AsType[*executions.StepError](err)
				if !ok {
					return nil, fmt.Errorf("not a StepError: %w", err)
				}
				seen = append(seen, *failure)
				return nil, nil
			})
			if diff := cmp.Diff([]executions.StepError{c.want, c.want}, seen); diff != "" || got.Status != executions.Completed {
				t.Errorf("status %s, errors (-want +got):\n%s", got.Status, diff)
			}
			if n := value[int](t, pool, `select count(*) from agent_activity where skill_name = 'call' and status <> 'error'`); n != 0 {
				t.Errorf("%d rows of the call do not say that it failed", n)
			}
		})
	}
}

// A step to which the code comes when its own limit is over does not begin, and that is its result: a later run, which is
// there in time because it has everything before on record, would otherwise do what this one did without.
func TestAStepThatItsLimitKeepsFromBeginningIsRecorded(t *testing.T) {
	t.Parallel()
	cases := map[string]func(ctx context.Context, made *atomic.Int64) error{
		"step": func(ctx context.Context, made *atomic.Int64) error {
			_, err := executions.Step(ctx, "late", func(context.Context) (int64, error) { return made.Add(1), nil })
			return err
		},
		"call": func(ctx context.Context, made *atomic.Int64) error {
			call := executions.Call{Entry: activity.Entry{Skill: "call"}}
			_, err := executions.Do(ctx, "late", call, func(context.Context, *executions.Effect) (int64, error) { return made.Add(1), nil })
			return err
		},
		"transaction": func(ctx context.Context, made *atomic.Int64) error {
			_, err := executions.StepTx(ctx, "late", func(context.Context, pgx.Tx) (int64, error) { return made.Add(1), nil })
			return err
		},
		"wait": func(ctx context.Context, _ *atomic.Int64) error {
			_, err := executions.Wait(ctx, "late", executions.Event("key", time.Hour))
			return err
		},
	}
	for name, fn := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var made atomic.Int64
			var seen []string
			got, pool := replayed(t, func(ctx context.Context, again bool) (any, error) {
				if !again {
					ended, cancel := context.WithTimeout(ctx, 0)
					defer cancel()
					ctx = ended
				}
				err := fn(ctx, &made)
				failure, ok := errors.AsType[*executions.StepError](err)
				if !ok {
					return nil, fmt.Errorf("not a StepError: %w", err)
				}
				seen = append(seen, failure.Step+": "+failure.Class+", "+failure.Message)
				return nil, nil
			})
			const late = "late: timeout, context deadline exceeded"
			if diff := cmp.Diff([]string{late, late}, seen); diff != "" || got.Status != executions.Completed || made.Load() != 0 {
				t.Errorf("status %s, made %d times, errors (-want +got):\n%s", got.Status, made.Load(), diff)
			}
			if n := value[int](t, pool, `select count(*) from agent_activity where skill_name = 'call'`); n != 0 {
				t.Errorf("%d rows of a call that was not made", n)
			}
		})
	}
}
