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

// ToolEvent is the start, or with Done the end, of a tool call in this process.
type ToolEvent struct {
	ID        string          // of the call
	Name      string          // of the tool
	Arguments json.RawMessage // of the model; may be invalid JSON
	Done      bool
	Status    string // of a done call: success, error, denied or pending_approval
	Result    string // of a done call, for the model
	Error     string // of a failed or refused call
	Duration  time.Duration
	// ApprovalID is the requested approval of the call; empty for none.
	ApprovalID string
}

// callbacks calls a turn's callbacks in order, in a goroutine of its own. A panicking callback does not fail the turn.
// A slow callback delays only flush and close, each by at most flushTimeout.
type callbacks struct {
	log *slog.Logger

	mu        sync.Mutex
	queue     []func()
	closed    bool          // the queue accepts no more
	abandoned bool          // run calls no more callbacks
	wake      chan struct{} // has room for one signal
	done      chan struct{}
}

// queueCallbacks redirects a turn's callbacks to a queue; nil without callbacks. The caller must close it.
func (l *Loop) queueCallbacks(ctx context.Context, t *Turn) *callbacks {
	if t.OnDelta == nil && t.OnRestart == nil && t.OnTool == nil && t.OnApproval == nil {
		return nil
	}
	cb := &callbacks{log: l.log(), wake: make(chan struct{}, 1), done: make(chan struct{})}
	if fn := t.OnDelta; fn != nil {
		t.OnDelta = func(text string) { cb.add(func() { fn(text) }) }
	}
	if fn := t.OnRestart; fn != nil {
		t.OnRestart = func() { cb.add(fn) }
	}
	if fn := t.OnTool; fn != nil {
		t.OnTool = func(e ToolEvent) { cb.add(func() { fn(e) }) }
	}
	if fn := t.OnApproval; fn != nil {
		t.OnApproval = func(a approvals.Approval) { cb.add(func() { fn(a) }) }
	}
	go cb.run(context.WithoutCancel(ctx))
	return cb
}

func (cb *callbacks) add(fn func()) {
	cb.mu.Lock()
	defer cb.mu.Unlock()
	if !cb.closed {
		cb.queue = append(cb.queue, fn)
		cb.signal()
	}
}

func (cb *callbacks) signal() {
	select {
	case cb.wake <- struct{}{}:
	default:
	}
}

// run calls the queued callbacks until close.
func (cb *callbacks) run(ctx context.Context) {
	defer close(cb.done)
	for {
		batch, closed := cb.drain()
		for _, fn := range batch {
			if !cb.call(ctx, fn) {
				return
			}
		}
		switch {
		case len(batch) > 0:
		case closed:
			return
		default:
			<-cb.wake
		}
	}
}

func (cb *callbacks) drain() (batch []func(), closed bool) {
	cb.mu.Lock()
	defer cb.mu.Unlock()
	batch, cb.queue = cb.queue, nil
	return batch, cb.closed
}

// call calls one callback. It returns false if the turn abandoned the queue.
func (cb *callbacks) call(ctx context.Context, fn func()) (proceed bool) {
	cb.mu.Lock()
	proceed = !cb.abandoned
	cb.mu.Unlock()
	if !proceed {
		return false
	}
	defer func() {
		if p := recover(); p != nil { // proceed stays true: the other callbacks follow
			cb.log.ErrorContext(ctx, "callback of a turn panicked", "panic", fmt.Sprint(p))
		}
	}()
	fn()
	return true
}

// flushTimeout bounds the wait for callbacks.
const flushTimeout = 3 * time.Second

// flush waits, within flushTimeout, for the queued callbacks. After a durable wait, another process may continue with
// the data that the callbacks stored.
func (cb *callbacks) flush(ctx context.Context) {
	if cb == nil {
		return
	}
	flushed := make(chan struct{})
	cb.add(func() { close(flushed) })
	timer := time.NewTimer(flushTimeout)
	defer timer.Stop()
	select {
	case <-flushed:
	case <-cb.done:
	case <-ctx.Done():
	case <-timer.C:
	}
}

// close waits, within flushTimeout, for all callbacks. Then it abandons the queue; a callback that has begun continues.
func (cb *callbacks) close(ctx context.Context) {
	if cb == nil {
		return
	}
	cb.mu.Lock()
	cb.closed = true
	cb.signal()
	cb.mu.Unlock()
	timer := time.NewTimer(flushTimeout)
	defer timer.Stop()
	select {
	case <-cb.done:
	case <-timer.C:
		cb.mu.Lock()
		cb.abandoned = true
		cb.mu.Unlock()
		cb.log.WarnContext(ctx, "callbacks of a turn did not keep up and were left behind")
	}
}

func (w *turn) reportStart(c *call) {
	if c.runsHere {
		return
	}
	c.runsHere, c.startedAt = true, time.Now()
	if w.OnTool != nil {
		w.OnTool(c.event())
	}
}

// reportEnd reports the end of a call that this process made.
func (w *turn) reportEnd(c *call, status, failure string) {
	if !c.runsHere || w.OnTool == nil {
		return
	}
	e := c.event()
	e.Done, e.Status, e.Result, e.Error, e.Duration = true, status, c.result, failure, time.Since(c.startedAt)
	w.OnTool(e)
}

// event is the start of a call.
func (c *call) event() ToolEvent {
	e := ToolEvent{ID: c.id, Name: c.name, Arguments: c.args}
	if c.approval != nil {
		e.ApprovalID = c.approval.row.ID
	}
	return e
}

// firstTime reports whether the turn reaches a place for the first time. Without OnTool and OnApproval it records
// nothing and returns false.
func (w *turn) firstTime(ctx context.Context, place string) (first bool, err error) {
	if w.OnTool == nil && w.OnApproval == nil {
		return false, nil
	}
	_, err = executions.Step(ctx, "show "+place, func(context.Context) (struct{}, error) {
		first = true
		return struct{}{}, nil
	})
	return first, err
}

// notifyOnce reports a call that the turn does not make.
func (w *turn) notifyOnce(ctx context.Context, c *call, place, status, failure string) error {
	first, err := w.firstTime(ctx, place)
	if err == nil && first {
		w.reportStart(c)
		w.reportEnd(c, status, failure)
	}
	return err
}
