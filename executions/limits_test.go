package executions_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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
