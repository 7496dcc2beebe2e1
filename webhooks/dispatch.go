package webhooks

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
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
		NextDue: func(ctx context.Context, full []string) (time.Duration, error) { return nextDue(ctx, d.Pool, full) },
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
// cannot open the activity. If it cannot record the result, the message is due again when the lease ends.
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
	d.Logger.InfoContext(ctx, "webhook attempted", "target", msg.Target, "event", msg.Event, "attempt", msg.Attempt,
		"http_status", result.status, "error", result.message)
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
	response := Poster{Client: d.Client, Getenv: d.Getenv}.Post(ctx, Request{
		ID: msg.ID, TraceID: msg.TraceID, URL: msg.URL, Secrets: msg.Secrets, Payload: msg.Payload, SentAt: msg.SentAt,
	})
	result := attemptResult{
		status: response.Status, message: response.Error, class: response.Class, pause: response.Pause, gone: response.Gone,
	}
	if response.Status != 0 {
		result.outcome = map[string]any{"http_status": response.Status, "answer": response.Answer}
	}
	return result
}
