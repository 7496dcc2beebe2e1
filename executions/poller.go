package executions

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/logging"
)

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
	var failures logging.Failures
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
		failures.Log(ctx, p.log, "poll failed; the next one follows", err)
		if err == nil {
			p.publish(values)
		}
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
