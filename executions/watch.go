package executions

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// StatusChange is a state of an execution, and when it began.
type StatusChange struct {
	ID         string    `json:"id"`
	TraceID    string    `json:"trace_id"`
	Status     Status    `json:"status"`
	WaitingFor *string   `json:"waiting_for"`
	At         time.Time `json:"at"`
	Claim      int64     `json:"-"`
	WaitNumber int       `json:"-"`
	// Change numbers the stored status changes of an external execution; 0 for others.
	Change int `json:"-"`
}

const (
	// watchInterval is the pause between polls of watched executions.
	watchInterval = 250 * time.Millisecond
	// watchTimeout bounds one poll.
	watchTimeout = 10 * time.Second
)

// CurrentStatus reads the state of an execution. It returns ErrNotFound for an unknown one.
func (e *Engine) CurrentStatus(ctx context.Context, id string) (StatusChange, error) {
	found, err := e.watcher.read(ctx, []string{id})
	if now, is := found[id]; is || err != nil {
		return now, err
	}
	return StatusChange{}, fmt.Errorf("execution %s: %w", id, ErrNotFound)
}

// Watch follows an execution until unsubscribe, which the caller must call. The channel holds the latest state, from
// the first poll on; a zero value means that the execution is gone. A run that ends in this process is seen at once,
// others within watchInterval: one query reads all watched executions.
func (e *Engine) Watch(ctx context.Context, id string) (updates <-chan StatusChange, unsubscribe func()) {
	return e.watcher.subscribe(ctx, id)
}

// Await waits until an execution has ended, and returns it. When ctx ends first, it returns the cause.
func (e *Engine) Await(ctx context.Context, id string) (Execution, error) {
	updates, unsubscribe := e.Watch(ctx, id)
	defer unsubscribe()
	for {
		x, err := Get(ctx, e.pool, id)
		if err == nil && x.Status.Ended() || err != nil && !postgres.Transient(err) {
			return x, err
		}
		for ended := false; !ended; {
			select {
			case <-ctx.Done():
				return x, context.Cause(ctx)
			case now := <-updates:
				ended = now.ID == "" || now.Status.Ended()
			}
		}
	}
}

// statusWatcher polls all watched executions in one query. Its goroutine runs only while there are watchers.
type statusWatcher struct {
	e       *Engine
	changed chan struct{} // a watched run ended in this process

	mu        sync.Mutex
	followers map[string]map[chan StatusChange]struct{} // by execution
	stop      func()                                    // ends the goroutine and waits; nil without one
}

func newStatusWatcher(e *Engine) *statusWatcher {
	return &statusWatcher{
		e: e, changed: make(chan struct{}, 1), followers: map[string]map[chan StatusChange]struct{}{},
	}
}

func (h *statusWatcher) subscribe(ctx context.Context, id string) (<-chan StatusChange, func()) {
	ch := make(chan StatusChange, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.followers[id] == nil {
		h.followers[id] = map[chan StatusChange]struct{}{}
	}
	h.followers[id][ch] = struct{}{}
	if h.stop == nil {
		h.start(context.WithoutCancel(ctx))
	}
	return ch, func() { h.unsubscribe(id, ch) }
}

func (h *statusWatcher) start(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.run(ctx)
	}()
	h.stop = func() {
		cancel()
		<-done
	}
}

func (h *statusWatcher) unsubscribe(id string, ch chan StatusChange) {
	h.mu.Lock()
	delete(h.followers[id], ch)
	if len(h.followers[id]) == 0 {
		delete(h.followers, id)
	}
	var stop func()
	if len(h.followers) == 0 {
		stop, h.stop = h.stop, nil
	}
	h.mu.Unlock()
	if stop != nil {
		stop()
	}
}

// runEnded polls soon if the execution is watched.
func (h *statusWatcher) runEnded(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.followers[id]) > 0 {
		signal(h.changed)
	}
}

func (h *statusWatcher) run(ctx context.Context) {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-h.changed:
		}
		ids := h.ids()
		found, err := h.read(ctx, ids)
		if err != nil {
			if ctx.Err() == nil {
				h.e.log.WarnContext(ctx, "watched executions not read", "error", err)
			}
			continue
		}
		h.publish(ids, found)
	}
}

func (h *statusWatcher) ids() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := make([]string, 0, len(h.followers))
	for id := range h.followers {
		list = append(list, id)
	}
	return list
}

func (h *statusWatcher) read(ctx context.Context, ids []string) (map[string]StatusChange, error) {
	ctx, cancel := context.WithTimeout(ctx, watchTimeout)
	defer cancel()
	rows, err := h.e.pool.Query(ctx, `
		select e.id::text, e.trace_id, e.status, e.waiting_for, e.updated_at as at, e.claim, e.wait_number,
		       case when e.outside then coalesce((select max(c.n) from agent_status_changes c where c.execution_id = e.id), 0)
		         else 0 end as change
		  from agent_executions e where e.id = any (@ids::uuid[])`, postgres.Strict{"ids": ids})
	list, err := postgres.Collect(rows, err, "read status", pgx.RowToStructByName[StatusChange])
	if err != nil {
		return nil, err
	}
	found := make(map[string]StatusChange, len(list))
	for _, e := range list {
		found[e.ID] = e
	}
	return found, nil
}

// publish replaces an unread state by the latest one.
func (h *statusWatcher) publish(ids []string, found map[string]StatusChange) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range ids {
		for ch := range h.followers[id] {
			select {
			case <-ch:
			default:
			}
			ch <- found[id] // has room: this is the only sender
		}
	}
}
