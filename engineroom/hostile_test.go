package engineroom

import (
	"math"
	"net/http"
	"strings"
	"testing"
)

// What somebody wrote straight into the tables, past every check of the packages, takes no part of a page away: times
// without end, counts that are none, texts of a megabyte in fields that are short.
func TestRowsThatNobodyChecked(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	const run = "01a20055-1dbc-7d0e-8014-41a4f664fe0a"
	for _, sql := range []string{
		`alter table agent_executions disable trigger user`, `alter domain agent_wait_kind drop constraint agent_wait_kind_check`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	const unknown = "01a20055-1dbc-7d0e-8014-41a4f664fe0b"
	put(t, pool, `
		insert into agent_threads (id, channel, next_seq, created_at, updated_at)
		values ('odd', repeat('é<b>', 100000), 9, 'infinity', '-infinity') returning id`)
	put(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, channel, status, execution_id, trace_id, created_at, sent_at)
		values ('odd', 1, 1, 'user', 'hello', repeat('é<b>', 100000), 'failed', $1::text::uuid, repeat('é<b>', 100000), 'infinity', '-infinity')
		returning id::text`, run)
	put(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, waiting_for, waiting_key, waiting_until, waiting_step, thread_id,
		       created_at, started_at, updated_at)
		values ($1::text::uuid, $2, 'operate', 'operate', 'waiting', 'response', 'odd', null, 's', 'odd', '-infinity', '4713-01-01 BC', 'infinity')
		returning id::text`, run, trace)
	put(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, waiting_for, waiting_until)
		values ($1::text::uuid, $2, 'operate', 'odd', 'waiting', 'godot', 'infinity') returning id::text`, unknown, trace)
	put(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, created_at, started_at, completed_at)
		values ($1, 'operate', 'odd', 'completed', '-infinity', '-infinity', '294276-12-31') returning id::text`, trace)
	for _, usage := range []string{
		`"x"`, `[]`, `{"prompt_tokens": "abc", "total_tokens": 1e30, "completion_tokens": -5}`, `{"total_tokens": 1.5, "prompt_tokens": {}}`,
	} {
		put(t, pool, `
			insert into agent_activity (trace_id, execution_id, surface, skill_name, kind, status, token_usage, cost_usd, duration_ms,
			       thread_id, created_at, finished_at)
			values ($1, $2::text::uuid, 'operate', 'model_call', 'model', 'error', $3::text::jsonb, 'NaN', -5, repeat('é<b>', 100000), 'infinity',
			       '-infinity') returning id::text`, trace, run, usage)
	}
	put(t, pool, `
		insert into agent_automations (name, trigger, cron, prompt, enabled, disabled_by, paused_for, timezone, source, next_run_at)
		values ('odd', 'cron', '* * * * *', 'p', false, 'admin', repeat('é<b>', 100000), repeat('é<b>', 100000), repeat('é<b>', 100000), 'infinity')
		returning id::text`)
	put(t, pool, `
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status, trace_id)
		select id, 'cron', '-infinity', 'dead', repeat('é<b>', 100000) from agent_automations returning id::text`)
	put(t, pool, `
		insert into agent_webhook_targets (name, url, secrets, events)
		values ('odd', 'https://user:hunter2hunter2@ops.example/?token=hunter2hunter2', '{"s"}', '{null,"*"}') returning id::text`)
	quiet(t, pool, `
		insert into agent_agents (name, version, digest, definition, is_default, source, created_at)
		select 'odd', 1, 'x', jsonb_build_object('name', w.text, 'model', w.text, 'memory', w.text, 'description', w.text, 'instructions', w.text,
		       'greeting', w.text, 'timezone', w.text, 'effort', w.text, 'skills', array[w.text], 'keys', array[w.text], 'pinned', array[w.text],
		       'delegates', array[w.text], 'languages', array[w.text], 'fallback', array[w.text], 'heartbeat', jsonb_build_object('cron', w.text, 'prompt', w.text)),
		       true, w.text, 'infinity'
		  from (select repeat('é<b>', 100000) as text) w where $1 <> ''`, "odd")
	for _, path := range []string{
		"/", "/agents", "/agents/odd", "/activity", "/traces", "/traces/" + trace, "/traces/" + trace + "?view=tree", "/traces/" + trace + "?view=table",
		"/executions", "/executions?view=waiting", "/executions?view=stuck", "/executions/" + run, "/executions/" + unknown, "/threads", "/threads/odd",
		"/operate?session=odd", "/automations", "/automations/odd", "/spend", "/spend?by=purpose", "/audit", "/skills", "/deliveries",
	} {
		body := shows(t, server.URL+path)
		if len(body) > 300_000 {
			t.Errorf("%s has %d bytes", path, len(body))
		}
		if strings.Contains(body, "hunter2") {
			t.Errorf("%s shows the password of an address", path)
		}
	}
}

// The least number has no counterpart: it is written, where negating it would never end.
func TestEveryNumberIsWritten(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{
		0: "0", 999: "999", 1000: "1,000", -1: "-1", -999: "-999", -123456: "-123,456",
		math.MaxInt64: "9,223,372,036,854,775,807", math.MinInt64: "-9,223,372,036,854,775,808",
	} {
		if got := thousands(n); got != want {
			t.Errorf("thousands(%d) = %q, want %q", n, got, want)
		}
	}
}

// What is in an address and cannot be in the tables is refused, not asked for.
func TestAddressesThatNothingHas(t *testing.T) {
	t.Parallel()
	_, server := open(t)
	for _, list := range []string{"traces", "executions", "threads", "approvals", "skills", "automations", "objectives", "memory", "deliveries", "outgoing", "agents"} {
		for _, id := range []string{"%00", "a%00b", "%ff%fe"} {
			for _, prefix := range []string{"/", "/live/"} {
				path := prefix + list + "/" + id
				if status, _ := see(t, server.URL+path); status != http.StatusNotFound && status != http.StatusBadRequest {
					t.Errorf("%s: status %d, want 404 or 400", path, status)
				}
			}
		}
	}
	turnsAway(t, server.URL+"/activity?cursor="+strings.Repeat("A", 43), http.StatusBadRequest, "take it from the page before")
}
