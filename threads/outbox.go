package threads

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
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

// dueAtOnce is how many messages that are due are looked at for those that may go.
const dueAtOnce = 200

// takeDue begins up to limit attempts, none to the targets in full. A message that is taken is not due again before
// hold has passed, so nobody else delivers it meanwhile. The statement's time stands for the clock: it lets the index
// be used.
func takeDue(ctx context.Context, db postgres.DB, limit int, full []string, hold time.Duration) ([]outboxMessage, error) {
	rows, err := db.Query(ctx, `
		with due as (
		  select m.id, m.target, m.channel, m.next_attempt_at from agent_messages m
		   where m.status = 'sending' and m.next_attempt_at <= statement_timestamp()
		     and (m.channel <> 'webhook' or m.target <> all(@full::text[]))
		   order by m.next_attempt_at limit @look),
		ranked as (select d.id, d.channel, row_number() over (partition by d.channel, d.target order by d.next_attempt_at) as n from due d),
		picked as (
		  select m.id from agent_messages m
		   where m.id in (select r.id from ranked r where r.channel <> 'webhook' or r.n <= @each)
		     and m.status = 'sending' and m.next_attempt_at <= statement_timestamp()
		   order by m.next_attempt_at limit @limit for update skip locked),
		taken as (
		  update agent_messages m
		     set attempts = m.attempts + 1, next_attempt_at = clock_timestamp() + make_interval(secs => @hold)
		    from picked where m.id = picked.id
		  returning m.id, m.thread_id, m.seq, m.channel, m.target, m.content, m.trace_id, m.attempts, m.execution_id, m.sent_at)
		select k.id::text, k.thread_id, k.seq, k.channel, k.target, k.content, k.trace_id, k.attempts as attempt,
		       jsonb_build_object('type', 'thread.message',
		         'timestamp', to_char(k.sent_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
		         'data', jsonb_build_object('message_id', k.id, 'thread_id', k.thread_id, 'seq', k.seq, 'content', k.content,
		           'execution_id', k.execution_id, 'trace_id', k.trace_id, 'participant', h.participant))::text as payload,
		       clock_timestamp() as now, t.url, t.secrets, t.enabled, t.disabled_reason as reason
		  from taken k join agent_threads h on h.id = k.thread_id
		  left join agent_webhook_targets t on t.name = k.target and k.channel = 'webhook'`,
		postgres.Strict{
			"limit": limit, "each": outbox.PerTarget, "look": dueAtOnce, "full": full, "hold": hold.Seconds(),
		})
	if err != nil {
		return nil, fmt.Errorf("take outgoing messages: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[outboxMessage])
	if err != nil {
		return nil, fmt.Errorf("take outgoing messages: %w", err)
	}
	return got, nil
}

// untilDue is how long until something is to be delivered, by the database's clock; outbox.MaxPause when nothing waits.
func untilDue(ctx context.Context, db postgres.DB, full []string) (time.Duration, error) {
	var seconds *float64
	err := db.QueryRow(ctx, `
		select extract(epoch from (select m.next_attempt_at from agent_messages m
		   where m.status = 'sending' and m.next_attempt_at is not null and (m.channel <> 'webhook' or m.target <> all(@full::text[]))
		   order by m.next_attempt_at limit 1) - clock_timestamp())::float8`,
		postgres.Strict{"full": full}).Scan(&seconds)
	if err != nil || seconds == nil {
		return outbox.MaxPause, err
	}
	return time.Duration(*seconds * float64(time.Second)), nil
}

// verdict is how an attempt ended.
type verdict struct {
	status Status // delivered, failed, or sending: once more after retry
	err    string
	retry  time.Duration
}

// settle records how an attempt ended, in one transaction; then the next message of the thread that goes the same way may
// go. recorded is false for an attempt that was outlived by its hold: it has no effect.
func settle(ctx context.Context, db postgres.DB, p outboxMessage, v verdict) (recorded bool, err error) {
	b := &pgx.Batch{}
	// The thread is locked first: a new message sees this one settled, or is seen here.
	b.Queue(`select from agent_threads where id = @thread for no key update`, postgres.Strict{"thread": p.ThreadID})
	b.Queue(`
		update agent_messages
		   set status = @status, error_message = nullif(@error, ''), delivered_at = case when @status = 'delivered' then clock_timestamp() end,
		       next_attempt_at = case when @status = 'sending' then clock_timestamp() + make_interval(secs => @retry) end
		 where id = @id and status = 'sending' and attempts = @attempt`,
		postgres.Strict{"id": p.ID, "attempt": p.Attempt, "status": string(v.status), "error": postgres.Text(v.err), "retry": v.retry.Seconds()}).
		Exec(func(tag pgconn.CommandTag) error {
			recorded = tag.RowsAffected() > 0
			return nil
		})
	b.Queue(`
		with next as (
		  update agent_messages m set next_attempt_at = clock_timestamp()
		   where m.id = (select y.id from agent_messages y
		                  where y.thread_id = @thread and y.status = 'sending' and y.channel = @channel and y.target = @target order by y.seq limit 1)
		     and m.next_attempt_at is null
		  returning m.id)
		select pg_notify('agent_outbox', '') from next`,
		postgres.Strict{"thread": p.ThreadID, "channel": p.Channel, "target": p.Target})
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return false, fmt.Errorf("settle outgoing message: %w", err)
	}
	return recorded, nil
}
