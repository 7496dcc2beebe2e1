package engineroom

import (
	"sync"
	"sync/atomic"
	"time"
)

// cached shares the result of a read among pages and viewers. Concurrent calls wait for one read.
type cached[T any] struct {
	stale atomic.Bool // set by invalidate
	mu    sync.Mutex  // held during a read
	at    time.Time
	last  T
}

// read returns a result of at most the given age, or reads a new one.
func (r *cached[T]) read(age time.Duration, read func() (T, error)) (T, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.stale.Swap(false) && time.Since(r.at) < age {
		return r.last, nil
	}
	r.at = time.Time{}
	result, err := read()
	if err == nil {
		r.last, r.at = result, time.Now()
	}
	return result, err
}

// invalidate makes the next call read again, even during a running read.
func (r *cached[T]) invalidate() { r.stale.Store(true) }

// sumsInterval is the interval at which a stream refreshes sums over the log.
const sumsInterval = 10 * time.Second

// dayCache caches results by day. Concurrent calls after the lifetime of a result each read it.
type dayCache struct {
	mu   sync.Mutex
	days map[time.Time]cachedDay
}

type cachedDay struct {
	data any
	at   time.Time
}

// maxCachedDays bounds the cached days. At the bound, the cache drops all of them.
const maxCachedDays = 32

// read returns the cached result of a day, or reads it.
func (m *dayCache) read(day time.Time, lifetime time.Duration, read func() (any, error)) (any, error) {
	m.mu.Lock()
	result, ok := m.days[day]
	m.mu.Unlock()
	if ok && time.Since(result.at) < lifetime {
		return result.data, nil
	}
	data, err := read()
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.days == nil || len(m.days) >= maxCachedDays {
		m.days = map[time.Time]cachedDay{}
	}
	m.days[day] = cachedDay{data, time.Now()}
	return data, nil
}
