package api

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// pendingResults are results that the server could not store during an outage. Until their leases end, their keys would
// block the same requests at every process. The next keyed request flushes these results, and so does a goroutine. A
// result expires with the lease that began when it was added. The goroutine ends when no result is pending.
type pendingResults struct {
	db   postgres.DB
	stop <-chan struct{} // ends the goroutine; nil means never

	writing chan struct{} // semaphore of flush
	mu      sync.Mutex
	results []pendingResult
	running bool // the goroutine
}

type pendingResult struct {
	request *keyedRequest
	outcome outcome
	until   time.Time // end of its lease
}

const (
	// maxPending bounds the pending results. The key of a further result stays blocked until its lease ends.
	maxPending = 1000
	// minFlushPause is the first pause between flushes; it doubles up to maxFlushPause.
	minFlushPause = 50 * time.Millisecond
	maxFlushPause = 2 * time.Second
)

func (u *pendingResults) add(id *keyedRequest, out outcome) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.results) >= maxPending {
		return
	}
	u.results = append(u.results, pendingResult{id, out, time.Now().Add(keyLease)})
	if !u.running {
		u.running = true
		go u.run()
	}
}

// run flushes until no result is pending.
func (u *pendingResults) run() {
	pause := minFlushPause
	for {
		select {
		case <-u.stop:
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, maxFlushPause)
		ctx, cancel := context.WithTimeout(context.Background(), completeTimeout)
		u.flush(ctx)
		cancel()
		u.mu.Lock()
		u.running = len(u.results) > 0
		pending := u.running
		u.mu.Unlock()
		if !pending {
			return
		}
	}
}

// flush stores the pending results as far as possible. Concurrent callers wait for each other.
func (u *pendingResults) flush(ctx context.Context) {
	if len(u.unexpired()) == 0 {
		return
	}
	select {
	case u.writing <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-u.writing }()
	for _, a := range u.unexpired() {
		if postgres.RetryOnDisconnect(ctx, func() error { return a.request.complete(ctx, u.db, a.outcome) }) != nil {
			return
		}
		u.mu.Lock()
		u.results = slices.DeleteFunc(u.results, func(other pendingResult) bool { return other.request == a.request })
		u.mu.Unlock()
	}
}

// unexpired returns the results whose leases have not ended.
func (u *pendingResults) unexpired() []pendingResult {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.results = slices.DeleteFunc(u.results, func(a pendingResult) bool { return time.Now().After(a.until) })
	return slices.Clone(u.results)
}
