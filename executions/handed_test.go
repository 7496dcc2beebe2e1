package executions_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The record that comes with the claim is the one that is stored: of the wait alone, and with what was recorded before it.
func TestTheRecordThatIsHandedOverIsTheOneThatIsStored(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	me := worker(t, pool)
	for _, record := range []struct {
		before string
		steps  int
	}{
		{"", 1},
		{"early", 2},
		{"event", 1}, // whatever stands under the name of the wait stays
	} {
		id := parked(t, pool, "k", "flow", 2)
		if record.before != "" {
			exec(t, pool, `
				insert into agent_checkpoints (execution_id, step, claim, fingerprint, failed, output)
				select id, @step, claim, 'print', true, '{"a": 1}' from agent_executions where id = @id`, postgres.Strict{"id": id, "step": record.before})
		}
		var steps []string
		var answered, stored string
		err := pool.QueryRow(t.Context(), `
			select steps, jsonb_build_array(claims, prints, failed, outputs, times)::text
			  from lanekeeper.deliver_agent_event('EVENT_COMPLETED', 'k', '{"b": 2}', null, @worker, '{background}')`,
			postgres.Strict{"worker": me}).Scan(&steps, &answered)
		if err != nil {
			t.Fatal(err)
		}
		err = pool.QueryRow(t.Context(), `
			select jsonb_build_array(jsonb_agg(c.claim order by s.n), jsonb_agg(c.fingerprint order by s.n), jsonb_agg(c.failed order by s.n),
			                         jsonb_agg(c.output order by s.n), jsonb_agg(c.created_at order by s.n))::text
			  from unnest(@steps::text[]) with ordinality s (step, n)
			  left join agent_checkpoints c on c.execution_id = @id and c.step = s.step`,
			postgres.Strict{"steps": steps, "id": id}).Scan(&stored)
		if err != nil {
			t.Fatal(err)
		}
		if len(steps) != record.steps || answered != stored {
			t.Errorf("after %q: steps %q were answered as %s, stored is %s", record.before, steps, answered, stored)
		}
		exec(t, pool, `delete from agent_executions`)
	}
}

// meanwhile lets an event wait for the row of the execution that waits for it, changes something, and lets it go on.
func meanwhile(t *testing.T, pool *pgxpool.Pool, worker, id string, change func(tx pgx.Tx)) []handed {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	exec(t, tx, `select from agent_executions where id = @id for update`, postgres.Strict{"id": id})
	done := make(chan []handed, 1)
	go func() {
		defer close(done) // also when it fails
		done <- hand(t, pool, worker, 2, one, "k")
	}()
	pgtest.Eventually(t, patience, func() bool {
		return value[bool](t, pool, `
			select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like '%deliver_agent_event%')`)
	}, "the event waits")
	change(tx)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	return <-done
}

// What decides is looked at when the row is locked, not before.
func TestWhatHappensWhileAnEventWaitsForItsRowCounts(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change  func(t *testing.T, tx pgx.Tx, id, worker string)
		status  executions.Status
		claimed bool
	}{
		"nothing": {func(*testing.T, pgx.Tx, string, string) {}, executions.Running, true},
		"the lease of the worker ends": {func(t *testing.T, tx pgx.Tx, _, worker string) {
			exec(t, tx, `update agent_workers set expires_at = clock_timestamp() where id = @id`, postgres.Strict{"id": worker})
		}, executions.Running, false},
		"a limit is set": {func(t *testing.T, tx pgx.Tx, _, _ string) {
			exec(t, tx, `insert into agent_limits values ('flow', 'flow', 9)`)
		}, executions.Running, false},
		"it gets a lane": {func(t *testing.T, tx pgx.Tx, id, _ string) {
			exec(t, tx, `
				insert into agent_locks (lane, locked_by, fencing_token, expires_at, parked, execution_id)
				values ('thread:t', @owner, 1, '9000-01-01', true, @id)`, postgres.Strict{"owner": id + "#2", "id": id})
		}, executions.Running, true},
		"its time is over": {func(t *testing.T, tx pgx.Tx, id, _ string) {
			exec(t, tx, `select lanekeeper.resume_agent_execution(@id, 1, '{"timed_out": true}')`, postgres.Strict{"id": id})
		}, executions.Running, false},
		"it is cancelled": {func(t *testing.T, tx pgx.Tx, id, _ string) {
			exec(t, tx, `update agent_executions set status = 'cancelled' where id = @id`, postgres.Strict{"id": id})
		}, executions.Cancelled, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			me, id := worker(t, pool), parked(t, pool, "k", "flow", 2)
			got := meanwhile(t, pool, me, id, func(tx pgx.Tx) { c.change(t, tx, id, me) })
			x := get(t, pool, id)
			if len(got) != 1 || (got[0].Claimed != nil) != c.claimed || (x.ClaimedBy != nil) != c.claimed || x.Status != c.status {
				t.Errorf("answered %+v, it is %s and claimed by %q", got, x.Status, str(x.ClaimedBy))
			}
			taken := value[bool](t, pool, `select consumed_by is not null from agent_events where key = 'k'`)
			if mine := name != "its time is over" && name != "it is cancelled"; taken != mine || (got[0].ExecutionID != nil) != mine {
				t.Errorf("the event is taken %t, answered %+v", taken, got)
			}
			if n := value[int](t, pool, `select count(*) from agent_locks where execution_id = @id and parked`, postgres.Strict{"id": id}); n > 0 {
				t.Error("the lane did not go on with it")
			}
		})
	}
}

// Who raised an event is noted for that event, whatever it wakes, and for no other of the transaction.
func TestTheRaiserOfAnEventIsNotedForItAlone(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for range 2 {
		parked(t, pool, "two", "flow", 2)
	}
	parked(t, pool, "one", "flow", 2)
	request := value[string](t, pool, `select lanekeeper.agent_uuid7()::text`)
	for name, event := range map[string][2]string{
		"nobody waits":  {"EVENT_COMPLETED", "none"},
		"one waits":     {"EVENT_COMPLETED", "one"},
		"two wait":      {"EVENT_COMPLETED", "two"},
		"a test's kind": {"AGENT_COMPLETED", request},
	} {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var ids []string
		for i, raiser := range []string{"trace fl_a", ""} {
			ids = append(ids, value[string](t, tx, `
				with by as materialized (select set_config('lanekeeper.raised_by', @raiser, true) as raiser)
				select event_id::text from by cross join lateral lanekeeper.deliver_agent_event(case when by.raiser is not null then @event end, @key,
				       '{"status": "completed", "result_type": "success"}', @id) limit 1`,
				postgres.Strict{"event": event[0], "key": event[1], "id": fmt.Sprint(name, i), "raiser": raiser}))
		}
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i, want := range []string{"trace fl_a", ""} {
			got := value[string](t, pool, `select coalesce(max(cause), '') from agent_links where kind = 'raised' and effect = 'event ' || @id`, postgres.Strict{"id": ids[i]})
			if got != want {
				t.Errorf("%s: event %d was raised by %q, want %q", name, i, got, want)
			}
		}
	}
}
