package operate_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

func TestATurnThatAnotherProcessWentOnWithIsFollowed(t *testing.T) {
	t.Parallel()
	w, called := guarded(t)
	other := w.process(t, true)
	// The listener looks so rarely that the other process is always quicker.
	p := w.process(t, false, func(o *operate.Options) { o.Poll = 1500 * time.Millisecond })
	b := p.say(t, p.open(t, ""), "Wipe orders.", false)
	asked := until[operate.Approval](t, b, "approval")
	start := until[operate.Start](t, b, "start")
	w.becomes(t, start.ExecutionID, executions.Waiting)
	w.decide(t, asked.ID, true)
	if err := other.engine.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	done, err := b.wait(t)
	if err != nil || done.Text != "It is over." || b.text() != done.Text || called.Load() != 1 {
		t.Errorf("done %+v, %v; streamed %q; called %d times", done, err, b.text(), called.Load())
	}
	if !strings.HasPrefix(w.held(t), "op_") {
		t.Errorf("the admin is still there, but the lane is held by %q", w.held(t))
	}
}

func TestATurnWhoseProcessDiedResumesHeadless(t *testing.T) {
	t.Parallel()
	for name, elsewhere := range map[string]bool{"under the lane that it had": false, "when another admin has left": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			resumesHeadless(t, elsewhere)
		})
	}
}

func resumesHeadless(t *testing.T, elsewhere bool) {
	w := newWorld(t, modeltest.ToolCall("first", `{}`), modeltest.ToolCall("second", `{}`), modeltest.Text("All done."))
	var first, second atomic.Int64
	reached, gone := make(chan struct{}), make(chan struct{})
	w.builtin(t, "first", "", func(context.Context, skills.Call) (any, error) {
		first.Add(1)
		return "one", nil
	})
	w.builtin(t, "second", "", func(ctx context.Context, _ skills.Call) (any, error) {
		if second.Add(1) == 1 {
			close(reached)
			<-ctx.Done()
			close(gone)
			return nil, ctx.Err()
		}
		return "two", nil
	})
	exec(t, w.pool, `update agent_skills set idempotent = true`)
	p := w.process(t, false)
	s := p.open(t, "")
	b := p.say(t, s, "Do both.", false)
	<-reached
	start := until[operate.Start](t, b, "start")
	// The process is paused past its lease: nobody renews what it has. Its lane, which nobody else may have yet, is the turn's.
	const lost = `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`
	if elsewhere { // at once: else the turn may go on under the lane in between
		exec(t, w.pool, `with lost as (`+lost+`)
			select release_agent_lock('operate', l.locked_by), try_acquire_agent_lock('operate', 'another admin', 300)
			  from agent_locks l where l.lane = 'operate'`)
	} else {
		exec(t, w.pool, lost)
	}
	other := w.process(t, true)
	if elsewhere {
		x := w.becomes(t, start.ExecutionID, executions.Waiting)
		if deref(x.WaitingFor) != "lane" || w.held(t) != "another admin" {
			t.Errorf("it waits for %s, the lane is held by %q", deref(x.WaitingFor), w.held(t))
		}
		exec(t, w.pool, `update agent_locks set expires_at = clock_timestamp() - interval '1 second' where lane = 'operate'`)
		if err := other.engine.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	x := w.becomes(t, start.ExecutionID, executions.Completed)
	if x.ResultSummary != "All done." || first.Load() != 1 || second.Load() != 2 {
		t.Errorf("%q; first was called %d times, second %d", x.ResultSummary, first.Load(), second.Load())
	}
}

func TestAShutdownHandsTheTurnOn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("slow", `{}`), modeltest.Text("Done."))
	reached := make(chan struct{}, 2)
	var calls atomic.Int64
	w.builtin(t, "slow", "", func(ctx context.Context, _ skills.Call) (any, error) {
		reached <- struct{}{}
		if calls.Add(1) == 1 {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return "ok", nil
	})
	exec(t, w.pool, `update agent_skills set idempotent = true`)
	p := w.process(t, true)
	b := p.say(t, p.open(t, ""), "Be slow.", false)
	<-reached
	start := until[operate.Start](t, b, "start")
	p.stop()
	if done, err := b.wait(t); err != nil || done.Ended != operate.HandedOn {
		t.Errorf("left as %+v, %v", done, err)
	}
	if err := p.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.process(t, true)
	w.becomes(t, start.ExecutionID, executions.Completed)
}

// Between two turns nothing but the process keeps the lane: it must not be kept from the next admin for the rest of its lease.
func TestTheLaneOfASessionGoesWithItsProcess(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Hello."), modeltest.Text("Hello."))
	dead, alive := w.process(t, false), w.process(t, true)
	if _, err := dead.say(t, dead.open(t, ""), "Hello.", false).wait(t); err != nil {
		t.Fatal(err)
	}
	next := alive.open(t, "")
	if err := alive.engine.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := next.Hold(t.Context(), false); !errors.Is(err, lanes.ErrBusy) {
		t.Fatalf("the lane of a living process: %v", err)
	}
	exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second' where id::text =
	                   (select split_part(locked_by, '@', 2) from agent_locks where lane = 'operate')`)
	pgtest.Eventually(t, time.Minute, func() bool { // another sweep may be under way, which began before
		if err := alive.engine.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		return next.Hold(t.Context(), false) == nil
	}, "the lane of a dead process is free")
}
