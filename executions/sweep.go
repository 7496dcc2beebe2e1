package executions

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/migrations"
	"github.com/lanekeeper/lanekeeper/trace"
)

// leaderGrace is how long a schedule may be due before the sweeper ticks instead of River's leader. After the death of
// the leader, River elects a new one only after some 15 seconds.
const leaderGrace = 3 * time.Second

const (
	// maxSkips bounds the doubling of the pause while sweeps skip a due timer. The longest pause is 64 ms.
	maxSkips = 6
	// failureDelay is the pause after a failed sweep or claim.
	failureDelay = time.Second
)

// dueTimes are the next due times of timers and schedules, as far as this process knows.
type dueTimes struct {
	mu       sync.Mutex
	schedule time.Time
	timer    time.Time
	dbTimer  float64 // the timer by the database's clock, in seconds since the epoch
	skips    int     // number of sweeps that skipped the due timer
}

// scheduleDue reports whether a schedule has been due for at least d.
func (d *dueTimes) scheduleDue(duration time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.schedule.IsZero() && time.Since(d.schedule) >= duration
}

// advanceTimer sets the next timer to t if t is earlier. It reports whether it did.
func (d *dueTimes) advanceTimer(t time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.timer.IsZero() && !t.Before(d.timer) {
		return false
	}
	d.timer, d.skips = t, 0
	return true
}

// set stores the due times after a sweep. The same dbTimer as before means that the sweep skipped the timer.
func (d *dueTimes) set(schedule, timer time.Time, dbTimer float64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if dbTimer == d.dbTimer && !timer.IsZero() && !timer.After(time.Now()) {
		d.skips = min(d.skips+1, maxSkips)
	} else {
		d.skips = 0
	}
	d.schedule, d.timer, d.dbTimer = schedule, timer, dbTimer
}

// postpone delays a due timer after a failed sweep.
func (d *dueTimes) postpone() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if soonest := time.Now().Add(failureDelay); !d.timer.IsZero() && d.timer.Before(soonest) {
		d.timer = soonest
	}
}

// sleepTime returns how long the sweeper may sleep. The time doubles while sweeps skip a due timer, because its row is
// locked or another process sweeps.
func (d *dueTimes) sleepTime(maxSleep time.Duration) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer.IsZero() {
		return maxSleep
	}
	return min(maxSleep, max(time.Until(d.timer), time.Millisecond<<d.skips))
}

// sweepLoop sweeps until ctx ends. It also ticks if River's leader does not, expires lanes, and does housekeeping.
func (e *Engine) sweepLoop(ctx context.Context) {
	var nextHousekeeping time.Time
	var nextExpire time.Time
	afterLane := "" // the lane after which the scan for expired lanes continues
	for ctx.Err() == nil {
		if err := e.Sweep(ctx); err != nil && ctx.Err() == nil {
			e.log.WarnContext(ctx, "sweep failed", "error", err)
			e.nextDue.postpone()
		}
		if e.nextDue.scheduleDue(leaderGrace) {
			if err := e.Tick(ctx); err != nil && ctx.Err() == nil {
				e.log.WarnContext(ctx, "tick failed", "error", err)
			}
		}
		if time.Now().After(nextExpire) {
			var err error
			if afterLane, err = e.keeper.Expire(ctx, afterLane); err != nil && ctx.Err() == nil {
				e.log.WarnContext(ctx, "expired lanes not cleared", "error", err)
			}
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

// sweepLimit bounds the work of one sweep.
const sweepLimit = 500

// Sweep runs one sweep: it releases lost claims, fires due timers, ends waits for free lanes, and wakes workers for
// ready executions. Of concurrent calls, one does the work.
func (e *Engine) Sweep(ctx context.Context) error {
	type readyCount struct {
		Queue string
		N     int
	}
	var ready []readyCount
	var ended []endedExecution
	if err := e.completeCancels(ctx); err != nil {
		return err
	}
	if err := e.deliverCompletions(ctx); err != nil { // before timers, so an ended child does not time out
		return err
	}
	b := &pgx.Batch{}
	queueSweep(b)
	queueEnded(b, &ended)
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
		ready, err = pgx.CollectRows(rows, pgx.RowToStructByPos[readyCount])
		return err
	})
	if err := e.pool.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("sweep executions: %w", err)
	}
	for _, r := range ready { // after the commit, which makes the executions visible
		e.notifyReady(r.Queue, r.N)
	}
	err := e.sweepThreads(ctx)
	expiredFor, dueErr := e.readDue(ctx)
	err = errors.Join(err, dueErr)
	e.logEnded(ctx, ended)
	if err == nil && expiredFor > stuckThreshold {
		err = e.warnStuck(ctx)
	}
	return err
}

