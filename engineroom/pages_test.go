package engineroom

import (
	"fmt"
	"html"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

func TestChannelPageBoundsSenders(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	addSenders := func(from, to int) {
		rows.Quiet(t, pool, `
			insert into agent_channel_identities (channel, subject, conversation, status)
			select 'mail', 'sender ' || n, 'c', 'paired' from generate_series($1::int, $2::int) n`, from, to)
	}
	addSenders(1, maxSenders)
	assert.True(t, !strings.Contains(wantTexts(t, server.URL+"/channels"), "The list is cut"),
		"the page shows all senders, but says that it omits some")
	addSenders(maxSenders+1, maxSenders+1)
	wantTexts(t, server.URL+"/channels", "The list is cut")
}

func TestUnlinkRemovesLinksViewerMayNotOpen(t *testing.T) {
	t.Parallel()
	for lacks, links := range map[string]map[string]bool{
		" threads:read": {
			"/skills/prompts": true, "/flows/prompts": true, "?tab=events": true, "#main": true,
			"/threads/t": false, "/traces/x?tab=prompt": false, "/v1/traces/x/prompts": false, "/evals/runs/r/cases/c": false,
		},
		" runs:read": {"/threads/t": true, "/traces/x?tab=prompt": false, "?tab=prompt": true},
	} {
		req := &pageRequest{missingScopes: lacks, mayReadThreads: !strings.Contains(lacks, "threads:read")}
		for link, wanted := range links {
			tag := `<a class="x" href="` + link + `">x</a>`
			assert.Equal(t, wanted, string(req.unlink([]byte(tag))) == tag, link, lacks)
		}
	}
}

// Rows written by plain SQL, past the checks of the packages, break no page: infinite times, impossible counts, texts
// of a megabyte in short fields.
func TestPagesShowInvalidRows(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	const run = "01a20055-1dbc-7d0e-8014-41a4f664fe0a"
	for _, sql := range []string{
		`alter table agent_executions disable trigger user`,
		`alter domain agent_wait_kind drop constraint agent_wait_kind_check`,
	} {
		pgtest.Exec(t, pool, sql)
	}
	const unknown = "01a20055-1dbc-7d0e-8014-41a4f664fe0b"
	insert(t, pool, `
		insert into agent_threads (id, channel, next_seq, created_at, updated_at)
		values ('odd', repeat('é<b>', 30000), 9, 'infinity', '-infinity') returning id`)
	insert(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, channel, status, execution_id, trace_id, created_at,
		  sent_at)
		values ('odd', 1, 1, 'user', 'hello', repeat('é<b>', 100000), 'failed', $1::text::uuid, repeat('é<b>', 100000),
		  'infinity', '-infinity')
		returning id::text`, run)
	insert(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, waiting_for, waiting_key, waiting_until,
		  waiting_step, thread_id, created_at, started_at, updated_at)
		values ($1::text::uuid, $2, 'operate', 'operate', 'waiting', 'response', 'odd', null, 's', 'odd', '-infinity',
		  '4713-01-01 BC', 'infinity')
		returning id::text`, run, trace)
	insert(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, waiting_for, waiting_until)
		values ($1::text::uuid, $2, 'operate', 'odd', 'waiting', 'godot', 'infinity') returning id::text`, unknown, trace)
	insert(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, created_at, started_at, completed_at)
		values ($1, 'operate', 'odd', 'completed', '-infinity', '-infinity', '294276-12-31') returning id::text`, trace)
	for _, usage := range []string{
		`"x"`, `[]`, `{"prompt_tokens": "abc", "total_tokens": 1e30, "completion_tokens": -5}`,
		`{"total_tokens": 1.5, "prompt_tokens": {}}`,
	} {
		insert(t, pool, `
			insert into agent_activity (trace_id, execution_id, surface, skill_name, kind, status, token_usage, cost_usd,
			  duration_ms, thread_id, created_at, finished_at)
			values ($1, $2::text::uuid, 'operate', 'model_call', 'model', 'error', $3::text::jsonb, 'NaN', -5,
			  repeat('é<b>', 100000), 'infinity', '-infinity') returning id::text`, trace, run, usage)
	}
	insert(t, pool, `
		insert into agent_automations (name, trigger, cron, prompt, enabled, disabled_by, paused_for, timezone, source,
		  next_run_at)
		values ('odd', 'cron', '* * * * *', 'p', false, 'admin', repeat('é<b>', 100000), repeat('é<b>', 100000),
		  repeat('é<b>', 100000), 'infinity')
		returning id::text`)
	insert(t, pool, `
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status, trace_id)
		select id, 'cron', '-infinity', 'dead', repeat('é<b>', 100000) from agent_automations returning id::text`)
	insert(t, pool, `
		insert into agent_webhook_targets (name, url, secrets, events)
		values ('odd', 'https://user:hunter2hunter2@ops.example/?token=hunter2hunter2', '{"s"}', '{null,"*"}')
		  returning id::text`)
	rows.Quiet(t, pool, `
		insert into agent_agents (name, version, digest, definition, is_default, source, created_at)
		select 'odd', 1, 'x', jsonb_build_object('name', w.text, 'model', w.text, 'memory', w.text, 'description', w.text,
		  'instructions', w.text,
		       'greeting', w.text, 'timezone', w.text, 'effort', w.text, 'skills', array[w.text], 'keys', array[w.text],
		         'pinned', array[w.text],
		       'delegates', array[w.text], 'languages', array[w.text], 'fallback', array[w.text], 'heartbeat',
		         jsonb_build_object('cron', w.text, 'prompt', w.text)),
		       true, w.text, 'infinity'
		  from (select repeat('é<b>', 100000) as text) w where $1 <> ''`, "odd")
	for _, path := range []string{
		"/", "/agents", "/agents/odd", "/activity", "/traces", "/traces/" + trace, "/traces/" + trace + "?view=table",
		"/traces/" + trace + "?tab=cost", "/traces/" + trace + "?span=" + run + "&tab=raw",
		"/executions", "/executions?view=waiting", "/executions?view=stuck", "/executions/" + run, "/executions/" + unknown,
		"/threads", "/threads/odd",
		"/operate?session=odd", "/automations", "/automations/odd", "/spend", "/spend?by=purpose", "/audit",
		"/skills", "/deliveries",
	} {
		body := wantTexts(t, server.URL+path)
		assert.Truef(t, len(body) <= 300_000, "%s has %d bytes", path, len(body))
		assert.Truef(t, !strings.Contains(body, "hunter2"), "%s shows the password of an address", path)
	}
}

