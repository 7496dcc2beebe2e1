package executions_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// While somebody holds the row of a timer that is due, sweeps come less often; when it is free, the next one is no longer waited for.
func TestATimerThatASweepLeavesIsNotSweptForAllTheTime(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, flow(nothing))
	for range 2 {
		p.begin(t, "flow")
	}
	exec(t, pool, `update agent_executions set status = 'running'`)
	exec(t, pool, `
		update agent_executions set status = 'waiting', waiting_for = 'delay', waiting_step = 'w',
		       waiting_until = clock_timestamp() - row_number * interval '1 hour'
		  from (select id as which, row_number() over (order by id) from agent_executions) n where id = which`)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	exec(t, tx, `select from agent_executions for update`)
	sweep := func() {
		t.Helper()
		if err := p.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	sweep()
	if got := p.SweepPause(); got != time.Millisecond {
		t.Errorf("sleeps for %s after the first sweep that left it", got)
	}
	for range 10 {
		sweep()
	}
	if got := p.SweepPause(); got != 64*time.Millisecond {
		t.Errorf("sleeps for %s after many sweeps that left it", got)
	}
	exec(t, tx, `update agent_executions set waiting_until = clock_timestamp() + interval '1 day' where waiting_until = (select min(waiting_until) from agent_executions)`)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	sweep()
	if got := p.SweepPause(); got < time.Minute {
		t.Errorf("sleeps for %s though nothing is due", got)
	}
}

