package postgres

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// lockPause is how long a [KeyedTx] waits, without a connection, before it tries again, at least; it doubles.
	lockPause = 20 * time.Millisecond
	// turnPatience is for how long it waits for others of its key, unless the lock is kept from them.
	turnPatience = 10 * time.Second
)

// KeyedTx runs transactions on behalf of strangers, whose connections nobody's lock may take: of each key one at a time
// in this process, and none waits for a lock with a connection for longer than a moment. When another transaction keeps
// the lock for a second, the error is the server's: see [Locked]. The zero value is ready.
type KeyedTx struct {
	// Slots bounds how many are under way at once, by its capacity, so that others have the rest of the connections; nil for no bound.
	Slots chan struct{}

	mu    sync.Mutex
	lines map[string]*line
}

// line is who waits for a key.
type line struct {
	turn    chan struct{} // holds a value while nobody has the key
	n       int
	blocked bool // the last one did not get its lock
}

// Do is [InTx] for a key. fn may be called several times: each time in a new transaction, when the one before was
// rolled back.
func (k *KeyedTx) Do(ctx context.Context, db Beginner, key string, fn func(tx pgx.Tx) error) error {
	return k.Try(ctx, key, func(ctx context.Context) error { return InTxWithin(ctx, db, fn) })
}

// Try is Do for a write that bounds its waits for locks itself, by LockTimeout, and changes nothing when it fails.
func (k *KeyedTx) Try(ctx context.Context, key string, write func(ctx context.Context) error) error {
	l := k.join(key)
	defer k.leave(key, l)
	timer := time.NewTimer(k.patience(l))
	defer timer.Stop()
	select {
	case <-l.turn:
	case <-timer.C:
		return &pgconn.PgError{Severity: "ERROR", Code: codeLocked, Message: "other requests wait for the same lock"}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { l.turn <- struct{}{} }()
	patience := LockPatience
	if k.isBlocked(l) { // who waited behind one that did not get the lock tries once
		patience = 0
	}
	err := again(ctx, patience, k.bounded(write))
	k.mu.Lock()
	l.blocked = Locked(err)
	k.mu.Unlock()
	return err
}

// patience is for how long a call waits for others of its key: briefly where the lock is kept.
func (k *KeyedTx) patience(l *line) time.Duration {
	if k.isBlocked(l) {
		return LockPatience
	}
	return turnPatience
}

func (k *KeyedTx) isBlocked(l *line) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return l.blocked
}

// bounded has a write wait for one of the slots.
func (k *KeyedTx) bounded(write func(ctx context.Context) error) func(ctx context.Context) error {
	if k.Slots == nil {
		return write
	}
	return func(ctx context.Context) error {
		select {
		case k.Slots <- struct{}{}:
			defer func() { <-k.Slots }()
			return write(ctx)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// join waits in the line of a key.
func (k *KeyedTx) join(key string) *line {
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.lines[key]
	if l == nil {
		l = &line{turn: make(chan struct{}, 1)}
		l.turn <- struct{}{}
		if k.lines == nil {
			k.lines = map[string]*line{}
		}
		k.lines[key] = l
	}
	l.n++
	return l
}

func (k *KeyedTx) leave(key string, l *line) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.n--; l.n == 0 {
		delete(k.lines, key)
	}
}

// again tries for so long, once at least.
func again(ctx context.Context, patience time.Duration, write func(ctx context.Context) error) error {
	until := time.Now().Add(patience)
	for pause := lockPause; ; pause *= 2 {
		err := write(ctx)
		wait := pause + rand.N(pause)
		if !Locked(err) || time.Now().Add(wait).After(until) {
			return err
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}
