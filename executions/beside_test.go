package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// A call is left in the middle when another branch begins to wait, and that branch may wait again before the call's comes to it.
func TestACallThatIsWaitedBesideIsNotMadeAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var runs, calls atomic.Int32
	var class atomic.Value
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		run := runs.Add(1)
		group, ctx := errgroup.WithContext(ctx)
		begun := make(chan struct{})
		group.Go(func() error {
			if run == 2 {
				<-ctx.Done() // slower than the other branch
			}
			_, err := executions.Do(executions.Scope(ctx, "calls"), "call", executions.Call{Entry: activity.Entry{Skill: "call"}},
				func(ctx context.Context, _ *executions.Effect) (int, error) {
					if calls.Add(1) > 1 {
						return 0, nil
					}
					close(begun)
					<-ctx.Done()
					return 0, ctx.Err()
				})
			failure, ok := errors.AsType[*executions.StepError](err)
			if ok {
				class.Store(failure.Class)
				return nil
			}
			return err
		})
		group.Go(func() error {
			if run == 1 {
				<-begun
			}
			for _, key := range []string{"first", "second"} {
				if _, err := executions.Wait(executions.Scope(ctx, "waits"), key, executions.Event(key, 0)); err != nil {
					return err
				}
			}
			return nil
		})
		return ends("done", group.Wait())
	}))
	id := p.begin(t, "flow")
	for _, key := range []string{"first", "second"} {
		pgtest.Eventually(t, patience, func() bool {
			x := get(t, pool, id)
			return x.Status == executions.Waiting && *x.WaitingKey == key
		}, "it waits")
		if _, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", key, json.RawMessage(`{}`), ""); err != nil {
			t.Fatal(err)
		}
	}
	until(t, pool, id, executions.Completed)
	if calls.Load() != 1 || class.Load() != executions.ClassUnknown {
		t.Errorf("called %d times, and the call ended %v", calls.Load(), class.Load())
	}
}

// A connection that breaks in a step is no result of it, also when another branch has come to further steps meanwhile.
func TestABrokenConnectionBesideAnotherBranchIsTriedAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var tries atomic.Int32
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		group, ctx := errgroup.WithContext(ctx)
		begun, beside := make(chan struct{}), make(chan struct{})
		group.Go(func() error {
			_, err := executions.Step(executions.Scope(ctx, "one"), "read", func(ctx context.Context) (int, error) {
				if tries.Add(1) > 1 {
					return 0, nil
				}
				close(begun)
				<-beside
				_, err := pool.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`, postgres.Strict{})
				return 0, err
			})
			return err
		})
		group.Go(func() error {
			defer close(beside)
			<-begun
			_, err := executions.Step(executions.Scope(ctx, "other"), "step", func(context.Context) (int, error) { return 0, nil })
			return err
		})
		return ends("done", group.Wait())
	}))
	id := p.begin(t, "flow")
	pgtest.Eventually(t, patience, func() bool { return get(t, pool, id).Status.Ended() }, "it ends")
	if got := get(t, pool, id); got.Status != executions.Completed || tries.Load() != 2 {
		t.Errorf("%s after %d tries", got.Status, tries.Load())
	}
}
