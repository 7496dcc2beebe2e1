package executions_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// A long loop is replayed from its last snapshot, not from its beginning, and its old records are gone.
func TestALoopIsReplayedFromItsSnapshot(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var steps, bodies atomic.Int32
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		return ends(executions.Loop(ctx, "count", 0, func(ctx context.Context, sum int) (int, bool, error) {
			bodies.Add(1)
			n, err := executions.Step(ctx, "add", func(context.Context) (int, error) { steps.Add(1); return sum + 1, nil })
			if err == nil && n == 38 {
				_, err = executions.Wait(ctx, "pause", executions.Delay(50*time.Millisecond))
			}
			return n, n == 40, err
		}))
	}))
	id := p.begin(t, "flow")
	got := until(t, pool, id, executions.Completed)
	if string(got.Result) != "40" || steps.Load() != 40 {
		t.Errorf("result %s after %d steps, want 40 after 40", got.Result, steps.Load())
	}
	// 38 until the park, then again from 32 on: 6 replayed, 2 new.
	if bodies.Load() != 38+8 {
		t.Errorf("the body ran %d times, want 46", bodies.Load())
	}
	points, err := executions.Checkpoints(t.Context(), pool, id)
	if err != nil || len(points) != 1 || points[0].Step != "count" {
		t.Errorf("%d records left (%v), want the loop's alone", len(points), err)
	}
}

func TestAFinishedLoopIsNotRepeated(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var bodies atomic.Int32
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		last, err := executions.Loop(ctx, "thrice", "", func(_ context.Context, word string) (string, bool, error) {
			bodies.Add(1)
			return word + "x", len(word) == 2, nil
		})
		if err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "pause", executions.Delay(50*time.Millisecond)); err != nil {
			return executions.Result{}, err
		}
		return ends(last, nil)
	}))
	got := until(t, pool, p.begin(t, "flow"), executions.Completed)
	if string(got.Result) != `"xxx"` || bodies.Load() != 3 {
		t.Errorf("result %s after %d iterations, want xxx after 3", got.Result, bodies.Load())
	}
}
