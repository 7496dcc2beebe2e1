package executions_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// While a session holds the row of a due timer, sweeps run less often. Once no timer is due, the sweeper sleeps a
// minute or more.
func TestSkippedTimerBacksOffSweeps(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(noop))
	for range 2 {
		p.startFlow(t, "flow")
	}
	pgtest.Exec(t, pool, `update agent_executions set status = 'running'`)
	pgtest.Exec(t, pool, `
		update agent_executions set status = 'waiting', waiting_for = 'delay', waiting_step = 'w',
		       waiting_until = clock_timestamp() - row_number * interval '1 hour'
		  from (select id as which, row_number() over (order by id) from agent_executions) n where id = which`)
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `select from agent_executions for update`)
	sweep := func() {
		t.Helper()
		require.NoError(t, p.Sweep(t.Context()))
	}
	sweep()
	assert.Equal(t, time.Millisecond, p.SweepPause())
	for range 10 {
		sweep()
	}
	assert.Equal(t, 64*time.Millisecond, p.SweepPause())
	pgtest.Exec(t, tx, `update agent_executions set waiting_until = clock_timestamp() + interval '1 day'
		where waiting_until = (select min(waiting_until) from agent_executions)`)
	require.NoError(t, tx.Commit(t.Context()))
	sweep()
	got := p.SweepPause()
	assert.Truef(t, got >= time.Minute, "sleeps for %s though nothing is due", got)
}

