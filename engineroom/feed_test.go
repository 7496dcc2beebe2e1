package engineroom

import (
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// did writes n rows of the log, which name their number.
func did(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `
		insert into agent_activity (id, trace_id, skill_name, purpose, status, surface, agent, lane, error_class, error_message, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'), case n % 2 when 0 then 'even' else 'odd' end, 'number ' || n || '.',
		       case n % 3 when 0 then 'error' else 'success' end, case n % 5 when 0 then 'chat' else 'heartbeat' end,
		       'agent_' || n % 7, 'lane_' || n % 11, case n % 3 when 0 then 'timeout_class' else '' end, case n % 3 when 0 then 'too slow' end, at
		  from (select n, clock_timestamp() - make_interval(secs => 3 * ($1::int - n)) as at from generate_series(1, $1::int) n) x`, n)
	if err != nil {
		t.Fatal(err)
	}
}

// filled are the partitions of the log that have rows: an empty one is best read as it is.
func filled(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	return strings.Fields(put(t, pool, `select string_agg(distinct tableoid::regclass::text, ' ') from agent_activity`))
}

func TestFiltersOfTheLogCombine(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	did(t, pool, 120)
	for query, want := range map[string]string{
		"/?surface=chat&status=error":                             "120 105 90 75 60 45 30 15",
		"/activity?surface=chat&status=error&skill=even":          "120 90 60 30",
		"/activity?lane=lane_1&agent=agent_1":                     "78 1",
		"/activity?trace=hb_00000000000000000000000042":           "42",
		"/activity?trace=00000000000000000000000042&status=error": "42",
		"/activity?skill=none":                                    "",
		"/activity?since=2999-01-01":                              "",
		"/activity?until=2000-01-01T00:00":                        "",
	} {
		body := shows(t, server.URL+query)
		var got []string
		for _, m := range regexp.MustCompile(`number (\d+)\.`).FindAllStringSubmatch(body, -1) {
			got = append(got, m[1])
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s has %v, want %s", query, got, want)
		}
	}
	shows(t, server.URL+"/?status=error", "timeout_class", "too slow", `role="log"`, `<option value="error" selected>`)
}

func TestTheLogGoesOnOverPages(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	did(t, pool, 120)
	seen, path := map[string]int{}, "/activity?surface=heartbeat"
	pages := 0
	for path != "" {
		body := shows(t, server.URL+path)
		for _, m := range regexp.MustCompile(`data-row="([^"]+)"`).FindAllStringSubmatch(body, -1) {
			seen[m[1]]++
		}
		pages++
		path = ""
		if m := regexp.MustCompile(`href="([^"]+)">Older activities`).FindStringSubmatch(body); m != nil {
			path = strings.ReplaceAll(m[1], "&amp;", "&")
		}
	}
	for id, n := range seen {
		if n != 1 {
			t.Errorf("%s comes %d times", id, n)
		}
	}
	if len(seen) != 96 || pages != 2 {
		t.Errorf("%d rows on %d pages, want 96 on 2", len(seen), pages)
	}
}

func TestARowOfTheLogUnfolds(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := put(t, pool, `
		insert into agent_activity (trace_id, skill_name, input, output, error_message, step, idempotency_key, token_usage)
		values ('hb_00000000000000000000000001', 'look', jsonb_build_object('text', $1::text), to_jsonb(repeat('z', 1000000)), $1, $1, $1,
		        '{"prompt_tokens": 1200, "completion_tokens": 34}') returning id::text`, hostile)
	folded := shows(t, server.URL+"/activity", `aria-expanded="false"`, "row="+id)
	if strings.Contains(folded, "zzzz") || strings.Contains(folded, "1,200 read") {
		t.Error("a folded row has what it leaves out")
	}
	shows(t, server.URL+"/activity?row="+id, `aria-expanded="true"`, "1,200 read, 34 written", "zzzz", "in all")
	harmless(t, server.URL+"/activity?row="+id)
	shows(t, server.URL+"/activity?row=018f0000-0000-7000-8000-000000000000", "look")
}

func TestTheLogIsReadByItsIndexes(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	did(t, pool, 20_000)
	analyse(t, pool, "agent_activity")
	tables := filled(t, pool)
	for _, path := range []string{
		"/activity", "/activity?surface=chat&status=error", "/activity?lane=none", "/activity?skill=even", "/activity?agent=nobody&since=2020-01-01",
		"/activity?trace=hb_00000000000000000000000042", "/activity?status=running",
	} {
		indexed(t, pool, path, tables...)
	}
}

func TestTheOverviewIsReadByItsIndexes(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	did(t, pool, 20_000)
	_, err := pool.Exec(t.Context(), `
		insert into agent_executions (trace_id, surface, flow) select 'fl_' || n, 'flow', 'x' from generate_series(1, 5000) n;
		insert into agent_locks (lane, locked_by, fencing_token, expires_at) select 'l' || n, '', n, clock_timestamp() from generate_series(1, 5000) n;
		insert into agent_memory (category, key, value) select 'c' || n % 5, 'k' || n, to_jsonb(n) from generate_series(1, 5000) n;
		insert into agent_threads (id, channel) values ('t', 'chat');
		insert into agent_messages (thread_id, role, content, status) select 't', 'user', 'x', 'withdrawn' from generate_series(1, 5000) n;
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, status, expires_at)
		select 'hb_1', 'x', 1, '{}', n::text, 'rejected', clock_timestamp() from generate_series(1, 5000) n;
		insert into agent_requests (kind, execution_id, trace_id, status)
		select 'test', lanekeeper.agent_uuid7(), 'x', 'closed' from generate_series(1, 5000) n;
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256)
		select 'e', n::text, 'x', 'x', 'done', '', '' from generate_series(1, 5000) n;
		insert into agent_webhook_targets (name, url, secrets, events) values ('t', 'https://example.com', '{x}', '{*}');
		insert into agent_webhook_outbox (target_id, event, payload, trace_id, status)
		select t.id, 'e', '{}', 'x', 'sent' from agent_webhook_targets t, generate_series(1, 5000) n;
		insert into agent_automations (name, prompt) values ('a', 'look');
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status)
		select a.id, 'manual', clock_timestamp(), 'success' from agent_automations a, generate_series(1, 5000) n;
		insert into agent_objectives (name, goal, status) select 'o' || n, 'x', 'completed' from generate_series(1, 5000) n;
		insert into agent_objective_steps (objective_id, position, title) select o.id, 1, 'x' from agent_objectives o`)
	if err != nil {
		t.Fatal(err)
	}
	tables := []string{
		"agent_executions", "agent_locks", "agent_messages", "agent_approvals", "agent_requests", "agent_webhook_deliveries",
		"agent_webhook_outbox", "agent_automation_runs", "agent_objectives", "agent_objective_steps", "agent_memory",
	}
	analyse(t, pool, append(tables, "agent_activity")...)
	indexed(t, pool, "/", append(tables, filled(t, pool)...)...)
}
