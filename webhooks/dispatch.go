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

// lease is how long an attempt has before another process makes the next.
const lease = 60 * time.Second

// Dispatcher sends what is in the outbox. Pool, Client and Logger are required. Any number may run on one
// database; an attempt is made by one of them.
type Dispatcher struct {
	Pool *pgxpool.Pool
	// Client makes the connections; its redirects are not followed. It comes from skills.NewGuardedClient, which refuses
	// private addresses that the operator has not allowed: a target must not be a way into the network.
	Client   *http.Client
	Logger   *slog.Logger
	Listener *postgres.Listener  // shortens waits; may be nil
	Getenv   func(string) string // of the secrets; nil is the process's environment
	// Schedule is how long after each failed attempt the next one is made; when it is used up, the message is dead. The default is
	// that of Standard Webhooks: 5 s, 5 m, 30 m, 2 h, 5 h, 10 h, 14 h, 20 h, 24 h, each up to a fifth longer.
	Schedule []time.Duration
}

// defaultSchedule is what Standard Webhooks recommends, after the first attempt at once.
func defaultSchedule() []time.Duration {
	return []time.Duration{
		5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour, 10 * time.Hour, 14 * time.Hour,
		20 * time.Hour, 24 * time.Hour,
	}
}

// Run sends until ctx ends, then lets the attempts under way finish and returns nil. A database that is away is waited for.
func (d *Dispatcher) Run(ctx context.Context) error {
	if d.Schedule == nil {
		d.Schedule = defaultSchedule()
	}
	out := outbox.Dispatcher[message]{
		Logger: d.Logger, Attempt: d.attempt,
		Target: func(m message) string { return m.TargetID },
		Claim: func(ctx context.Context, limit int, full []string) ([]message, error) {
			return take(ctx, d.Pool, limit, outbox.PerTarget, full, lease)
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

// attempt makes one attempt: its activity before, the request, the verdict after. What cannot be recorded is not sent.
func (d *Dispatcher) attempt(ctx context.Context, m message) {
	ctx, cancel := context.WithTimeout(ctx, lease-5*time.Second)
	defer cancel()
	ctx = trace.With(ctx, trace.Span{TraceID: trace.ID(m.TraceID), Surface: trace.Webhook})
	entry := activity.Entry{
		Skill: "webhook_send", Kind: activity.KindCall, Purpose: m.Event, IdempotencyKey: m.ID,
		Input: map[string]any{"target": m.Target, "event": m.Event, "webhook_id": m.ID, "attempt": m.Attempt},
	}
	id, err := file(ctx, d.Pool, m, entry)
	if err != nil {
		d.Logger.WarnContext(ctx, "outgoing webhook put off", "target", m.Target, "error", err)
		return // due again when the lease ends
	}
	v := d.send(trace.WithActivity(ctx, id), m)
	if !v.ok() && !v.gone && m.Attempt <= len(d.Schedule) {
		v.retry = max(outbox.Jitter(d.Schedule[m.Attempt-1]), v.pause)
	}
	out := activity.Outcome{Status: activity.Success, Output: v.outcome, Message: v.err, Class: v.class}
	if !v.ok() {
		out.Status = activity.Error
	}
	err = postgres.Again(ctx, func() error {
		return postgres.InTx(ctx, d.Pool, func(tx pgx.Tx) error { // a row that is not closed is only found by the message
			if err := activity.Close(ctx, tx, id, entry, out); err != nil {
				return err
			}
			return settle(ctx, tx, m, v)
		})
	})
	if err != nil {
		d.Logger.WarnContext(ctx, "outgoing webhook not settled, it will be sent again", "target", m.Target, "error", err)
	}
	d.Logger.InfoContext(ctx, "webhook sent", "target", m.Target, "event", m.Event, "attempt", m.Attempt, "http_status", v.status, "error", v.err)
}

// send makes the request.
func (d *Dispatcher) send(ctx context.Context, m message) verdict {
	got := Poster{Client: d.Client, Getenv: d.Getenv}.Post(ctx, Request{
		ID: m.ID, TraceID: m.TraceID, URL: m.URL, Secrets: m.Secrets, Payload: m.Payload, SentAt: m.SentAt,
	})
	v := verdict{status: got.Status, err: got.Error, class: got.Class, pause: got.Pause, gone: got.Gone}
	if got.Status != 0 {
		v.outcome = map[string]any{"http_status": got.Status, "answer": got.Answer}
	}
	return v
}
