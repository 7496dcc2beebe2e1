package soak_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// validRows is a small correct history: a turn of a visitor, one of the admin, a heartbeat, and a delivery whose event
// started the run of an automation. Ids are short names; see id.
const validRows = `
	insert into agent_executions (id, trace_id, surface, flow, status, completed_at, thread_id, input, result) values
	  (id('chat'), tr('ch', 1), 'chat', 'chat', 'completed', now(), 't1', '{}', '{}'),
	  (id('op'), tr('op', 1), 'operate', 'operate', 'completed', now(), null, '{}', '{}'),
	  (id('hb'), tr('hb', 1), 'heartbeat', 'heartbeat', 'completed', now(), null, '{}', '{"skipped": ""}'),
	  (id('wh'), tr('wh', 1), 'webhook', 'webhook', 'completed', now(), null, '{}', '{}'),
	  (id('au'), tr('wh', 1), 'webhook', 'automation', 'completed', now(), null, jsonb_build_object('run_id', id('run')),
	    '{}');
	insert into agent_activity (id, trace_id, execution_id, kind, surface, skill_name, status, input, output, token_usage,
	  cost_usd, purpose, lane, created_at, finished_at)
	select lanekeeper.agent_uuid7(now() - interval '1 minute' + at * interval '1 second'), x.trace_id, x.id, kind,
	       x.surface, skill, 'success', args, out,
	       case when kind = 'model' then '{"total_tokens": 10}'::jsonb else '{}' end, case when kind = 'model' then 0.5
	         else 0 end, purpose, '',
	       now() - interval '1 minute' + at * interval '1 second',
	         now() - interval '1 minute' + (at + 0.5) * interval '1 second'
	  from (values
	    ('chat', 1, 'model', 'model_call', '{}'::jsonb, '{}'::jsonb, ''),
	    ('chat', 2, 'call', 'look_up', '{}', '{}', ''),
	    ('op', 1, 'model', 'model_call', '{}', '{}', ''),
	    ('op', 2, 'call', 'memory_write', '{"key": "counter"}', '{"revision": 1}', ''),
	    ('hb', 1, 'phase', 'self_heal', '{}', '{}', ''), ('hb', 2, 'phase', 'follow_through', '{}', '{}', ''),
	    ('hb', 3, 'phase', 'advance_plan', '{}', '{}', ''), ('hb', 4, 'phase', 'run_automations', '{}', '{}', ''),
	    ('hb', 5, 'phase', 'reflect', '{}', '{}', ''), ('hb', 6, 'phase', 'save_memories', '{}', '{}', ''),
	    ('hb', 3, 'call', 'advance_step', jsonb_build_object('report', jsonb_build_object('step_id', id('step'))),
	      '{"change": "complete step"}', ''),
	    ('au', 1, 'model', 'model_call', '{}', '{}', 'automation settle'),
	      ('au', 2, 'call', 'ship', '{}', '{}', 'automation settle'),
	    ('au', 1, 'phase', 'run_automation', '{}', jsonb_build_object('run', id('run')), '')) v (name, at, kind, skill,
	      args, out, purpose)
	  join agent_executions x on x.id = id(v.name);
	insert into agent_memory (category, key, value, revision) values ('soak', 'counter', '1', 1);
	insert into agent_objectives (id, name, goal) values (id('goal'), 'stock', 'Know it.');
	insert into agent_objective_steps (id, objective_id, position, title, status, started_at)
	  values (id('step'), id('goal'), 1, 'Count', 'done', now() - interval '1 hour');
	insert into agent_objective_evidence (step_id, activity_id) select id('step'), id from agent_activity
	  where skill_name = 'look_up';
	insert into agent_automations (id, name, trigger, event, prompt)
	  values (id('settle'), 'settle', 'event', 'EVENT_COMPLETED', 'Ship.');
	insert into agent_automations (id, name, cron, skill_name) values (id('pulse'), 'pulse', '@daily', 'pulse');
	insert into agent_events (id, event, key) values (id('event'), 'EVENT_COMPLETED', 'shop-1');
	insert into agent_automation_runs (id, automation_id, cause, scheduled_for, event_id, payload, status, execution_id,
	  output) values
	  (id('run'), id('settle'), 'event', now(), id('event'), '{"data": {"type": "order.paid", "n": 1}}', 'success',
	   id('au'), '{"text": "Shipped order 1."}');
	insert into agent_threads (id, channel, next_seq) values ('t1', 'chat', 3);
	insert into agent_messages (thread_id, seq, turn, role, content, channel, execution_id, status) values
	  ('t1', 1, 1, 'user', 'Here is question 1 of thread t1.', 'chat', id('chat'), 'received'),
	  ('t1', 2, 1, 'assistant', 'This is the answer to question 1 of thread t1.', 'chat', id('chat'), 'sent');
	insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, attempts, repeats, body,
	  body_sha256)
	values ('shop', 'msg_1', tr('wh', 1), tr('wh', 1), 'done', 1, 1, '', '');
	insert into agent_budgets (scope, tokens, cost_usd) values ('day:2026-01-01', 30, 1.5),
	  ('day:2026-01-01:chat', 10, 0.5),
	  ('day:2026-01-01:operate', 10, 0.5), ('day:2026-01-01:webhook', 10, 0.5), ('run:' || tr('ch', 1), 10, 0.5);
	insert into soak.calls (skill, key, body) values ('look_up', 'k1', '{}'), ('ship', 'k2', '{"order": 1}');
	insert into soak.deliveries (id, n, type, status) values ('msg_1', 1, 'order.paid', 202),
	  ('msg_1', 1, 'order.paid', 200);
	insert into soak.answers (thread, question, answer) values ('t1', 1, 'This is the answer to question 1 of thread t1.');
	insert into soak.operated (n, trace_id, answer) values (1, tr('op', 1), 'Counted in turn 1.');
	insert into soak.lanes (lane, owner, token) values ('heartbeat', id('hb') || '#1', 1),
	  ('thread:t1', id('chat') || '#1', 1)`

