package runner_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Traces of an eval and of a chat. Each has an execution with a claim.
const (
	evalTrace = `ev_01JD3V7K8ZQ6W2M5T9X4C1B0AE`
	chatTrace = `ch_01JD3V7K8ZQ6W2M5T9X4C1B0AF`
)

// tracedWrites are writes with an effect outside the trial. The database rejects them by the trace in the row. @t is
// the trace, @x the execution, and @s the surface.
var tracedWrites = map[string]string{
	"outbox":          `insert into agent_webhook_outbox (target_id, event, payload, trace_id) select id, 'e', '{}', @t from agent_webhook_targets`,
	"webhook":         `insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, body, body_sha256) values ('e', 'd', @t, @t, '', '')`,
	"message":         `insert into agent_messages (thread_id, role, content, status, trace_id) values ('th', 'user', 'x', 'queued', @t)`,
	"channel message": `insert into agent_channel_messages (channel, external_id, conversation, sender, trace_id) values ('c', '1', 'x', 'y', @t)`,
	"document":        `insert into agent_documents (name, content_type, size, sha256, is_text, content, trace_id, owner_kind, owner) values ('n', 't', 1, sha256('x'), true, 'x', @t, 'admin', '')`,
	"objective":       `insert into agent_objectives (name, goal, last_trace_id) values ('x', 'g', @t)`,
	"proposal":        `insert into agent_objectives (name, goal, status, proposed_by, proposed_trace) values ('x', 'g', 'proposed', 'a', @t)`,
	"objective edit":  `update agent_objectives set last_trace_id = @t`,
	"step":            `update agent_objective_steps set trace_id = @t`,
	"memory":          `insert into agent_memory (key, value, trace_id) values ('x', '1', @t)`,
	"memory edit":     `update agent_memory set value = '2', trace_id = @t`,
	"memory conflict": `insert into agent_memory_conflicts (category, key, value, if_revision, found_revision, trace_id) values ('c', 'k', '1', 1, 0, @t)`,
	"automation":      `update agent_automations set last_trace_id = @t`,
	"automation run":  `insert into agent_automation_runs (automation_id, cause, scheduled_for, trace_id) select id, 'manual', now(), @t from agent_automations`,
	"request":         `insert into agent_requests (kind, execution_id, trace_id) values ('test', gen_random_uuid(), @t)`,
	"approval":        `insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, expires_at) values (@t, 's', 1, '{}', 'h', now() + interval '1 day')`,
	"child":           `insert into agent_executions (trace_id, surface, flow) values (@t, @s, 'delegate')`,
	"other surface":   `insert into agent_executions (trace_id, surface, flow) values (@t, 'chat', 'eval')`,
	"turn in thread":  `insert into agent_executions (trace_id, surface, flow, thread_id) values (@t, @s, 'eval', 'th')`,
	"wait":            `update agent_executions set status = 'waiting', waiting_for = 'event', waiting_key = 'k', waiting_step = 's' where id = @x`,
	"self-heal":       `insert into agent_activity (trace_id, surface, kind, skill_name, status) values (@t, 'chat', 'call', 'check_order', 'error')`,
	"budget of a day": `insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd) values (@x, 's', '{day:2026-11-27}', 1, 1, 1)`,
	"other budget":    `insert into agent_budget_reservations (execution_id, step, scopes, granted, tokens, cost_usd) values (@x, 's', array['eval:01a21b5b-d823-7e9b-9835-e8870bab2cf4'], 1, 1, 1)`,
	"event":           `select raise_agent_event('EVENT_COMPLETED', 'k', '{}', null, @t)`,
}

