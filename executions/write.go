package executions

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Pauses between two tries of a write while the database is away; they double.
const (
	firstPause   = 20 * time.Millisecond
	longestPause = 2 * time.Second
)

// write is the seam through which every durable write of a run goes: one batch, one commit, awaited.
// The statements must bear being sent twice, because a connection that breaks does not tell whether the
// commit took effect: write then sends them again, for as long as ctx lives.
func (e *Engine) write(ctx context.Context, queue func(b *pgx.Batch)) error {
	pause := firstPause
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
		if !sleep(ctx, pause+rand.N(pause)) {
			return errors.Join(context.Cause(ctx), err)
		}
		pause = min(2*pause, longestPause)
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

// transient reports an error that another try may not meet: the server is away, starting or stopping, or
// the transaction was chosen to give way.
func transient(err error) bool {
	if code := postgres.Code(err); code != "" {
		switch code[:2] {
		case "08", "40", "57":
			return code != "57014" // a cancelled query was meant
		case "53":
			return code != "53400" // disk full, out of memory, too many connections; not a limit of somebody's making
		case "23": // a try whose connection broke was still at work: the next sees the row that it opened
			return postgres.Constraint(err) == "agent_activity_open_step"
		}
		// A lock timeout; read-only while a failover settles; a session that was ended because this process was paused in a transaction.
		return code == "55P03" || code == "25006" || code == "25P03"
	}
	var connect *pgconn.ConnectError
	return errors.As(err, &connect) || pgconn.SafeToRetry(err) || pgconn.Timeout(err) || brokenPipe(err)
}

// passing reports an error that another try of one of the engine's own writes may not meet. What a slow moment of the database makes last
// longer than statement_timeout says is no more the result of a run than an outage: a query of the flow's own may be meant to be cancelled, these never.
func passing(err error) bool { return transient(err) || postgres.IsCode(err, "57014") }

// refused reports an error with which the database refuses what was written: another try would meet it again.
func refused(err error) bool { return postgres.Code(err) != "" && !passing(err) }

// brokenPipe reports an error of the connection itself.
func brokenPipe(err error) bool {
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) ||
		errors.Is(err, net.ErrClosed) || err.Error() == "conn closed"
}

// reject notes a refused write in the activity log, without the run's context, which has ended.
func (r *run) reject(ctx context.Context, entry activity.Entry, out activity.Outcome) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	r.e.log.ErrorContext(ctx, "stale write rejected", "step", entry.Step, "claim", r.exec.Claim)
	if err := activity.Reject(ctx, r.e.pool, entry, out); err != nil {
		r.e.log.ErrorContext(ctx, "stale write not noted", "step", entry.Step, "error", err)
	}
}
