package webhooks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// lease is the time after which another process may make the next attempt.
const lease = 60 * time.Second

// Dispatcher sends the messages of the outbox. Pool, Client and Logger are required. Several dispatchers may run on one
// database. Only one of them makes an attempt.
type Dispatcher struct {
	Pool *pgxpool.Pool
	// Client makes the connections; redirects are not followed. Use skills.NewGuardedClient, which refuses private
	// addresses unless the operator allows them: a target must not reach the internal network.
	Client   *http.Client
	Logger   *slog.Logger
	Listener *postgres.Listener  // notifies of new messages; nil for polling only
	Getenv   func(string) string // for secrets; nil reads the process's environment
	// PublicURL is the agent's public URL, for links in Slack's messages; empty for none.
	PublicURL string
	// Schedule lists the pauses after failed attempts. After the last, the message is dead. The default is that of
	// Standard Webhooks: 5 s, 5 m, 30 m, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h, each up to a fifth longer.
	Schedule []time.Duration
}

// defaultSchedule is the schedule of Standard Webhooks after the first, immediate attempt.
func defaultSchedule() []time.Duration {
	return []time.Duration{
		5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour, 10 * time.Hour, 14 * time.Hour,
		20 * time.Hour, 24 * time.Hour,
	}
}

// Run sends until ctx ends, then finishes its attempts and returns nil. It waits for an unreachable database.
func (d *Dispatcher) Run(ctx context.Context) error {
	if d.Schedule == nil {
		d.Schedule = defaultSchedule()
	}
	out := outbox.Dispatcher[message]{
		Logger: d.Logger, Attempt: d.attempt,
		Target: func(m message) string { return m.TargetID },
		Claim: func(ctx context.Context, limit int, full []string) ([]message, error) {
			return claimDue(ctx, d.Pool, limit, outbox.MaxPerTarget, full, lease)
		},
		NextDue: func(ctx context.Context, _ []string) (time.Duration, error) { return nextDue(ctx, d.Pool) },
	}
	if d.Listener != nil {
		wake, stop := d.Listener.Subscribe("agent_webhooks")
		defer stop()
		out.Wake = wake
	}
	out.Run(ctx)
	return nil
}

// attempt makes one attempt: it opens the activity, sends the request, and records the result. It sends nothing if it
// cannot open the activity.
func (d *Dispatcher) attempt(ctx context.Context, msg message) {
	ctx, cancel := context.WithTimeout(ctx, lease-5*time.Second)
	defer cancel()
	ctx = trace.With(ctx, trace.Span{TraceID: trace.ID(msg.TraceID), Surface: trace.Webhook})
	entry := activity.Entry{
		Skill: "webhook_send", Kind: activity.KindCall, Purpose: msg.Event, IdempotencyKey: msg.ID,
		Input: map[string]any{"target": msg.Target, "event": msg.Event, "webhook_id": msg.ID, "attempt": msg.Attempt},
	}
	id, err := openActivity(ctx, d.Pool, msg, entry)
	if err != nil {
		d.Logger.WarnContext(ctx, "outgoing webhook delayed", "target", msg.Target, "error", err)
		return // the message is due again when the lease ends
	}
	result := d.send(trace.WithActivity(ctx, id), msg)
	if !result.ok() && !result.gone && msg.Attempt <= len(d.Schedule) {
		result.retry = max(outbox.Jitter(d.Schedule[msg.Attempt-1]), result.pause)
	}
	out := activity.Outcome{Status: activity.Success, Output: result.outcome, Message: result.message, Class: result.class}
	if !result.ok() {
		out.Status = activity.Error
	}
	err = postgres.RetryOnDisconnect(ctx, func() error {
		return postgres.InTx(ctx, d.Pool, func(tx pgx.Tx) error { // an open row is found only through the message
			if err := activity.Close(ctx, tx, id, entry, out); err != nil {
				return err
			}
			return settle(ctx, tx, msg, result)
		})
	})
	if err != nil {
		d.Logger.WarnContext(ctx, "outgoing webhook not settled; it will be resent", "target", msg.Target, "error", err)
	}
	d.Logger.InfoContext(ctx, "webhook sent", "target", msg.Target, "event", msg.Event, "attempt", msg.Attempt,
		"http_status",
		result.status, "error", result.message)
}

