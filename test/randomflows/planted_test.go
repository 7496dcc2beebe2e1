package randomflows_test

import (
	"encoding/json"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// validRows is a correct flow and its child. Ids are made from short names.
const validRows = `
	create function pg_temp.id(name text) returns uuid language sql immutable as $$ select md5(name)::uuid $$;
	insert into agent_executions (id, trace_id, surface, flow, status, parent_id, claim, input, result, variables,
	  completed_at)
	select pg_temp.id(v.name), 'fl_planted', 'flow', 'drawn', 'completed', pg_temp.id(v.parent), 3,
	       jsonb_build_object('seed', v.seed), to_jsonb(v.value), v.variables, now()
	  from (values ('root', null, '1', 10, '{"value": 3}'::jsonb), ('child', 'root', '2', 20, '{}')) v (name, parent, seed,
	    value, variables);
	insert into proof.expected values ('1', true, 10, '{"value": 3}', 2, 1, 2, 1), ('2', false, 20, '{}', 0, 0, 0, 0);
	insert into proof.effects values (pg_temp.id('root'), 'a'), (pg_temp.id('root'), 'b');
	insert into proof.calls (kind, execution_id, step, key)
	select v.kind, pg_temp.id('root'), v.step, v.key
	  from (values ('call', 'c', 'k'), ('call', 'c', 'k'), ('once', 'd', 'l')) v (kind, step, key);
	insert into agent_activity (trace_id, execution_id, claim, kind, skill_name, step, status, error_class)
	select 'fl_planted', pg_temp.id('root'), v.claim, 'call', 'once', v.step, v.status, v.class
	  from (values (1, 'd', 'success', ''), (2, 'e', 'unknown', 'interrupted')) v (claim, step, status, class);
	insert into agent_events (event, key, execution_id) select 'AGENT_COMPLETED', id::text, id from agent_executions;
	insert into proof.events values ('came');
	insert into agent_events (id, event, key, consumed_by)
	  values (pg_temp.id('event'), 'EVENT_COMPLETED', 'came', pg_temp.id('root'));
	insert into agent_checkpoints (execution_id, step, claim, output)
	values (pg_temp.id('root'), 'f', 3, jsonb_build_object('event_id', pg_temp.id('event')));
	insert into proof.alone (lane, execution_id, place, at)
	select v.lane, pg_temp.id(v.name), v.place, v.at
	  from (values ('one', 'root', '.1', 'begins'), ('two', 'child', '.1', 'begins'), ('one', 'root', '.1', 'ends'),
	        ('one', 'root', '.2', 'begins'), ('two', 'child', '.1', 'ends'), ('one', 'root', '.2', 'ends')) v (lane, name,
	        place, at)`

// violations are changes that each violate one check. Every check has some.
var violations = map[string][]string{
	"each flow was run once": {
		`delete from agent_executions where id = pg_temp.id('root')`, `update agent_executions set parent_id = null`,
		`insert into agent_executions (trace_id, surface, flow, input)
			values ('fl_planted', 'flow', 'drawn', '{"seed": "1"}')`,
		`insert into agent_executions (trace_id, surface, flow, input)
			values ('fl_planted', 'flow', 'drawn', '{"seed": "3"}')`,
	},
	"each ended with what the model says": {
		`update agent_executions set status = 'failed' where id = pg_temp.id('child')`,
		`update agent_executions set result = '11' where id = pg_temp.id('root')`,
		`update agent_executions set result = null where id = pg_temp.id('root')`,
		`update agent_executions set variables = '{}'`,
	},
	"a parent has its children": {
		`delete from agent_executions where id = pg_temp.id('child')`,
		`insert into agent_executions (trace_id, surface, flow, parent_id, input)
			values ('fl_planted', 'flow', 'drawn', pg_temp.id('root'), '{"seed": "2"}')`,
	},
	"an effect is there once": {
		`insert into proof.effects values (pg_temp.id('root'), 'a')`, `delete from proof.effects where step = 'a'`,
		`update proof.effects set step = 'a'`, `update proof.effects set execution_id = pg_temp.id('child')`,
	},
	"a call that may be repeated was made, under one key": {
		`delete from proof.calls where kind = 'call'`,
		`insert into proof.calls values ('call', pg_temp.id('root'), 'c', 'm')`,
		`insert into proof.calls values ('call', pg_temp.id('child'), 'c', 'm')`,
	},
	"a call that may not be repeated was made once, or is unknown": {
		`insert into proof.calls values ('once', pg_temp.id('root'), 'd', 'l')`,
		`delete from proof.calls where kind = 'once'`,
		`insert into proof.calls values ('once', pg_temp.id('root'), 'e', 'm'), ('once', pg_temp.id('root'), 'f', 'n')`,
		`delete from agent_activity where status = 'unknown'`, `update agent_activity set status = 'error'`,
	},
	"a call is unknown only where a claim was lost": {
		`update agent_activity set claim = 3 where status = 'unknown'`,
		`update agent_activity set error_class = 'timeout' where status = 'unknown'`,
	},
	"each end was told once": {
		`delete from agent_events where execution_id = pg_temp.id('root')`,
		`insert into agent_events (event, key, execution_id)
			values ('AGENT_COMPLETED', pg_temp.id('root')::text, pg_temp.id('root'))`,
	},
	"each event ended one wait": {
		`delete from agent_events where key = 'came'`, `update agent_events set consumed_by = null where key = 'came'`,
		`insert into agent_events (event, key) values ('EVENT_COMPLETED', 'came')`, `delete from agent_checkpoints`,
		`insert into agent_checkpoints (execution_id, step, claim, output) select execution_id, 'g', claim, output
			from agent_checkpoints`,
	},
	"who has a lane is alone in it": {
		`insert into proof.alone (lane, execution_id, place, at) values ('one', pg_temp.id('child'), '.1', 'ends')`,
		`insert into proof.alone (lane, execution_id, place, at) values ('one', pg_temp.id('child'), '.2', 'begins'),
			('one', pg_temp.id('root'), '.3', 'begins')`,
		`update proof.alone set lane = 'one'`,
		`update proof.alone set execution_id = pg_temp.id('child') where lane = 'one' and at = 'begins'`,
		`update proof.alone set place = '.1' where at = 'begins'`, `delete from proof.alone where at = 'ends'`,
	},
	"nothing is left": {
		`update agent_executions set status = 'running', completed_at = null, claimed_by = pg_temp.id('worker')`,
		`update agent_executions set status = 'waiting', completed_at = null, waiting_for = 'event', waiting_key = 'came'`,
		`insert into agent_activity_open (activity_id, kind) values (pg_temp.id('x'), 'call')`,
		`update agent_activity set status = 'running' where step = 'd'`,
		`insert into agent_unpublished_completions values (pg_temp.id('root'))`,
		`insert into agent_locks (lane, locked_by, fencing_token, expires_at) values ('one', 'somebody', 1, now())`,
		`insert into agent_locks (lane, locked_by, fencing_token, expires_at, parked) values ('one', '', 1, now(), true)`,
	},
}

// TestEveryCheckCanFail plants the violations of each check in a correct database.
func TestEveryCheckCanFail(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t, pgtest.URL(t))
	for name := range violations {
		assert.Truef(t, checks[name] != "", "there is no check %q", name)
	}
	for name, check := range checks {
		assert.Truef(t, len(violations[name]) > 0, "nothing shows that %q can fail", name)
		for _, sql := range violations[name] {
			w.plant(name, check, sql)
		}
	}
}

