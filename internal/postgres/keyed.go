package postgres

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	// lockMoment is how long a statement of a [KeyedTx] waits for a lock.
	lockMoment = "50ms"
	// lockPause is how long a [KeyedTx] waits, without a connection, before it tries again, at least; it doubles.
	lockPause = 20 * time.Millisecond
	// lockPatience is for how long it tries.
	lockPatience = time.Second
	// turnPatience is for how long it waits for others of its key.
	turnPatience = 10 * time.Second
)

// KeyedTx runs transactions on behalf of strangers, whose connections nobody's lock may take: of each key one at a time
// in this process, and none waits for a lock with a connection for longer than a moment. When another transaction keeps
// the lock for a second, the error is the server's: see [Locked]. The zero value is ready.
type KeyedTx struct {
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
	l := k.join(key)
	defer k.leave(key, l)
	timer := time.NewTimer(turnPatience)
	defer timer.Stop()
	select {
	case <-l.turn:
	case <-timer.C:
		return &pgconn.PgError{Severity: "ERROR", Code: codeLocked, Message: "other requests wait for the same lock"}
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { l.turn <- struct{}{} }()
	patience := lockPatience
	if l.blocked { // who waited behind one that did not get the lock tries once
		patience = 0
	}
	err := again(ctx, db, patience, fn)
	l.blocked = Locked(err)
	return err
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
func again(ctx context.Context, db Beginner, patience time.Duration, fn func(tx pgx.Tx) error) error {
	until := time.Now().Add(patience)
	for pause := lockPause; ; pause *= 2 {
		err := InTx(ctx, db, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `select set_config('lock_timeout', @moment, true)`, Strict{"moment": lockMoment}); err != nil {
				return fmt.Errorf("bound the wait for locks: %w", err)
			}
			return fn(tx)
		})
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

// Locked reports that another transaction did not give up a lock in time.
func Locked(err error) bool { return IsCode(err, codeLocked) }
