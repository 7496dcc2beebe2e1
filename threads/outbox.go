package threads

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// outboxMessage is one attempt to deliver a message.
type outboxMessage struct {
	ID       string
	ThreadID string
	Seq      int64
	Channel  string
	Target   string
	Content  string
	TraceID  string
	Attempt  int
	Payload  string
	Now      time.Time
	URL      *string // nil: the target is not declared, or the channel has none
	Secrets  []string
	Enabled  *bool
	Reason   *string
}

// maxDue bounds the due messages that one claim reads.
const maxDue = 200

// claimDue claims up to limit due messages, none of them for fullTargets. A claimed message is not due again before
// hold has passed, so no other process delivers it. statement_timestamp() lets the index be used.
func claimDue(
	ctx context.Context, db postgres.DB, limit int, fullTargets []string, hold time.Duration,
) ([]outboxMessage, error) {
	return postgres.Rows[outboxMessage](ctx, db, "claim outgoing messages", `
		with due as (
		  select m.id, m.target, m.channel, m.next_attempt_at from agent_messages m
		   where m.status = 'sending' and m.next_attempt_at <= statement_timestamp()
		     and (m.channel <> 'webhook' or m.target <> all(@full::text[]))
		   order by m.next_attempt_at limit @look),
		ranked as (select d.id, d.channel, row_number() over (partition by d.channel, d.target order by d.next_attempt_at)
		  as n from due d),
		picked as (
		  select m.id from agent_messages m
		   where m.id in (select r.id from ranked r where r.channel <> 'webhook' or r.n <= @each)
		     and m.status = 'sending' and m.next_attempt_at <= statement_timestamp()
		   order by m.next_attempt_at limit @limit for update skip locked),
		taken as (
		  update agent_messages m
		     set attempts = m.attempts + 1, next_attempt_at = clock_timestamp() + make_interval(secs => @hold)
		    from picked where m.id = picked.id
		  returning m.id, m.thread_id, m.seq, m.channel, m.target, m.content, m.trace_id, m.attempts, m.execution_id,
		            m.sent_at)
		select k.id::text, k.thread_id, k.seq, k.channel, k.target, k.content, k.trace_id, k.attempts as attempt,
		       jsonb_build_object('type', 'thread.message',
		         'timestamp', to_char(k.sent_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
		         'data', jsonb_build_object('message_id', k.id, 'thread_id', k.thread_id, 'seq', k.seq, 'content', k.content,
		           'execution_id', k.execution_id, 'trace_id', k.trace_id, 'participant', h.participant))::text as payload,
		       clock_timestamp() as now, t.url, t.secrets, t.enabled, t.disabled_reason as reason
		  from taken k join agent_threads h on h.id = k.thread_id
		  left join agent_webhook_targets t on t.name = k.target and k.channel = 'webhook'`,
		postgres.Strict{
			"limit": limit, "each": outbox.MaxPerTarget, "look": maxDue, "full": fullTargets, "hold": hold.Seconds(),
		})
}

// untilDue returns the time until the next message is due, by the database's clock; outbox.MaxPause without one.
func untilDue(ctx context.Context, db postgres.DB, fullTargets []string) (time.Duration, error) {
	var seconds *float64
	err := db.QueryRow(ctx, `
		select extract(epoch from (select m.next_attempt_at from agent_messages m
		   where m.status = 'sending' and m.next_attempt_at is not null
		     and (m.channel <> 'webhook' or m.target <> all(@full::text[]))
		   order by m.next_attempt_at limit 1) - clock_timestamp())::float8`,
		postgres.Strict{"full": fullTargets}).Scan(&seconds)
	if err != nil || seconds == nil {
		return outbox.MaxPause, err
	}
	return time.Duration(*seconds * float64(time.Second)), nil
}

// attemptResult is the result of a delivery attempt.
type attemptResult struct {
	status     Status // delivered, failed, or sending: retried after retryDelay
	err        string
	retryDelay time.Duration
}