// helperFunctions name objects in innocent and in planted rows: id makes a uuid from a name, tr a trace from a number.
const helperFunctions = `
	create function id(name text) returns uuid language sql immutable as $$ select md5(name)::uuid $$;
	create function tr(prefix text, n int) returns text language sql immutable as $$
	  select prefix || '_' || lpad(n::text, 26, '0') $$`

// violations are rows that each violate one check. Every check has some.
var violations = map[string][]string{
	"no lost update: the counter is what was counted": {
		`update agent_memory set value = '5'`, `update agent_memory set revision = 3`, `delete from agent_memory`,
	},
	"no lost update: a revision is written once": {
		`insert into agent_activity (trace_id, execution_id, skill_name, input, output)
			values (tr('op', 1), id('op'), 'memory_write', '{"key": "counter"}', '{"revision": 1}')`,
	},
	"no lost update: a step that is reported has its evidence": {
		`delete from agent_objective_evidence`,
		`insert into agent_activity (trace_id, skill_name, input) select tr('hb', 1), 'advance_step', input
			from agent_activity where skill_name = 'advance_step'`,
	},
	"one run for each event and automation": {
		`delete from agent_automation_runs`,
		`insert into agent_events (event, key) values ('EVENT_COMPLETED', 'shop-2')`,
	},
	"a run does what its condition says": {
		`update agent_automation_runs set payload = '{"data": {"type": "noise"}}'`,
		`update agent_automation_runs set status = 'skipped'`, `update agent_automation_runs set status = 'dead'`,
	},
	"a run is made once": {
		`insert into agent_activity (trace_id, skill_name, output)
			values (tr('hb', 1), 'run_automation', jsonb_build_object('run', id('run')))`,
		`delete from agent_activity where skill_name = 'run_automation'`,
		`update agent_automation_runs set attempt = 2`,
		`drop index agent_automation_runs_times;
		 insert into agent_automation_runs (automation_id, scheduled_for, status) select id('pulse'), '2026-01-01', 'success'
		   from generate_series(1, 2)`,
	},
	"an order that was paid is shipped once": {
		`insert into soak.calls (skill, key, body) values ('ship', 'k3', '{"order": 1}')`,
		`insert into soak.calls (skill, key, body) values ('ship', 'k3', '{"order": 2}')`,
		`delete from soak.calls where skill = 'ship'`,
	},
	"a run's output is that of its event": {
		`update agent_automation_runs set output = '{"text": "Shipped order 2."}'`,
		`update agent_automation_runs set output = null`,
	},
	"a call that is logged was made, and no other": {
		`insert into soak.calls (skill, key, body) values ('restock', 'k3', '{}')`,
		`insert into soak.calls (skill, key, body) values ('look_up', 'k1', '{}')`,
		`delete from soak.calls where skill = 'look_up'`,
	},
	"a skill's automation calls it once a run": {
		`insert into soak.calls (skill, key, body) values ('pulse', 'k3', '{}')`,
		`insert into agent_automation_runs (automation_id, scheduled_for, status) values (id('pulse'), now(), 'success')`,
	},
	"no overlap within a lane": {
		overlapping("heartbeat", "heartbeat", "null", "''", "''"), overlapping("operate", "operate", "null", "''", "''"),
		overlapping("chat", "chat", "'t1'", "''", "''"),
		overlapping("webhook", "automation", "null", "'automation settle'", "''"),
		overlapping("webhook", "other", "null", "''", "'objective:x'"),
	},
	"a fencing token is given once": {`insert into soak.lanes (lane, owner, token) values ('heartbeat', 'somebody', 1)`},
	"who works holds the lane": {
		`delete from soak.lanes where lane = 'heartbeat'`,
		`update soak.lanes set owner = 'x' where lane = 'thread:t1'`,
	},
	"every activity has a trace that something began": {
		`update agent_activity set trace_id = 'none' where skill_name = 'ship'`,
		`insert into agent_activity (trace_id, skill_name) values (tr('hb', 9), 'x')`,
	},
	"an activity has its execution's trace": {
		`update agent_activity set trace_id = tr('ch', 1) where skill_name = 'ship'`,
		`insert into agent_activity (trace_id, execution_id, skill_name) values (tr('hb', 1), id('nobody'), 'x')`,
	},
	"every trace is complete": {
		`update agent_activity set status = 'running' where skill_name = 'ship'`,
		`update agent_activity set status = 'unknown' where skill_name = 'ship'`,
		`update agent_activity set finished_at = null where skill_name = 'ship'`,
		`insert into agent_activity_open (activity_id, kind) values (id('x'), 'call')`,
		`update agent_executions set status = 'running' where id = id('op')`,
		`update agent_executions set status = 'failed' where id = id('op')`,
		`insert into agent_locks (lane, locked_by, fencing_token, expires_at) values ('x', 'somebody', 1, now())`,
		`insert into agent_message_drafts (execution_id, claim, content) values (id('chat'), 1, 'So')`,
	},
	"a trace shows what was done": {
		`delete from agent_activity where kind = 'model' and surface = 'chat'`,
		`delete from agent_activity where kind = 'model' and surface = 'webhook'`,
		`update agent_activity set status = 'error' where kind = 'model' and surface = 'operate'`,
		`delete from agent_activity where skill_name = 'reflect'`,
		`insert into agent_activity (trace_id, execution_id, kind, skill_name)
			values (tr('hb', 1), id('hb'), 'phase', 'reflect')`,
	},
	"each question is answered once, in order": {
		`delete from agent_messages where role = 'assistant'`,
		`insert into agent_messages (thread_id, seq, turn, role, content, channel, execution_id, status)
			values ('t1', 3, 1, 'assistant', 'Again.', 'chat', id('chat'), 'sent')`,
		`update agent_messages set content = 'This is the answer to question 2 of thread t1.' where role = 'assistant'`,
		`update agent_messages set interrupted = true where role = 'assistant'`,
		`insert into agent_messages (thread_id, seq, turn, role, content, channel, status)
			values ('t1', 3, 3, 'assistant', 'a', 'chat', 'sent'), ('t1', 4, 2, 'assistant', 'b', 'chat', 'sent')`,
	},
	"what a client got is what is stored": {
		`update soak.answers set answer = 'Something else.'`,
		`delete from agent_messages where role = 'assistant'`,
	},
	"an admin's answer is that of the turn": {
		`update soak.operated set answer = 'Counted in turn 2.'`, `delete from soak.operated`,
	},
	"each delivery is handled once": {
		`update agent_webhook_deliveries set status = 'dead'`, `update agent_webhook_deliveries set repeats = 0`,
		`delete from agent_webhook_deliveries`,
		`update agent_webhook_deliveries set attempts = 2`, `update soak.deliveries set status = 202`,
		`delete from agent_events`,
		`insert into agent_events (event, key) values ('EVENT_COMPLETED', 'shop-1')`,
		`insert into agent_executions (trace_id, surface, flow, status)
			values (tr('wh', 1), 'webhook', 'webhook', 'completed')`,
		`delete from soak.deliveries`,
	},
	"budgets are the sum of the model's calls": {
		`update agent_budgets set tokens = 29 where scope = 'day:2026-01-01'`,
		`update agent_budgets set cost_usd = 0.6 where scope = 'day:2026-01-01:chat'`,
		`delete from agent_budgets where scope = 'day:2026-01-01:operate'`,
		`insert into agent_activity (trace_id, kind, surface, skill_name, token_usage)
			values (tr('hb', 1), 'model', 'heartbeat', 'model_call', '{"total_tokens": 1}')`,
	},
	"nothing stays reserved": {
		`update agent_budgets set reserved_tokens = 1 where scope like 'run:%'`,
		`update agent_budgets set unsettled = 1 where scope like 'run:%'`,
		`insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd)
			values (id('op'), 's', '{}', 1, 1, 0)`,
	},
	"a run's budget is the sum of its calls": {`update agent_budgets set tokens = 11 where scope like 'run:%'`},
}

