package executions

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// leaderGrace is how long a schedule may be due before the sweeper ticks instead of River's leader. After the death of
// the leader, River elects a new one only after some 15 seconds.
const leaderGrace = 3 * time.Second

// sweepLoop sweeps until ctx ends. It also ticks if River's leader does not, expires lanes, and does housekeeping.
func (e *Engine) sweepLoop(ctx context.Context) {
	var nextHousekeeping time.Time
	var nextExpire time.Time
	var sweeps, expiries logging.Failures
	afterLane := "" // the lane after which the scan for expired lanes continues
	for ctx.Err() == nil {
		err := e.Sweep(ctx)
		sweeps.Log(ctx, e.log, "sweep failed", err)
		if err != nil {
			e.nextDue.postpone()
		}
		if e.nextDue.scheduleDue(leaderGrace) {
			if err := e.Tick(ctx); err != nil && ctx.Err() == nil {
				e.log.WarnContext(ctx, "tick failed", "error", err)
			}
		}
		if time.Now().After(nextExpire) {
			afterLane, err = e.keeper.Expire(ctx, afterLane)
			expiries.Log(ctx, e.log, "expired lanes not cleared", err)
			nextExpire = time.Now().Add(e.opts.SweepEvery)
		}
		if time.Now().After(nextHousekeeping) {
			nextHousekeeping = time.Now().Add(time.Hour)
			if err := e.housekeep(ctx); err != nil && ctx.Err() == nil {
				e.log.WarnContext(ctx, "housekeeping failed", "error", err)
				nextHousekeeping = time.Now().Add(time.Minute)
			}
		}
		e.waitForSweep(ctx)
	}
}

// waitForSweep waits until a timer is due, a sweep is requested, or SweepEvery is over.
func (e *Engine) waitForSweep(ctx context.Context) {
	latest := time.Now().Add(e.opts.SweepEvery)
	for {
		timer := time.NewTimer(e.nextDue.sleepTime(time.Until(latest)))
		select {
		case <-e.timerChanged:
			timer.Stop()
			continue
		case <-ctx.Done():
		case <-timer.C:
		case <-e.sweepRequests:
		}
		timer.Stop()
		return
	}
}

// wakeSweepIn makes the sweeper sweep after a delay at the latest.
func (e *Engine) wakeSweepIn(delay time.Duration) {
	if e.nextDue.advanceTimer(time.Now().Add(delay)) {
		signal(e.timerChanged)
	}
}

// sweepLock is a CTE that acquires the lock of sweeps. Without the lock, a statement of a concurrent sweep does
// nothing.
const sweepLock = `sweep_lock as materialized (
	select pg_try_advisory_xact_lock(hashtextextended('sweep executions', 0)) as acquired)`

// queueSweep queues the transaction of a sweep. It releases claims of expired and unregistered workers and of
// executions without progress. It resumes waits whose time has passed or whose lane is free. It locks workers before
// executions, so no worker renews its lease meanwhile. It disables sequential scans, because a cached plan may be older
// than the growth of its table.
func queueSweep(b *pgx.Batch) {
	b.Queue(`select set_config('lock_timeout', @lock_timeout, true), set_config('enable_seqscan', 'off', true)`,
		postgres.Strict{"lock_timeout": lockTimeout})
	b.Queue(`
		with ` + sweepLock + `,
		expired as materialized (
		  select w.id
		    from sweep_lock cross join agent_workers w
		   where acquired and w.expires_at < statement_timestamp()
		   order by w.expires_at for update of w skip locked),
		unregistered as (
		  select distinct x.claimed_by as id
		    from sweep_lock cross join agent_executions x
		   where acquired and x.claimed_by is not null
		     and not exists (select from agent_workers w where w.id = x.claimed_by))
		select count(lanekeeper.lose_agent_claims(l.id))
		  from (select e.id from expired e union select u.id from unregistered u) l`)
	b.Queue(`
		with ` + sweepLock + `,
		stalled as materialized (
		  select s.id, s.claimed_by
		    from sweep_lock cross join lanekeeper.agent_stalled_executions s
		   where acquired order by s.id)
		select count(lanekeeper.lose_agent_claims(s.claimed_by, s.id)) from stalled s`)
	b.Queue(`with ` + sweepLock + ` select lanekeeper.sweep_agent_waits() from sweep_lock where acquired`)
}

// sweepLimit bounds the completions that a sweep delivers, the ready executions that it counts, and the threads that it
// flushes. The next sweep continues.
const sweepLimit = 500

// Sweep runs one sweep: it completes cancels, releases lost claims, fires due timers, ends waits for free lanes, sends
// queued messages, and wakes workers for ready executions. Of concurrent sweeps, one releases claims and ends waits.
func (e *Engine) Sweep(ctx context.Context) error {
	if err := e.completeCancels(ctx); err != nil {
		return err
	}
	if err := e.deliverCompletions(ctx); err != nil { // before timers, so an ended child does not time out
		return err
	}
	var ready []readyCount
	var ended []Ended
	b := &pgx.Batch{}
	queueSweep(b)
	queueEnded(b, &ended)
	queueReadyCounts(b, &ready)
	if err := e.pool.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("sweep executions: %w", err)
	}
	for _, r := range ready { // after the commit, which makes the executions visible
		e.notifyReady(r.Queue, r.Count)
	}
	err := e.sweepThreads(ctx)
	expiredFor, dueErr := e.readDue(ctx)
	err = errors.Join(err, dueErr)
	e.LogEnded(ctx, ended)
	if err == nil && expiredFor > stuckThreshold {
		err = e.warnStuck(ctx)
	}
	return err
}

