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

// Resend makes a dead outgoing message due now, under the same webhook-id. A failure makes it dead again, unless a 410
// had ended its schedule early. Resend returns false if the message is not dead, and [ErrNotFound] for an unknown one.
// A disabled target receives the message once it is enabled.
func Resend(ctx context.Context, tx pgx.Tx, id string) (bool, error) {
	// The attempt number grows, so the late end of an old attempt does not affect the new attempt.
	tag, err := tx.Exec(ctx, `
		with again as (
		  update agent_webhook_outbox
		     set status = 'pending', next_attempt_at = clock_timestamp(), finished_at = null
		   where id = @id and status = 'dead' returning id)
		select pg_notify('agent_webhooks', '') from again`, postgres.Strict{"id": id})
	if err != nil {
		return false, fmt.Errorf("resend webhook %s: %w", id, err)
	}
	if tag.RowsAffected() > 0 {
		return true, nil
	}
	var known bool
	err = tx.QueryRow(ctx, `select exists (select from agent_webhook_outbox where id = @id)`,
		postgres.Strict{"id": id}).Scan(&known)
	if err == nil && !known {
		err = ErrNotFound
	}
	if err != nil {
		return false, fmt.Errorf("resend webhook %s: %w", id, err)
	}
	return false, nil
}

// message is one attempt to send a row of the outbox.
type message struct {
	ID         string
	TargetID   string
	Target     string
	URL        string
	Secrets    []string
	Format     string
	Event      string
	Payload    string
	TraceID    string
	Attempt    int
	ActivityID *string // open activity of an earlier attempt without a recorded end
	SentAt     time.Time
}

// claimDue claims up to limit due messages, the oldest first, and at most perTarget for each target. It skips the
// targets that full lists. A claimed message is not due again before the lease ends.
func claimDue(
	ctx context.Context, db postgres.DB, limit, perTarget int, full []string, lease time.Duration,
) ([]message, error) {
	return postgres.Rows[message](ctx, db, "claim outgoing webhooks", `
		with due as (
		  select o.id from agent_webhook_targets t
		   cross join lateral (
		     select m.id from agent_webhook_outbox m
		      where m.target_id = t.id and m.status = 'pending' and m.next_attempt_at <= statement_timestamp()
		      order by m.next_attempt_at limit @each) o
		   where t.enabled and t.blocked_until <= clock_timestamp() and t.id <> all(@full::uuid[])),
		picked as (
		  select m.id from agent_webhook_outbox m
		   where m.id = any(array(select due.id from due)) and m.status = 'pending'
		     and m.next_attempt_at <= statement_timestamp()
		   order by m.next_attempt_at limit @limit for update skip locked),
		claimed as (
		  update agent_webhook_outbox o
		     set attempts = o.attempts + 1, leased = true, next_attempt_at = clock_timestamp() + make_interval(secs => @lease)
		    from picked where o.id = picked.id
		  returning o.id, o.target_id, o.event, o.payload, o.trace_id, o.attempts, o.activity_id)
		select c.id::text, c.target_id::text, t.name as target, t.url, t.secrets, t.format, c.event,
		       c.payload::text as payload, c.trace_id, c.attempts as attempt, c.activity_id::text,
		       clock_timestamp() as sent_at
		  from claimed c join agent_webhook_targets t on t.id = c.target_id`,
		postgres.Strict{"limit": limit, "each": perTarget, "full": full, "lease": lease.Seconds()})
}

// nextDue returns the time until a message is due, by the database's clock. It skips the targets that full lists.
// Without messages it returns outbox.MaxPause.
func nextDue(ctx context.Context, db postgres.DB, full []string) (time.Duration, error) {
	var seconds *float64
	err := db.QueryRow(ctx, `
		select extract(epoch from min(greatest(o.next_attempt_at, t.blocked_until)) - clock_timestamp())::float8
		  from agent_webhook_targets t
		  cross join lateral (select m.next_attempt_at from agent_webhook_outbox m
		                       where m.target_id = t.id and m.status = 'pending' order by m.next_attempt_at limit 1) o
		 where t.enabled and t.id <> all(@full::uuid[])`, postgres.Strict{"full": full}).Scan(&seconds)
	if err != nil {
		return 0, fmt.Errorf("find due webhooks: %w", err)
	}
	if seconds == nil {
		return outbox.MaxPause, nil
	}
	return time.Duration(*seconds * float64(time.Second)), nil
}