// overlapping returns two executions of one lane with overlapping calls, one within the other.
func overlapping(surface, flow, thread, purpose, lane string) string {
	return `
		insert into agent_executions (id, trace_id, surface, flow, status, completed_at, thread_id, result)
		select id(n), tr('fl', 1), '` + surface + `', '` + flow + `', 'completed', now(), ` + thread + `, '{}' from unnest(array['one', 'two']) n;
		insert into agent_activity (trace_id, execution_id, skill_name, purpose, lane, created_at, finished_at) values
		  (tr('fl', 1), id('one'), 'x', ` + purpose + `, ` + lane + `, now(), now() + interval '3 seconds'),
		  (tr('fl', 1), id('two'), 'y', ` + purpose + `, ` + lane + `, now() + interval '1 second', now() + interval '2 seconds')`
}

// TestEveryCheckCanFail plants the violations of each check. Without them, no check may find anything.
func TestEveryCheckCanFail(t *testing.T) {
	db := pgtest.DB(t)
	for name := range violations {
		_, ok := checks[name]
		assert.Truef(t, ok, "there is no check %q", name)
	}
	for _, sql := range []string{factTables, helperFunctions} {
		pgtest.Exec(t, db, sql)
	}
	for _, name := range slices.Sorted(maps.Keys(checks)) {
		assert.Truef(t, len(violations[name]) > 0, "nothing shows that %q can fail", name)
		for _, sql := range violations[name] {
			withValidRows(t, db, func(tx pgx.Tx) {
				found := pgtest.Column[string](t, tx, checks[name])
				assert.Truef(t, len(found) == 0, "%s: finds fault with innocent rows: %q", name, found)
				pgtest.Exec(t, tx, sql)
				assert.Truef(t, len(pgtest.Column[string](t, tx, checks[name])) > 0, "%s: finds nothing after %s", name, sql)
			})
		}
	}
}

// withValidRows calls f in a transaction with the innocent rows and without triggers, and rolls it back.
func withValidRows(t *testing.T, db postgres.Beginner, f func(tx pgx.Tx)) {
	t.Helper()
	tx, err := db.Begin(t.Context())
	require.NoError(t, err)
	defer func() {
		assert.NoError(t, tx.Rollback(t.Context()))
	}()
	for _, sql := range []string{`set local session_replication_role = replica`, validRows} {
		pgtest.Exec(t, tx, sql)
	}
	f(tx)
}