// A lost worker's executions are taken from it all at once, and each goes on, or ends, by its own rules.
func TestWhatALostWorkerHad(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	lost, other := worker(t, pool), worker(t, pool)
	has := func(by, set string) string {
		id := pending(t, pool)
		mustClaim(t, pool, id, by)
		exec(t, pool, `update agent_executions set `+set+` where id = @id`, postgres.Strict{"id": id})
		return id
	}
	fresh, again := has(lost, `attempt = 0`), has(lost, `attempt = 3`)
	recorded, spent, spentButRecorded := has(lost, `attempt = 3`), has(lost, `attempt = 4`), has(lost, `attempt = 4`)
	fails, once, locked, others := has(lost, `on_lost = 'fail'`), has(lost, `max_attempts = 1`), has(lost, `attempt = 0`), has(other, `attempt = 0`)
	for _, id := range []string{recorded, spentButRecorded} {
		exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim, output) values (@id, 'step', 1, '1')`, postgres.Strict{"id": id})
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	exec(t, tx, `select from agent_executions where id = @id for update`, postgres.Strict{"id": locked})
	if n := value[int](t, pool, `select lanekeeper.lose_agent_claims(@id)`, postgres.Strict{"id": lost}); n != 7 {
		t.Errorf("%d were lost", n)
	}
	const gone = "running, nobody's, claim 2, wake 1, noted lost, attempt "
	const ended = "failed, nobody's, claim 2, wake 0, noted lost, attempt "
	const kept = "running, somebody's, claim 1, wake 0, noted , attempt "
	for id, want := range map[string]string{
		fresh: gone + "1: ", again: gone + "4: ", recorded: gone + "1: ", spentButRecorded: gone + "1: ",
		spent: ended + "5: given up after 5 workers were lost without a checkpoint between",
		fails: ended + "1: the worker's lease expired", once: ended + "1: given up after 1 workers were lost without a checkpoint between",
		locked: kept + "0: ", others: kept + "0: ",
	} {
		got := value[string](t, pool, `
			select concat(x.status, case when x.claimed_by is null then ', nobody''s' else ', somebody''s' end, ', claim ', x.claim, ', wake ', x.wake,
			       ', noted ', (select string_agg(c.how, ' ') from agent_claims_lost c where c.execution_id = x.id and c.claim = 1 and c.worker_name <> ''),
			       ', attempt ', x.attempt, ': ', x.error_message)
			  from agent_executions x where x.id = @id`, postgres.Strict{"id": id})
		if got != want {
			t.Errorf("%s\nwant %s", got, want)
		}
	}
}

// lostWork is what a worker has that is dead: twenty executions, of which every fourth ends with its worker.
func lostWork(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	dead := worker(t, pool)
	for i := range 20 {
		id := pending(t, pool)
		mustClaim(t, pool, id, dead)
		if i%4 == 0 {
			exec(t, pool, `update agent_executions set on_lost = 'fail' where id = @id`, postgres.Strict{"id": id})
		}
	}
	exec(t, pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
}

// became counts what has become of the work of a dead worker.
const became = `
	select format('%s its still, %s ready, %s ended, %s told, %s noted', count(*) filter (where x.claim = 1 and x.claimed_by is not null),
	         count(*) filter (where x.status = 'running' and x.claim = 2 and x.wake = 1 and x.attempt = 1 and x.claimed_by is null),
	         count(*) filter (where x.status = 'failed' and x.claim = 2 and x.completed_at is not null),
	         (select count(*) from agent_events where event = 'AGENT_COMPLETED'), (select count(*) from agent_claims_lost))
	  from agent_executions x`

// However many look at once, what a dead worker had is taken from it once.
func TestManySweepsTakeLostWorkOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	lostWork(t, pool)
	p := prepare(t, pool, flow(nothing))
	barrier := held(t, pool) // lets them all begin, and meet
	exec(t, barrier, `lock table agent_workers in access exclusive mode`)
	var group errgroup.Group
	late := func(err error) error { // on a slow machine one gives up its wait for the others: the next sweep takes what is left
		if postgres.Locked(err) {
			return nil
		}
		return err
	}
	for range 4 {
		group.Go(func() error { return late(p.Sweep(t.Context())) })
		group.Go(func() error { // as who asks for the run of a lost worker does
			_, err := pool.Exec(t.Context(), `select lanekeeper.lose_agent_claims(w.id) from agent_workers w`)
			return late(err)
		})
	}
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, pool, `
			select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`) >= 4
	}, "several sweep")
	if err := barrier.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	if err := p.Sweep(t.Context()); err != nil {
		t.Error(err)
	}
	if got := value[string](t, pool, became); got != "0 its still, 15 ready, 5 ended, 5 told, 20 noted" {
		t.Error(got)
	}
}

// A sweep whose connection is lost in the middle has taken nothing, and the next one takes all.
func TestASweepThatIsCutOffHasTakenNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	lostWork(t, pool)
	p := prepare(t, pool, flow(nothing))
	exec(t, pool, `
		create function stall() returns trigger language plpgsql as 'begin perform pg_advisory_xact_lock(42); return null; end'`)
	exec(t, pool, `create trigger stall after insert on agent_claims_lost for each statement execute function stall()`)
	stall := held(t, pool)
	exec(t, stall, `select pg_advisory_xact_lock(42)`)
	var group errgroup.Group
	group.Go(func() error { return p.Sweep(t.Context()) })
	pgtest.Eventually(t, patience, func() bool {
		return value[bool](t, pool, `
			select coalesce(bool_or(pg_terminate_backend(pid)), false) from pg_stat_activity
			 where datname = current_database() and wait_event = 'advisory'`)
	}, "a sweep is cut off")
	if err := group.Wait(); err == nil {
		t.Error("the sweep does not say that it was cut off")
	}
	if got := value[string](t, pool, became); got != "20 its still, 0 ready, 0 ended, 0 told, 0 noted" {
		t.Error(got)
	}
	if err := stall.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, patience, func() bool { // the server frees the locks of the one that was cut off after it has told it
		if err := p.Sweep(t.Context()); err != nil {
			t.Error(err)
		}
		return value[string](t, pool, became) == "0 its still, 15 ready, 5 ended, 5 told, 20 noted"
	}, "the next one takes all, once")
}
