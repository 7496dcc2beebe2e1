package webhooks

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// message is one attempt to send a row of the outbox.
type message struct {
	ID         string
	TargetID   string
	Target     string
	URL        string
	Secrets    []string
	Event      string
	Payload    string
	TraceID    string
	Attempt    int
	ActivityID *string // of an attempt before, whose end nobody recorded
	SentAt     time.Time
}

// take begins up to limit attempts, none of the targets in full and at most each of one target. A row that is taken is not due
// again before the lease ends, so nobody else attempts it meanwhile.
func take(ctx context.Context, db postgres.DB, limit, each int, full []string, lease time.Duration) ([]message, error) {
	rows, err := db.Query(ctx, `
		with due as (
		  select o.id from agent_webhook_targets t
		   cross join lateral (
		     select m.id from agent_webhook_outbox m
		      where m.target_id = t.id and m.status = 'pending' and m.next_attempt_at <= clock_timestamp()
		      order by m.next_attempt_at limit @each for update skip locked) o
		   where t.enabled and t.blocked_until <= clock_timestamp() and t.id <> all(@full::uuid[])
		   limit @limit),
		taken as (
		  update agent_webhook_outbox o
		     set attempts = o.attempts + 1, leased = true, next_attempt_at = clock_timestamp() + make_interval(secs => @lease)
		    from due where o.id = due.id
		  returning o.id, o.target_id, o.event, o.payload, o.trace_id, o.attempts, o.activity_id)
		select k.id::text, k.target_id::text, t.name as target, t.url, t.secrets, k.event, k.payload::text as payload, k.trace_id,
		       k.attempts as attempt, k.activity_id::text, clock_timestamp() as sent_at
		  from taken k join agent_webhook_targets t on t.id = k.target_id`,
		postgres.Strict{"limit": limit, "each": each, "full": full, "lease": lease.Seconds()})
	if err != nil {
		return nil, fmt.Errorf("take outgoing webhooks: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[message])
	if err != nil {
		return nil, fmt.Errorf("take outgoing webhooks: %w", err)
	}
	return got, nil
}

// nextDue is how long until something is to be sent, by the database's clock; outbox.MaxPause when nothing waits.
func nextDue(ctx context.Context, db postgres.DB) (time.Duration, error) {
	var seconds *float64
	err := db.QueryRow(ctx, `
		select extract(epoch from min(greatest(o.next_attempt_at, t.blocked_until)) - clock_timestamp())::float8
		  from agent_webhook_targets t
		  cross join lateral (select m.next_attempt_at from agent_webhook_outbox m
		                       where m.target_id = t.id and m.status = 'pending' order by m.next_attempt_at limit 1) o
		 where t.enabled`).Scan(&seconds)
	if err != nil {
		return 0, fmt.Errorf("look for outgoing webhooks: %w", err)
	}
	if seconds == nil {
		return outbox.MaxPause, nil
	}
	return time.Duration(*seconds * float64(time.Second)), nil
}

// file opens the activity of an attempt and notes it with the message, so that whoever makes the next can close it if this one is
// lost; that of an attempt that was lost before, it closes.
func file(ctx context.Context, db postgres.Beginner, m message, entry activity.Entry) (id string, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if m.ActivityID != nil {
			lost := activity.Outcome{Status: activity.Unknown, Class: "interrupted", Message: "the process was lost during the attempt"}
			if err := activity.Close(ctx, tx, *m.ActivityID, entry, lost); err != nil {
				return err
			}
		}
		if id, err = activity.Open(ctx, tx, entry); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `update agent_webhook_outbox set activity_id = @activity where id = @id and attempts = @attempt`,
			postgres.Strict{"id": m.ID, "attempt": m.Attempt, "activity": id})
		if err == nil && tag.RowsAffected() == 0 {
			err = errors.New("another attempt has begun")
		}
		return err
	})
	if err != nil {
		return "", fmt.Errorf("file outgoing webhook: %w", err)
	}
	return id, nil
}

// verdict is how an attempt ended.
type verdict struct {
	status  int // of HTTP; 0 without an answer
	err     string
	class   string
	retry   time.Duration // until the next attempt; 0: none
	pause   time.Duration // that the target asked for
	gone    bool          // the target wants no more
	outcome any
}

func (v verdict) ok() bool { return v.err == "" }

// settle records how an attempt ended, for the message and for its target. An attempt that was outlived by its lease has no effect.
func settle(ctx context.Context, tx pgx.Tx, m message, v verdict) error {
	status := "pending"
	switch {
	case v.ok():
		status = "sent"
	case v.retry == 0:
		status = "dead"
	}
	tag, err := tx.Exec(ctx, `
		update agent_webhook_outbox
		   set status = @status, leased = false, activity_id = null, http_status = @http, last_error = @error,
		       next_attempt_at = clock_timestamp() + make_interval(secs => @retry),
		       finished_at = case when @status <> 'pending' then clock_timestamp() end
		 where id = @id and attempts = @attempt and status = 'pending'`,
		postgres.Strict{
			"id": m.ID, "attempt": m.Attempt, "status": status, "http": v.status, "error": redact.Text(v.err, 1000),
			"retry": v.retry.Seconds(),
		})
	if err == nil && tag.RowsAffected() > 0 {
		err = judge(ctx, tx, m, v)
	}
	if err != nil {
		return fmt.Errorf("settle outgoing webhook: %w", err)
	}
	return nil
}

// persistent is how long a target must have failed, without a success between, to be taken out of service.
const persistent = 24 * time.Hour

// judge keeps count of a target's failures, and takes it out of service when it said so (410), or has failed max_failures times
// in a row over at least a day.
func judge(ctx context.Context, tx pgx.Tx, m message, v verdict) error {
	if v.ok() {
		_, err := tx.Exec(ctx, `
			update agent_webhook_targets set failures = 0, failing_since = null where id = @id and failures > 0`,
			postgres.Strict{"id": m.TargetID})
		return err
	}
	_, err := tx.Exec(ctx, `
		with counted as (
		  select t.id, t.failures + 1 as failures, coalesce(t.failing_since, clock_timestamp()) as since,
		         @gone or (t.failures + 1 >= t.max_failures
		                   and coalesce(t.failing_since, clock_timestamp()) <= clock_timestamp() - make_interval(secs => @persistent)) as out
		    from agent_webhook_targets t where t.id = @id for no key update)
		update agent_webhook_targets t
		   set failures = c.failures, failing_since = c.since,
		       blocked_until = greatest(t.blocked_until, clock_timestamp() + make_interval(secs => @pause)),
		       enabled = t.enabled and not c.out,
		       disabled_by = case when t.enabled and c.out then 'webhooks' else t.disabled_by end,
		       disabled_at = case when t.enabled and c.out then clock_timestamp() else t.disabled_at end,
		       disabled_reason = case when not (t.enabled and c.out) then t.disabled_reason
		                              when @gone then 'it answered 410: it wants no more'
		                              else format('%s attempts failed in a row since %s; the last: %s', c.failures, c.since, @error::text) end
		  from counted c where t.id = c.id`,
		postgres.Strict{
			"id": m.TargetID, "gone": v.gone, "pause": v.pause.Seconds(), "persistent": persistent.Seconds(),
			"error": redact.Text(v.err, 500),
		})
	return err
}
