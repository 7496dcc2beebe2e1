package executions

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

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

// unstorable reports that the database refused a value: SQLSTATE class 22 (data exception) or 54 (program limit
// exceeded). The same write without that value may succeed.
func unstorable(err error) bool {
	code := postgres.Code(err)
	return strings.HasPrefix(code, "22") || strings.HasPrefix(code, "54")
}

// rejected reports a permanent error of the database, which a retry would get again.
func rejected(err error) bool { return postgres.Code(err) != "" && !transient(err) }

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
