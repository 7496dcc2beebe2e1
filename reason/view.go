package reason

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
)

// ApprovalMode says what a turn does with a call that only an admin can allow.
type ApprovalMode int

const (
	// Defer records that the call is wanted and goes on; whoever follows approvals through makes it later.
	Defer ApprovalMode = iota
	// Park waits, durably, for the decision, and makes the call when it is approved.
	Park
)

// ToolEvent is the start (Done is false) or the end of a tool call that happens in this process.
type ToolEvent struct {
	ID        string          // of the call, as the model gave it
	Name      string          // of the tool
	Arguments json.RawMessage // as the model gave them; they need not be valid JSON
	Done      bool
	Status    string // when done: success, error, denied or pending_approval
	Result    string // when done: what the model is told
	Error     string // why it was not made or failed, if so
	Duration  time.Duration
}

// patience is how long the end of a turn waits for callbacks that have not caught up.
const patience = 3 * time.Second

// viewer calls a turn's callbacks, one at a time and in order, beside the turn: one that is slow or panics
// does not hold the turn up, nor use its time.
type viewer struct {
	log *slog.Logger

	mu    sync.Mutex
	queue []func()
	over  bool          // nothing more is added
	left  bool          // nothing more is called
	wake  chan struct{} // has room for one
	done  chan struct{}
}

// watch puts a viewer between a turn and its callbacks; nil when it has none. Whoever calls it calls close.
func (l *Loop) watch(ctx context.Context, t *Turn) *viewer {
	if t.OnDelta == nil && t.OnRestart == nil && t.OnTool == nil && t.OnApproval == nil {
		return nil
	}
	v := &viewer{log: l.log(), wake: make(chan struct{}, 1), done: make(chan struct{})}
	if show := t.OnDelta; show != nil {
		t.OnDelta = func(text string) { v.add(func() { show(text) }) }
	}
	if show := t.OnRestart; show != nil {
		t.OnRestart = func() { v.add(show) }
	}
	if show := t.OnTool; show != nil {
		t.OnTool = func(e ToolEvent) { v.add(func() { show(e) }) }
	}
	if show := t.OnApproval; show != nil {
		t.OnApproval = func(a approvals.Approval) { v.add(func() { show(a) }) }
	}
	go v.run(context.WithoutCancel(ctx))
	return v
}

func (v *viewer) add(show func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.over {
		v.queue = append(v.queue, show)
		v.knock()
	}
}

func (v *viewer) knock() {
	select {
	case v.wake <- struct{}{}:
	default:
	}
}

// run calls what was added until close and the last of it.
func (v *viewer) run(ctx context.Context) {
	defer close(v.done)
	for {
		batch, over := v.take()
		for _, show := range batch {
			if !v.call(ctx, show) {
				return
			}
		}
		switch {
		case len(batch) > 0:
		case over:
			return
		default:
			<-v.wake
		}
	}
}

func (v *viewer) take() (batch []func(), over bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	batch, v.queue = v.queue, nil
	return batch, v.over
}

// call calls one callback; false when the turn has left.
func (v *viewer) call(ctx context.Context, show func()) (goOn bool) {
	v.mu.Lock()
	goOn = !v.left
	v.mu.Unlock()
	if !goOn {
		return false
	}
	defer func() {
		if p := recover(); p != nil { // goOn stays true
			v.log.ErrorContext(ctx, "callback of a turn panicked", "panic", fmt.Sprint(p))
		}
	}()
	show()
	return true
}

// catchUp waits until what was added so far was shown, for as long as its patience lasts: who waits for somebody else
// may go on in another process, which finds what was stored by then.
func (v *viewer) catchUp(ctx context.Context) {
	if v == nil {
		return
	}
	shown := make(chan struct{})
	v.add(func() { close(shown) })
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-shown:
	case <-v.done:
	case <-ctx.Done():
	case <-timer.C:
	}
}

// close waits until everything was shown, for as long as its patience lasts. After it no further callback begins.
func (v *viewer) close(ctx context.Context) {
	if v == nil {
		return
	}
	v.mu.Lock()
	v.over = true
	v.knock()
	v.mu.Unlock()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-v.done:
	case <-timer.C:
		v.mu.Lock()
		v.left = true
		v.mu.Unlock()
		v.log.WarnContext(ctx, "callbacks of a turn did not keep up and were left behind")
	}
}

// begin shows that a call is made now.
func (w *turn) begin(c *call) {
	if c.live {
		return
	}
	c.live, c.began = true, time.Now()
	if w.OnTool != nil {
		w.OnTool(ToolEvent{ID: c.id, Name: c.name, Arguments: c.args})
	}
}

// end shows how a call went, if this process made it.
func (w *turn) end(c *call, status, failure string) {
	if !c.live || w.OnTool == nil {
		return
	}
	w.OnTool(ToolEvent{
		ID: c.id, Name: c.name, Arguments: c.args, Done: true,
		Status: status, Result: c.result, Error: failure, Duration: time.Since(c.began),
	})
}

// news reports whether the turn comes to this place for the first time, for the sake of who watches. Without a
// watcher nothing is recorded and nothing is news.
func (w *turn) news(ctx context.Context, place string) (first bool, err error) {
	if w.OnTool == nil && w.OnApproval == nil {
		return false, nil
	}
	_, err = executions.Step(ctx, "show "+place, func(context.Context) (struct{}, error) {
		first = true
		return struct{}{}, nil
	})
	return first, err
}

// showOnce shows a call that is not made.
func (w *turn) showOnce(ctx context.Context, c *call, place, status, failure string) error {
	first, err := w.news(ctx, place)
	if err == nil && first {
		w.begin(c)
		w.end(c, status, failure)
	}
	return err
}
