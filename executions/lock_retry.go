package executions

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// lockTimeout bounds how long a statement waits for a lock and occupies its connection. The SQL functions use the same
// value.
const lockTimeout = postgres.LockTimeout

type lockTimeoutKey struct{}

// WithLockTimeout bounds how long calls under ctx retry a write that another open transaction blocks. The default is
// the worker's lease. After the timeout the call returns a postgres.LockedError, and nothing has changed. Retries hold
// no connection between attempts.
func WithLockTimeout(ctx context.Context, timeout time.Duration) context.Context {
	return context.WithValue(ctx, lockTimeoutKey{}, timeout)
}

// lockTimeout returns the timeout of WithLockTimeout, or its default.
func (e *Engine) lockTimeout(ctx context.Context) time.Duration {
	if timeout, ok := ctx.Value(lockTimeoutKey{}).(time.Duration); ok {
		return timeout
	}
	return e.opts.LeaseTTL
}

// queueLockTimeout queues a lock_timeout for the later statements of the batch.
func queueLockTimeout(b *pgx.Batch) {
	b.Queue(`select set_config('lock_timeout', @lock_timeout, true)`, postgres.Strict{"lock_timeout": lockTimeout})
}

// maxLockPause is the longest pause between attempts of a blocked write.
const maxLockPause = 200 * time.Millisecond

// unqueuedRetries is the number of retries without the retry slot and without a warning. Most locks are released within
// these retries.
const unqueuedRetries = 3

// retryLocked retries a write while another transaction blocks it, for at most e.lockTimeout. It holds no connection
// between attempts. All writes that remain blocked share one slot, and so one connection. So a transaction that stays
// open does not use up the connections.
func retryLocked[T any](ctx context.Context, e *Engine, write func(ctx context.Context) (T, error)) (T, error) {
	deadline := time.Now().Add(e.lockTimeout(ctx))
	value, err := write(ctx)
	pause := minBackoff
	for n := 1; postgres.IsCode(err, "55P03") && time.Now().Before(deadline); n++ {
		if !sleep.For(ctx, pause+rand.N(pause)) {
			return value, err
		}
		if pause = min(2*pause, maxLockPause); n <= unqueuedRetries {
			value, err = write(ctx)
			continue
		}
		if !e.acquireRetrySlot(ctx, time.Until(deadline)) {
			return value, err
		}
		value, err = withRetrySlot(ctx, e, write)
	}
	return value, err
}

// acquireRetrySlot waits for the retry slot. It returns false after the timeout or the end of ctx.
func (e *Engine) acquireRetrySlot(ctx context.Context, timeout time.Duration) bool {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case e.retrySlot <- struct{}{}:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// withRetrySlot makes a write and releases the retry slot.
func withRetrySlot[T any](ctx context.Context, e *Engine, write func(ctx context.Context) (T, error)) (T, error) {
	defer func() { <-e.retrySlot }()
	return write(ctx)
}

// withKey makes a write whose key another transaction may hold. An empty name is a write without a key.
func (e *Engine) withKey(ctx context.Context, name string, write func(ctx context.Context) error) error {
	return e.serializeKey(ctx, name, func() error { return e.retryKey(ctx, name, write) })
}

// serializeKey calls write while no other call of this process writes with the same key. So of many blocked calls, one
// at a time queries the database.
func (e *Engine) serializeKey(ctx context.Context, name string, write func() error) error {
	if name == "" {
		return write()
	}
	unlock, err := e.keyQueue.Acquire(ctx, name, e.lockTimeout(ctx))
	if err != nil {
		return err
	}
	defer unlock()
	return write()
}

// retryKey is retryLocked for a write with a key. First attempts use at most half of the pool's connections.
func (e *Engine) retryKey(ctx context.Context, name string, write func(ctx context.Context) error) error {
	attempts := 0
	_, err := retryLocked(ctx, e, func(ctx context.Context) (struct{}, error) {
		if attempts++; name == "" {
			return struct{}{}, write(ctx)
		}
		if attempts > 1 {
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