// A sweep releases all claims of a lost worker at once. Each execution continues or ends by its own rule.
func TestSweepReleasesClaimsOfLostWorker(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	lost, other := newWorker(t, pool), newWorker(t, pool)
	has := func(by, set string) string {
		id := insertPending(t, pool)
		mustClaim(t, pool, id, by)
		pgtest.Exec(t, pool, `update agent_executions set `+set+` where id = @id`, postgres.Strict{"id": id})
		return id
	}
	fresh, again := has(lost, `attempt = 0`), has(lost, `attempt = 3`)
	recorded, spent, spentButRecorded := has(lost, `attempt = 3`), has(lost, `attempt = 4`), has(lost, `attempt = 4`)
	fails, once, locked, others := has(lost, `on_lost = 'fail'`), has(lost, `max_attempts = 1`), has(lost, `attempt = 0`),
		has(other, `attempt = 0`)
	for _, id := range []string{recorded, spentButRecorded} {
		pgtest.Exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim, output) values (@id, 'step', 1, '1')`,
			postgres.Strict{"id": id})
	}
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `select from agent_executions where id = @id for update`, postgres.Strict{"id": locked})
	assert.Equal(t, 7, pgtest.Value[int](t, pool, `select lanekeeper.lose_agent_claims(@id)`, postgres.Strict{"id": lost}))
	const released = "running, free, claim 2, wake 1, recorded lost, attempt "
	const ended = "failed, free, claim 2, wake 0, recorded lost, attempt "
	const held = "running, claimed, claim 1, wake 0, recorded , attempt "
	for id, want := range map[string]string{
		fresh: released + "1: ", again: released + "4: ", recorded: released + "1: ", spentButRecorded: released + "1: ",
		spent: ended + "5: given up after 5 workers were lost without a checkpoint between",
		fails: ended + "1: the worker's lease expired", once: ended + "1: given up after 1 workers were lost without a " +
			"checkpoint between",
		locked: held + "0: ", others: held + "0: ",
	} {
		pgtest.Equal(t, pool, want, `
			select concat(x.status, case when x.claimed_by is null then ', free' else ', claimed' end, ', claim ',
			              x.claim, ', wake ', x.wake, ', recorded ',
			              (select string_agg(c.how, ' ') from agent_claims_lost c
			                where c.execution_id = x.id and c.claim = 1 and c.worker_name <> ''),
			              ', attempt ', x.attempt, ': ', x.error_message)
			  from agent_executions x where x.id = @id`, postgres.Strict{"id": id})
	}
}

// createLostWorker creates a dead worker with twenty executions. Every fourth fails with its worker.
func createLostWorker(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	dead := newWorker(t, pool)
	for i := range 20 {
		id := insertPending(t, pool)
		mustClaim(t, pool, id, dead)
		if i%4 == 0 {
			pgtest.Exec(t, pool, `update agent_executions set on_lost = 'fail' where id = @id`, postgres.Strict{"id": id})
		}
	}
	pgtest.Exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
}

// outcomeSQL counts the outcomes of a dead worker's executions.
const outcomeSQL = `
	select format('%s still claimed, %s ready, %s failed, %s completion events, %s lost claims',
	         count(*) filter (where x.claim = 1 and x.claimed_by is not null),
	         count(*) filter (where x.status = 'running' and x.claim = 2 and x.wake = 1 and x.attempt = 1
	                            and x.claimed_by is null),
	         count(*) filter (where x.status = 'failed' and x.claim = 2 and x.completed_at is not null),
	         (select count(*) from agent_events where event = 'AGENT_COMPLETED'),
	         (select count(*) from agent_claims_lost))
	  from agent_executions x`

// lostWorkerReleased is the result of outcomeSQL after a sweep.
const lostWorkerReleased = "0 still claimed, 15 ready, 5 failed, 5 completion events, 20 lost claims"

// Concurrent sweeps release the claims of a dead worker once.
func TestConcurrentSweepsReleaseClaimsOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	createLostWorker(t, pool)
	p := newEngine(t, pool, flowMap(noop))
	barrier := pgtest.Begin(t, pool) // blocks all until they have started
	pgtest.Exec(t, barrier, `lock table agent_workers in access exclusive mode`)
	var group errgroup.Group
	// On a slow machine a sweep may time out while it waits for the others. The last sweep releases the rest.
	ignoreTimeout := func(err error) error {
		if postgres.Locked(err) {
			return nil
		}
		return err
	}
	for range 3 { // with the barrier 7 connections; the pooler has 8
		group.Go(func() error { return ignoreTimeout(p.Sweep(t.Context())) })
		group.Go(func() error { // like a request for the run of a lost worker
			_, err := pool.Exec(t.Context(), `select lanekeeper.lose_agent_claims(w.id) from agent_workers w`)
			return ignoreTimeout(err)
		})
	}
	pgtest.AwaitBlocked(t, pool, 4, "")
	require.NoError(t, barrier.Commit(t.Context()))
	assert.NoError(t, group.Wait())
	assert.NoError(t, p.Sweep(t.Context()))
	assert.Equal(t, lostWorkerReleased, pgtest.Value[string](t, pool, outcomeSQL))
}

// A sweep that loses its connection changes nothing, and the next sweep does all.
func TestInterruptedSweepChangesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	createLostWorker(t, pool)
	p := newEngine(t, pool, flowMap(noop))
	pgtest.Exec(t, pool, `
		create function stall() returns trigger language plpgsql
		  as 'begin perform pg_advisory_xact_lock(42); return null; end'`)
	pgtest.Exec(t, pool, `create trigger stall after insert
		on agent_claims_lost for each statement execute function stall()`)
	stall := pgtest.Begin(t, pool)
	pgtest.Exec(t, stall, `select pg_advisory_xact_lock(42)`)
	var group errgroup.Group
	group.Go(func() error {
		for {
			if err := p.Sweep(t.Context()); !postgres.Locked(err) { // a sweep waits up to a second for a lock
				return err
			}
		}
	})
	pgtest.Until(t, pool, true, `
			select coalesce(bool_or(pg_terminate_backend(pid)), false) from pg_stat_activity
			 where datname = current_database() and wait_event = 'advisory'`)
	assert.Error(t, group.Wait(), "the sweep returned no error")
	assert.Equal(t, "20 still claimed, 0 ready, 0 failed, 0 completion events, 0 lost claims", pgtest.Value[string](t, pool, outcomeSQL))
	require.NoError(t, stall.Commit(t.Context()))
	// the server ends the session before it frees its locks
	pgtest.Eventually(t, func() bool {
		assert.NoError(t, p.Sweep(t.Context()))
		return pgtest.Value[string](t, pool, outcomeSQL) == lostWorkerReleased
	}, "the next one takes all, once")
}

// sweepTimeout is far longer than a sweep, and far shorter than a client leaves a transaction open.
const sweepTimeout = 30 * time.Second

// A sweep leaves locked executions to a later sweep, and does not delay others.
func TestSweepSkipsLockedRows(t *testing.T) {
	t.Parallel()
	const (
		lane = `select from agent_locks where lane = 'automation:a' for update`
		end  = `insert into agent_events (event, key, external_id)
		        select 'AGENT_COMPLETED', l.execution_id::text, 'completed ' || l.execution_id from agent_locks l
		         where l.lane = 'automation:a'`
	)
	lost := func(t *testing.T, pool *pgxpool.Pool, set string) (held, free string) {
		dead := newWorker(t, pool)
		held, free = insertPending(t, pool), insertPending(t, pool)
		for _, id := range []string{held, free} {
			mustClaim(t, pool, id, dead)
			pgtest.Exec(t, pool, `update agent_executions set `+set+` where id = @id`, postgres.Strict{"id": id})
		}
		pgtest.Exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 minute' where id = @id`,
			postgres.Strict{"id": dead})
		return held, free
	}
	waits := func(t *testing.T, pool *pgxpool.Pool, wait string) (held, free string) {
		held, free = insertPending(t, pool), insertPending(t, pool)
		pgtest.Exec(t, pool, `update agent_executions set status = 'running'`)
		pgtest.Exec(t, pool, `update agent_executions set status = 'waiting', waiting_step = 'w', `+wait)
		return held, free
	}
	for name, one := range map[string]struct {
		lock    string
		prepare func(t *testing.T, pool *pgxpool.Pool) (held, free string)
		then    executions.Status
	}{
		"timer": {lane, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			return waits(t, pool, `waiting_for = 'delay', waiting_until = clock_timestamp() - interval '1 hour'`)
		}, executions.Running},
		"child": {lane, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			return waits(t, pool,
				`waiting_for = 'agent', waiting_key = lanekeeper.agent_uuid7()::text, waiting_until = clock_timestamp() - interval '1 hour'`)
		}, executions.Running},
		"lane wanted": {lane, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			return waits(t, pool, `waiting_for = 'lane', waiting_key = 'automation:free'`)
		}, executions.Running},
		"lost worker": {lane, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			return lost(t, pool, `on_lost = 'fail'`)
		}, executions.Failed},
		"no progress": {lane, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			held, free := lost(t, pool,
				`on_lost = 'fail', progress_seconds = 1, updated_at = clock_timestamp() - interval '1 hour'`)
			pgtest.Exec(t, pool, `update agent_workers set expires_at = clock_timestamp() + interval '1 hour'`)
			return held, free
		}, executions.Failed},
		"end": {end, func(t *testing.T, pool *pgxpool.Pool) (string, string) {
			return lost(t, pool, `on_lost = 'fail'`)
		}, executions.Failed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			p := newEngine(t, pool, flowMap(noop))
			held, free := one.prepare(t, pool)
			pgtest.Exec(t, pool, `
				insert into agent_locks (lane, locked_by, fencing_token, locked_at, expires_at, ttl_seconds, execution_id)
				select 'automation:a', x.id || '#' || x.claim, 1, clock_timestamp(), clock_timestamp() + interval '1 hour', 3600,
				       x.id
				  from agent_executions x where x.id = @id`, postgres.Strict{"id": held})
			before, err := executions.Get(t.Context(), pool, held)
			require.NoError(t, err)
			tx := openTx(t, pool, one.lock)
			ctx, cancel := context.WithTimeout(t.Context(), sweepTimeout)
			defer cancel()
			require.NoError(t, p.Sweep(ctx))
			enginetest.Await(t, pool, free, one.then)
			x, err := executions.Get(t.Context(), pool, held)
			assert.Truef(t, err == nil && x.Status == before.Status && x.Claim == before.Claim,
				"locked execution: %+v, %v", x, err)
			require.NoError(t, tx.Rollback(t.Context()))
			require.NoError(t, p.Sweep(t.Context()))
			enginetest.Await(t, pool, held, one.then)
		})
	}
}

