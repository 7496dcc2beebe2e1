package webhooks

import (
	"context"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	workers     = 16
	perTarget   = 4                // at once, so that a slow target does not hold up the others
	lease       = 60 * time.Second // longer than an attempt can take
	longestWait = 5 * time.Second  // between two looks, where no notification comes
)

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

// crew is what a running dispatcher has under way.
type crew struct {
	mu    sync.Mutex
	busy  map[string]int // by target
	n     int
	freed chan struct{} // an attempt has ended
	wait  sync.WaitGroup
}

// Run sends until ctx ends, then lets the attempts under way finish and returns nil. A database that is away is waited for.
func (d *Dispatcher) Run(ctx context.Context) error {
	d.Schedule = slices.Clip(d.Schedule)
	if d.Schedule == nil {
		d.Schedule = defaultSchedule()
	}
	var notes <-chan string
	if d.Listener != nil {
		heard, stop := d.Listener.Subscribe("agent_webhooks")
		defer stop()
		notes = heard
	}
	c := &crew{busy: map[string]int{}, freed: make(chan struct{}, 1)}
	defer c.wait.Wait()
	for ctx.Err() == nil {
		n, pause, err := d.round(ctx, c)
		if err != nil && ctx.Err() == nil {
			d.Logger.WarnContext(ctx, "outgoing webhooks not looked at", "error", err)
			pause = time.Second
		}
		if n > 0 {
			continue
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-notes:
		case <-c.freed:
		}
		timer.Stop()
	}
	return nil
}

// round begins what is due, as far as there is room, and says how long there is nothing to do.
func (d *Dispatcher) round(ctx context.Context, c *crew) (int, time.Duration, error) {
	room, full := c.room()
	if room == 0 {
		return 0, longestWait, nil
	}
	due, err := take(ctx, d.Pool, room, perTarget, full, lease)
	if err != nil {
		return 0, 0, err
	}
	for _, m := range due {
		c.begin(m.TargetID)
		c.wait.Go(func() {
			defer c.end(m.TargetID)
			d.attempt(context.WithoutCancel(ctx), m)
		})
	}
	if len(due) > 0 {
		return len(due), 0, nil
	}
	pause, waiting, err := nextDue(ctx, d.Pool)
	if err != nil || !waiting {
		return 0, longestWait, err
	}
	// What is due already is another's, or of a target that is full: look again soon, and not at once.
	return 0, min(max(pause, 100*time.Millisecond), longestWait), nil
}

func (c *crew) room() (int, []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var full []string
	for _, target := range slices.Sorted(maps.Keys(c.busy)) {
		if c.busy[target] >= perTarget {
			full = append(full, target)
		}
	}
	return workers - c.n, full
}

func (c *crew) begin(target string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	c.busy[target]++
}

func (c *crew) end(target string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n--
	if c.busy[target]--; c.busy[target] == 0 {
		delete(c.busy, target)
	}
	select {
	case c.freed <- struct{}{}:
	default:
	}
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
		v.retry = max(jitter(d.Schedule[m.Attempt-1]), v.pause)
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

// jitter keeps senders that failed together from coming back together.
func jitter(d time.Duration) time.Duration {
	if d <= 0 {
		return time.Millisecond
	}
	return d + rand.N(d/5+1)
}

// send makes the request.
func (d *Dispatcher) send(ctx context.Context, m message) verdict {
	got := Poster{Client: d.Client, Getenv: d.Getenv}.Post(ctx, Letter{
		ID: m.ID, TraceID: m.TraceID, URL: m.URL, Secrets: m.Secrets, Payload: m.Payload, SentAt: m.SentAt,
	})
	v := verdict{status: got.Status, err: got.Error, class: got.Class, pause: got.Pause, gone: got.Gone}
	if got.Status != 0 {
		v.outcome = map[string]any{"http_status": got.Status, "answer": got.Answer}
	}
	return v
}
