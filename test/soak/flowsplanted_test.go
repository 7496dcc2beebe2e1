//go:build unix

package soak_test

import (
	"strconv"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// innocentFlows is a small history in which nothing is wrong: two executions that share a thread, the second with a
// child; one that was cancelled with its child; and one that posts its messages. Ids are short names; see helpers.
const innocentFlows = `
	insert into agent_executions (id, trace_id, surface, flow, status, parent_id, inherits, thread_id, claim, input, completed_at)
	select id(v.name), tr('fl', 1), 'flow', v.flow, v.status, id(v.parent), v.parent is not null, v.thread, 2, jsonb_build_object('n', v.n),
	       '2026-01-01'::timestamptz + v.ended * interval '1 second'
	  from (values ('talk', 'talk', 'completed', null, 't', 1, 20), ('overdue', 'overdue', 'timeout', null, 't', 2, 60), ('brief', 'brief', 'completed', 'overdue', 't', 2, 50),
	    ('stopped', 'stopped', 'cancelled', null, 't', 3, 80), ('stays', 'stays', 'cancelled', 'stopped', 't', 3, 80),
	    ('errands', 'errands', 'completed', null, 'p', 4, 80)) v (name, flow, status, parent, thread, n, ended);
	insert into soak.runs (n, flow, id) values (1, 'talk', id('talk')), (2, 'overdue', id('overdue')), (3, 'stopped', id('stopped')), (4, 'errands', id('errands'));
	insert into soak.ends select id, status from agent_executions;
	insert into agent_threads (id, channel, next_seq) values ('t', 'chat', 14), ('p', 'chat', 4);
	insert into agent_messages (id, thread_id, seq, turn, role, content, channel, execution_id, status, attempts, sent_at)
	select lanekeeper.agent_uuid7('2026-01-01'::timestamptz + at * interval '1 second'), v.thread, v.seq, v.seq, v.role, v.content, v.channel, id(v.name), v.status,
	       case when v.channel = 'webhook' then 2 else 0 end, '2026-01-01'::timestamptz + at * interval '1 second'
	  from (values
	    (1, 't', 1, 'assistant', '1 talk 1: hello', 'chat', 'talk', 'sent'),
	    (2, 't', 2, 'assistant', '1 talk 2: how are you?', 'chat', 'talk', 'sent'),
	    (3, 't', 3, 'user', 'answer to 1 talk 2', 'chat', null, 'received'),
	    (4, 't', 4, 'assistant', '1 talk 3: heard [answer to 1 talk 2] looked 1', 'chat', 'talk', 'sent'),
	    (5, 't', 5, 'assistant', '1 talk 4: and now?', 'chat', 'talk', 'sent'),
	    (6, 't', 6, 'user', 'answer to 1 talk 4', 'chat', null, 'received'),
	    (7, 't', 7, 'assistant', '1 talk 5: heard [answer to 1 talk 4]', 'chat', 'talk', 'sent'),
	    (8, 't', 8, 'assistant', '2 overdue 1: begins', 'chat', 'overdue', 'sent'),
	    (9, 't', 9, 'assistant', '2 brief 1: said', 'chat', 'brief', 'sent'),
	    (10, 't', 10, 'assistant', '2 overdue 2: second', 'chat', 'overdue', 'sent'),
	    (11, 't', 11, 'assistant', '2 overdue 3: third', 'chat', 'overdue', 'sent'),
	    (12, 't', 12, 'assistant', '2 overdue 4: too late', 'chat', 'overdue', 'sent'),
	    (13, 't', 13, 'user', 'too late', 'chat', null, 'received'),
	    (14, 't', null, 'assistant', '3 stopped 1: begins', 'chat', 'stopped', 'withdrawn'),
	    (15, 'p', 1, 'assistant', '4 errands 1: begins', 'webhook', 'errands', 'delivered'),
	    (16, 'p', 2, 'assistant', '4 errands 2: sum 171', 'webhook', 'errands', 'delivered'),
	    (17, 'p', 3, 'assistant', '4 errands 3: got [event 4]', 'webhook', 'errands', 'delivered')) v (at, thread, seq, role, content, channel, name, status);
	insert into soak.calls (skill, key, body)
	select 'post', id::text, jsonb_build_object('data', jsonb_build_object('content', content)) from agent_messages where channel = 'webhook' order by seq;
	insert into agent_events (event, key, data, external_id, execution_id)
	select 'AGENT_COMPLETED', id::text, jsonb_build_object('status', status), 'completed ' || id, id from agent_executions;
	insert into agent_events (event, key, external_id, consumed_by) values ('EVENT_COMPLETED', 'event 4', 'soak event 4', id('errands')), ('EVENT_COMPLETED', 'late 2', 'soak late 2', null);
	insert into soak.given (id, event, key, wanted) values ('soak event 4', 'EVENT_COMPLETED', 'event 4', true), ('soak late 2', 'EVENT_COMPLETED', 'late 2', false);
	insert into agent_activity (trace_id, execution_id, claim, kind, skill_name, status, error_class, idempotency_key, finished_at)
	select tr('fl', 1), id(v.name), v.claim, 'call', v.skill, v.status, v.class, v.key, now()
	  from (values ('talk', 1, 'look', 'unknown', 'interrupted', 'k1'), ('talk', 2, 'look', 'success', '', 'k1'), ('overdue', 2, 'look', 'success', '', 'k2'),
	    ('stopped', 2, 'look', 'success', '', 'k3'), ('errands', 2, 'look', 'success', '', 'k4'), ('errands', 2, 'look', 'success', '', 'k5'),
	    ('errands', 2, 'pay', 'success', '', 'k6'), ('errands', 2, 'pay', 'success', '', 'k7')) v (name, claim, skill, status, class, key);
	insert into soak.calls (skill, key, body)
	select v.skill, v.key, jsonb_build_object('n', 4, 'at', v.key)
	  from (values ('look', 'k1'), ('look', 'k1'), ('look', 'k2'), ('look', 'k3'), ('look', 'k4'), ('look', 'k5'), ('pay', 'k6'), ('pay', 'k7')) v (skill, key)`

// plantedFlows are rows that violate one check each; every check has some.
var plantedFlows = map[string][]string{
	"what was started is there, once": {
		`insert into soak.runs values (1, 'talk', id('other'))`, `delete from agent_executions where id = id('talk')`,
		`delete from soak.runs where n = 1`,
		`update agent_executions set input = '{"n": 9}' where id = id('talk')`,
		`update agent_executions set flow = 'late' where id = id('talk')`,
	},
	"a child is started once": {
		`delete from agent_executions where id = id('brief')`,
		`insert into agent_executions (trace_id, surface, flow, status, parent_id) values (tr('fl', 1), 'flow', 'brief', 'completed', id('overdue'))`,
		`insert into agent_executions (trace_id, surface, flow, status, parent_id) values (tr('fl', 1), 'flow', 'brief', 'completed', id('talk'))`,
	},
	"an execution ends as its scenario says": {
		`update agent_executions set status = 'failed' where id = id('talk')`,
		`update agent_executions set status = 'completed' where id = id('overdue')`,
		`update agent_executions set status = 'running' where id = id('stays')`,
		`update agent_executions set status = 'failed' where id = id('errands')`,
		`update agent_executions set flow = 'other' where id = id('talk')`,
	},
	"an execution ends once, and says so once": {
		`insert into soak.ends values (id('talk'), 'completed')`, `delete from soak.ends where execution_id = id('talk')`,
		`update soak.ends set status = 'failed' where execution_id = id('talk')`,
		`delete from agent_events where execution_id = id('talk')`,
		`insert into agent_events (event, key, data) values ('AGENT_COMPLETED', id('talk')::text, '{"status": "completed"}')`,
		`update agent_events set data = '{"status": "failed"}' where execution_id = id('talk')`,
	},
	"each message is said once, and none is lost": {
		`delete from agent_messages where content = '1 talk 1: hello'`,
		`update agent_messages set execution_id = id('overdue') where content = '1 talk 1: hello'`,
		`insert into agent_messages (thread_id, seq, turn, role, content, execution_id, status) values ('t', 14, 14, 'assistant', '1 talk 1: hello', id('talk'), 'sent')`,
		`update agent_messages set status = 'withdrawn', seq = null, turn = null where content = '1 talk 1: hello'`,
		`update agent_messages set content = '1 talk 3: heard [answer to 2 talk 2] looked 1' where content like '1 talk 3%'`,
	},
	"nothing else is said": {
		`insert into agent_messages (thread_id, seq, turn, role, content, execution_id, status) values ('t', 14, 14, 'assistant', '2 overdue 5: never', id('overdue'), 'sent')`,
		`insert into agent_messages (thread_id, seq, turn, role, content, status) values ('t', 14, 14, 'user', 'hello', 'received')`,
	},
	"the messages of an execution are in order": {
		swapped(1, 2), `update agent_messages set seq = null, turn = null, status = 'withdrawn' where seq = 1 and thread_id = 't'`,
		`update agent_messages set id = lanekeeper.agent_uuid7('2026-01-02') where seq = 1 and thread_id = 't'`,
	},
	"a thread has no gap": {
		`delete from agent_messages where seq = 4`, `delete from agent_messages where seq = 1 and thread_id = 't'`,
		`update agent_threads set next_seq = 20`,
	},
	"nobody speaks while another has the thread": {
		swapped(7, 8), swapped(9, 4),
		`update agent_messages set execution_id = id('talk') where content like '2 brief%'`,
	},
	"who speaks as one is heard in order": {swapped(9, 10), swapped(9, 12)},
	"a message arrives": {
		`update agent_messages set status = 'failed' where seq = 2`,
		`update agent_messages set status = 'sending' where seq = 2 and thread_id = 'p'`,
		`update agent_messages set status = 'sent' where seq = 2 and thread_id = 'p'`,
		`update agent_executions set status = 'failed' where id = id('stopped')`,
		`delete from soak.calls where skill = 'post'`, `update agent_messages set attempts = 0`,
		`insert into soak.calls (skill, key, body) values ('post', 'none', '{}')`,
		`update soak.calls set body = '{"data": {"content": "other"}}' where skill = 'post'`,
	},
	"messages are posted in order": {`
		delete from soak.calls where skill = 'post';
		insert into soak.calls (skill, key, body) select 'post', id::text, '{}' from agent_messages where channel = 'webhook' order by seq desc`},
	"no event is lost": {
		`delete from agent_events where key = 'event 4'`, `update agent_events set consumed_by = null where key = 'event 4'`,
		`update agent_events set consumed_by = id('overdue') where key = 'late 2'`,
		`insert into agent_events (event, key) values ('EVENT_COMPLETED', 'event 4')`,
		`insert into soak.given values ('soak 5', 'EVENT_COMPLETED', 'event 5', true)`,
		`update agent_events set key = 'other' where key = 'event 4'`,
	},
	"a stored result never changes": {`insert into soak.changed values (id('talk'), 'a step', '1', '2')`},
	"nothing must be done twice": {
		`insert into soak.calls (skill, key, body) values ('pay', 'k6', '{}')`,
		`insert into soak.calls (skill, key, body) values ('pay', 'k8', '{"n": 4, "at": "k6"}')`,
	},
	"what was done twice shows": {
		`insert into soak.calls (skill, key, body) values ('look', 'k1', '{}')`,
		`insert into soak.calls (skill, key, body) values ('look', 'k2', '{}')`,
		`delete from agent_activity where status = 'unknown'`,
		`update agent_activity set status = 'success' where status = 'unknown'`,
		`insert into soak.calls (skill, key, body) values ('look', '', '{}')`,
	},
	"what is logged was done, and as often as the flow says": {
		`delete from soak.calls where key = 'k6'`, `delete from agent_activity where idempotency_key = 'k6'`,
		`insert into agent_activity (trace_id, execution_id, skill_name, idempotency_key) values (tr('fl', 1), id('talk'), 'look', 'k1')`,
		`insert into agent_activity (trace_id, execution_id, skill_name, idempotency_key) values (tr('fl', 1), id('stays'), 'pay', 'k6')`,
	},
	"what is unknown is so because a claim was lost": {
		`update agent_activity set status = 'error' where idempotency_key = 'k2'`,
		`update agent_activity set claim = 2 where status = 'unknown'`,
		`update agent_activity set error_class = 'timeout' where status = 'unknown'`,
	},
	"nothing is left": {
		`insert into agent_locks (lane, locked_by, fencing_token, expires_at) values ('thread:t', 'somebody', 1, now())`,
		`insert into agent_locks (lane, locked_by, fencing_token, expires_at, parked) values ('thread:t', '', 1, now(), true)`,
		`insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds) values ('thread:t', 1, id('a'), id('b'), 1)`,
		`update agent_executions set status = 'waiting', completed_at = null where id = id('talk')`,
		`insert into agent_untold_ends values (id('talk'))`,
		`update agent_messages set status = 'queued', seq = null, turn = null where seq = 2`,
		`update agent_messages set status = 'sending' where seq = 2`,
		`insert into agent_requests (kind, execution_id, trace_id) values ('test', id('talk'), tr('fl', 1))`,
		`insert into agent_activity_open (activity_id, kind) values (id('x'), 'call')`,
		`update agent_activity set status = 'running' where idempotency_key = 'k2'`,
		`update agent_activity set finished_at = null where idempotency_key = 'k2'`,
		`insert into agent_message_drafts (execution_id, claim, content) values (id('talk'), 1, 'So')`,
		`insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`,
	},
}

// swapped plants two messages of the shared thread in each other's place.
func swapped(a, b int) string {
	return `
		update agent_messages set seq = seq + 100, turn = turn + 100 where thread_id = 't' and seq in (` + strconv.Itoa(a) + `, ` + strconv.Itoa(b) + `);
		update agent_messages set seq = ` + strconv.Itoa(a+b) + ` + 100 - seq, turn = ` + strconv.Itoa(a+b) + ` + 100 - seq where seq > 100`
}

// TestEveryCheckOfFlowsCanFail is TestEveryCheckCanFail for the soak of flows.
func TestEveryCheckOfFlowsCanFail(t *testing.T) {
	canFail(t, flowChecks, plantedFlows, innocentFlows, noted, notedOfFlows, scenariosSQL(), helpers)
}

// TestTheTriggersOfTheSoakNoteWhatMustNotBe changes recorded steps, and lets a loop go on, which is no such change.
func TestTheTriggersOfTheSoakNoteWhatMustNotBe(t *testing.T) {
	db := pgtest.DB(t)
	for _, sql := range []string{
		noted, notedOfFlows, helpers,
		`insert into agent_executions (id, trace_id, surface, flow) values (id('x'), tr('fl', 1), 'flow', 'talk')`,
		`select cancel_agent_execution(id('x'), 'me', 'enough')`,
		`alter table agent_checkpoints disable trigger agent_checkpoints_fence, disable trigger agent_checkpoints_fence_update`,
		`insert into agent_checkpoints (execution_id, step, claim, output) values (id('x'), 'changed', 1, '1'), (id('x'), 'gone', 1, '1'),
		   (id('x'), 'loop', 1, '{"next": 16}'), (id('x'), 'loop@3/set', 1, '1'), (id('x'), 'back', 1, '{"next": 16}'), (id('x'), 'same', 1, '1')`,
		`update agent_checkpoints set output = '2' where step = 'changed'`,
		`delete from agent_checkpoints where step = 'gone'`,
		`update agent_checkpoints set output = '{"next": 32}' where step = 'loop'`,
		`delete from agent_checkpoints where step like 'loop@%'`,
		`update agent_checkpoints set output = '{"next": 2}' where step = 'back'`,
		`update agent_checkpoints set claim = 2 where step = 'same'`,
	} {
		pgtest.Exec(t, db, sql)
	}
	var got string
	err := db.QueryRow(t.Context(), `select concat_ws(', ', (select string_agg(step, ' ' order by step) from soak.changed),
		(select string_agg(status, ' ') from soak.ends))`).Scan(&got)
	if err != nil || got != "back changed gone, cancelled" {
		t.Errorf("noted %q, %v", got, err)
	}
}
