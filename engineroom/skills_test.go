package engineroom

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// skill declares a skill, in service or not.
func skill(t *testing.T, pool *pgxpool.Pool, name, description, disabledBy, reason string) {
	t.Helper()
	put(t, pool, `
		insert into agent_skills (name, description, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at, evidence)
		values ($1, $2, jsonb_build_object('name', $1::text, 'description', $2::text), 'builtin:x', $3 = '', $3, $4,
		        case when $3 <> '' then clock_timestamp() end, '{}') returning id::text`, name, description, disabledBy, reason)
}

// called writes calls of a skill.
func called(t *testing.T, pool *pgxpool.Pool, name, status, message string, n int) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `
		insert into agent_activity (trace_id, surface, skill_name, status, error_class, error_message, duration_ms)
		select 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'heartbeat', $1, $2, case when $2 = 'error' then 'timeout' else '' end, nullif($3, ''), 120
		  from generate_series(1, $4::int)`, name, status, message, n); err != nil {
		t.Fatal(err)
	}
}

func TestSkillsAreListedWithTheirHealth(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/skills", "agent apply DIR")
	shows(t, server.URL+"/", "agent apply DIR")
	skill(t, pool, "fetch_price", "Fetches a price.", "", "")
	skill(t, pool, "post_tweet", "Posts.", "self-heal", "5 consecutive failures")
	called(t, pool, "fetch_price", "success", "", 6)
	called(t, pool, "fetch_price", "error", "no route", 2)
	for _, path := range []string{"/skills", "/"} {
		body := shows(t, server.URL+path, "fetch_price", "75 %", "by self-heal", "5 consecutive failures", "120 ms")
		if path == "/" && strings.Index(body, "post_tweet") > strings.Index(body, "fetch_price") {
			t.Error("what is out of service does not come first")
		}
	}
	if body := shows(t, server.URL+"/skills?state=disabled", "post_tweet", "/act/v1/skills/post_tweet/enable"); strings.Contains(body, `id="skill-fetch_price"`) {
		t.Error("an enabled skill is listed as disabled")
	}
	shows(t, server.URL+"/skills", `id="failing-fetch_price"`, "no route", `id="slowest-fetch_price"`)
	shows(t, server.URL+"/skills?state=on+trial", "There is none")
	shows(t, server.URL+"/skills?skill=fetch_price", "/act/v1/skills/fetch_price/disable")
	turnsAway(t, server.URL+"/skills?state=broken", 400, "state is")
}

func TestASkillIsShownWithItsCalls(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	skill(t, pool, "fetch_price", "Fetches a price.", "", "")
	shows(t, server.URL+"/skills/fetch_price", "It was never called", "It was not called in this time", "None. An automation")
	called(t, pool, "fetch_price", "success", "", 3)
	called(t, pool, "fetch_price", "error", "no route to host", 1)
	put(t, pool, `insert into agent_automations (name, cron, skill_name) values ('prices', '0 * * * *', 'fetch_price') returning id::text`)
	shows(t, server.URL+"/skills/fetch_price", "Definition, as a model sees it", "75 %", "no route to host", "/automations/prices",
		"/act/v1/skills/fetch_price/disable", "Calls by day, 7 days")
	turnsAway(t, server.URL+"/skills/nothing", 404, "there is no skill")
	turnsAway(t, server.URL+"/skills/%00", 404, "there is no skill")
}

func TestHostileTextInSkillsIsText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	skill(t, pool, "hostile", hostile[:len(hostile)-1], "admin", hostile)
	skill(t, pool, "huge", strings.Repeat("ñ", 1_000_000), "admin", strings.Repeat("<", 1_000_000))
	called(t, pool, "hostile", "error", hostile, 2)
	called(t, pool, "huge", "error", strings.Repeat("<", 1_000_000), 2)
	for _, path := range []string{"/skills", "/skills/hostile", "/"} {
		harmless(t, server.URL+path)
	}
	if body := shows(t, server.URL+"/skills/huge"); len(body) > 400_000 {
		t.Errorf("the page of a skill with a megabyte of text has %d bytes", len(body))
	}
}

func TestSkillsAndSpendReadNothingWhole(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	if _, err := pool.Exec(t.Context(), `
		insert into agent_activity (id, trace_id, kind, skill_name, purpose, surface, status, token_usage, created_at, duration_ms)
		select lanekeeper.agent_uuid7(at), 'hb_x', case n % 4 when 0 then 'model' else 'call' end, case n % 4 when 0 then 'model_call' else 'skill_' || n % 97 end,
		       'p' || n % 7, 'heartbeat', case n % 11 when 0 then 'error' else 'success' end, '{"total_tokens": 5}', at, n % 1000
		  from (select n, clock_timestamp() - interval '20 days' * n / 30001 as at from generate_series(1, 30000) n) x;
		insert into agent_skills (name, tool_definition, handler) select 'skill_' || n, '{}', 'builtin:x' from generate_series(0, 96) n;
		insert into agent_executions (trace_id, surface, flow, status) select 'hb_' || n, 'heartbeat', 'f' || n % 50, 'pending' from generate_series(1, 5000) n;
		insert into agent_activity_counts (span, start, kind, skill, surface, model, calls)
		select 'hour', date_trunc('hour', now()) - interval '1 hour' * (n / 20), 'call', 'skill_' || n % 20, 'heartbeat', '', 1 from generate_series(1, 20000) n;
		insert into agent_activity_counts (span, start, kind, skill, surface, model, calls)
		select 'day', date_trunc('day', now()) - interval '1 day' * (n / 20), 'call', 'skill_' || n % 20, 'heartbeat', '', 1 from generate_series(1, 20000) n;
		delete from agent_activity_uncounted;
		update agent_activity_counted set counted_upto = lanekeeper.agent_uuid7(clock_timestamp())`); err != nil {
		t.Fatal(err)
	}
	analyse(t, pool, "agent_activity", "agent_activity_counts", "agent_activity_durations", "agent_executions", "agent_skills")
	var partitions string
	if err := pool.QueryRow(t.Context(), `select string_agg(distinct tableoid::regclass::text, '|') from agent_activity`).Scan(&partitions); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/spend?days=7", "/spend?days=1&per=hour", "/spend?by=purpose", "/audit?surface=chat", "/skills", "/skills/skill_7"} {
		indexed(t, pool, path, partitions, "agent_activity_counts", "agent_executions")
	}
}
