package engineroom

import (
	"html"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/replica"
)

// quiet makes a connection's statements run without triggers, so that a test can make rows in any state.
func quiet(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	if _, err := tx.Exec(t.Context(), `set local session_replication_role = replica`); err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// execution makes one in a state.
func execution(t *testing.T, pool *pgxpool.Pool, status, surface, flow string) string {
	t.Helper()
	id := put(t, pool, `select lanekeeper.agent_uuid7()::text`)
	quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, outside, status, waiting_for, waiting_key, waiting_until, waiting_step, updated_at, completed_at)
		select @id::uuid, lanekeeper.agent_trace_id('fl'), @surface, @flow, @flow like 'external%', @status::text, x.kind, x.key, x.until, x.step, x.at, x.ended
		  from (select case when @status = 'waiting' then 'event' end as kind, case when @status = 'waiting' then 'news' end as key,
		               case when @status = 'waiting' then clock_timestamp() + interval '1 hour' end as until,
		               case when @status = 'waiting' then 'wait for news' end as step, clock_timestamp() as at,
		               case when @status not in ('pending', 'running', 'waiting') then clock_timestamp() end as ended) x`,
		postgres.Strict{"id": id, "status": status, "surface": surface, "flow": flow})
	return id
}

// Completed ones are in no index of states: they are counted among the newest, and where there are others, the count says that it is not all.
func TestCompletedExecutionsAreCountedAmongTheNewest(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	for range 3 {
		execution(t, pool, "completed", "chat", "flow")
	}
	shows(t, server.URL+"/executions", "completed")
	if counts, err := (&Room{Options: Options{Read: replica.Primary(pool)}}).countStates(t.Context()); err != nil || counts["completed"] != "3" || counts["failed"] != "0" {
		t.Errorf("counted %v, %v", counts, err)
	}
	quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, outside, status, completed_at)
		select lanekeeper.agent_uuid7(clock_timestamp() - interval '1 hour'), 'fl_1', 'flow', 'flow', false, 'failed', clock_timestamp()
		  from generate_series(1, 4 * @most::int) n`, postgres.Strict{"most": countedMost})
	if counts, err := (&Room{Options: Options{Read: replica.Primary(pool)}}).countStates(t.Context()); err != nil || counts["completed"] != "3+" || counts["failed"] != "1,000+" {
		t.Errorf("counted %v, %v", counts, err)
	}
}

// listed are those of ids that a page has a row of.
func listed(body string, ids map[string]string) string {
	var names []string
	for _, name := range []string{"pending", "running", "waiting", "completed", "failed", "timeout", "cancelled"} {
		if strings.Contains(body, `id="execution-`+ids[name]+`"`) {
			names = append(names, name)
		}
	}
	return strings.Join(names, " ")
}