// deliverCompletions resumes the parents of ended executions that the ending process did not resume. Each delivery has
// its own transaction, so a blocked delivery delays few others.
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
	locked := 0
	for _, id := range ids {
		switch err := e.tryDeliverCompletion(ctx, id); {
		case postgres.IsCode(err, "55P03"):
			if locked++; locked == 10 {
				return nil
			}
		case err != nil:
			return fmt.Errorf("resume the parent of execution %s: %w", id, err)
		}
	}
	return nil
}

const (
	// ReleaseStaleThreads releases the lanes of threads whose holder has ended, or whose lease expired @overdue seconds
	// ago. Without a queued message, it releases an expired lane only after @grace seconds, so people can still see it.
	ReleaseStaleThreads = `
		with stale as materialized (
		  select l.lane, l.locked_by, l.execution_id, l.expires_at, l.ttl_seconds
		    from agent_locks l
		   where l.lane like 'thread:%' and l.locked_by <> '' and not l.parked
		     and (l.expires_at <= clock_timestamp() - make_interval(secs => @overdue)
		            and (l.expires_at <= clock_timestamp() - make_interval(secs => @grace)
		                 or exists (select from agent_messages m
		                             where m.thread_id = substr(l.lane, 8) and m.status = 'queued'))
		          or l.execution_id is not null
		            and not exists (select from agent_executions x
		                             where x.id = l.execution_id and x.completed_at is null))
		   order by l.lane for update of l skip locked)
		select substr(s.lane, 8) as thread_id, s.locked_by as holder, s.execution_id::text,
		       extract(epoch from clock_timestamp() - s.expires_at
		                          + make_interval(secs => s.ttl_seconds))::bigint as idle_seconds
		  from stale s, lanekeeper.return_agent_lock(s.lane, null, 'expired')`
	flushThreads = `
		with recursive queued as (
		  (select m.thread_id from agent_messages m where m.status = 'queued' order by m.thread_id limit 1)
		  union all
		  select (select m.thread_id from agent_messages m
		           where m.status = 'queued' and m.thread_id > q.thread_id
		           order by m.thread_id limit 1)
		    from queued q where q.thread_id is not null),
		ready as (
		  select q.thread_id
		    from queued q
		    left join agent_locks l on l.lane = 'thread:' || q.thread_id and l.expires_at > clock_timestamp()
		   where q.thread_id is not null
		     and (l.lane is null
		          or exists (select from agent_messages m
		                       join agent_executions x on x.id = m.execution_id
		                      where m.thread_id = q.thread_id and m.status = 'queued'
		                        and (x.id = l.execution_id or x.inherits)))
		   order by random() limit @max_threads)
		select coalesce(sum(f.n), 0)::int, coalesce(array_agg('thread:' || f.thread_id), '{}')
		  from (select r.thread_id, lanekeeper.flush_agent_thread(r.thread_id, 100, false) as n from ready r) f`
)

// ReleasedThread is a thread whose lane was released because its holder had ended or was idle.
type ReleasedThread struct {
	ThreadID    string  `json:"thread_id"`
	Holder      string  `json:"holder"`
	ExecutionID *string `json:"execution_id"`
	IdleSeconds int64   `json:"idle_seconds"`
}

// Log logs the release. Call Log after the commit.
func (f ReleasedThread) Log(ctx context.Context, log *slog.Logger) {
	log.WarnContext(ctx, "lane stale, clearing", "lane", "thread:"+f.ThreadID, "holder", f.Holder,
		"age", time.Duration(f.IdleSeconds)*time.Second)
}

