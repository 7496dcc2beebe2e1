package executions

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// StatusChange is a state of an execution and the time when the state began.
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

// CurrentStatus reads the state of an execution. It returns ErrNotFound for an unknown execution.
func (e *Engine) CurrentStatus(ctx context.Context, id string) (StatusChange, error) {
	statuses, err := e.readStatus(ctx, []string{id})
	if status := statuses[id]; status.ID != "" || err != nil {
		return status, err
	}
	return StatusChange{}, fmt.Errorf("execution %s: %w", id, ErrNotFound)
}

// Watch follows an execution until the caller calls unsubscribe, which is mandatory. The channel holds the latest
// state, from the first poll on; a zero value means that the execution is gone. Watch reports a run that ends in this
// process at once, and all other changes within watchInterval. One query reads all watched executions.
func (e *Engine) Watch(ctx context.Context, id string) (updates <-chan StatusChange, unsubscribe func()) {
	return e.statuses.subscribe(ctx, id)
}

// Await waits until an execution has ended, and returns the execution. When ctx ends first, Await returns the cause.
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
			case change := <-updates:
				ended = change.ID == "" || change.Status.Ended()
			}
		}
	}
}

// readStatus reads the states of executions. A missing execution has a zero value.
func (e *Engine) readStatus(ctx context.Context, ids []string) (map[string]StatusChange, error) {
	rows, err := e.pool.Query(ctx, `
		select e.id::text, e.trace_id, e.status, e.waiting_for, e.updated_at as at, e.claim, e.wait_number,
		       case when e.is_external
		         then coalesce((select max(c.n) from agent_status_changes c where c.execution_id = e.id), 0)
		         else 0 end as change
		  from agent_executions e
		 where e.id = any (@ids::uuid[])`, postgres.Strict{"ids": ids})
	changes, err := postgres.Collect(rows, err, "read status", pgx.RowToStructByName[StatusChange])
	if err != nil {
		return nil, err
	}
	statuses := make(map[string]StatusChange, len(ids))
	for _, id := range ids {
		statuses[id] = StatusChange{}
	}
	for _, e := range changes {
		statuses[e.ID] = e
	}
	return statuses, nil
}

// poller reads the values of all subscribed keys in one query. Its goroutine runs only while the poller has
// subscribers.
type poller[V any] struct {
	read    func(ctx context.Context, keys []string) (map[string]V, error)
	limit   func(V) int // subscribers of a key that get a value; nil for all
	log     *slog.Logger
	changed chan struct{} // a token starts the next poll at once

	mu          sync.Mutex
	subscribers map[string]map[chan V]struct{} // by key
	stop        func()                         // ends the goroutine and waits; nil without one
}

func newPoller[V any](
	log *slog.Logger, read func(ctx context.Context, keys []string) (map[string]V, error),
) *poller[V] {
	return &poller[V]{
		read: read, log: log, changed: make(chan struct{}, 1), subscribers: map[string]map[chan V]struct{}{},
	}
}

// subscribe returns a channel with the latest value of any of the keys.
func (p *poller[V]) subscribe(ctx context.Context, keys ...string) (updates <-chan V, unsubscribe func()) {
	ch := make(chan V, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range keys {
		if p.subscribers[key] == nil {
			p.subscribers[key] = map[chan V]struct{}{}
		}
		p.subscribers[key][ch] = struct{}{}
	}
	if p.stop == nil {
		p.start(context.WithoutCancel(ctx))
	}
	return ch, func() { p.unsubscribe(ch, keys) }
}

func (p *poller[V]) start(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.run(ctx)
	}()
	p.stop = func() {
		cancel()
		<-done
	}
}

func (p *poller[V]) unsubscribe(ch chan V, keys []string) {
	p.mu.Lock()
	for _, key := range keys {
		delete(p.subscribers[key], ch)
		if len(p.subscribers[key]) == 0 {
			delete(p.subscribers, key)
		}
	}
	var stop func()
	if len(p.subscribers) == 0 {
		stop, p.stop = p.stop, nil
	}
	p.mu.Unlock()
	if stop != nil {
		stop()
	}
}

// wake polls now if the key has a subscriber.
func (p *poller[V]) wake(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.subscribers[key]) > 0 {
		signal(p.changed)
	}
}

func (p *poller[V]) run(ctx context.Context) {
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-p.changed:
		}
		pollCtx, cancel := context.WithTimeout(ctx, watchTimeout)
		values, err := p.read(pollCtx, p.keys())
		cancel()
		if err != nil {
			if ctx.Err() == nil {
				p.log.WarnContext(ctx, "poll failed; the next one follows", "error", err)
			}
			continue
		}
		p.publish(values)
	}
}

func (p *poller[V]) keys() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.subscribers))
}

// publish replaces an unread value by the latest value.
func (p *poller[V]) publish(values map[string]V) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, value := range values {
		remaining := len(p.subscribers[key])
		if p.limit != nil {
			remaining = p.limit(value)
		}
		for ch := range p.subscribers[key] {
			if remaining--; remaining < 0 {
				break
			}
			select {
			case <-ch:
			default:
			}
			ch <- value // has room: this is the only sender
		}
	}
}