// recordAttempt records the result of an attempt and makes the next message of the thread and target due. recorded is
// false when the claim has expired: nothing changes.
func recordAttempt(
	ctx context.Context, db postgres.DB, m outboxMessage, result attemptResult,
) (recorded bool, err error) {
	b := &pgx.Batch{}
	// The thread is locked first, so a concurrent new message is not missed.
	b.Queue(`select from agent_threads where id = @thread for no key update`, postgres.Strict{"thread": m.ThreadID})
	b.Queue(`
		update agent_messages
		   set status = @status, error_message = nullif(@error, ''), delivered_at = case when @status = 'delivered'
		     then clock_timestamp() end,
		       next_attempt_at = case when @status = 'sending' then clock_timestamp() + make_interval(secs => @retry) end
		 where id = @id and status = 'sending' and attempts = @attempt`,
		postgres.Strict{
			"id": m.ID, "attempt": m.Attempt, "status": string(result.status), "error": postgres.Text(result.err),
			"retry": result.retryDelay.Seconds(),
		}).
		Exec(func(tag pgconn.CommandTag) error {
			recorded = tag.RowsAffected() > 0
			return nil
		})
	b.Queue(`
		with next as (
		  update agent_messages m set next_attempt_at = clock_timestamp()
		   where m.id = (select y.id from agent_messages y
		                  where y.thread_id = @thread and y.status = 'sending' and y.channel = @channel and y.target = @target
		                    order by y.seq limit 1)
		     and m.next_attempt_at is null
		  returning m.id)
		select pg_notify('agent_outbox', '') from next`,
		postgres.Strict{"thread": m.ThreadID, "channel": m.Channel, "target": m.Target})
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return false, fmt.Errorf("record delivery attempt: %w", err)
	}
	return recorded, nil
}

const (
	flushBatch   = 100 // messages per transaction of Flush
	flushThreads = 500 // threads per pass of flushAll
)

// Flush sends the queued messages of a thread that may be sent, in order, and returns their number. A thread that
// another transaction has locked is an error with SQLSTATE 55P03; the sweep sends its messages later.
func Flush(ctx context.Context, db postgres.DB, log *slog.Logger, thread string) (int, error) {
	for total := 0; ; {
		var n int
		var before, after int64
		var owner, execution, traceID string
		var lender *string
		b := &pgx.Batch{} // one transaction
		b.Queue(`select coalesce(max(fencing_token), 0) from agent_locks where lane = @lane`,
			postgres.Strict{"lane": postgres.Text(Lane(thread))}).QueryRow(func(r pgx.Row) error { return r.Scan(&before) })
		b.Queue(`
			select lanekeeper.flush_agent_thread(case when p <> '' then @thread end, @limit)
			  from set_config('lock_timeout', @lock_timeout, true) p`,
			postgres.Strict{"thread": postgres.Text(thread), "limit": flushBatch, "lock_timeout": postgres.LockTimeout}).
			QueryRow(func(r pgx.Row) error { return r.Scan(&n) })
		b.Queue(`
			select l.fencing_token, l.locked_by, x.id::text, x.trace_id, (
			  select o.lender::text from agent_lock_loans o where o.lane = l.lane order by o.depth desc limit 1)
			  from agent_locks l join agent_executions x on x.id = l.execution_id
			 where l.lane = @lane and l.expires_at > clock_timestamp()`,
			postgres.Strict{"lane": postgres.Text(Lane(thread))}).Query(func(rows pgx.Rows) error {
			_, err := pgx.ForEachRow(rows, []any{&after, &owner, &execution, &traceID, &lender}, func() error { return nil })
			return err
		})
		err := db.SendBatch(ctx, b).Close()
		if postgres.IsCode(err, "P0002") {
			err = ErrNotFound
		}
		if err != nil {
			return total, fmt.Errorf("send queued messages of thread %q: %w", thread, err)
		}
		if n > 0 && after > before {
			SendResult{acquired: true, fencingToken: after, lender: lender}.Log(
				trace.With(ctx, trace.Span{TraceID: trace.ID(traceID), ExecutionID: execution}), log, thread, owner)
		}
		if total += n; n < flushBatch {
			return total, nil
		}
	}
}

// flushAll sends the queued messages of all threads.
func flushAll(ctx context.Context, db postgres.Beginner, log *slog.Logger) (int, error) {
	n, err := executions.FlushThreads(ctx, db, log, flushThreads)
	if err != nil {
		return n, fmt.Errorf("send queued messages: %w", err)
	}
	return n, nil
}

// Freed is a thread whose lane was released.
type Freed = executions.ReleasedThread

// idleGrace is how much longer an idle holder keeps a thread in which nothing is queued.
const idleGrace = 5 * time.Minute

// Clean releases and logs the threads whose holder has ended, is gone, or has been idle for the time of its lease.
func Clean(ctx context.Context, db postgres.DB, log *slog.Logger) ([]Freed, error) {
	return releaseStale(ctx, db, log, 0)
}

// releaseStale is Clean with a grace period for idle holders of threads in which nothing is queued.
func releaseStale(ctx context.Context, db postgres.DB, log *slog.Logger, grace time.Duration) ([]Freed, error) {
	freed, err := postgres.Rows[Freed](ctx, db, "clean threads", executions.ReleaseStaleThreads,
		postgres.Strict{"grace": grace.Seconds()})
	if err != nil {
		return nil, err
	}
	for _, f := range freed {
		f.Log(ctx, log)
	}
	if len(freed) > 0 {
		log.InfoContext(ctx, "locks released", "count", len(freed))
	}
	return freed, nil
}
