package executions

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
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

// isPool reports whether db is a pool, not the caller's transaction or connection.
func isPool(db postgres.Beginner) bool {
	_, pool := db.(*pgxpool.Pool)
	return pool
}

// The pause between attempts doubles from minBackoff to maxBackoff while the database is unavailable.
const (
	minBackoff = 20 * time.Millisecond
	maxBackoff = 2 * time.Second
)

func newBackoff() postgres.Backoff { return postgres.Backoff{First: minBackoff, Max: maxBackoff} }

// write commits the statements that queue adds to a batch. It repeats the batch until ctx ends while the database is
// unavailable. The statements must be safe to send twice, because a broken connection hides the outcome of a commit.
func (e *Engine) write(ctx context.Context, queue func(b *pgx.Batch)) error {
	backoff := newBackoff()
	for {
		_, err := retryLocked(ctx, e, func(ctx context.Context) (struct{}, error) {
			b := &pgx.Batch{}
			queue(b)
			return struct{}{}, e.pool.SendBatch(ctx, b).Close()
		})
		switch {
		case err == nil:
			return nil
		case postgres.IsCode(err, "LK001"):
			return ErrStale
		case ctx.Err() != nil, !transient(err):
			return err
		}
		e.warnUnavailable(ctx, err)
		if !backoff.Wait(ctx) {
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// warnUnavailable logs a failed attempt while the database is unavailable, with a hint for known problems.
func (e *Engine) warnUnavailable(ctx context.Context, err error, attrs ...any) {
	attrs = append(attrs, "error", err)
	if problem, hint := postgres.Diagnose(err); problem != "" {
		attrs = append(attrs, "trouble", problem, "hint", hint)
	}
	e.log.WarnContext(ctx, "database unavailable, trying again", attrs...)
}

// transient reports whether a retry of an engine write may avoid an error. Statement timeouts are transient here,
// because an engine write, unlike a query of a flow, never intends one.
func transient(err error) bool { return postgres.Transient(err) || postgres.IsCode(err, "57014") }

// rejected reports a permanent error of the database, which a retry would get again.
func rejected(err error) bool { return postgres.Code(err) != "" && !transient(err) }

// recordRejected records a rejected write in the activity log, even if the context of the run has ended.
func (r *run) recordRejected(ctx context.Context, entry activity.Entry, out activity.Outcome) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	r.e.log.ErrorContext(ctx, "stale write rejected", "step", entry.Step, "claim", r.exec.Claim)
	if err := activity.Reject(ctx, r.e.pool, entry, out); err != nil {
		r.e.log.ErrorContext(ctx, "stale write not recorded", "step", entry.Step, "error", err)
	}
}

// maxCancelRetries bounds how often a statement timeout counts as transient.
const maxCancelRetries = 2

// RetryTransient calls fn, and retries it for one lease while connections break or the database is unavailable. So a
// restart of the database does not fail a step. fn must be safe to repeat, like a read. RetryTransient returns other
// errors unchanged, and any error after fn has started a step. It retries a statement timeout twice, because a third
// one is probably intended. Step uses RetryTransient. Code between steps and inside a Call may use it too.
func RetryTransient[T any](ctx context.Context, fn func(ctx context.Context) (T, error)) (T, error) {
	r, err := runFrom(ctx)
	if err != nil {
		return fn(ctx)
	}
	deadline := time.Now().Add(r.e.opts.LeaseTTL)
	cancelled := 0
	backoff := newBackoff()
	for n := 1; ; n++ {
		before := r.countSteps()
		value, err := fn(ctx)
		if postgres.IsCode(err, "57014") {
			cancelled++
		}
		switch {
		case err == nil, ctx.Err() != nil, !retryable(err), cancelled > maxCancelRetries, time.Now().After(deadline),
			r.stopCause() != nil:
			return value, err
		case r.startedSince(scopeOf(ctx), before): // another call of fn would give its steps other keys
			return value, err
		}
		if !postgres.Locked(err) || n > unqueuedRetries {
			r.e.warnUnavailable(ctx, err)
		}
		if !backoff.Wait(ctx) {
			return value, err
		}
	}
}

// retryable reports whether a retry may avoid an error. It excludes errors of other servers and deadlines of the flow.
func retryable(err error) bool {
	var urlErr *url.Error
	return transient(err) && !errors.As(err, &urlErr) && !errors.Is(err, context.DeadlineExceeded)
}

// countSteps returns the number of started steps.
func (r *run) countSteps() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stepCount
}

// startedSince reports whether a step was started after step number since, in scope or in a scope within or around it.
func (r *run) startedSince(scope string, since int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for other, last := range r.latestStep {
		if last > since && (strings.HasPrefix(other, scope) || strings.HasPrefix(scope, other)) {
			return true
		}
	}
	return false
}