// fencedWrites are writes to tables without a trace. The database rejects them in a transaction that has fenced the
// claim of a trial.
var fencedWrites = map[string]string{
	"thread":              `insert into agent_threads (id, channel) values ('new', 'chat')`,
	"thread access":       `insert into agent_thread_access (thread_id, kind) values ('th', 'flow')`,
	"forgotten memory":    `delete from agent_memory`,
	"removed document":    `delete from agent_documents`,
	"removed objective":   `delete from agent_objectives`,
	"automation proposed": `insert into agent_automations (name, trigger, cron, prompt, proposed_by, enabled, disabled_by) values ('x', 'cron', '* * * * *', 'p', 'a', false, 'proposal')`,
	"automation enabled":  `update agent_automations set enabled = true`,
	"event delivered":     `select deliver_agent_event('EVENT_COMPLETED', 'k')`,
	"channel":             `insert into agent_channels (name, type) values ('t', 'telegram')`,
	"pairing":             `insert into agent_channel_identities (channel, subject, conversation, status) values ('t', 's', 'c', 'paired')`,
	"channel send":        `insert into agent_channel_sends (message_id, channel, thread_id, seq) select id, 'c', 'th', 1 from agent_messages`,
	"principal":           `insert into agent_principals (kind, name, role) values ('user', 'eve', 'admin')`,
	"skill out":           `update agent_skills set enabled = false, disabled_by = 'x'`,
	"agent":               `update agent_agents set current = false`,
	"flow":                `update agent_flows set current = false`,
	"target":              `delete from agent_webhook_targets`,
	"endpoint":            `delete from agent_webhook_endpoints`,
	"mcp server":          `delete from agent_mcp_servers`,
	"pause":               `insert into agent_pauses (paused_by, reason, trace_id) values ('eve', 'why', 'x')`,
	"limit":               `delete from agent_limits`,
	"schedule":            `delete from agent_schedules`,
	"secret":              `delete from agent_secrets`,
	"suite":               `delete from agent_evals`,
}

// fenceBypasses are statements that try to bypass the rejection of fencedWrites.
var fenceBypasses = map[string]string{
	"setting":     `select set_config('lanekeeper.trial', v, true) from unnest('{on,off,""}'::text[]) v`,
	"all reset":   `reset all`,
	"note gone":   `delete from lanekeeper.agent_trial_transactions`,
	"note edited": `update lanekeeper.agent_trial_transactions set id = '3'`,
	"notes gone":  `truncate lanekeeper.agent_trial_transactions`,
	"second fence": `savepoint s; select fence_agent_execution(id, 1) from agent_executions where surface = 'eval';
		rollback to savepoint s`,
	"other names": `
		create schema evil;
		create function evil.pg_current_xact_id_if_assigned() returns xid8 language sql as 'select null::xid8';
		create function evil.no(xid8, xid8) returns boolean language sql as 'select false';
		create operator evil.= (leftarg = xid8, rightarg = xid8, function = evil.no);
		create table evil.agent_trial_transactions (id xid8);
		select set_config('search_path', 'evil,' || current_schema() || ',lanekeeper,pg_catalog', true)`,
}

// attemptWrite runs a write for a trace in a transaction that is rolled back. If fenced is set, the transaction first
// fences the claim of the trace's execution.
func attemptWrite(ctx context.Context, pool *pgxpool.Pool, sql, traceID string, fenced bool) error {
	rollback := errors.New("rolled back")
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var id, surface string
		err := tx.QueryRow(ctx, `select id::text, surface::text from agent_executions where trace_id = $1`, traceID).
			Scan(&id, &surface)
		if err == nil && fenced {
			_, err = tx.Exec(ctx, `select fence_agent_execution($1, 1)`, id)
		}
		if err != nil {
			return err
		}
		sql = strings.NewReplacer("@t", "'"+traceID+"'", "@x", "'"+id+"'", "@s", "'"+surface+"'").Replace(sql)
		if _, err := tx.Exec(ctx, sql); err != nil {
			return err
		}
		return rollback
	})
	if errors.Is(err, rollback) {
		return nil
	}
	return err
}