// A process hangs in the middle of a step's transaction. It keeps its executions until the server ends the transaction.
func TestStuckExecutionsAreLogged(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	l := &logLines{}
	p := newEngine(t, pool, nil, l.capture)
	lost := newWorker(t, pool)
	mustClaim(t, pool, insertPending(t, pool), lost)
	tx := pgtest.Begin(t, pool) // the server ended it
	pgtest.Exec(t, tx, `select from agent_executions for key share`)
	pgtest.Exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 minute'`)
	pid := pgtest.Value[int](t, tx, `select pg_backend_pid() from pg_sleep(1.1)`)
	for range 2 {
		require.NoError(t, p.Sweep(t.Context()))
	}
	records := l.Records(t, "lost executions not taken over yet, their rows are locked")
	assert.Truef(t, len(records) == 1 && records[0]["worker"] == "test" && records[0]["executions"] == 1.0 &&
		strings.Contains(fmt.Sprint(records[0]["open_transactions"]), fmt.Sprintf("pid %d of ", pid)),
		"after two sweeps the log has %v, want once, with the worker and session %d", records, pid)
	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, p.Sweep(t.Context()))
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null`))
}

// A process that starts after an outage finds the workers from before. It logs nothing about them until it has swept.
func TestFirstSweepLogsNoStuckExecutions(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	l := &logLines{}
	p := newEngine(t, pool, nil, l.capture)
	mustClaim(t, pool, insertPending(t, pool), newWorker(t, pool))
	pgtest.Exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 hour'`)
	err := p.PutSchedule(t.Context(), executions.Schedule{
		Name: "first", Flow: "heartbeat", Surface: trace.Heartbeat,
		Cron: "@every 1h", Timezone: "UTC",
	})
	require.NoError(t, err)
	require.NoError(t, p.Sweep(t.Context()))
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_executions where claimed_by is not null`))
	records := l.Records(t, "lost executions not taken over yet, their rows are locked")
	assert.Truef(t, len(records) == 0, "the log has %v", records)
}

func noop(context.Context) (executions.Result, error) { return executions.Result{}, nil }

func everySchedule(spec string) executions.Schedule {
	return executions.Schedule{Name: "pulse", Flow: "flow", Surface: trace.Heartbeat, Cron: spec, Timezone: "UTC"}
}

// The sweep ticks while River's leader is dead.
func TestSweepTicksWithoutRiverLeader(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into river.river_leader (name, leader_id, elected_at, expires_at)
		values ('default', 'dead', now(), now() + interval '1 hour')`)
	p := startEngine(t, pool, flowMap(noop))
	require.NoError(t, p.PutSchedule(t.Context(), everySchedule("@every 1s")))
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[int](t, pool, `select count(*) from agent_executions where status = 'completed'`) >= 2
	}, "two ticks have run")
	assert.Equal(t, "dead", pgtest.Value[string](t, pool, `select leader_id from river.river_leader`))
}

func TestConcurrentTicksStartOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(noop))
	require.NoError(t, p.PutSchedule(t.Context(), everySchedule("*/30 * * * *")))
	for round := range 5 {
		pgtest.Exec(t, pool, `update agent_schedules set next_run_at = clock_timestamp() - interval '9 hours'`)
		var group errgroup.Group
		for range 8 {
			group.Go(func() error { return p.tick(t.Context()) })
		}
		require.NoError(t, group.Wait())
		require.Equal(t, round+1, pgtest.Value[int](t, pool, `select count(*) from agent_executions`))
		assert.True(t, pgtest.Value[bool](t, pool, `select next_run_at > clock_timestamp()
			and last_run_at < clock_timestamp() - interval '8 hours' from agent_schedules`), "the schedule did not move on")
	}
}

// A worker outside may have used the key of a due time. The schedule then starts its flow a minute later.
func TestScheduleRunsAfterWorkerUsedItsKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(noop))
	require.NoError(t, p.PutSchedule(t.Context(), everySchedule("@every 1h")))
	pgtest.Exec(t, pool, `update agent_schedules set next_run_at = clock_timestamp() - interval '1 second'`)
	due := pgtest.Value[time.Time](t, pool, `select next_run_at from agent_schedules`)
	id := pgtest.Value[string](t, pool, `select start_agent_execution('external', '{}', $1)::text`,
		"pulse "+due.UTC().Format(time.RFC3339Nano))
	assert.ErrorContains(t, p.tick(t.Context()), "started execution "+id+" of flow external")
	assert.True(t, pgtest.Value[bool](t, pool, `
		select next_run_at < clock_timestamp() + interval '2 minutes' from agent_schedules`), "the schedule is not due in a minute")
	pgtest.Exec(t, pool, `update agent_schedules set next_run_at = clock_timestamp() - interval '1 second'`)
	require.NoError(t, p.tick(t.Context()))
	pgtest.Equal(t, pool, 1, `select count(*)::int from agent_executions where flow = 'flow'`)
}