// send makes the request.
func (d *Dispatcher) send(ctx context.Context, msg message) attemptResult {
	if msg.Format == FormatSlack {
		body, err := slackBody(msg.Payload, d.PublicURL)
		if err != nil {
			return attemptResult{message: err.Error(), class: "refused"}
		}
		msg.Payload = body
	}
	got := Poster{Client: d.Client, Getenv: d.Getenv}.Post(ctx, Request{
		ID: msg.ID, TraceID: msg.TraceID, URL: msg.URL, Secrets: msg.Secrets, Payload: msg.Payload, SentAt: msg.SentAt,
	})
	result := attemptResult{status: got.Status, message: got.Error, class: got.Class, pause: got.Pause, gone: got.Gone}
	if got.Status != 0 {
		result.outcome = map[string]any{"http_status": got.Status, "answer": got.Answer}
	}
	return result
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

// claimDue claims up to limit due messages, at most perTarget for each target, and none for the targets in full. A
// claimed message is not due again before the lease ends.
func claimDue(
	ctx context.Context, db postgres.DB, limit, perTarget int, full []string, lease time.Duration,
) ([]message, error) {
	return postgres.Rows[message](ctx, db, "claim outgoing webhooks", `
		with due as (
		  select o.id from agent_webhook_targets t
		   cross join lateral (
		     select m.id from agent_webhook_outbox m
		      where m.target_id = t.id and m.status = 'pending' and m.next_attempt_at <= statement_timestamp()
		      order by m.next_attempt_at limit @each for update skip locked) o
		   where t.enabled and t.blocked_until <= clock_timestamp() and t.id <> all(@full::uuid[])
		   limit @limit),
		claimed as (
		  update agent_webhook_outbox o
		     set attempts = o.attempts + 1, leased = true, next_attempt_at = clock_timestamp() + make_interval(secs => @lease)
		    from due where o.id = due.id
		  returning o.id, o.target_id, o.event, o.payload, o.trace_id, o.attempts, o.activity_id)
		select c.id::text, c.target_id::text, t.name as target, t.url, t.secrets, t.format, c.event,
		       c.payload::text as payload, c.trace_id, c.attempts as attempt, c.activity_id::text,
		       clock_timestamp() as sent_at
		  from claimed c join agent_webhook_targets t on t.id = c.target_id`,
		postgres.Strict{"limit": limit, "each": perTarget, "full": full, "lease": lease.Seconds()})
}

// nextDue returns the time until a message is due, by the database's clock; outbox.MaxPause without messages.
func nextDue(ctx context.Context, db postgres.DB) (time.Duration, error) {
	var seconds *float64
	err := db.QueryRow(ctx, `
		select extract(epoch from min(greatest(o.next_attempt_at, t.blocked_until)) - clock_timestamp())::float8
		  from agent_webhook_targets t
		  cross join lateral (select m.next_attempt_at from agent_webhook_outbox m
		                       where m.target_id = t.id and m.status = 'pending' order by m.next_attempt_at limit 1) o
		 where t.enabled`).Scan(&seconds)
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
			"id": msg.ID, "attempt": msg.Attempt, "status": status, "http": result.status, "error": redact.Text(result.message,
				1000),
			"retry": result.retry.Seconds(),
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
		                              else format('%s attempts failed in a row since %s; the last: %s', c.failures, c.since,
		                                          @error::text) end
		  from counted c where t.id = c.id`,
		postgres.Strict{
			"id": msg.TargetID, "gone": result.gone, "pause": result.pause.Seconds(), "persistent": disableAfter.Seconds(),
			"error": redact.Text(result.message, 500),
		})
	return err
}

const (
	sendTimeout = 15 * time.Second
	maxPause    = 24 * time.Hour // longest pause that a target may request
	maxAnswer   = 4 << 10
)

// Poster sends requests signed by Standard Webhooks. Client comes from skills.NewGuardedClient; redirects are not
// followed. A nil Getenv reads the process's environment.
type Poster struct {
	Client *http.Client
	Getenv func(string) string
}

// Request is one request to a target.
type Request struct {
	ID      string // the webhook-id, equal for every attempt
	TraceID string
	URL     string
	Secrets []string // references; each one signs
	Payload string   // JSON
	SentAt  time.Time
}

// Response is the outcome of a request. Only a 2xx is a success and has no Error.
type Response struct {
	Status int    // HTTP status; 0 without a response
	Answer string // the beginning of the body
	Error  string // without the URL, whose query may be a secret
	Class  string // secret, refused, network, http_status, …
	Pause  time.Duration
	Gone   bool // the target rejects further messages
}

// Post makes one request within 15 seconds. Pause is the wait that the target requested, at most a day.
func (p Poster) Post(ctx context.Context, r Request) Response {
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	secrets, err := Secrets(r.Secrets, p.Getenv)
	if err != nil {
		return Response{Error: err.Error(), Class: "secret"}
	}
	if isReference(r.URL) {
		if r.URL, err = resolveSecret(r.URL, p.getenv()); err != nil {
			return Response{Error: err.Error(), Class: "secret"}
		}
	}
	headers := http.Header{}
	if len(secrets) > 0 {
		headers, err = signature.Sign(secrets, r.ID, r.SentAt, []byte(r.Payload))
	}
	if err != nil {
		return Response{Error: err.Error(), Class: "secret"}
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL, strings.NewReader(r.Payload))
	if err != nil {
		// The error contains the URL, which may be a secret.
		return Response{Error: "the target's url is not a URL", Class: "refused"}
	}
	request.Header = headers
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("User-Agent", "lanekeeper")
	request.Header.Set("X-Trace-Id", r.TraceID)
	if parent := trace.Traceparent(ctx); parent != "" {
		request.Header.Set("Traceparent", parent)
	}
	client := *p.Client
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	response, err := client.Do(request)
	if err != nil {
		return connectionFailure(err)
	}
	defer func() { _ = response.Body.Close() }()
	body, _ := io.ReadAll(io.LimitReader(response.Body, maxAnswer)) // the body is only logged
	return classifyResponse(response, string(body))
}

func (p Poster) getenv() func(string) string {
	if p.Getenv == nil {
		return os.Getenv
	}
	return p.Getenv
}

// connectionFailure is the outcome of a request without a response.
func connectionFailure(err error) Response {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	r := Response{Error: err.Error(), Class: "network"}
	if ce, ok := errors.AsType[*skills.CallError](err); ok {
		r.Class = ce.Class
	}
	return r
}

func classifyResponse(response *http.Response, body string) Response {
	r := Response{Status: response.StatusCode, Answer: body}
	if r.Status >= 200 && r.Status < 300 {
		return r
	}
	r.Error, r.Class = fmt.Sprintf("it answered %s", response.Status), "http_status"
	switch r.Status {
	case http.StatusGone:
		r.Gone = true
	case http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusBadGateway, http.StatusGatewayTimeout:
		r.Pause = retryAfter(response.Header.Get("Retry-After"), time.Now())
	}
	return r
}

// retryAfter parses the seconds or the date of Retry-After. It returns 0 for another text.
func retryAfter(text string, now time.Time) time.Duration {
	if seconds, err := strconv.Atoi(text); err == nil {
		return min(max(time.Duration(seconds), 0)*time.Second, maxPause)
	}
	if at, err := http.ParseTime(text); err == nil {
		return min(max(at.Sub(now), 0), maxPause)
	}
	return 0
}