func TestExecutionsAreListedByState(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/executions", "Nothing has run yet", "The queue is empty")
	ids := map[string]string{}
	for i, status := range executionStatuses() {
		ids[status] = execution(t, pool, status, []string{"chat", "webhook"}[i%2], "flow_"+status)
	}
	// One that a worker has is in no index of its flow.
	quiet(t, pool, `update agent_executions set claimed_by = lanekeeper.agent_uuid7() where status = 'running'`)
	trace := put(t, pool, `select trace_id from agent_executions where id = $1`, ids["failed"])
	for query, want := range map[string]string{
		"":                                       "pending running waiting completed failed timeout cancelled",
		"?status=failed":                         "failed",
		"?status=completed&flow=":                "completed",
		"?failed=1":                              "failed timeout",
		"?failed=1&surface=webhook":              "timeout",
		"?surface=chat":                          "pending waiting failed cancelled",
		"?flow=flow_timeout":                     "timeout",
		"?flow=flow_running":                     "running",
		"?flow=flow_pending":                     "pending",
		"?status=running":                        "running",
		"?status=cancelled":                      "cancelled",
		"?flow=flow_timeout&status=failed":       "",
		"?flow=flow_failed&failed=1":             "failed",
		"?trace_id=" + trace:                     "failed",
		"?trace_id=" + trace + "&status=timeout": "",
		"?view=waiting":                          "waiting",
		"?view=waiting&for=event":                "waiting",
		"?view=waiting&for=delay":                "",
		"?view=stuck":                            "",
	} {
		body := shows(t, server.URL+"/executions"+query)
		if got := listed(body, ids); got != want {
			t.Errorf("%q lists %q, want %q", query, got, want)
		}
	}
	for surface, flows := range map[string][2]string{"webhook": {"flow_running", "flow_pending"}, "chat": {"flow_waiting", "flow_running"}} {
		body := shows(t, server.URL+"/traces?surface="+surface, flows[0])
		if strings.Contains(body, flows[1]) {
			t.Errorf("/traces?surface=%s shows %s, which is of another", surface, flows[1])
		}
	}
	quiet(t, pool, `update agent_executions set waiting_until = now() - interval '2 hours', updated_at = now() - interval '2 hours' where status = 'waiting'`)
	if got := listed(shows(t, server.URL+"/executions?view=stuck"), ids); got != "waiting" {
		t.Errorf("stuck is %q", got)
	}
	for query, why := range map[string]string{
		"?status=odd": "pending, running", "?surface=odd": "heartbeat", "?view=odd": "waiting, stuck", "?view=waiting&for=odd": "response",
		"?failed=2": "1", "?for=event": "view=waiting", "?view=stuck&status=failed": "leave status", "?trace_id=odd": "not a trace id",
		"?before=odd": "not where a page", "?view=waiting&before=odd": "not where a page", "?colour=red": "no filter", "?status=failed&status=failed": "2 times",
	} {
		turnsAway(t, server.URL+"/executions"+query, 400, why)
	}
}

func TestExecutionsGoOnOverPages(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, waiting_for, waiting_key, waiting_until)
		select lanekeeper.agent_uuid7(clock_timestamp() - n * interval '1 second'), 'fl_' || n, 'flow', 'f', 'waiting', 'event', 'k', now() + n / 7 * interval '1 hour'
		  from generate_series(1, 120) n`)
	for _, path := range []string{"/executions", "/executions?status=waiting&flow=f", "/executions?view=waiting"} {
		seen := map[string]bool{}
		for pages := 0; path != "" && pages < 5; pages++ {
			body := shows(t, server.URL+path)
			for _, row := range strings.Split(body, `id="execution-`)[1:] {
				if seen[row[:36]] {
					t.Errorf("%s shows %s again", path, row[:36])
				}
				seen[row[:36]] = true
			}
			path = next(body, `<p class="pager">`)
		}
		if len(seen) != 120 {
			t.Errorf("the pages have %d executions", len(seen))
		}
	}
}

// next is where a link of a page leads, after a text.
func next(body, after string) string {
	_, link, _ := strings.Cut(body, after+`<a href="`)
	link, _, _ = strings.Cut(link, `"`)
	return html.UnescapeString(link)
}

func TestARareCombinationIsLookedForInSteps(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status)
		select lanekeeper.agent_uuid7(clock_timestamp() - n * interval '1 second'), 'fl_' || n, case when n > @looked then 'chat' else 'flow' end, 'f',
		       case when n = @looked + 3 then 'timeout' else 'failed' end
		  from generate_series(1, @looked + 5) n`, postgres.Strict{"looked": lookedAt})
	analyse(t, pool, "agent_executions")
	for _, filter := range []string{"?surface=chat", "?surface=chat&failed=1"} { // the timeout has a window of its own, which reaches farther
		body := shows(t, server.URL+"/executions"+filter, "among those that were looked at", "Look farther back")
		if strings.Contains(body, `id="execution-`) {
			t.Errorf("%s: what lies farther back is on the first page", filter)
		}
		body = shows(t, server.URL+next(body, "looked at.</span> "))
		if n := strings.Count(body, `id="execution-`); n != 5 || strings.Contains(body, "Look farther back") {
			t.Errorf("%s: the next page has %d executions", filter, n)
		}
	}
	shows(t, server.URL+"/executions", "1,000&#43;")
}

func TestTheQueueAndItsLimitsAreShown(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	execution(t, pool, "pending", "chat", "greet")
	execution(t, pool, "pending", "chat", "greet")
	quiet(t, pool, `insert into agent_limits values ('flow', 'greet', 0), ('surface', 'chat', 3)`)
	shows(t, server.URL+"/executions", `aria-label="2 ready, flow greet, surface chat`, "full: the others wait", "surface=chat")
}