// openActivity opens the activity of an attempt and links it to the message, so that a later attempt can close it. It
// closes the activity of an earlier attempt whose process was lost.
func openActivity(ctx context.Context, db postgres.Beginner, msg message, entry activity.Entry) (id string, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if msg.ActivityID != nil {
			lost := activity.Outcome{
				Status: activity.Unknown, Class: "interrupted",
				Message: "the process was lost during the attempt",
			}
			if err := activity.Close(ctx, tx, *msg.ActivityID, entry, lost); err != nil {
				return err
			}
		}
		if id, err = activity.Open(ctx, tx, entry); err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `
			update agent_webhook_outbox set activity_id = @activity where id = @id and attempts = @attempt`,
			postgres.Strict{"id": msg.ID, "attempt": msg.Attempt, "activity": id})
		if err == nil && tag.RowsAffected() == 0 {
			err = errors.New("another attempt has begun")
		}
		return err
	})
	if err != nil {
		return "", fmt.Errorf("open activity of outgoing webhook: %w", err)
	}
	return id, nil
}

// attemptResult is the outcome of an attempt.
type attemptResult struct {
	status  int // HTTP status; 0 without a response
	message string
	class   string
	retry   time.Duration // until the next attempt; 0 for none
	pause   time.Duration // requested by the target
	gone    bool          // the target rejects further messages
	outcome any
}

func (v attemptResult) ok() bool { return v.message == "" }

// settle records the result of an attempt for the message and its target. It has no effect if a later attempt has
// begun.
func settle(ctx context.Context, tx pgx.Tx, msg message, result attemptResult) error {
	status := "pending"
	switch {
	case result.ok():
		status = "sent"
	case result.retry == 0:
		status = "dead"
	}
	tag, err := tx.Exec(ctx, `
		update agent_webhook_outbox
		   set status = @status, leased = false, activity_id = null, http_status = @http, last_error = @error,
		       next_attempt_at = clock_timestamp() + make_interval(secs => @retry),
		       finished_at = case when @status <> 'pending' then clock_timestamp() end
		 where id = @id and attempts = @attempt and status = 'pending'`,
		postgres.Strict{
			"id": msg.ID, "attempt": msg.Attempt, "status": status, "http": result.status,
			"error": redact.Text(result.message, 1000), "retry": result.retry.Seconds(),
		})
	if err == nil && tag.RowsAffected() > 0 {
		err = countFailure(ctx, tx, msg, result)
	}
	if err != nil {
		return fmt.Errorf("settle outgoing webhook: %w", err)
	}
	return nil
}

// disableAfter is how long a target must fail without a success before it is disabled.
const disableAfter = 24 * time.Hour

// countFailure counts a target's failures. It disables the target after a 410, or after max_failures consecutive
// failures over at least a day.
func countFailure(ctx context.Context, tx pgx.Tx, msg message, result attemptResult) error {
	if result.ok() {
		_, err := tx.Exec(ctx, `
			update agent_webhook_targets set failures = 0, failing_since = null where id = @id and failures > 0`,
			postgres.Strict{"id": msg.TargetID})
		return err
	}
	_, err := tx.Exec(ctx, `
		with locked as (
		  select t.id, t.failures + 1 as failures, coalesce(t.failing_since, clock_timestamp()) as since, t.max_failures
		    from agent_webhook_targets t where t.id = @id for no key update),
		counted as (
		  select l.id, l.failures, l.since,
		         @gone or l.failures >= l.max_failures
		                  and l.since <= clock_timestamp() - make_interval(secs => @persistent) as out
		    from locked l)
		update agent_webhook_targets t
		   set failures = c.failures, failing_since = c.since,
		       blocked_until = greatest(t.blocked_until, clock_timestamp() + make_interval(secs => @pause)),
		       enabled = t.enabled and not c.out,
		       disabled_by = case when t.enabled and c.out then 'webhooks' else t.disabled_by end,
		       disabled_at = case when t.enabled and c.out then clock_timestamp() else t.disabled_at end,
		       disabled_reason = case when not (t.enabled and c.out) then t.disabled_reason
		                              when @gone then 'it answered 410: it wants no more'
		                              else format('%s attempts failed in a row since %s; the last: %s', c.failures, c.since,
		                                          @error::text) end
		  from counted c where t.id = c.id`,
		postgres.Strict{
			"id": msg.TargetID, "gone": result.gone, "pause": result.pause.Seconds(), "persistent": disableAfter.Seconds(),
			"error": redact.Text(result.message, 500),
		})
	return err
}
