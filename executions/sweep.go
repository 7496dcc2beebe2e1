package executions

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/lanes"
)

// leaderGrace is how long River's leader has for a tick. When it has died, a new one is elected only after
// some 15 seconds; until then whoever sweeps ticks instead.
const leaderGrace = 3 * time.Second

const (
	// mostLeft is how often the time between two sweeps is doubled for a timer that they leave: to 64 ms.
	mostLeft = 6
	// afterFailure is how long the next sweep waits for a timer, or the next claim, when one has failed.
	afterFailure = time.Second
)

// dueTime is when the next timer or schedule is due, as far as this process knows.
type dueTime struct {
	mu       sync.Mutex
	schedule time.Time
	timer    time.Time
	first    float64 // the timer by the database's clock
	left     int     // how often sweeps have left it, though it was due
}

// passed reports whether a schedule is due; River's leader asks once a second.
func (d *dueTime) passed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.schedule.IsZero() && !time.Now().Before(d.schedule)
}

// overdue reports whether a schedule has been due for longer than a tick of River's leader takes.
func (d *dueTime) overdue() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.schedule.IsZero() && time.Since(d.schedule) > leaderGrace
}

// sooner brings the next timer forward, and reports whether that changed it.
func (d *dueTime) sooner(t time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.timer.IsZero() && !t.Before(d.timer) {
		return false
	}
	d.timer, d.left = t, 0
	return true
}

// set is what a sweep has found. First is the timer by the database's clock, by which it is known again.
func (d *dueTime) set(schedule, timer time.Time, first float64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if first == d.first && !timer.IsZero() && !timer.After(time.Now()) {
		d.left = min(d.left+1, mostLeft)
	} else {
		d.left = 0
	}
	d.schedule, d.timer, d.first = schedule, timer, first
}

// postpone puts a timer off that a sweep has failed to fire.
func (d *dueTime) postpone() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if soonest := time.Now().Add(afterFailure); !d.timer.IsZero() && d.timer.Before(soonest) {
		d.timer = soonest
	}
}

// pause is how long the sweeper may sleep: longer each time that a timer was left, because its row is locked or
// another process sweeps.
func (d *dueTime) pause(longest time.Duration) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer.IsZero() {
		return longest
	}
	return min(longest, max(time.Until(d.timer), time.Millisecond<<d.left))
}

// sweepLoop does what no running code would do: take claims from the dead, fire timers, repeat hints.
func (e *Engine) sweepLoop(ctx context.Context) {
	var keep time.Time   // when to keep house again
	var expire time.Time // when to look for lanes whose lease ended
	after := ""          // the lane after which that goes on
	for ctx.Err() == nil {
		if err := e.Sweep(ctx); err != nil && ctx.Err() == nil {
			e.log.WarnContext(ctx, "sweep failed", "error", err)
			e.due.postpone()
		}
		if e.due.overdue() {
			if err := e.Tick(ctx); err != nil && ctx.Err() == nil {
				e.log.WarnContext(ctx, "tick failed", "error", err)
			}
		}
		if time.Now().After(expire) {
			var err error
			if after, err = e.keeper.Expire(ctx, after); err != nil && ctx.Err() == nil {
				e.log.WarnContext(ctx, "lanes that ended not cleared", "error", err)
			}
			expire = time.Now().Add(e.opts.SweepEvery)
		}
		if time.Now().After(keep) {
			keep = time.Now().Add(time.Hour)
			if err := e.housekeep(ctx); err != nil && ctx.Err() == nil {
				e.log.WarnContext(ctx, "housekeeping failed", "error", err)
				keep = time.Now().Add(time.Minute)
			}
		}
		e.untilSweep(ctx)
	}
}

// untilSweep waits until a timer is due, somebody asks, or the time between two sweeps is over.
func (e *Engine) untilSweep(ctx context.Context) {
	latest := time.Now().Add(e.opts.SweepEvery)
	for {
		timer := time.NewTimer(e.due.pause(time.Until(latest)))
		select {
		case <-e.alarm:
			timer.Stop()
			continue
		case <-ctx.Done():
		case <-timer.C:
		case <-e.nudge:
		}
		timer.Stop()
		return
	}
}