// The database rejects these writes of a trial. The same write of a chat succeeds.
func TestDatabaseRefusesWritesOfTrials(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_webhook_targets (name, url, secrets, events) values ('t', 'https://example.com', '{s}', '{*}');
		insert into agent_threads (id, channel) values ('th', 'chat');
		insert into agent_messages (thread_id, role, content, status) values ('th', 'user', 'x', 'queued');
		insert into agent_automations (name, trigger, cron, skill_name) values ('a', 'cron', '* * * * *', 's');
		insert into agent_objectives (name, goal) values ('o', 'g');
		insert into agent_objective_steps (objective_id, position, title) select id, 1, 's' from agent_objectives;
		insert into agent_memory (key, value) values ('k', '1');
		insert into agent_executions (trace_id, surface, flow) values ('`+evalTrace+`', 'eval', 'eval'), ('`+chatTrace+`', 'chat', 'eval');
		insert into agent_workers (id, name, expires_at) values (gen_random_uuid(), 'w', clock_timestamp() + interval '1 hour');
		update agent_executions set claimed_by = (select id from agent_workers), claim = 1, status = 'running'`)
	expectRefused := func(t *testing.T, err error) {
		assert.Truef(t, err != nil &&
			(strings.Contains(err.Error(), "a trial of an eval cannot") || strings.Contains(err.Error(), "is not a trace id")),
			"the write of a trial was not refused as such: %v", err)
	}
	for attempt, sql := range fenceBypasses {
		t.Run(attempt, func(t *testing.T) {
			_, err := pool.Exec(t.Context(),
				`begin; select fence_agent_execution(id, 1) from agent_executions where surface = 'eval';`+sql+`; insert into agent_threads (id, channel) values ('new', 'chat'); rollback`, pgx.QueryExecModeSimpleProtocol)
			if !postgres.IsCode(err, "LK009") {
				t.Errorf("the write of a trial was not refused as such: %v", err)
			}
		})
	}
	for fenced, writes := range map[bool]map[string]string{false: tracedWrites, true: fencedWrites} {
		for name, sql := range writes {
			t.Run(name, func(t *testing.T) {
				expectRefused(t, attemptWrite(t.Context(), pool, sql, evalTrace, fenced))
				require.NoError(t, attemptWrite(t.Context(), pool, sql, chatTrace, fenced))
			})
		}
	}
}

// After the rollback of a fence, a write is not a write of a trial. The database removes the records of ended
// transactions.
func TestRolledBackFenceHasNoEffect(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t), postgres.Options{MaxConns: 1})
	pgtest.Exec(t, pool, `
		insert into agent_executions (trace_id, surface, flow) values ('`+evalTrace+`', 'eval', 'eval');
		insert into agent_workers (id, name, expires_at) values (gen_random_uuid(), 'w', clock_timestamp() + interval '1 hour');
		update agent_executions set claimed_by = (select id from agent_workers), claim = 1, status = 'running'`)
	fence := `select fence_agent_execution(id, 1) from agent_executions;`
	pgtest.Exec(t, pool, `begin; savepoint s; `+fence+` rollback to savepoint s;
		insert into agent_threads (id, channel) values ('new', 'chat'); commit`)
	for range 3 {
		pgtest.Exec(t, pool, fence)
	}
	pgtest.Equal(t, pool, 1, `select count(*)::int from lanekeeper.agent_trial_transactions`)
	pgtest.Eventually(t, func() bool { // a restored copy restarts its transaction count
		_, err := pool.Exec(t.Context(), `select void_agent_leases()`)
		return err == nil
	}, "void_agent_leases works when no other session of the owner is left")
	pgtest.Equal(t, pool, 0, `select count(*)::int from lanekeeper.agent_trial_transactions`)
}

// A trial can call no skill and acquire no lane.
func TestTrialCannotCallSkillOrAcquireLane(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	call := skills.Call{Skill: skills.Skill{Name: "check_order"}, Args: []byte(`{"order":1}`)}
	var err error
	call.Skill, err = skills.Get(t.Context(), w.pool, "check_order")
	require.NoError(t, err)
	for surface, allowed := range map[trace.Surface]bool{trace.Eval: false, trace.Chat: true} {
		before := w.realCalls.Load()
		ctx := trace.With(t.Context(), trace.Span{TraceID: trace.New(surface)})
		_, err := w.runner.Skills.Invoke(ctx, call)
		assert.Truef(t, (err == nil) == allowed && (w.realCalls.Load() > before) == allowed,
			"%s: the error is %v, and the skill was called %d times", surface, err, w.realCalls.Load()-before)
		engine := enginetest.New(t, w.pool)
		require.NoError(t, engine.Register("eval", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			_, err := executions.Lane(ctx, "shop")
			return executions.Result{}, err
		}))
		x, _, err := engine.Start(t.Context(), w.pool, executions.Spec{Flow: "eval", Surface: surface})
		require.NoError(t, err)
		testkit.Run(t, engine.KeepAlive)
		require.NoError(t, engine.ClaimAndRun(t.Context(), x.ID))
		want := executions.Failed
		if allowed {
			want = executions.Completed
		}
		enginetest.Await(t, w.pool, x.ID, want)
	}
}
