package executions_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// renewing is a keeper that renews its leases until the test ends.
func renewing(t *testing.T, o *executions.Options) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { _ = o.Keeper.Run(ctx) }) // it returns when ctx ends
	t.Cleanup(func() { cancel(); running.Wait() })
}

// No step begins in a run that has lost a lane, whichever context it has, until the lane is taken again or given back.
func TestNoStepBeginsAfterALaneWasLost(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, c := range map[string]struct {
		after func(ctx context.Context, hold *executions.Hold) error
		goOn  bool
	}{
		"a step": {func(context.Context, *executions.Hold) error { return nil }, false},
		"taken again": {func(ctx context.Context, _ *executions.Hold) error {
			_, err := executions.Lane(ctx, "objective:1")
			return err
		}, true},
		"given back": {func(ctx context.Context, hold *executions.Hold) error {
			if err := hold.Release(ctx); !errors.Is(err, lanes.ErrLost) {
				return errors.Join(errors.New("the release of a lost lane says nothing"), err)
			}
			return nil
		}, true},
	} {
		called := false
		var stopped error
		p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
			hold, err := executions.Lane(ctx, "objective:1", lanes.WithTTL(3*time.Second))
			if err != nil {
				return executions.Result{}, err
			}
			if broken, err := lanes.Break(ctx, pool, "objective:1", "stuck"); err != nil || !broken {
				return executions.Result{}, errors.Join(errors.New("not broken"), err)
			}
			<-hold.Context().Done()
			if err := c.after(ctx, hold); err != nil {
				return executions.Result{}, err
			}
			_, stopped = executions.Step(ctx, "act", func(context.Context) (int, error) { called = true; return 1, nil })
			return ends(nil, stopped)
		}), func(o *executions.Options) { renewing(t, o) })
		x, err := p.RunNow(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
		if err != nil || called != c.goOn || errors.Is(stopped, lanes.ErrLost) == c.goOn || (x.Status == executions.Completed) != c.goOn {
			t.Errorf("%s: the step was called %t, with %v; the run is %s, %v", name, called, stopped, x.Status, err)
		}
		p.stop()
	}
}

// A lane that a run holds twice is lost for it also when it has given back the inner of the two holds.
func TestNoStepBeginsAfterTheOuterHoldOfALaneWasLost(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	called := false
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		outer, err := executions.Lane(ctx, "objective:1", lanes.WithTTL(3*time.Second))
		if err != nil {
			return executions.Result{}, err
		}
		inner, err := executions.Lane(ctx, "objective:1", lanes.WithTTL(3*time.Second))
		if err != nil {
			return executions.Result{}, err
		}
		if broken, err := lanes.Break(ctx, pool, "objective:1", "stuck"); err != nil || !broken {
			return executions.Result{}, errors.Join(errors.New("not broken"), err)
		}
		<-outer.Context().Done()
		_ = inner.Release(ctx) // it says that the lane was lost
		_, err = executions.Step(ctx, "act", func(context.Context) (int, error) { called = true; return 1, nil })
		return ends(nil, err)
	}), func(o *executions.Options) { renewing(t, o) })
	if x, err := p.RunNow(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow}); err != nil || called {
		t.Errorf("the step was called %t; the run is %s, %v", called, x.Status, err)
	}
	p.stop()
}