// soon has the sweep wake for a timer that is due then.
func (e *Engine) soon(in time.Duration) {
	if e.due.sooner(time.Now().Add(in)) {
		signal(e.alarm)
	}
}

// Sweep looks once for lost claims, due timers, freed lanes and ready executions without a hint. Many
// may call it at once; one does the work.
func (e *Engine) Sweep(ctx context.Context) error {
	type readyIn struct {
		Queue string
		N     int
	}
	var ready []readyIn
	var ends []ended
	if err := e.completeCancels(ctx); err != nil {
		return err
	}
	b := &pgx.Batch{}
	b.Queue(`select queue, count(*) from lanekeeper.sweep_agent_executions() group by queue`).Query(func(rows pgx.Rows) (err error) {
		ready, err = pgx.CollectRows(rows, pgx.RowToStructByPos[readyIn])
		return err
	})
	endedIn(b, &ends)
	if err := e.pool.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("sweep executions: %w", err)
	}
	for _, r := range ready { // after the commit: who looked before would find nothing
		e.ready(r.Queue, r.N)
	}
	left, err := e.lookAround(ctx)
	e.announceEnds(ctx, ends)
	if err == nil && left > stuckAfter {
		err = e.warnOfStuck(ctx)
	}
	return err
}

// lookAhead is lookAround for who has not swept.
func (e *Engine) lookAhead(ctx context.Context) error {
	_, err := e.lookAround(ctx)
	return err
}

// lookAround learns when the next timer and the next schedule are due, and for how long the worker that was lost
// first is left. What is asked is how long until then, by the database's clock, so this process's clock may be wrong.
func (e *Engine) lookAround(ctx context.Context) (left time.Duration, err error) {
	var schedule, timer, lost *float64
	var first float64
	err = e.pool.QueryRow(ctx, `
		select extract(epoch from (select min(next_run_at) from agent_schedules) - clock_timestamp())::float8,
		       extract(epoch from w.first - clock_timestamp())::float8,
		       extract(epoch from clock_timestamp() - (select min(expires_at) from agent_workers))::float8,
		       coalesce(extract(epoch from w.first), 0)::float8
		  from (select min(waiting_until) as first from agent_executions where status = 'waiting') w`).Scan(&schedule, &timer, &lost, &first)
	if err != nil {
		return 0, fmt.Errorf("look ahead: %w", err)
	}
	e.due.set(after(schedule), after(timer), first)
	signal(e.alarm) // the sweep may be asleep until a later time
	if lost != nil {
		left = time.Duration(min(*lost, 1e6) * float64(time.Second))
	}
	return left, nil
}

// after is the local time that is some seconds away; zero for none.
func after(seconds *float64) time.Time {
	if seconds == nil {
		return time.Time{}
	}
	return time.Now().Add(time.Duration(min(*seconds, 1e6) * float64(time.Second)))
}

// housekeep makes partitions ahead and forgets lanes that nobody uses.
func (e *Engine) housekeep(ctx context.Context) error {
	_, first := e.pool.Exec(ctx, `select lanekeeper.ensure_agent_activity_partitions()`)
	return errors.Join(first, lanes.Prune(ctx, e.pool, 24*time.Hour))
}

// quiet keeps River's chatter out of the program's log; its warnings and errors stay.
func quiet(log *slog.Logger) *slog.Logger {
	return slog.New(&atLeast{log.Handler(), slog.LevelWarn})
}

type atLeast struct {
	slog.Handler
	level slog.Level
}

func (h *atLeast) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= h.level && h.Handler.Enabled(ctx, l)
}

func (h *atLeast) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &atLeast{h.Handler.WithAttrs(attrs), h.level}
}

func (h *atLeast) WithGroup(name string) slog.Handler {
	return &atLeast{h.Handler.WithGroup(name), h.level}
}
