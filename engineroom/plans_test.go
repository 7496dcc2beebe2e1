package engineroom

import (
	"cmp"
	"math"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// analyze updates the planner's statistics of tables.
func analyze(t *testing.T, pool *pgxpool.Pool, tables ...string) {
	t.Helper()
	for _, table := range tables {
		pgtest.Exec(t, pool, "analyze "+pgx.Identifier{table}.Sanitize())
	}
}

// maxRowsRead is the maximum number of rows that a step of a plan may read or filter out, for a page of a large table.
const maxRowsRead = 1500

var (
	filteredRows = regexp.MustCompile(`Rows Removed by (?:Join )?Filter: (\d+)`)
	actualRows   = regexp.MustCompile(`\(actual rows=(\d+)`)
)

// checkPlans opens a page. No query of the page may read one of the tables whole. No step of a plan may read or filter
// out more than limit rows.
func checkPlans(t *testing.T, pool *pgxpool.Pool, path string, tables []string, limit int) {
	t.Helper()
	scanned := regexp.MustCompile(`Seq Scan on (` + strings.Join(tables, "|") + `)\b`)
	recorded, recorder := pgtest.Recorded(t, pool)
	room := newRoom(t, Options{Pool: recorded})
	mux := muxOf(room)
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, http.NoBody))
	require.Truef(t, w.Code == http.StatusOK && !strings.Contains(w.Body.String(), "This could not be read"),
		"%s: status %d\n%s", path, w.Code, w.Body)
	checked := 0
	for _, q := range recorder.Queries() {
		if !regexp.MustCompile(`^\s*(select|with)\s`).MatchString(q.SQL) {
			continue
		}
		checked++
		rows, err := pool.Query(t.Context(), "explain (analyze, timing off, summary off) "+q.SQL, q.Args...)
		require.NoError(t, err, "explain", q.SQL)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err, "explain", q.SQL)
		plan := strings.Join(lines, "\n")
		tooMuch := scanned.MatchString(plan)
		for _, found := range append(filteredRows.FindAllStringSubmatch(plan, -1),
			actualRows.FindAllStringSubmatch(plan, -1)...) {
			n, err := strconv.Atoi(found[1])
			tooMuch = tooMuch || err != nil || n > limit
		}
		assert.Truef(t, !tooMuch, "%s reads too much:\n%s\n%s", path, q.SQL, plan)
	}
	assert.Truef(t, checked != 0, "%s has no query", path)
}