func TestHostileExecutionsAreText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := execution(t, pool, "waiting", "chat", "greet")
	long := hostile + strings.Repeat("x", 1_000_000)
	quiet(t, pool, `
		update agent_executions set flow = @bad, waiting_key = left(@long, 2000), waiting_step = @long, error_message = @long, result_summary = @long,
		       input = jsonb_build_object('a', @json::text, @json::text, 1), variables = jsonb_build_object('a', @json::text),
		       result = jsonb_build_object('a', repeat(@json::text, 3)), waiting_data = jsonb_build_object('a', @json::text), failed_step = @long,
		       cancelled_by = @long, cancel_reason = @long, thread_id = @bad where id = @id::uuid`,
		postgres.Strict{"id": id, "bad": hostile, "long": long, "json": long})
	quiet(t, pool, `
		insert into agent_checkpoints (execution_id, step, claim, failed, output)
		select @id::uuid, n || @bad, n, n % 2 = 0, jsonb_build_object('event', @long::text, 'timed_out', false, 'data', @long::text) from generate_series(1, 5) n`,
		postgres.Strict{"id": id, "bad": hostile, "long": long})
	quiet(t, pool, `insert into agent_requests (kind, execution_id, trace_id, title) values ('test', @id::uuid, 'x', @long)`,
		postgres.Strict{"id": id, "long": long})
	harmless(t, server.URL+"/executions")
	harmless(t, server.URL+"/executions?view=waiting")
	harmless(t, server.URL+"/executions/"+id)
	harmless(t, server.URL+"/executions/"+id+"?from="+url.QueryEscape("<script>alert(1)</script>"))
}

func TestExecutionsAreFoundByAnIndex(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	id := execution(t, pool, "waiting", "flow", "greet")
	quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, parent_id, waiting_for, waiting_key, waiting_until)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'), (array['heartbeat', 'operate', 'chat', 'webhook', 'flow'])[1 + n % 5], 'flow_' || n % 20,
		       case when n % 17 = 0 then 'waiting' when n % 97 = 0 then 'failed' when n % 13 = 0 then 'pending' else 'completed' end,
		       case when n % 500 = 0 then @id::uuid end, case when n % 17 = 0 then 'event' end, case when n % 17 = 0 then 'k' || n end,
		       case when n % 17 = 0 then at + interval '7 days' end
		  from (select n, clock_timestamp() - n * interval '1 minute' as at from generate_series(1, 10000) n) x`, postgres.Strict{"id": id})
	quiet(t, pool, `
		insert into agent_checkpoints (execution_id, step, claim, output)
		select case when n < 100 then @id::uuid else gen_random_uuid() end, 'step ' || n, 1, '{}' from generate_series(1, 5000) n`, postgres.Strict{"id": id})
	quiet(t, pool, `
		insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id)
		select 'lane' || n, case when n % 50 = 0 then 'x' else '' end, n, now() + interval '1 hour', case when n % 50 = 0 then gen_random_uuid() end
		  from generate_series(1, 5000) n`)
	quiet(t, pool, `insert into agent_requests (kind, execution_id, trace_id) select 'test', gen_random_uuid(), 'x' from generate_series(1, 5000)`)
	quiet(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, status, execution_id)
		select 'thread' || n % 50, n, n, 'user', 'words', 'received', gen_random_uuid() from generate_series(1, 5000) n`)
	tables := []string{"agent_executions", "agent_checkpoints", "agent_locks", "agent_requests", "agent_messages"}
	analyse(t, pool, tables...)
	trace := "hb_" + strings.Repeat("0", 23) + "123"
	for _, path := range []string{
		"/executions", "/executions?status=failed", "/executions?status=completed&surface=chat&flow=flow_1", "/executions?failed=1&flow=flow_2",
		"/executions?flow=flow_3", "/executions?surface=chat", "/executions?trace_id=" + trace, "/executions?before=" + id, "/executions?view=waiting",
		"/executions?view=stuck", "/executions?view=waiting&flow=flow_1&for=event", "/executions/" + id,
		"/executions/" + id + "?before=" + url.QueryEscape("2026-01-01T00:00:00Z step 50"),
	} {
		indexed(t, pool, path, tables...)
	}
}
