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
)

// lockTimeout is how long a statement that a client's open transaction may hold up waits for a lock, and holds its
// connection. Functions of the database have the same setting.
const lockTimeout = postgres.LockTimeout

type lockTimeoutKey struct{}

// WithLockTimeout bounds how long calls under ctx try a write that an open transaction of somebody else holds up: for
// as long as a worker's lease lasts without it. Then they fail with a postgres.LockedError, and nothing has changed.
// Between two tries they hold no connection.
func WithLockTimeout(ctx context.Context, patience time.Duration) context.Context {
	return context.WithValue(ctx, lockTimeoutKey{}, patience)
}

func (e *Engine) lockTimeout(ctx context.Context) time.Duration {
	if patience, given := ctx.Value(lockTimeoutKey{}).(time.Duration); given {
		return patience
	}
	return e.opts.LeaseTTL
}

// queueLockTimeout bounds the waits for locks of what is queued after it.
func queueLockTimeout(b *pgx.Batch) {
	b.Queue(`select set_config('lock_timeout', @patience, true)`, postgres.Strict{"patience": lockTimeout})
}

// maxLockPause is the longest pause before a write that met a lock is made again.
const maxLockPause = 200 * time.Millisecond

// unqueuedRetries is how many retries of a write need no turn: a lock that others hold for a moment is free by then.
const unqueuedRetries = 3

// retryLocked makes a write again while another transaction has a lock that it needs, for as long as lockPatience says.
// Between two tries it holds no connection. Writes that go on meeting a lock take turns and hold one connection among
// all of them: a transaction that somebody has left open delays nobody else's work.
func retryLocked[T any](ctx context.Context, e *Engine, write func(ctx context.Context) (T, error)) (T, error) {
	until := time.Now().Add(e.lockTimeout(ctx))
	value, err := write(ctx)
	pause := minBackoff
	for n := 1; postgres.IsCode(err, "55P03") && time.Now().Before(until); n++ {
		if !sleep(ctx, pause+rand.N(pause)) {
			return value, err
		}
		if pause = min(2*pause, maxLockPause); n <= unqueuedRetries {
			value, err = write(ctx)
			continue
		}
		if !e.acquireRetrySlot(ctx, time.Until(until)) {
			return value, err
		}
		value, err = withRetrySlot(ctx, e, write)
	}
	return value, err
}

// acquireRetrySlot waits for the turn of a write that goes on meeting a lock; false when the patience or ctx ends
// first.
func (e *Engine) acquireRetrySlot(ctx context.Context, patience time.Duration) bool {
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

// withRetrySlot makes a write, and gives the turn back.
func withRetrySlot[T any](ctx context.Context, e *Engine, write func(ctx context.Context) (T, error)) (T, error) {
	defer func() { <-e.retrySlot }()
	return write(ctx)
}

// withKey makes a write with a key that another transaction may hold; name is the key's, empty for a write without one.
func (e *Engine) withKey(ctx context.Context, name string, write func(ctx context.Context) error) error {
	return e.serializeKey(ctx, name, func() error { return e.retryKey(ctx, name, write) })
}

// serializeKey calls write when no other call of this process writes with the key: of many that wait for it, one asks
// the database.
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

// retryKey is retryLocked. First tries with keys have half of the pool's connections at most, whatever is held.
func (e *Engine) retryKey(ctx context.Context, name string, write func(ctx context.Context) error) error {
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

// Pauses between two tries of a write while the database is away; they double.
const (
	minBackoff = 20 * time.Millisecond
	maxBackoff = 2 * time.Second
)

func newBackoff() postgres.Backoff { return postgres.Backoff{First: minBackoff, Max: maxBackoff} }

// write is the seam through which every durable write of a run goes: one batch, one commit, awaited.
// The statements must bear being sent twice, because a connection that breaks does not tell whether the
// commit took effect: write then sends them again, for as long as ctx lives.
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

// warnUnavailable logs a try that met a database in trouble, with what to do where that is known.
func (e *Engine) warnUnavailable(ctx context.Context, err error, attrs ...any) {
	attrs = append(attrs, "error", err)
	if what, todo := postgres.Trouble(err); what != "" {
		attrs = append(attrs, "trouble", what, "hint", todo)
	}
	e.log.WarnContext(ctx, "database unavailable, trying again", attrs...)
}

// transient reports an error that another try of one of the engine's own writes may not meet. What a slow moment of the
// database makes last longer than statement_timeout says is no more the result of a run than an outage: a query of
// the flow's own may be meant to be cancelled, these never.
func transient(err error) bool { return postgres.Transient(err) || postgres.IsCode(err, "57014") }

// rejected reports an error with which the database refuses what was written: another try would meet it again.
func rejected(err error) bool { return postgres.Code(err) != "" && !transient(err) }

// recordRejected notes a refused write in the activity log, without the run's context, which has ended.
func (r *run) recordRejected(ctx context.Context, entry activity.Entry, out activity.Outcome) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	r.e.log.ErrorContext(ctx, "stale write rejected", "step", entry.Step, "claim", r.exec.Claim)
	if err := activity.Reject(ctx, r.e.pool, entry, out); err != nil {
		r.e.log.ErrorContext(ctx, "stale write not noted", "step", entry.Step, "error", err)
	}
}

// maxCancelRetries is how often Persist takes a statement that was cancelled for one that met a slow moment.
const maxCancelRetries = 2

// RetryTransient asks the database again, for as long as a worker's lease lasts, when fn fails because a connection
// broke or the database is away: so a restart of the database is not the result of a step. fn must bear being called
// twice, as a read does; other errors, and those of steps in it, are returned as they come. A statement that was
// cancelled, as statement_timeout does it in a slow moment of the database, is made again twice: one that is
// cancelled each time is meant to be. Step does it by itself; code between steps and inside a Call may use it.
func RetryTransient[T any](ctx context.Context, fn func(ctx context.Context) (T, error)) (T, error) {
	r, err := runFrom(ctx)
	if err != nil {
		return fn(ctx)
	}
	deadline := time.Now().Add(r.e.opts.LeaseTTL)
	cancelled := 0
	for backoff := newBackoff(); ; {
		before := r.countSteps()
		value, err := fn(ctx)
		if postgres.IsCode(err, "57014") {
			cancelled++
		}
		switch {
		case err == nil, ctx.Err() != nil, !retryable(err), cancelled > maxCancelRetries, time.Now().After(deadline), r.stopCause() != nil:
			return value, err
		case r.startedSince(scopeOf(ctx), before): // called again, it would take its own steps for others
			return value, err
		}
		r.e.warnUnavailable(ctx, err)
		if !backoff.Wait(ctx) {
			return value, err
		}
	}
}

// retryable reports an error of the database that another try may not meet. One of somebody else's server, or
// of time that the code gave itself, is not of that kind.
func retryable(err error) bool {
	var other *url.Error
	return transient(err) && !errors.As(err, &other) && !errors.Is(err, context.DeadlineExceeded)
}

// countSteps is how many steps the run has come to.
func (r *run) countSteps() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stepCount
}

// startedSince reports whether code in a scope has come to further steps, be they within it or around it. Those of
// other branches do not count.
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