// readyCount is the number of ready executions of a queue, up to sweepLimit for each flow and surface.
type readyCount struct {
	Queue string
	Count int
}

// queueReadyCounts counts the ready executions that the limits admit. places is null without a limit.
func queueReadyCounts(b *pgx.Batch, dest *[]readyCount) {
	b.Queue(`
		select k.queue, sum(r.n)::int
		  from lanekeeper.agent_ready_kinds k
		 cross join lateral (
		       select count(*) as n
		         from (select from lanekeeper.agent_ready_executions x
		                where x.queue = k.queue and x.flow = k.flow and x.surface = k.surface
		                limit least(k.places, @limit::int)) x) r
		 where (k.places > 0) is not false
		 group by k.queue`, postgres.Strict{"limit": sweepLimit}).Query(func(rows pgx.Rows) (err error) {
		*dest, err = pgx.CollectRows(rows, pgx.RowToStructByPos[readyCount])
		return err
	})
}

// maxBlockedDeliveries ends the deliveries of a sweep, because each blocked one waits for lockTimeout.
const maxBlockedDeliveries = 10

// deliverCompletions resumes the parents of ended executions that the ending process did not resume. Each delivery has
// its own transaction. The order is random, so that blocked deliveries do not always come first.
func (e *Engine) deliverCompletions(ctx context.Context) error {
	rows, err := e.pool.Query(ctx, `
		select u.id::text
		  from (select c.execution_id as id from agent_unpublished_completions c
		         order by c.execution_id limit @limit) u
		 order by random()`,
		postgres.Strict{"limit": sweepLimit})
	ids, err := postgres.Collect(rows, err, "list undelivered completions", pgx.RowTo[string])
	if err != nil {
		return err
	}
	blocked := 0
	for _, id := range ids {
		switch err := e.tryDeliverCompletion(ctx, id); {
		case postgres.IsCode(err, "55P03"):
			if blocked++; blocked == maxBlockedDeliveries {
				return nil
			}
		case err != nil:
			return fmt.Errorf("resume the parent of execution %s: %w", id, err)
		}
	}
	return nil
}

// housekeep creates the partitions of coming months and deletes unused lanes.
func (e *Engine) housekeep(ctx context.Context) error {
	_, err := migrations.EnsureMonths(ctx, e.pool, nil, migrations.MonthsAhead)
	return errors.Join(err, lanes.Prune(ctx, e.pool, 24*time.Hour))
}

const (
	stuckThreshold = 5 * time.Second  // time for which an expired worker may keep its claims without a warning
	stuckInterval  = 15 * time.Second // pause between warnings
)

// stuckWarnings limits the rate of warnings about stuck executions.
type stuckWarnings struct {
	mu          sync.Mutex
	lastWarning time.Time
}

// due reports whether to warn now.
func (n *stuckWarnings) due() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.lastWarning.IsZero() && time.Since(n.lastWarning) < stuckInterval {
		return false
	}
	n.lastWarning = time.Now()
	return true
}

// warnStuck logs an expired worker whose claims a sweep could not release because their rows are locked, and the open
// transactions. For example, a process may hang in the transaction of a step. If that session is idle,
// idle_in_transaction_session_timeout ends it.
func (e *Engine) warnStuck(ctx context.Context) error {
	if !e.stuckLimiter.due() {
		return nil
	}
	var worker, sessions string
	var seconds float64
	var n int
	err := e.pool.QueryRow(ctx, `
		select w.name, extract(epoch from clock_timestamp() - w.expires_at)::float8,
		       (select count(*) from agent_executions x where x.claimed_by = w.id),
		       (select coalesce(string_agg(format('pid %s of %s, %s for %s', s.pid, s.application_name, s.state,
		                 date_trunc('second', clock_timestamp() - s.state_change)), '; ' order by s.xact_start), '')
		          from pg_stat_activity s
		         where s.datname = current_database() and s.pid <> pg_backend_pid()
		           and s.xact_start < clock_timestamp() - interval '1 second')
		  from (select k.* from agent_workers k
		         where k.expires_at < clock_timestamp()
		           and exists (select from agent_executions x where x.claimed_by = k.id)
		         order by k.expires_at limit 1) w`).Scan(&worker, &seconds, &n, &sessions)
	switch {
	case errors.Is(err, pgx.ErrNoRows): // another sweep released these claims meanwhile
		return nil
	case err != nil:
		return fmt.Errorf("read stuck executions: %w", err)
	}
	e.log.WarnContext(ctx, "lost executions not taken over yet, their rows are locked", "worker", worker, "executions", n,
		"lost_for", time.Duration(seconds*float64(time.Second)).Round(time.Second), "open_transactions", sessions)
	return nil
}

// requestSweep wakes the sweeper.
func (e *Engine) requestSweep() { signal(e.sweepRequests) }
