package threads

import (
	"cmp"
	"context"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

const (
	defaultHold  = time.Minute     // longer than an attempt
	pollInterval = 5 * time.Second // without a notification
)

// Dispatcher sends queued messages when a lane is free, releases threads whose holder is gone, and delivers the
// messages of the channels log and webhook. Pool, Client and Logger are required. Any number may run on one database.
//
// A message is posted to a declared target as Standard Webhooks specifies, with one id for all attempts. The body is
// {type: thread.message, timestamp, data: {message_id, thread_id, seq, content, execution_id, participant}}. Messages
// of one thread to one target are sent in order: the next after the previous one is delivered or failed. If the
// process dies between the post and its record, the message is posted again.
type Dispatcher struct {
	Pool *pgxpool.Pool
	// Client sends the requests; see skills.NewGuardedClient.
	Client   *http.Client
	Logger   *slog.Logger
	Listener *postgres.Listener  // shortens waits; may be nil
	Getenv   func(string) string // of the secrets; default: the process's environment
	// Schedule has the pause after each failed attempt, to which up to a fifth is added. After the last one the message
	// has failed and the next message of its thread follows. Default: 2 s, 10 s, 1 m, 5 m, 20 m, 1 h.
	Schedule []time.Duration
	// Hold is the time after which another process may repeat an attempt; default 1 min.
	Hold time.Duration
}

// Run works until ctx ends, waits for active attempts, and returns nil. It retries while the database is away.
func (d *Dispatcher) Run(ctx context.Context) error {
	if d.Schedule == nil {
		d.Schedule = []time.Duration{
			2 * time.Second, 10 * time.Second, time.Minute, 5 * time.Minute,
			20 * time.Minute, time.Hour,
		}
	}
	d.Hold = cmp.Or(d.Hold, defaultHold)
	out := outbox.Dispatcher[outboxMessage]{
		Logger: d.Logger, Attempt: d.deliver,
		Target: func(p outboxMessage) string { return p.Target },
		Claim: func(ctx context.Context, limit int, full []string) ([]outboxMessage, error) {
			return claimDue(ctx, d.Pool, limit, full, d.Hold)
		},
		NextDue: func(ctx context.Context, full []string) (time.Duration, error) { return untilDue(ctx, d.Pool, full) },
	}
	var freed <-chan string
	if d.Listener != nil {
		threads, stopThreads := d.Listener.Subscribe("agent_threads")
		messages, stopMessages := d.Listener.Subscribe("agent_outbox")
		defer stopThreads()
		defer stopMessages()
		freed, out.Wake = threads, messages
	}
	var sending sync.WaitGroup
	defer sending.Wait()
	sending.Go(func() { out.Run(ctx) })
	d.flushThreads(ctx, freed)
	return nil
}

// flushThreads sends the queued messages of threads whose lane was released, until ctx ends.
func (d *Dispatcher) flushThreads(ctx context.Context, freed <-chan string) {
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	d.sweep(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case thread := <-freed:
			if thread == "" {
				d.sweep(ctx)
			} else {
				d.flush(ctx, thread)
			}
		case <-poll.C:
			d.sweep(ctx)
		}
	}
}

// sweep handles what notifications have missed.
func (d *Dispatcher) sweep(ctx context.Context) {
	if _, err := clean(ctx, d.Pool, d.Logger, idleGrace); err != nil && ctx.Err() == nil {
		d.Logger.WarnContext(ctx, "threads not cleaned", "error", err)
	}
	d.flush(ctx, "")
}

// flush sends the queued messages of a thread; of all threads without a name.
func (d *Dispatcher) flush(ctx context.Context, thread string) {
	var n int
	var err error
	if thread == "" {
		n, err = flushAll(ctx, d.Pool, d.Logger)
	} else {
		d.cleanStale(ctx, thread)
		n, err = Flush(ctx, d.Pool, d.Logger, thread)
	}
	if err != nil && ctx.Err() == nil {
		d.Logger.WarnContext(ctx, "queued messages not sent yet", "thread_id", thread, "error", err)
	} else if n > 0 {
		d.Logger.InfoContext(ctx, "queued messages sent", "thread_id", thread, "count", n)
	}
}

