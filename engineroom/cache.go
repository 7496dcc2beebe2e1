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

// keyedCache caches results by key. When a result has expired, each of several concurrent calls reads a new one.
type keyedCache[K comparable, T any] struct {
	mu      sync.Mutex
	results map[K]cachedResult[T]
}

type cachedResult[T any] struct {
	data T
	at   time.Time
}

// maxCachedKeys bounds the cached results. At the bound, the cache drops all of them.
const maxCachedKeys = 32

// read returns the cached result of a key, or reads it.
func (m *keyedCache[K, T]) read(key K, lifetime time.Duration, read func() (T, error)) (T, error) {
	m.mu.Lock()
	result := m.results[key]
	m.mu.Unlock()
	if time.Since(result.at) < lifetime {
		return result.data, nil
	}
	data, err := read()
	if err != nil {
		return data, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.results == nil || len(m.results) >= maxCachedKeys {
		m.results = map[K]cachedResult[T]{}
	}
	m.results[key] = cachedResult[T]{data, time.Now()}
	return data, nil
}