// A path that cannot be in the tables is rejected without a query.
func TestUnknownAddresses(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	for _, list := range []string{
		"traces", "executions", "threads", "approvals", "skills", "automations", "objectives",
		"memory", "deliveries", "outgoing", "agents",
	} {
		for _, id := range []string{"%00", "a%00b", "%ff%fe"} {
			for _, prefix := range []string{"/", "/live/"} {
				path := prefix + list + "/" + id
				if status, _ := testkit.Get(t, server.URL+path); status != http.StatusNotFound && status != http.StatusBadRequest {
					t.Errorf("%s: status %d, want 404 or 400", path, status)
				}
			}
		}
	}
	for path, sentence := range map[string]string{
		"/traces/nope":     `no trace has the id &#34;nope&#34;`,
		"/executions/nope": `no execution has the id &#34;nope&#34;`,
		"/flows/nope":      `there is no flow &#34;nope&#34;`,
	} {
		wantError(t, server.URL+path, http.StatusNotFound, sentence)
		wantError(t, server.URL+path, http.StatusNotFound, `name="q" value="nope"`)
	}
	wantError(t, server.URL+"/activity?cursor="+strings.Repeat("A", 43), http.StatusBadRequest,
		"take it from the page before")
}

func TestExpiredSessionHasEnded(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for _, path := range []string{"/principals", "/principals/root"} {
		id := insert(t, pool, `insert into agent_sessions (secret_sha256, principal_id, method, expires_at)
			select sha256(convert_to($1, 'UTF8')), p.id, 'token', clock_timestamp() - interval '1 hour'
			  from agent_principals p where p.name = 'root' returning id::text`, path)
		body := wantTexts(t, server.URL+path, `id="session-`+id, ">ended<")
		assert.Truef(t, !strings.Contains(body, "/v1/sessions/"+id+"/revoke"), "%s offers to revoke an expired session", path)
	}
}

