package executions

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// lockPatience is how long a statement that a client's open transaction may hold up waits for a lock, and holds its
// connection. Functions of the database have the same setting.
const lockPatience = postgres.LockTimeout

type lockPatienceKey struct{}

// WithLockPatience bounds how long calls under ctx try a write that an open transaction of somebody else holds up: for
// as long as a worker's lease lasts without it. Then they fail with a postgres.LockedError, and nothing has changed.
// Between two tries they hold no connection.
func WithLockPatience(ctx context.Context, patience time.Duration) context.Context {
	return context.WithValue(ctx, lockPatienceKey{}, patience)
}

func (e *Engine) lockPatience(ctx context.Context) time.Duration {
	if patience, given := ctx.Value(lockPatienceKey{}).(time.Duration); given {
		return patience
	}
	return e.opts.LeaseTTL
}

// queuePatience bounds the waits for locks of what is queued after it.
func queuePatience(b *pgx.Batch) {
	b.Queue(`select set_config('lock_timeout', @patience, true)`, postgres.Strict{"patience": lockPatience})
}

// longestLocked is the longest pause before a write that met a lock is made again.
const longestLocked = 200 * time.Millisecond

// freeRetries is how many retries of a write need no turn: a lock that others hold for a moment is free by then.
const freeRetries = 3

// retryLocked makes a write again while another transaction has a lock that it needs, for as long as lockPatience says.
// Between two tries it holds no connection. Writes that go on meeting a lock take turns and hold one connection among
// all of them: a transaction that somebody has left open delays nobody else's work.
func retryLocked[T any](ctx context.Context, e *Engine, write func(ctx context.Context) (T, error)) (T, error) {
	until := time.Now().Add(e.lockPatience(ctx))
	value, err := write(ctx)
	pause := firstPause
	for n := 1; postgres.IsCode(err, "55P03") && time.Now().Before(until); n++ {
		if !sleep(ctx, pause+rand.N(pause)) {
			return value, err
		}
		if pause = min(2*pause, longestLocked); n <= freeRetries {
			value, err = write(ctx)
			continue
		}
		if !e.takeTurn(ctx, time.Until(until)) {
			return value, err
		}
		value, err = inTurn(ctx, e, write)
	}
	return value, err
}

// takeTurn waits for the turn of a write that goes on meeting a lock; false when the patience or ctx ends first.
func (e *Engine) takeTurn(ctx context.Context, patience time.Duration) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case e.retrySlot <- struct{}{}:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// inTurn makes a write, and gives the turn back.
func inTurn[T any](ctx context.Context, e *Engine, write func(ctx context.Context) (T, error)) (T, error) {
	defer func() { <-e.retrySlot }()
	return write(ctx)
}

// withKey makes a write with a key that another transaction may hold; name is the key's, empty for a write without one.
func (e *Engine) withKey(ctx context.Context, name string, write func(ctx context.Context) error) error {
	return e.holdKey(ctx, name, func() error { return e.tryKey(ctx, name, write) })
}

// holdKey calls write when no other call of this process writes with the key: of many that wait for it, one asks the
// database.
func (e *Engine) holdKey(ctx context.Context, name string, write func() error) error {
	if name == "" {
		return write()
	}
	leave, err := e.keyQueue.Acquire(ctx, name, e.lockPatience(ctx))
	if err != nil {
		return err
	}
	defer leave()
	return write()
}

// tryKey is retryLocked. First tries with keys have half of the pool's connections at most, whatever is held.
func (e *Engine) tryKey(ctx context.Context, name string, write func(ctx context.Context) error) error {
	tries := 0
	_, err := retryLocked(ctx, e, func(ctx context.Context) (struct{}, error) {
		if tries++; name == "" {
			return struct{}{}, write(ctx)
		}
		if tries > 1 {
			e.keyQueue.MarkBlocked(name)
			return struct{}{}, write(ctx)
		}
		select {
		case e.firstTrySlots <- struct{}{}:
			defer func() { <-e.firstTrySlots }()
			return struct{}{}, write(ctx)
		case <-ctx.Done():
			return struct{}{}, context.Cause(ctx)
		}
	})
	return err
}

// isPool reports whether db is a pool, and not a transaction or a connection of the caller's.
func isPool(db postgres.Beginner) bool {
	_, pool := db.(*pgxpool.Pool)
	return pool
}
