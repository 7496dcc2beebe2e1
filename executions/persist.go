package executions

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// mostCancelled is how often Persist takes a statement that was cancelled for one that met a slow moment.
const mostCancelled = 2

// Persist asks the database again, for as long as a worker's lease lasts, when fn fails because a
// connection broke or the database is away: so a restart of the database is not the result of a step. fn
// must bear being called twice, as a read does; other errors, and those of steps in it, are returned as
// they come. A statement that was cancelled, as statement_timeout does it in a slow moment of the database, is made again
// twice: one that is cancelled each time is meant to be. Step does it by itself; code between steps and inside a Call may use it.
func Persist[T any](ctx context.Context, fn func(ctx context.Context) (T, error)) (T, error) {
	r, err := runOf(ctx)
	if err != nil {
		return fn(ctx)
	}
	deadline := time.Now().Add(r.e.opts.LeaseTTL)
	cancelled := 0
	for backoff := newBackoff(); ; {
		begun := r.steps()
		value, err := fn(ctx)
		if postgres.IsCode(err, "57014") {
			cancelled++
		}
		switch {
		case err == nil, ctx.Err() != nil, !away(err), cancelled > mostCancelled, time.Now().After(deadline), r.poisoned() != nil:
			return value, err
		case r.stepped(scopeOf(ctx), begun): // called again, it would take its own steps for others
			return value, err
		}
		r.e.warnUnavailable(ctx, err)
		if !backoff.Wait(ctx) {
			return value, err
		}
	}
}

// away reports an error of the database that another try may not meet. One of somebody else's server, or
// of time that the code gave itself, is not of that kind.
func away(err error) bool {
	var other *url.Error
	return passing(err) && !errors.As(err, &other) && !errors.Is(err, context.DeadlineExceeded)
}

// steps is how many steps the run has come to.
func (r *run) steps() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.begun
}

// stepped reports whether code in a scope has come to further steps, be they within it or around it. Those of other branches do not count.
func (r *run) stepped(scope string, since int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for other, last := range r.latest {
		if last > since && (strings.HasPrefix(other, scope) || strings.HasPrefix(scope, other)) {
			return true
		}
	}
	return false
}