func TestPutScheduleKeepsNextRun(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(noop))
	next := func() time.Time { return pgtest.Value[time.Time](t, pool, `select next_run_at from agent_schedules`) }
	put := func(s executions.Schedule) {
		t.Helper()
		require.NoError(t, p.PutSchedule(t.Context(), s))
	}
	put(everySchedule("@every 1h"))
	pgtest.Exec(t, pool, `update agent_schedules set next_run_at = clock_timestamp() - interval '1 minute'`)
	due := next()
	put(everySchedule("@every 1h"))
	if !next().Equal(due) {
		t.Errorf("due %s, then %s", due, next())
	}
	put(everySchedule("@every 2h"))
	left := time.Until(next())
	assert.Truef(t, left >= 119*time.Minute && left <= 121*time.Minute, "another interval is due in %s", left)
}

func TestPutScheduleRejectsInvalidFields(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, nil)
	for says, s := range map[string]executions.Schedule{
		"minute":      everySchedule("61 * * * *"),
		"5":           everySchedule("* * *"),
		"Mars/Base":   {Name: "pulse", Flow: "flow", Surface: trace.Heartbeat, Cron: "* * * * *", Timezone: "Mars/Base"},
		"name":        {Flow: "flow", Surface: trace.Heartbeat, Cron: "* * * * *", Timezone: "UTC"},
		"flow":        {Name: "pulse", Surface: trace.Heartbeat, Cron: "* * * * *", Timezone: "UTC"},
		`and "radio"`: {Name: "pulse", Flow: "flow", Surface: "radio", Cron: "* * * * *", Timezone: "UTC"},
	} {
		assert.ErrorContains(t, p.PutSchedule(t.Context(), s), says)
	}
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_schedules`))
}

func TestInvalidScheduleDelaysNoOther(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, nil)
	for name, change := range map[string]string{
		"bad cron": `cron = '* *'`, "bad zone": `timezone = 'Mars/Base'`, "bad surface": `surface = 'radio'`,
		"good": `name = 'good'`,
	} {
		pgtest.Exec(t, pool, `
			insert into agent_schedules (name, flow, surface, cron, timezone, next_run_at)
			values (@name, 'flow', 'heartbeat', '* * * * *', 'UTC',
			  clock_timestamp() - interval '1 minute')`, postgres.Strict{"name": name})
		pgtest.Exec(t, pool, `update agent_schedules set `+change+` where name = @name`, postgres.Strict{"name": name})
	}
	err := p.tick(t.Context())
	assert.Truef(t, err != nil && strings.Count(err.Error(), "schedule bad") == 3,
		"the error does not name the three: %v", err)
	assert.Equal(t, "good", pgtest.Value[string](t, pool,
		`select string_agg(split_part(dedupe_key, ' ', 1), ' ') from agent_executions`))
}