// cleanStale releases and logs a stale lane before the next sender acquires it.
func (d *Dispatcher) cleanStale(ctx context.Context, thread string) {
	var stale bool
	err := d.Pool.QueryRow(ctx, `
		select exists (select from agent_locks l where l.lane = 'thread:' || @thread and l.locked_by <> '' and not l.parked
		                  and l.expires_at <= clock_timestamp())`, postgres.Strict{"thread": postgres.Text(thread)}).Scan(&stale)
	if err == nil && stale {
		_, err = clean(ctx, d.Pool, d.Logger, idleGrace)
	}
	if err != nil && ctx.Err() == nil {
		d.Logger.WarnContext(ctx, "threads not cleaned", "error", err)
	}
}

// deliver makes and records one attempt.
func (d *Dispatcher) deliver(ctx context.Context, p outboxMessage) {
	ctx, cancel := context.WithTimeout(ctx, max(d.Hold-5*time.Second, d.Hold/2))
	defer cancel()
	ctx = trace.With(ctx, trace.Span{TraceID: trace.ID(p.TraceID), Surface: trace.Flow})
	about := []any{"message_id", p.ID, "thread_id", p.ThreadID, "seq", p.Seq, "attempt", p.Attempt}
	v := attemptResult{status: Delivered}
	if p.Channel == ChannelLog {
		d.Logger.InfoContext(ctx, "message", append(about, "content", p.Content)...)
	} else {
		v = d.post(ctx, p)
		d.Logger.InfoContext(ctx, "message attempted",
			append(about, "target", p.Target, "status", string(v.status), "error", v.err)...)
	}
	if _, err := recordAttempt(ctx, d.Pool, p, v); err != nil {
		d.Logger.WarnContext(ctx, "delivery attempt not recorded, the message will be delivered again",
			append(about, "error", err)...)
	}
}

// post sends a request and returns the result.
func (d *Dispatcher) post(ctx context.Context, p outboxMessage) attemptResult {
	var got webhooks.Response
	switch {
	case p.URL == nil:
		got.Error, got.Class = "unknown outgoing webhook target "+p.Target+"; declare it in the workspace", "refused"
	case !*p.Enabled:
		got.Error, got.Class = "the target "+p.Target+" is out of service: "+*p.Reason, "refused"
	default:
		got = webhooks.Poster{Client: d.Client, Getenv: d.Getenv}.Post(ctx, webhooks.Request{
			ID: p.ID, TraceID: p.TraceID, URL: *p.URL, Secrets: p.Secrets, Payload: p.Payload, SentAt: p.Now,
		})
	}
	v := attemptResult{status: Delivered, err: redact.Text(got.Error, 1000)}
	switch {
	case got.Error == "":
	case got.Gone || p.Attempt > len(d.Schedule):
		v.status = Failed
	default:
		wait := d.Schedule[p.Attempt-1]
		v.status, v.retry = Sending, max(outbox.Jitter(wait), got.Pause)
	}
	if p.TraceID != "" {
		out := activity.Outcome{
			Status: activity.Success, Message: got.Error, Class: got.Class,
			Output: map[string]any{"http_status": got.Status},
		}
		if got.Error != "" {
			out.Status = activity.Error
		}
		if _, err := activity.Note(ctx, d.Pool, activity.Entry{
			Skill: "message_send", Kind: activity.KindCall, Purpose: "thread.message", IdempotencyKey: p.ID,
			Input: map[string]any{"target": p.Target, "message_id": p.ID, "thread_id": p.ThreadID, "attempt": p.Attempt},
		}, out); err != nil {
			d.Logger.WarnContext(ctx, "outgoing message not logged", "message_id", p.ID, "error", err)
		}
	}
	return v
}
