package postgres

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// A [KeyedTx] tries leastTries times at least, and for [LockPatience]. It waits for a lock for firstLockWait at
// first, then for twice as long, up to maxLockWait: a key that many processes write to is busy and moves on, and who
// waits longer gets its turn. Between two tries it waits without a connection, for lockPause to twice as long.
const (
	leastTries    = 5
	firstLockWait = 50 * time.Millisecond
	maxLockWait   = 400 * time.Millisecond
	lockPause     = 20 * time.Millisecond
)

// KeyedTx runs one transaction per key at a time. A transaction holds a connection for at most 400 ms while it waits
// for a lock. When another transaction keeps the lock for about [LockPatience], the error is one that [Locked]
// reports. The zero value is ready, and may be used from many goroutines.
type KeyedTx struct {
	// Slots bounds by its capacity how many are under way at once, so that others have the rest of the connections; nil
	// for no bound.
	Slots chan struct{}

	queue KeyQueue
}

// Do is [InTx] for a key. fn may be called several times: each time in a new transaction, when the one before was
// rolled back.
func (k *KeyedTx) Do(ctx context.Context, db Beginner, key string, fn func(tx pgx.Tx) error) error {
	return k.try(ctx, key, func(ctx context.Context, wait time.Duration) error { return inTxWithin(ctx, db, wait, fn) })
}

// Try is Do for a write that bounds its waits for locks itself, by LockTimeout, and changes nothing when it fails.
func (k *KeyedTx) Try(ctx context.Context, key string, write func(ctx context.Context) error) error {
	return k.try(ctx, key, func(ctx context.Context, _ time.Duration) error { return write(ctx) })
}

func (k *KeyedTx) try(ctx context.Context, key string,
	write func(ctx context.Context, wait time.Duration) error,
) error {
	release, err := k.queue.Acquire(ctx, key, LockPatience)
	if err != nil {
		return err
	}
	defer release()
	return again(ctx, LockPatience, func(ctx context.Context, wait time.Duration) error {
		err := k.bounded(ctx, func(ctx context.Context) error { return write(ctx, wait) })
		if Locked(err) && wait == maxLockWait { // before, others may just have been quicker
			k.queue.MarkBlocked(key)
		}
		return err
	})
}

// bounded makes a write in one of the slots.
func (k *KeyedTx) bounded(ctx context.Context, write func(ctx context.Context) error) error {
	if k.Slots == nil {
		return write(ctx)
	}
	select {
	case k.Slots <- struct{}{}:
		defer func() { <-k.Slots }()
		return write(ctx)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// again tries for so long, leastTries times at least.
func again(ctx context.Context, patience time.Duration,
	write func(ctx context.Context, wait time.Duration) error,
) error {
	until, wait := time.Now().Add(patience), firstLockWait
	for tries := 1; ; tries++ {
		err := write(ctx, wait)
		pause := lockPause + rand.N(lockPause)
		if !Locked(err) || tries >= leastTries && time.Now().Add(pause).After(until) {
			return err
		}
		wait = min(2*wait, maxLockWait)
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// KeyQueue lets one goroutine at a time write what a key names, so that of many that wait for a lock one asks the
// database. The zero value is ready.
type KeyQueue struct {
	keys    KeyedMutex[string]
	mu      sync.Mutex
	blocked map[string]bool // keys whose writer has met a lock
}

// Acquire returns when the caller has the key, which release gives back. Behind a writer that has met a lock it fails
// with a LockedError after patience; behind others it waits until ctx ends.
func (q *KeyQueue) Acquire(ctx context.Context, key string, patience time.Duration) (release func(), err error) {
	for {
		bounded, cancel := context.WithTimeout(ctx, patience)
		unlock, err := q.keys.Lock(bounded, key)
		cancel()
		switch {
		case err == nil:
			return func() { q.mark(key, false); unlock() }, nil
		case ctx.Err() != nil:
			return nil, err
		case q.isBlocked(key):
			return nil, &LockedError{What: "what another request waits for"} // the key may be a secret
		}
	}
}

// MarkBlocked notes that the caller, who has the key, has met a lock.
func (q *KeyQueue) MarkBlocked(key string) { q.mark(key, true) }

func (q *KeyQueue) mark(key string, blocked bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !blocked {
		delete(q.blocked, key)
		return
	}
	if q.blocked == nil {
		q.blocked = map[string]bool{}
	}
	q.blocked[key] = true
}

func (q *KeyQueue) isBlocked(key string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.blocked[key]
}
