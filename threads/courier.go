package threads

import (
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
	defaultHold = time.Minute     // longer than an attempt can take
	lookEvery   = 5 * time.Second // where no notification comes
)

// Courier sends what is queued when a thread changes hands, frees threads whose holder is gone, and carries the
// messages of the channels log and webhook. Pool, Client and Logger are required. Any number may run on one database.
//
// A message is posted as Standard Webhooks says, under its own id for every attempt, to a target that the workspace
// declares; the body is {type: thread.message, timestamp, data: {message_id, thread_id, seq, content, execution_id,
// participant}}. Messages of one thread to one target go one after the other: the next when the one before is
// delivered or failed. A process that dies between the post and its record lets the message be posted again.
type Courier struct {
	Pool *pgxpool.Pool
	// Client makes the connections; it comes from skills.NewGuardedClient.
	Client   *http.Client
	Logger   *slog.Logger
	Listener *postgres.Listener  // shortens waits; may be nil
	Getenv   func(string) string // of the secrets; nil is the process's environment
	// Schedule is how long after each failed attempt the next one is made, up to a fifth longer; when it is used up,
	// the message has failed and the next one of its thread goes. Default: 2 s, 10 s, 1 m, 5 m, 20 m, 1 h.
	Schedule []time.Duration
	// Hold is how long an attempt has, before another courier makes the next; default 1 min.
	Hold time.Duration
}

// Run works until ctx ends, then lets the attempts under way finish and returns nil. A database that is away is
// waited for.
func (c *Courier) Run(ctx context.Context) error {
	if c.Schedule == nil {
		c.Schedule = []time.Duration{2 * time.Second, 10 * time.Second, time.Minute, 5 * time.Minute, 20 * time.Minute, time.Hour}
	}
	if c.Hold == 0 {
		c.Hold = defaultHold
	}
	out := outbox.Dispatcher[parcel]{
		Logger: c.Logger, Attempt: c.carry,
		Target: func(p parcel) string { return p.Target },
		Claim: func(ctx context.Context, limit int, full []string) ([]parcel, error) {
			return takeDue(ctx, c.Pool, limit, full, c.Hold)
		},
		NextDue: func(ctx context.Context, full []string) (time.Duration, error) { return untilDue(ctx, c.Pool, full) },
	}
	var handed <-chan string
	if c.Listener != nil {
		threads, stopThreads := c.Listener.Subscribe("agent_threads")
		messages, stopMessages := c.Listener.Subscribe("agent_outbox")
		defer stopThreads()
		defer stopMessages()
		handed, out.Wake = threads, messages
	}
	var sending sync.WaitGroup
	defer sending.Wait()
	sending.Go(func() { out.Run(ctx) })
	c.flushThreads(ctx, handed)
	return nil
}

// flushThreads sends the queued messages of threads that have changed hands, until ctx ends.
func (c *Courier) flushThreads(ctx context.Context, handed <-chan string) {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	c.lookAround(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case thread := <-handed:
			if thread == "" {
				c.lookAround(ctx)
			} else {
				c.flush(ctx, thread)
			}
		case <-look.C:
			c.lookAround(ctx)
		}
	}
}

// lookAround does what notifications may have missed.
func (c *Courier) lookAround(ctx context.Context) {
	if _, err := clean(ctx, c.Pool, c.Logger, unwanted); err != nil && ctx.Err() == nil {
		c.Logger.WarnContext(ctx, "threads not cleaned", "error", err)
	}
	c.flush(ctx, "")
}

// flush sends what is queued in a thread that has changed hands; in all, where it is not known which.
func (c *Courier) flush(ctx context.Context, thread string) {
	var n int
	var err error
	if thread == "" {
		n, err = flushAll(ctx, c.Pool)
	} else {
		c.cleanStale(ctx, thread)
		n, err = Flush(ctx, c.Pool, thread)
	}
	if err != nil && ctx.Err() == nil {
		c.Logger.WarnContext(ctx, "queued messages not sent yet", "thread_id", thread, "error", err)
	} else if n > 0 {
		c.Logger.InfoContext(ctx, "queued messages sent", "thread_id", thread, "count", n)
	}
}