// indexedPages are pages over large tables. The seed runs without triggers.
var indexedPages = map[string]struct {
	seed    string
	tables  string // large tables, which no query may read whole
	paths   string
	maxRows int // bound of the rows of a plan's step; 0 for none
}{
	"approvals": {
		seed: `
		insert into agent_approvals (id, trace_id, skill_name, skill_revision, arguments, arguments_hash, status, decided_at,
		  parked, execution_id, step, expires_at)
		select lanekeeper.agent_uuid7(now() - n * interval '1 minute'), 'op_' || n, 'skill_' || n % 50, 1, '{}', n::text,
		       (array['pending', 'approved', 'rejected', 'consumed', 'expired'])[1 + n % 5],
		       case when n % 5 between 1 and 3 then now() end,
		       true, gen_random_uuid(), 's', now() + interval '7 days' - n * interval '1 minute'
		  from generate_series(1, 20000) n;
		update agent_approvals set id = '01890000-0000-7000-8000-000000000000' where arguments_hash = '20000'`,
		tables: "agent_approvals",
		paths: `
			/approvals /find?q=skill_7 /approvals?status=decided /approvals?status=expired
			/approvals/01890000-0000-7000-8000-000000000000
			/approvals?status=expired&before=2026-01-01T00:00:00Z_01890000-0000-7000-8000-000000000000`,
		maxRows: maxRowsRead,
	},
	"automations": {
		seed: `
		insert into agent_automations (name, cron, skill_name) select 'a' || n, '@daily', 'fetch'
		  from generate_series(1, 60) n;
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status)
		select a.id, 'manual', now(), (array['success', 'error', 'dead'])[1 + n % 3] from agent_automations a,
		       generate_series(1, 300) n`,
		tables: "agent_automation_runs",
		paths: `
			/automations /automations?state=enabled /automations/a7
			/automations/a7?before=01890000-0000-7000-8000-000000000000`,
		maxRows: maxRowsRead,
	},
	"deliveries": {
		seed: `
		insert into agent_webhook_deliveries (id, endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256)
		select lanekeeper.agent_uuid7(now() - n * interval '1 minute'), 'e' || n % 9, n::text, 'wh_' || n, 'wh_' || n,
		       case when n % 500 = 0 then 'ignored' when n % 700 = 0 then 'dead' else 'done' end, '{}', 'x'
		         from generate_series(1, 20000) n;
		update agent_webhook_deliveries set id = '01890000-0000-7000-8000-000000000000' where delivery_id = '20000';
		insert into agent_webhook_targets (name, url, secrets, events)
		  values ('ops', 'https://ops.example', '{"${S}"}', '{"*"}');
		insert into agent_webhook_outbox (target_id, event, payload, trace_id, status)
		select t.id, 'execution.failed', '{}', 'wh_1', case n % 20 when 0 then 'dead' when 1 then 'pending' else 'sent' end
		  from agent_webhook_targets t, generate_series(1, 20000) n`,
		tables: "agent_webhook_deliveries agent_webhook_outbox",
		paths: `
			/deliveries /find?q=e3 /deliveries?endpoint=e3 /deliveries?status=ignored /deliveries?status=dead
			/deliveries?endpoint=e3&status=ignored
			/deliveries?endpoint=e3&before=01890000-0000-7000-8000-000000000000
			/deliveries/01890000-0000-7000-8000-000000000000 /outgoing
			/outgoing?target=ops&before=01890000-0000-7000-8000-000000000000 /outgoing?status=pending`,
		maxRows: maxRowsRead,
	},
	"executions": {
		seed: `
		insert into agent_executions (id, trace_id, surface, flow, status, parent_id, waiting_for, waiting_key, waiting_until)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'),
		  (array['heartbeat', 'operate', 'chat', 'webhook', 'flow'])[1 + n % 5], 'flow_' || n % 20,
		       case when n % 17 = 0 then 'waiting' when n % 97 = 0 then 'failed' when n % 13 = 0 then 'pending'
		         else 'completed' end,
		       case when n % 500 = 0 then '01890000-0000-7000-8000-000000000000'::uuid end,
		       case when n % 17 = 0 then 'event' end, case when n % 17 = 0 then 'k' || n end,
		       case when n % 17 = 0 then at + interval '7 days' end
		  from (select n, now() - n * interval '1 minute' as at from generate_series(1, 10000) n) x;
		update agent_executions set id = '01890000-0000-7000-8000-000000000000' where waiting_key = 'k17';
		insert into agent_checkpoints (execution_id, step, claim, output)
		select case when n < 100 then '01890000-0000-7000-8000-000000000000' else gen_random_uuid() end, 'step ' || n, 1, '{}'
		  from generate_series(1, 5000) n;
		insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id)
		select 'lane' || n, case when n % 50 = 0 then 'x' else '' end, n, now() + interval '1 hour',
		       case when n % 50 = 0 then gen_random_uuid() end
		  from generate_series(1, 5000) n;
		insert into agent_requests (kind, execution_id, trace_id) select 'test', gen_random_uuid(), 'x'
		  from generate_series(1, 5000);
		insert into agent_messages (thread_id, seq, turn, role, content, status, execution_id)
		select 'thread' || n % 50, n, n, 'user', 'words', 'received', gen_random_uuid() from generate_series(1, 5000) n`,
		tables: "agent_executions agent_checkpoints agent_locks agent_requests agent_messages",
		paths: `
			/executions /executions?status=failed /executions?status=completed&surface=chat&flow=flow_1
			/executions?failed=1&flow=flow_2 /executions?flow=flow_3 /executions?surface=chat
			/executions?trace_id=hb_00000000000000000000000123 /find?q=flow_1 /find
			/executions?before=01890000-0000-7000-8000-000000000001 /executions?view=waiting
			/executions?view=stuck /executions?view=waiting&flow=flow_1&for=event
			/executions/01890000-0000-7000-8000-000000000000
			/executions/01890000-0000-7000-8000-000000000000?before=2026-01-01T00%3A00%3A00Z+step+50`,
	},
	"slowest and most expensive": {
		seed: `
		insert into agent_executions (id, trace_id, surface, flow, status, created_at, completed_at)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'), case n % 2 when 0 then 'chat' else 'heartbeat' end,
		       'flow_' || n % 20, 'completed', at, at + n % 100 * interval '1 second'
		  from (select n, now() - n * interval '1 minute' as at from generate_series(1, 60000) n) x;
		insert into agent_activity (id, trace_id, execution_id, kind, skill_name, status, cost_usd, created_at, finished_at)
		select lanekeeper.agent_uuid7(e.created_at), e.trace_id, e.id, case x when 1 then 'model' else 'call' end,
		       case x when 1 then 'model_call' else 'skill' end,
		       case when x = 2 and e.flow = 'flow_3' then 'error' else 'success' end,
		       0.01, e.created_at, e.created_at
		  from (select * from agent_executions order by id desc limit 30000) e, generate_series(1, 2) x`,
		tables: "agent_executions agent_activity",
		paths: `
			/executions?sort=took /executions?sort=took&flow=flow_3 /executions?sort=cost&range=24h
			/executions?sort=cost /executions?flow=!flow_3&range=7d
			/executions?since=2020-01-01&until=2020-01-02 /traces?sort=took /traces?sort=cost /traces?errors=1
			/traces?errors=1&sort=took&range=24h /traces?range=24h&status=!completed&agent=!x`,
		maxRows: 2*maxSearched + 2,
	},
	"parts of ids": { // more than the search compares for a part from the middle
		seed: `
		insert into agent_executions (id, trace_id, surface, flow, status)
		select lanekeeper.agent_uuid7(now() - n * interval '1 minute'), 'hb_' || lpad(n::text, 26, '0'), 'heartbeat',
		       'beat', 'completed'
		  from generate_series(1, 120000) n`,
		tables: "agent_executions",
		paths: `
			/executions?trace_id=00123 /executions?trace_id=abcd12 /traces?trace=…00123 /activity?trace=hb_0…123
			/find?q=00123 /find?q=ABCD12 /find?q=abc…12`,
		maxRows: maxFragments,
	},
	"lanes": {
		seed: `
		insert into agent_locks (lane, locked_by, fencing_token, expires_at, parked)
		select 'lane ' || n, case when n % 4 = 0 then 'me' else '' end, n, now() + interval '1 hour', false
		  from generate_series(1, 20000) n;
		insert into agent_workers (name, expires_at) select 'w', now() + interval '1 hour' from generate_series(1, 20);
		insert into agent_executions (id, trace_id, surface, flow, status, claimed_by)
		select lanekeeper.agent_uuid7(now() - n * interval '1 minute'), 'fl_' || n, 'flow', 'f',
		       case when n % 500 = 0 then 'running' else 'pending' end,
		       case when n % 500 = 0 then (select id from agent_workers limit 1) end
		  from generate_series(1, 20000) n`,
		tables:  "agent_locks agent_executions",
		paths:   `/lanes /lanes?after=lane+7 /lanes?lane=lane+8 /lanes?before=01890000-0000-7000-8000-000000000000`,
		maxRows: maxRowsRead,
	},
	"memory": {
		seed: `
		insert into agent_memory (category, key, value) select 'c' || n % 7, 'k' || n, to_jsonb('word' || n)
		  from generate_series(1, 8000) n`,
		tables: "agent_memory",
		paths: `
			/memory /find?q=k77 /memory?category=c3 /memory?prefix=k77 /memory?q=word77
			/memory?q=word77&category=none /memory/k77`,
	},
	"objectives": {
		seed: `
		insert into agent_objectives (name, goal, status) select 'o' || n, 'g', 'completed' from generate_series(1, 4000) n;
		insert into agent_objectives (id, name, goal) values ('01890000-0000-7000-8000-000000000000', 'grow', 'g');
		insert into agent_objective_steps (objective_id, position, title) select o.id, 9, 'x' from agent_objectives o`,
		tables: "agent_objectives agent_objective_steps",
		paths: `
			/ /objectives /objectives?status=active /objectives?status=failed /objectives/grow
			/objectives/01890000-0000-7000-8000-000000000000`,
	},
	"operate": {
		seed: `
		insert into agent_threads (id, channel, next_seq) values ('` + aSession + `', 'operate', 6011);
		insert into agent_executions (trace_id, surface, flow, input, thread_id)
		select 'op_' || lpad(g::text, 26, '0'), 'operate', case when g % 3 = 0 then 'operate' else 'flow' end,
		       '{"message": "hello"}', 'other'
		  from generate_series(1, 6000) g;
		insert into agent_messages (thread_id, seq, turn, role, content, status)
		select '` + aSession + `', g + 10, g + 10, 'user', 'hello', 'received' from generate_series(1, 6000) g;
		insert into agent_pauses (paused_by, reason, trace_id, resumed_at)
		select 'ana', 'why', 'op_1', now() from generate_series(1, 6000);
		insert into agent_locks (lane, locked_by, fencing_token, expires_at)
		values ('operate', 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 1, now() + interval '1 hour')`,
		tables:  "agent_executions agent_messages agent_pauses",
		paths:   "/operate /operate?session=" + aSession,
		maxRows: maxRowsRead,
	},
	"overview": {
		seed: `
		insert into agent_executions (trace_id, surface, flow) select 'fl_' || n, 'flow', 'x' from generate_series(1, 5000) n;
		insert into agent_executions (id, trace_id, surface, agent, flow, status, error_message, created_at, completed_at)
		select lanekeeper.agent_uuid7(at), 'fl_' || lpad(n::text, 26, '0'), 'flow', (array['sales', 'billing'])[1 + n % 2],
		       case when n % 3 = 0 then 'flow_' || n % 40 else 'often' end,
		       case when n % 5 = 0 then 'failed' when n % 55 = 1 then 'timeout' else 'completed' end,
		       'no answer from host ' || n, at, at
		  from (select n, now() - n * interval '7 s' as at from generate_series(1, 18000) n) x;
		insert into agent_executions (id, trace_id, surface, agent, flow, status, completed_at)
		select lanekeeper.agent_uuid7(at), 'hb_' || n, 'heartbeat', 'sales', 'heartbeat', 'completed', at
		  from (select n, now() - n * interval '1 minute' as at from generate_series(1, 5000) n) x;
		insert into agent_schedules (name, flow, surface, agent, cron, timezone, next_run_at)
		values ('heartbeat', 'heartbeat', 'heartbeat', 'sales', '* * * * *', 'UTC', now());
		insert into agent_agents (name, version, digest, definition, is_default) values ('sales', 1, 'x', '{}', true),
		  ('billing', 1, 'x', '{}', false);
		insert into agent_activity_counts (span, start, kind, skill, surface, model, calls, worked, failed)
		select 'hour', date_trunc('hour', now()) - n / 20 * interval '1 hour', 'call', 'skill_' || n % 20, 'heartbeat', '',
		       9, 9, 3
		  from generate_series(1, 5000) n;
		insert into agent_lock_waiters (lane, owner, since, expires_at)
		select 'l' || n, 'w' || n, now() - interval '1 hour', now() + interval '1 hour' from generate_series(1, 5000) n;
		insert into agent_locks (lane, locked_by, fencing_token, expires_at)
		select 'l' || n, case n % 50 when 0 then 'x' else '' end, n, now() + interval '1 minute'
		  from generate_series(1, 5000) n;
		insert into agent_memory (category, key, value) select 'c' || n % 5, 'k' || n, to_jsonb(n)
		  from generate_series(1, 5000) n;
		insert into agent_messages (thread_id, role, content, status) select 't', 'user', 'x', 'withdrawn'
		  from generate_series(1, 5000) n;
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, status, expires_at)
		select 'hb_1', 'x', 1, '{}', n::text, 'rejected', now() from generate_series(1, 5000) n;
		insert into agent_requests (kind, execution_id, trace_id, status) select 'test', gen_random_uuid(), 'x', 'closed'
		  from generate_series(1, 5000) n;
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256)
		select 'e', n::text, 'x', 'x', 'done', '', '' from generate_series(1, 5000) n;
		insert into agent_webhook_outbox (target_id, event, payload, trace_id, status)
		select gen_random_uuid(), 'e', '{}', 'x', 'sent' from generate_series(1, 5000) n;
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status)
		select gen_random_uuid(), 'manual', now(), 'success' from generate_series(1, 5000) n;
		insert into agent_objectives (name, goal, status) select 'o' || n, 'x', 'completed' from generate_series(1, 5000) n;
		insert into agent_objective_steps (objective_id, position, title) select o.id, 1, 'x'
		  from agent_objectives o;` + insertActivitiesSQL,
		tables: `
			agent_executions agent_locks agent_messages agent_approvals agent_requests agent_webhook_deliveries
			agent_webhook_outbox agent_automation_runs agent_objectives agent_objective_steps agent_memory agent_activity
			agent_activity_counts agent_lock_waiters`,
		paths:   `/ /?agent=billing`,
		maxRows: 10_000,
	},
	"activity": {
		seed:   insertActivitiesSQL,
		tables: "agent_activity",
		paths: `
			/activity /activity?surface=chat&status=error /activity?lane=none /activity?skill=even
			/activity?trace=0000 /find?q=42 /activity?agent=nobody&since=2020-01-01
			/activity?trace=hb_00000000000000000000000042 /activity?status=running`,
	},
	"skills and spend": {
		seed: `
		insert into agent_activity (id, trace_id, kind, skill_name, purpose, surface, status, token_usage, created_at,
		  duration_ms)
		select lanekeeper.agent_uuid7(at), 'hb_x', case n % 4 when 0 then 'model' else 'call' end, case n % 4
		  when 0 then 'model_call' else 'skill_' || n % 97 end,
		       'p' || n % 7, 'heartbeat', case n % 11 when 0 then 'error' else 'success' end, '{"total_tokens": 5}', at,
		         n % 1000
		  from (select n, now() - interval '20 days' * n / 30001 as at from generate_series(1, 30000) n) x;
		insert into agent_skills (name, tool_definition, handler) select 'skill_' || n, '{}', 'builtin:x'
		  from generate_series(0, 96) n;
		insert into agent_executions (trace_id, surface, flow, status) select 'hb_' || n, 'heartbeat', 'f' || n % 50,
		  'pending' from generate_series(1, 5000) n;
		insert into agent_activity_counts (span, start, kind, skill, surface, model, calls)
		select s, date_trunc(s, now()) - ('1 ' || s)::interval * (n / 20), 'call', 'skill_' || n % 20, 'heartbeat', '', 1
		  from unnest(array['hour', 'day']) s, generate_series(1, 20000) n;
		update agent_activity_counted set counted_upto = lanekeeper.agent_uuid7(clock_timestamp())`,
		tables: "agent_activity agent_activity_counts agent_executions",
		paths: "/spend?days=7 /spend?days=1&per=hour /spend?by=purpose /spend?by=agent /spend/" +
			time.Now().UTC().Format(time.DateOnly) + " /charts /charts?range=90d /audit?surface=chat /skills /skills/skill_7",
	},
	"threads": {
		seed: `
		insert into agent_threads (id, channel, owner, participant, next_seq, summary, updated_at)
		select 'thread' || n, (array['chat', 'webhook', 'log'])[1 + n % 3], 'key' || n % 7, 'p', 11,
		       repeat('they spoke of prices ', 20), now() - n * interval '1 minute' from generate_series(1, 8000) n;
		insert into agent_messages (thread_id, seq, turn, role, content, status)
		select 'thread' || n, s, s, 'user', 'words', 'received' from generate_series(1, 4000) n, generate_series(1, 3) s;
		insert into agent_messages (thread_id, role, content, status) select 'thread' || n, 'assistant', 'words', 'queued'
		  from generate_series(1, 2000, 20) n;
		insert into agent_locks (lane, locked_by, fencing_token, expires_at)
		select 'thread:thread' || n, case when n % 50 = 0 then 'x' else '' end, n, now() + interval '1 hour'
		  from generate_series(1, 2000) n;
		insert into agent_executions (trace_id, surface, flow, status, thread_id) select 'x', 'chat', 'chat', 'completed',
		  'thread' || n from generate_series(1, 5000) n;
		insert into agent_lock_waiters (lane, owner, expires_at) select 'thread:thread' || n, 'x', now()
		  from generate_series(1, 2000) n`,
		tables: "agent_threads agent_messages agent_locks agent_executions agent_lock_waiters",
		paths: `
			/threads /threads?channel=chat /threads?owner=key3 /find?q=thread7 /threads?owner=key3&channel=log
			/threads?view=held /threads?view=queue /threads?view=undelivered /threads?before=2026-01-01T00%3A00%3A00Z+thread500
			/threads/thread7 /threads/thread21 /threads/thread50?before=5-5`,
	},
	"traces": {
		seed: `
		insert into agent_executions (id, trace_id, surface, flow, status, created_at, wait_number, claim)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'), case n % 5 when 0 then 'chat'
		  else 'heartbeat' end, 'beat', case when n % 2 = 0 then 'failed' else 'pending' end, at, 1, 2
		  from (select n, now() - n * interval '1 minute' as at from generate_series(1, 4000) n) x;
		insert into agent_activity (id, trace_id, execution_id, kind, skill_name, status, created_at, finished_at,
		  duration_ms)
		select lanekeeper.agent_uuid7(e.created_at), e.trace_id, e.id, 'call', 'skill', case n when 6 then 'error'
		  else 'success' end, e.created_at, e.created_at, 1
		  from agent_executions e, generate_series(1, 6) n;
		insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash,
		  expires_at)
		select e.trace_id, e.id, 'skill', 1, '{}', e.id::text, now() from agent_executions e;
		insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_since)
		select e.id, 'wait', 0, '{"event": "EVENT_COMPLETED", "timed_out": false}', 'event', e.created_at
		  from agent_executions e;
		insert into agent_claims_lost (execution_id, claim, how) select e.id, 1, 'lost' from agent_executions e`,
		tables: "agent_executions agent_activity agent_approvals agent_checkpoints agent_claims_lost",
		paths: `
			/traces /traces?surface=chat /traces?status=pending&since=1h /traces?status=failed
			/traces/hb_00000000000000000000000042 /traces/hb_00000000000000000000000042?tab=cost
			/traces/hb_00000000000000000000000042?view=table
			/traces/hb_00000000000000000000000042?view=table&after=01890000-0000-7000-8000-000000000000
			/traces/hb_00000000000000000000000042?span=01890000-0000-7000-8000-000000000000`,
	},
}

func TestPagesReadByIndex(t *testing.T) {
	t.Parallel()
	for name, c := range indexedPages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			rows.Quiet(t, pool, c.seed)
			tables := strings.Fields(c.tables)
			pgtest.Exec(t, pool, "analyze")
			if slices.Contains(tables, "agent_activity") { // a small partition is best read whole
				tables = append(tables, pgtest.Column[string](t, pool, `select tableoid::regclass::text
					from agent_activity group by tableoid having count(*) > 5000`)...)
			}
			for path := range strings.FieldsSeq(c.paths) {
				checkPlans(t, pool, path, tables, cmp.Or(c.maxRows, math.MaxInt))
			}
		})
	}
}
