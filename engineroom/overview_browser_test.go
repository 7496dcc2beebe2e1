package engineroom

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// busy fills a database with 20 of everything that the overview shows: two agents that beat, of which one fails,
// approvals with arguments, failures of few root errors, locks, objectives, skills in every state, and spend.
func busy(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	acts(t, pool, agents.Definition{Name: "sales", Default: true, Description: "Answers customers."})
	acts(t, pool, agents.Definition{Name: "billing", Heartbeat: &agents.Heartbeat{Cron: "*/30 * * * *"}})
	quiet(t, pool, strings.ReplaceAll(busySeed, "SALT", "0000000000000000000"))
	for _, purpose := range []string{"advance_plan", "reflect"} {
		spend(t, pool, purpose, "model-one", "0.75", "0")
		spend(t, pool, purpose, "model-two", "1.25", "1 day")
	}
	pgtest.Exec(t, pool, "analyze")
}

const busySeed = `
	insert into agent_workers (id, name, expires_at)
	values ('018f0000-0000-7000-8000-000000000001', 'worker-1', now() + interval '1 hour');
	insert into agent_schedules (name, flow, surface, agent, cron, timezone, next_run_at, last_run_at) values
	       ('heartbeat', 'heartbeat', 'heartbeat', 'sales', '*/30 * * * *', 'UTC', now() + interval '14 minutes', now() - interval '16 minutes'),
	       ('heartbeat:billing', 'heartbeat', 'heartbeat', 'billing', '*/30 * * * *', 'UTC', now() + interval '19 minutes', now() - interval '11 minutes');
	insert into agent_executions (id, trace_id, surface, agent, flow, status, result_summary, created_at, updated_at, completed_at)
	select lanekeeper.agent_uuid7(at), 'hb_SALT' || lpad(n::text, 7, '0'), 'heartbeat', a.agent, 'heartbeat', 'completed',
	       'advanced 2 plans, nothing due', at, at, at + interval '8 s'
	  from generate_series(1, 20) n, (values ('sales', interval '16 minutes'), ('billing', interval '11 minutes')) a(agent, since)
	 cross join lateral (select now() - a.since - (n - 1) * interval '30 minutes' as at) x;
	insert into agent_executions (id, trace_id, surface, agent, flow, status, created_at, updated_at, completed_at)
	select lanekeeper.agent_uuid7(at), 'fl_SALT' || lpad(n::text, 7, '0'), 'flow', 'sales', 'nightly_report', 'completed', at, at, at + interval '40 s'
	  from (select n, now() - n * n * interval '37 seconds' as at from generate_series(1, 45) n) x;
	insert into agent_executions (id, trace_id, surface, agent, flow, status, error_message, created_at, updated_at, completed_at)
	select lanekeeper.agent_uuid7(at), 'fl_SALT1' || lpad(n::text, 6, '0'), 'flow', 'billing', case n % 2 when 0 then 'import_orders' else 'reconcile_ledger' end,
	       'failed', 'step fetch: skill fetch_orders: dial tcp 10.0.0.' || n || ':443: connect: connection refused', at, at, at
	  from (select n, now() - n * interval '7 minutes' as at from generate_series(1, 20) n) x;
	insert into agent_executions (id, trace_id, surface, agent, flow, status, error_message, created_at, updated_at, completed_at)
	select lanekeeper.agent_uuid7(at), 'fl_SALT2' || lpad(n::text, 6, '0'), 'flow', 'sales', 'sync_customers', 'failed',
	       'customer ' || n * 7919 || ' has no address', at, at, at
	  from (select n, now() - n * interval '50 minutes' as at from generate_series(1, 20) n) x;
	insert into agent_executions (id, trace_id, surface, agent, flow, status, created_at, updated_at, completed_at)
	values (lanekeeper.agent_uuid7(now() - interval '2 minutes'), 'fl_SALT2999999', 'flow', 'sales', 'sync_customers', 'completed', now(), now(), now());
	insert into agent_executions (id, trace_id, surface, agent, flow, status, claimed_by, claim, created_at, updated_at)
	select lanekeeper.agent_uuid7(now() - n * interval '9 s'), 'ch_SALT3' || lpad(n::text, 6, '0'), 'chat', 'sales', 'chat', 'running',
	       '018f0000-0000-7000-8000-000000000001', 1, now(), now() - n * interval '9 s' from generate_series(1, 20) n;
	insert into agent_skills (name, description, tool_definition, handler, trust) values
	       ('issue_refund', 'Pays money back to a customer.', '{}', 'http:x', 'approve');
	insert into agent_skills (name, tool_definition, handler) select 'healthy_skill_' || n, '{}', 'builtin:x' from generate_series(1, 9) n;
	insert into agent_skills (name, tool_definition, handler) select 'skill_that_always_fails_' || n, '{}', 'builtin:x' from generate_series(1, 5) n;
	insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at)
	select 'disabled_skill_with_a_long_name_' || n, '{}', 'builtin:x', false, 'self-heal', '5 of its last 5 calls failed: connection refused', now() - n * interval '1 hour'
	  from generate_series(1, 4) n;
	insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at, trial_at)
	values ('skill_on_trial', '{}', 'builtin:x', false, 'self-heal', '5 of its last 5 calls failed', now() - interval '2 hours', now() - interval '1 minute');
	insert into agent_activity (id, trace_id, surface, agent, skill_name, status, error_class, error_message, duration_ms, created_at)
	select lanekeeper.agent_uuid7(at), 'hb_SALT' || lpad(n::text, 7, '0'), 'heartbeat', 'sales',
	       case n % 4 when 0 then 'skill_that_always_fails_' || 1 + n % 5 else 'healthy_skill_' || 1 + n % 9 end,
	       case n % 4 when 0 then 'error' else 'success' end, case n % 4 when 0 then 'timeout' else '' end,
	       case n % 4 when 0 then 'no answer within ' || 30 + n || ' s from https://orders.example.com/api/v2/orders?page=' || n end, 30 + n, at
	  from (select n, now() - n * interval '3 minutes' as at from generate_series(1, 80) n) x;
	insert into agent_approvals (id, trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash, expires_at, created_at)
	select lanekeeper.agent_uuid7(now() - n * interval '4 minutes'), 'ch_SALT3' || lpad(n::text, 6, '0'),
	       (select e.id from agent_executions e where e.trace_id = 'ch_SALT3' || lpad(n::text, 6, '0')), 'issue_refund', 1,
	       jsonb_build_object('order', 'A-' || 1000 + n, 'amount', 120.5 + n, 'currency', 'EUR', 'reason', 'the parcel never arrived; the carrier confirmed the loss'),
	       'h' || n, now() + interval '20 hours', now() - n * interval '4 minutes' from generate_series(1, 20) n;
	insert into agent_locks (lane, locked_by, fencing_token, locked_at, expires_at, execution_id)
	select 'thread:customer-with-a-long-name-' || n, e.id || '#1', n, now() - n * interval '20 s', now() + interval '10 minutes', e.id
	  from generate_series(1, 20) n join agent_executions e on e.trace_id = 'ch_SALT3' || lpad(n::text, 6, '0');
	insert into agent_requests (kind, execution_id, trace_id, title)
	select 'signature', e.id, e.trace_id, 'INE, CURP and proof of address of customer ' || n
	  from generate_series(1, 20) n join agent_executions e on e.trace_id = 'ch_SALT3' || lpad(n::text, 6, '0');
	insert into agent_objectives (name, goal) select 'keep the database of region ' || n || ' healthy', 'g' from generate_series(1, 20) n;
	insert into agent_objective_steps (objective_id, position, title) select o.id, 1, 'x' from agent_objectives o;
	insert into agent_objectives (name, goal, status, proposed_by) select 'propose ' || n, 'answer every customer within an hour', 'proposed', 'sales' from generate_series(1, 20) n;
	insert into agent_budgets (scope, tokens, cost_usd)
	select 'day:' || to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD') || s, 2000, 1.5 from unnest(array['', ':agent:sales']) s;
	insert into agent_memory (category, key, value) select 'category ' || n % 20, 'k' || n, to_jsonb('value ' || n) from generate_series(1, 100) n;
	insert into agent_automations (name, prompt, cron, next_run_at) select 'automation ' || n, 'look', '@daily', now() + interval '1 hour' from generate_series(1, 20) n;
	insert into agent_automation_runs (automation_id, scheduled_for, status, error_message)
	select a.id, now(), 'dead', 'relation "caretaker_notes" does not exist' from agent_automations a;
	insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256, error_message)
	select 'github', 'd' || n, 'wh_1', 'wh_1', 'dead', '', '', 'the flow refused it' from generate_series(1, 20) n`
