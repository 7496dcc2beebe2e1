package why_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/why"
)

// A flow that delivers an event is told as its cause, whichever way a process at work takes; an event from outside has none.
func TestAFlowThatRaisesAnEventIsItsCause(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	waits := func(ctx context.Context, in json.RawMessage) (executions.Result, error) {
		var key string
		if err := json.Unmarshal(in, &key); err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Wait(ctx, "wait", executions.Event(key, time.Hour))
		return executions.Result{}, err
	}
	raises := func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		_, err := executions.Step(ctx, "raise", func(ctx context.Context) (executions.Delivered, error) {
			return w.engine.Deliver(ctx, w.pool, "EVENT_COMPLETED", "inside", nil, "once")
		})
		return executions.Result{}, err
	}
	if err := errors.Join(w.engine.Register("waits", waits), w.engine.Register("raises", raises)); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var group errgroup.Group
	group.Go(func() error { return w.engine.Run(ctx) })
	defer func() {
		stop()
		if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}()
	begin := func(flow, key string) executions.Execution {
		x, _, err := w.engine.Start(t.Context(), w.pool, executions.Spec{Flow: flow, Surface: trace.Flow, Input: key})
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	until := func(x executions.Execution, status string) {
		pgtest.Eventually(t, time.Minute, func() bool {
			return value[string](w, `select status from agent_executions where id = $1`, x.ID) == status
		}, x.Flow+" is "+status)
	}
	inside, outside := begin("waits", "inside"), begin("waits", "outside")
	until(inside, "waiting")
	until(outside, "waiting")
	raiser := begin("raises", "")
	if _, err := w.engine.Deliver(t.Context(), w.pool, "EVENT_COMPLETED", "outside", nil, ""); err != nil {
		t.Fatal(err)
	}
	for x, by := range map[*executions.Execution]string{&inside: "execution " + raiser.ID, &outside: "outside"} {
		until(*x, "completed")
		answer, err := why.Of(t.Context(), w.pool, x.TraceID)
		if err != nil {
			t.Fatal(err)
		}
		var detail struct {
			By string `json:"raised_by"`
		}
		if waited := answer.Of(why.Waits); len(waited) != 1 || json.Unmarshal(waited[0].Detail, &detail) != nil || detail.By != by {
			t.Errorf("%s waited for %+v, want an event raised by %s", x.ID, waited, by)
		}
	}
	answer, err := why.Of(t.Context(), w.pool, raiser.TraceID)
	if err != nil {
		t.Fatal(err)
	}
	led := answer.Of(why.LedTo)
	if len(led) != 2 || led[0].FromRef != "execution "+raiser.ID || led[1].ToRef != "execution "+inside.ID || led[1].TraceID != inside.TraceID {
		t.Errorf("it led to %+v", led)
	}
}
