package executions

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Pauses between two tries of a write while the database is away; they double.
const (
	firstPause   = 20 * time.Millisecond
	longestPause = 2 * time.Second
)

func newBackoff() postgres.Backoff { return postgres.Backoff{First: firstPause, Max: longestPause} }

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
		case ctx.Err() != nil, !passing(err):
			return err
		}
		e.warnUnavailable(ctx, err)
		if !backoff.Wait(ctx) {
			return errors.Join(context.Cause(ctx), err)
		}
	}
}

// warnUnavailable logs a try that met a database in trouble, with what to do where that is known.
func (e *Engine) warnUnavailable(ctx context.Context, err error, about ...any) {
	about = append(about, "error", err)
	if what, todo := postgres.Trouble(err); what != "" {
		about = append(about, "trouble", what, "hint", todo)
	}
	e.log.WarnContext(ctx, "database unavailable, trying again", about...)
}

// passing reports an error that another try of one of the engine's own writes may not meet. What a slow moment of the database makes last
// longer than statement_timeout says is no more the result of a run than an outage: a query of the flow's own may be meant to be cancelled, these never.
func passing(err error) bool { return postgres.Transient(err) || postgres.IsCode(err, "57014") }

// refused reports an error with which the database refuses what was written: another try would meet it again.
func refused(err error) bool { return postgres.Code(err) != "" && !passing(err) }

// reject notes a refused write in the activity log, without the run's context, which has ended.
func (r *run) reject(ctx context.Context, entry activity.Entry, out activity.Outcome) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	r.e.log.ErrorContext(ctx, "stale write rejected", "step", entry.Step, "claim", r.exec.Claim)
	if err := activity.Reject(ctx, r.e.pool, entry, out); err != nil {
		r.e.log.ErrorContext(ctx, "stale write not noted", "step", entry.Step, "error", err)
	}
}