// plant makes a change to the innocent rows, in a transaction without triggers, and rolls it back.
func (w *testEnv) plant(name, check, sql string) {
	w.t.Helper()
	ctx := w.t.Context()
	tx, err := w.pool.Begin(ctx)
	require.NoError(w.t, err)
	defer func() {
		assert.NoError(w.t, tx.Rollback(ctx))
	}()
	change := func(sql string) {
		_, err := tx.Exec(ctx, sql)
		require.Truef(w.t, err == nil, "%v\n%s", err, sql)
	}
	count := func() (n int) {
		err := tx.QueryRow(ctx, `select count(*) from (`+check+`) found`).Scan(&n)
		require.Truef(w.t, err == nil, "%v\n%s", err, check)
		return n
	}
	change(`set local session_replication_role = replica`)
	change(validRows)
	n := count()
	assert.Truef(w.t, n == 0, "%s: finds %d faults in innocent rows", name, n)
	change(sql)
	assert.Truef(w.t, count() != 0, "%s: finds nothing after %s", name, sql)
}

// TestDifferentReplayIsReported replays a flow whose record has a different result for a step.
func TestDifferentReplayIsReported(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t, pgtest.URL(t))
	seed := uint64(1)
	for plan(seed, maxDepth)[0].kind != step {
		seed++
	}
	input := flowInput{Seed: strconv.FormatUint(seed, 10), Depth: maxDepth}
	x, _, err := w.engine.Start(t.Context(), w.pool, executions.Spec{Flow: flowName, Surface: trace.Flow, Input: input})
	require.NoError(t, err)
	name := plan(seed, maxDepth)[0].name
	b := &pgx.Batch{}
	b.Queue(`set local session_replication_role = replica`)
	b.Queue(`insert into agent_checkpoints (execution_id, step, claim, output) values ($1, $2, 1, $3)`, x.ID, name,
		json.RawMessage(`1`))
	b.Queue(
		`update agent_executions set status = 'completed', claim = 1, result = '1', completed_at = now() where id = $1`, x.ID)
	err = pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error { return tx.SendBatch(t.Context(), b).Close() })
	require.NoError(t, err)
	found := w.replays()
	assert.Truef(t, len(found) == 1, "%d replays differ: %q", len(found), found)
}