// FlushThreads sends queued messages of up to maxThreads threads whose lane permits it, and returns their number. It
// logs the lanes that it acquires for these messages. It does not wait for locks. The order of threads is random, so a
// thread with a blocked message does not delay the others.
func FlushThreads(ctx context.Context, db postgres.Beginner, log *slog.Logger, maxThreads int) (n int, err error) {
	type acquiredLane struct {
		Lane, Owner                  string
		Token                        int64
		ExecutionID, TraceID, Lender string
	}
	var acquired []acquiredLane
	err = postgres.InTxWithin(ctx, db, func(tx pgx.Tx) error {
		var laneNames []string
		err := tx.QueryRow(ctx, flushThreads, postgres.Strict{"max_threads": maxThreads}).Scan(&n, &laneNames)
		if err != nil || len(laneNames) == 0 {
			return err
		}
		rows, err := tx.Query(ctx, `
			select l.lane, l.locked_by, l.fencing_token, l.execution_id::text, x.trace_id,
			       coalesce((select o.lender::text from agent_lock_loans o
			                  where o.lane = l.lane order by o.depth desc limit 1), '')
			  from agent_locks l
			  join agent_executions x on x.id = l.execution_id
			 where l.lane = any (@lanes) and l.xmin = pg_current_xact_id()::xid -- written by this transaction
			 order by l.lane`, postgres.Strict{"lanes": laneNames})
		acquired, err = postgres.Collect(rows, err, "read acquired threads", pgx.RowToStructByPos[acquiredLane])
		return err
	})
	if err != nil {
		return 0, err
	}
	for _, l := range acquired {
		ctx := trace.With(ctx, trace.Span{TraceID: trace.ID(l.TraceID), ExecutionID: l.ExecutionID})
		if l.Lender != "" {
			log.InfoContext(ctx, "lane inherited", "lane", l.Lane, "from", l.Lender, "to", l.Owner, "fencing_token", l.Token)
		} else {
			log.InfoContext(ctx, "lane acquired", "lane", l.Lane, "owner", l.Owner, "fencing_token", l.Token)
		}
	}
	return n, nil
}

// sweepThreads releases the lanes of abandoned threads and sends queued messages of free threads. The outbox usually
// does both sooner. sweepThreads leaves locked rows to the next sweep.
func (e *Engine) sweepThreads(ctx context.Context) error {
	var freed []ReleasedThread
	b := &pgx.Batch{}
	queueLockTimeout(b)
	b.Queue(ReleaseStaleThreads, postgres.Strict{"overdue": 10.0, "grace": 300.0}).Query(func(rows pgx.Rows) (err error) {
		freed, err = pgx.CollectRows(rows, pgx.RowToStructByName[ReleasedThread])
		return err
	})
	err := e.pool.SendBatch(ctx, b).Close()
	for _, f := range freed {
		if err == nil {
			f.Log(ctx, e.log)
		}
	}
	if err == nil || postgres.IsCode(err, "55P03") {
		_, err = FlushThreads(ctx, e.pool, e.log, sweepLimit)
	}
	if err != nil && !postgres.IsCode(err, "55P03") {
		return fmt.Errorf("sweep threads: %w", err)
	}
	return nil
}

// refreshDue reads the due times again.
func (e *Engine) refreshDue(ctx context.Context) error {
	_, err := e.readDue(ctx)
	return err
}

// readDue reads when the next timer and schedule are due. It returns how long ago the first lease of a lost worker
// expired. The query returns durations, because the clock of this process may be wrong.
func (e *Engine) readDue(ctx context.Context) (expiredFor time.Duration, err error) {
	var schedule, timer, lost *float64
	var dbTimer float64
	err = e.pool.QueryRow(ctx, `
		select extract(epoch from (select min(next_run_at) from agent_schedules) - clock_timestamp())::float8,
		       extract(epoch from t.due_at - clock_timestamp())::float8,
		       extract(epoch from clock_timestamp() - (select min(expires_at) from agent_workers))::float8,
		       coalesce(extract(epoch from t.due_at), 0)::float8
		  from (select min(waiting_until) as due_at from agent_executions where status = 'waiting') t`).
		Scan(&schedule, &timer, &lost, &dbTimer)
	if err != nil {
		return 0, fmt.Errorf("read due times: %w", err)
	}
	e.nextDue.set(localTime(schedule), localTime(timer), dbTimer)
	signal(e.timerChanged) // the sweeper may sleep until a later time
	if lost != nil {
		expiredFor = time.Duration(min(*lost, 1e6) * float64(time.Second))
	}
	return expiredFor, nil
}

// localTime returns the local time after some seconds; the zero time for nil.
func localTime(seconds *float64) time.Time {
	if seconds == nil {
		return time.Time{}
	}
	return time.Now().Add(time.Duration(min(*seconds, 1e6) * float64(time.Second)))
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
// transactions. For example, a process may hang in the transaction of a step. The server ends such a transaction after
// a while.
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
		         where k.expires_at < clock_timestamp() and exists (select from agent_executions x where x.claimed_by = k.id)
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
