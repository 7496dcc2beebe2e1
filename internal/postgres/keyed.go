package postgres

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// A [KeyedTx] tries for [LockRetryTimeout], and at least minTries times. The first try waits for a lock for
// firstLockWait, each further try for twice as long, up to maxLockWait. So old waiters of a busy key win. Between two
// tries the KeyedTx waits without a connection, for lockPause to twice lockPause.
const (
	minTries      = 5
	firstLockWait = 50 * time.Millisecond
	maxLockWait   = 400 * time.Millisecond
	lockPause     = 20 * time.Millisecond
)

// KeyedTx runs one transaction per key at a time in this process. A transaction holds a connection for at most 400 ms
// for each lock that it waits for. When another transaction keeps the lock for about [LockRetryTimeout], KeyedTx
// returns an error that [Locked] reports. The zero value is ready. A KeyedTx is safe for concurrent use.
type KeyedTx struct {
	// Slots bounds the concurrent transactions by its capacity, which leaves connections for other work; nil for no bound.
	Slots chan struct{}

	queue KeyQueue
}

// Do is [InTx] for a key. It may call fn several times, each in a new transaction, after a rollback of the previous
// one.
func (k *KeyedTx) Do(ctx context.Context, db Beginner, key string, fn func(tx pgx.Tx) error) error {
	return k.try(ctx, key, func(ctx context.Context, wait time.Duration) error { return inTxWithin(ctx, db, wait, fn) })
}

// Try is Do for a write that bounds its lock waits by LockTimeout, and changes nothing if it fails.
func (k *KeyedTx) Try(ctx context.Context, key string, write func(ctx context.Context) error) error {
	return k.try(ctx, key, func(ctx context.Context, _ time.Duration) error { return write(ctx) })
}

func (k *KeyedTx) try(ctx context.Context, key string,
	write func(ctx context.Context, wait time.Duration) error,
) error {
	release, err := k.queue.Acquire(ctx, key, LockRetryTimeout)
	if err != nil {
		return err
	}
	defer release()
	return retryLocked(ctx, LockRetryTimeout, func(ctx context.Context, wait time.Duration) error {
		err := k.inSlot(ctx, func(ctx context.Context) error { return write(ctx, wait) })
		if Locked(err) && wait == maxLockWait { // a shorter wait may only have lost to other writers
			k.queue.MarkBlocked(key)
		}
		return err
	})
}

// inSlot runs a write in one of the slots.
func (k *KeyedTx) inSlot(ctx context.Context, write func(ctx context.Context) error) error {
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

// retryLocked retries a write that another transaction's lock blocked, until the timeout, and at least minTries times.
func retryLocked(ctx context.Context, timeout time.Duration,
	write func(ctx context.Context, wait time.Duration) error,
) error {
	until, wait := time.Now().Add(timeout), firstLockWait
	for tries := 1; ; tries++ {
		err := write(ctx, wait)
		pause := lockPause + rand.N(lockPause)
		if !Locked(err) || tries >= minTries && time.Now().Add(pause).After(until) {
			return err
		}
		wait = min(2*wait, maxLockWait)
		if !sleep.For(ctx, pause) {
			return err
		}
	}
}

// KeyQueue serializes the writes of a key in this process, so at most one waits for a lock of the database. The zero
// value is ready.
type KeyQueue struct {
	keys    KeyedMutex[string]
	mu      sync.Mutex
	blocked map[string]bool // keys whose writer a lock blocks
}

// Acquire waits until the caller has the key. Behind a writer that a lock blocks, it fails with a LockedError after the
// timeout. Behind any other writer, it waits until ctx ends. The caller must call release.
func (q *KeyQueue) Acquire(ctx context.Context, key string, timeout time.Duration) (release func(), err error) {
	for {
		bounded, cancel := context.WithTimeout(ctx, timeout)
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

// MarkBlocked records that a lock blocks the caller, which has the key.
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

// KeyedMutex is a mutex for each key. The zero value is ready.
type KeyedMutex[K comparable] struct {
	mu    sync.Mutex
	locks map[K]*keyLock
}

type keyLock struct {
	token chan struct{} // full while the key is locked
	users int           // holder and waiters
}

// Lock locks the key, or returns the cause of ctx when ctx ends first. The caller must call unlock.
func (m *KeyedMutex[K]) Lock(ctx context.Context, key K) (unlock func(), err error) {
	l := m.join(key)
	select {
	case l.token <- struct{}{}:
		return func() { <-l.token; m.leave(key, l) }, nil
	case <-ctx.Done():
		m.leave(key, l)
		return nil, context.Cause(ctx)
	}
}

func (m *KeyedMutex[K]) join(key K) *keyLock {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.locks == nil {
		m.locks = make(map[K]*keyLock)
	}
	l := m.locks[key]
	if l == nil {
		l = &keyLock{token: make(chan struct{}, 1)}
		m.locks[key] = l
	}
	l.users++
	return l
}

func (m *KeyedMutex[K]) leave(key K, l *keyLock) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(m.locks, key)
	}
}