// cleanStale frees and logs threads whose holder is gone, if one is, before who is next takes it over.
func (c *Courier) cleanStale(ctx context.Context, thread string) {
	var stale bool
	err := c.Pool.QueryRow(ctx, `
		select exists (select from agent_locks l where l.lane = 'thread:' || @thread and l.locked_by <> '' and not l.parked
		                  and l.expires_at <= clock_timestamp())`, postgres.Strict{"thread": postgres.Text(thread)}).Scan(&stale)
	if err == nil && stale {
		_, err = clean(ctx, c.Pool, c.Logger, unwanted)
	}
	if err != nil && ctx.Err() == nil {
		c.Logger.WarnContext(ctx, "threads not cleaned", "error", err)
	}
}

// carry makes one attempt and records how it ended.
func (c *Courier) carry(ctx context.Context, p parcel) {
	ctx, cancel := context.WithTimeout(ctx, max(c.Hold-5*time.Second, c.Hold/2))
	defer cancel()
	ctx = trace.With(ctx, trace.Span{TraceID: trace.ID(p.TraceID), Surface: trace.Flow})
	about := []any{"message_id", p.ID, "thread_id", p.ThreadID, "seq", p.Seq, "attempt", p.Attempt}
	v := verdict{status: Delivered}
	if p.Channel == ChannelLog {
		c.Logger.InfoContext(ctx, "message", append(about, "content", p.Content)...)
	} else {
		v = c.post(ctx, p)
		c.Logger.InfoContext(ctx, "message carried", append(about, "target", p.Target, "status", string(v.status), "error", v.err)...)
	}
	if _, err := settle(ctx, c.Pool, p, v); err != nil {
		c.Logger.WarnContext(ctx, "outgoing message not settled, it will be carried again", append(about, "error", err)...)
	}
}

// post makes a request and judges it.
func (c *Courier) post(ctx context.Context, p parcel) verdict {
	var got webhooks.Receipt
	switch {
	case p.URL == nil:
		got.Error, got.Class = "there is no outgoing webhook target "+p.Target+": declare it in the workspace", "refused"
	case !*p.Enabled:
		got.Error, got.Class = "the target "+p.Target+" is out of service: "+*p.Reason, "refused"
	default:
		got = webhooks.Poster{Client: c.Client, Getenv: c.Getenv}.Post(ctx, webhooks.Letter{
			ID: p.ID, TraceID: p.TraceID, URL: *p.URL, Secrets: p.Secrets, Payload: p.Payload, SentAt: p.Now,
		})
	}
	v := verdict{status: Delivered, err: redact.Text(got.Error, 1000)}
	switch {
	case got.Error == "":
	case got.Gone || p.Attempt > len(c.Schedule):
		v.status = Failed
	default:
		wait := c.Schedule[p.Attempt-1]
		v.status, v.retry = Sending, max(outbox.Jitter(wait), got.Pause)
	}
	if p.TraceID != "" {
		out := activity.Outcome{Status: activity.Success, Message: got.Error, Class: got.Class, Output: map[string]any{"http_status": got.Status}}
		if got.Error != "" {
			out.Status = activity.Error
		}
		if _, err := activity.Note(ctx, c.Pool, activity.Entry{
			Skill: "message_send", Kind: activity.KindCall, Purpose: "thread.message", IdempotencyKey: p.ID,
			Input: map[string]any{"target": p.Target, "message_id": p.ID, "thread_id": p.ThreadID, "attempt": p.Attempt},
		}, out); err != nil {
			c.Logger.WarnContext(ctx, "outgoing message not logged", "message_id", p.ID, "error", err)
		}
	}
	return v
}
