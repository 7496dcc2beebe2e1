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
	dispatcher := outbox.Dispatcher[outboxMessage]{
		Logger: d.Logger, Attempt: d.deliver,
		Target: func(p outboxMessage) string { return p.Target },
		Claim: func(ctx context.Context, limit int, full []string) ([]outboxMessage, error) {
			return claimDue(ctx, d.Pool, limit, full, d.Hold)
		},
		NextDue: func(ctx context.Context, full []string) (time.Duration, error) { return untilDue(ctx, d.Pool, full) },
	}
	var released <-chan string
	if d.Listener != nil {
		threads, stopThreads := d.Listener.Subscribe("agent_threads")
		messages, stopMessages := d.Listener.Subscribe("agent_outbox")
		defer stopThreads()
		defer stopMessages()
		released, dispatcher.Wake = threads, messages
	}
	var sending sync.WaitGroup
	defer sending.Wait()
	sending.Go(func() { dispatcher.Run(ctx) })
	d.flushThreads(ctx, released)
	return nil
}

// flushThreads sends the queued messages of threads whose lane was released, until ctx ends.
func (d *Dispatcher) flushThreads(ctx context.Context, released <-chan string) {
	poll := time.NewTicker(pollInterval)
	defer poll.Stop()
	d.sweep(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case thread := <-released:
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
	if _, err := releaseStale(ctx, d.Pool, d.Logger, idleGrace); err != nil && ctx.Err() == nil {
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
		d.releaseStaleLane(ctx, thread)
		n, err = Flush(ctx, d.Pool, d.Logger, thread)
	}
	if err != nil && ctx.Err() == nil {
		d.Logger.WarnContext(ctx, "queued messages not sent yet", "thread_id", thread, "error", err)
	} else if n > 0 {
		d.Logger.InfoContext(ctx, "queued messages sent", "thread_id", thread, "count", n)
	}
}

// releaseStaleLane releases and logs a stale lane before the next sender acquires it.
func (d *Dispatcher) releaseStaleLane(ctx context.Context, thread string) {
	var stale bool
	err := d.Pool.QueryRow(ctx, `
		select exists (select from agent_locks l
		                where l.lane = 'thread:' || @thread and l.locked_by <> '' and not l.parked
		                  and l.expires_at <= clock_timestamp())`,
		postgres.Strict{"thread": postgres.Text(thread)}).Scan(&stale)
	if err == nil && stale {
		_, err = releaseStale(ctx, d.Pool, d.Logger, idleGrace)
	}
	if err != nil && ctx.Err() == nil {
		d.Logger.WarnContext(ctx, "threads not cleaned", "error", err)
	}
}

// deliver makes and records one attempt.
func (d *Dispatcher) deliver(ctx context.Context, m outboxMessage) {
	ctx, cancel := context.WithTimeout(ctx, max(d.Hold-5*time.Second, d.Hold/2))
	defer cancel()
	ctx = trace.With(ctx, trace.Span{TraceID: trace.ID(m.TraceID), Surface: trace.Flow})
	attrs := []any{"message_id", m.ID, "thread_id", m.ThreadID, "seq", m.Seq, "attempt", m.Attempt}
	result := attemptResult{status: Delivered}
	if m.Channel == ChannelLog {
		d.Logger.InfoContext(ctx, "message", append(attrs, "content", m.Content)...)
	} else {
		result = d.post(ctx, m)
		d.Logger.InfoContext(ctx, "message attempted",
			append(attrs, "target", m.Target, "status", string(result.status), "error", result.err)...)
	}
	if _, err := recordAttempt(ctx, d.Pool, m, result); err != nil {
		d.Logger.WarnContext(ctx, "delivery attempt not recorded, the message will be delivered again",
			append(attrs, "error", err)...)
	}
}

// post sends a request and returns the result.
func (d *Dispatcher) post(ctx context.Context, m outboxMessage) attemptResult {
	var resp webhooks.Response
	switch {
	case m.URL == nil:
		resp.Error, resp.Class = "unknown outgoing webhook target "+m.Target+"; declare it in the workspace", "refused"
	case !*m.Enabled:
		resp.Error, resp.Class = "the target "+m.Target+" is out of service: "+*m.Reason, "refused"
	default:
		resp = webhooks.Poster{Client: d.Client, Getenv: d.Getenv}.Post(ctx, webhooks.Request{
			ID: m.ID, TraceID: m.TraceID, URL: *m.URL, Secrets: m.Secrets, Payload: m.Payload, SentAt: m.Now,
		})
	}
	result := attemptResult{status: Delivered, err: redact.Text(resp.Error, 1000)}
	switch {
	case resp.Error == "":
	case resp.Gone || m.Attempt > len(d.Schedule):
		result.status = Failed
	default:
		wait := d.Schedule[m.Attempt-1]
		result.status, result.retryDelay = Sending, max(outbox.Jitter(wait), resp.Pause)
	}
	if m.TraceID != "" {
		outcome := activity.Outcome{
			Status: activity.Success, Message: resp.Error, Class: resp.Class,
			Output: map[string]any{"http_status": resp.Status},
		}
		if resp.Error != "" {
			outcome.Status = activity.Error
		}
		if _, err := activity.Note(ctx, d.Pool, activity.Entry{
			Skill: "message_send", Kind: activity.KindCall, Purpose: "thread.message", IdempotencyKey: m.ID,
			Input: map[string]any{"target": m.Target, "message_id": m.ID, "thread_id": m.ThreadID, "attempt": m.Attempt},
		}, outcome); err != nil {
			d.Logger.WarnContext(ctx, "outgoing message not logged", "message_id", m.ID, "error", err)
		}
	}
	return result
}