func TestListPages(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, waiting_for, waiting_key, waiting_until,
		  claimed_by, created_at)
		select lanekeeper.agent_uuid7(at), 'fl_' || lpad(n::text, 26, '0'), 'flow', 'f', 'waiting', 'event', 'k',
		       now() + n / 7 * interval '1 hour', null, at
		  from (select n, clock_timestamp() - n * interval '1 second' as at from generate_series(1, 120) n) x;
		insert into agent_threads (id, channel, owner, updated_at)
		select 'thread ' || n, 'chat', 'o', now() - n / 3 * interval '1 minute' from generate_series(1, 120) n;
		insert into agent_memory (category, key, value) select 'c', 'k' || n, '1' from generate_series(1, 70) n;
		insert into agent_automations (name, cron, skill_name, next_run_at)
		select 'a' || n, '0 3 * * *', 'fetch', now() from generate_series(1, 52) n;
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status)
		select a.id, 'manual', now(), 'success' from agent_automations a, generate_series(1, 31) where a.name = 'a1';
		insert into agent_locks (lane, locked_by, fencing_token, expires_at)
		select 'lane ' || lpad(n::text, 4, '0'), 'me', n, now() + interval '1 hour' from generate_series(1, 201) n;
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, status, decided_at,
		  expires_at)
		select 'op_1', 'drop', 1, '{}', n::text, (array['approved', 'rejected'])[1 + n % 2], now(), now() + interval '5 hours'
		  from generate_series(1, 52) n;
		insert into agent_objectives (name, goal) select 'o' || n, 'g' from generate_series(1, 51) n`)
	insertActivities(t, pool, 120)
	for path, c := range map[string]struct{ row, want string }{
		"/executions":                       {`<tr id="execution-`, "[50 50 20]"},
		"/executions?status=waiting&flow=f": {`<tr id="execution-`, "[50 50 20]"},
		"/executions?view=waiting":          {`<tr id="execution-`, "[50 50 20]"},
		"/threads":                          {`<a href="/threads/`, "[50 50 20]"},
		"/threads?owner=o&channel=chat":     {`<a href="/threads/`, "[50 50 20]"},
		"/traces?status=waiting":            {`<tr id="trace-`, "[50 50 20]"},
		"/memory?category=c":                {`<tr id="entry-`, "[50 20]"},
		"/automations?state=enabled":        {`<tr id="automation-`, "[50 2]"},
		"/automations/a1":                   {`<tr id="run-`, "[30 1]"},
		"/lanes":                            {`<tr id="lane-`, "[200 1]"},
		"/approvals?status=decided":         {`<tr id="approval-`, "[50 2]"},
		"/objectives":                       {`<tr id="objective-`, "[50 1]"},
		"/activity?surface=heartbeat":       {`<tr id="row-`, "[50 46]"},
	} {
		got := fmt.Sprint(followPager(t, server, path, regexp.MustCompile(c.row+`([^"]+)"`)))
		assert.Truef(t, got == c.want, "the pages of %s have %s rows, want %s", path, got, c.want)
	}
}

// followPager follows the links of a pager from a path to the last page. It returns the number of rows of each page,
// and fails if two pages show the same row. The group of row is a row's id.
func followPager(t *testing.T, server *httptest.Server, path string, row *regexp.Regexp) (counts []int) {
	t.Helper()
	seen := map[string]string{}
	for path != "" && len(counts) < 10 {
		body := wantTexts(t, server.URL+path)
		rows := row.FindAllStringSubmatch(body, -1)
		for _, m := range rows {
			before := seen[m[1]]
			assert.Truef(t, before == "", "%s shows %s again, after %s", path, m[1], before)
			seen[m[1]] = path
		}
		counts = append(counts, len(rows))
		link := olderLink.FindStringSubmatch(body)
		if path = ""; link != nil {
			path, _, _ = strings.Cut(html.UnescapeString(link[1]), "#")
		}
	}
	return counts
}

// olderLink matches the link to the next page, not the one back to the first.
var olderLink = regexp.MustCompile(`<p class="pager">` +
	`(?:<span>[^<]*</span> |<a href="[^"]+">(?:Newest|First|Latest) [^<]*</a>)*` +
	`<a href="([^"]+)">(?:Older|Further|Earlier|Later|More|Search) `)
