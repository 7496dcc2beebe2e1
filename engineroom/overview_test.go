package engineroom

import (
	"html"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

func TestEmptyOverview(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	wantTexts(t, server.URL+"/", "Nothing is running", "Nothing needs attention.", "No activity yet", "No lane is held",
		"No active objective", "Memory is empty")
	wantTexts(t, server.URL+"/?surface=chat", "No activity matches")
}

func TestOverviewShowsRunningWork(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	worker := insert(t, pool, `insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 hour')
		returning id::text`)
	dead := insert(t, pool, `insert into agent_workers (expires_at) values (clock_timestamp() - interval '1 hour')
		returning id::text`)
	run := insert(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
		values ('hb_00000000000000000000000001', 'heartbeat', 'beat', 'running', $1, 1) returning id::text`, worker)
	lost := insert(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
		values ('hb_00000000000000000000000002', 'heartbeat', 'beat', 'running', $1, 1) returning id::text`, dead)
	insert(t, pool, `insert into agent_executions (trace_id, surface, flow)
		values ('fl_00000000000000000000000003', 'flow', 'later') returning id::text`)
	for _, name := range []string{"reflect", "fetch_prices"} {
		call := insert(t, pool, `
			insert into agent_activity (trace_id, execution_id, skill_name, status)
			  values ('hb_00000000000000000000000001', $1, $2, 'running')
			returning id::text`, run, name)
		insert(t, pool,
			`insert into agent_activity_open (activity_id, execution_id, kind) values ($1, $2, 'call') returning 'x'`, call, run)
	}
	loose := insert(t, pool, `
		insert into agent_activity (trace_id, skill_name, status)
		  values ('op_00000000000000000000000004', 'apply_workspace', 'running') returning id::text`)
	insert(t, pool, `insert into agent_activity_open (activity_id, kind) values ($1, 'call') returning 'x'`, loose)
	body := wantTexts(t, server.URL+"/", "reflect › fetch_prices", "/executions/"+run, "apply_workspace",
		"without an execution",
		`<a href="/executions?status=pending">1 ready</a>`)
	assert.True(t, !strings.Contains(body, lost), "a run whose worker is gone is said to run")
}

func TestOverviewShowsLocks(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insert(t, pool, `select try_acquire_agent_lock('pipeline:prices', 'somebody', 60)::text`)
	insert(t, pool, `select try_acquire_agent_lock('pipeline:over', 'another', 60)::text`)
	insert(t, pool, `update agent_locks set expires_at = clock_timestamp() - interval '1 s' where lane = 'pipeline:over'
		returning lane`)
	insert(t, pool, `insert into agent_lock_waiters (lane, owner, expires_at)
		values ('pipeline:prices', 'a', clock_timestamp() + interval '1 hour') returning lane`)
	insert(t, pool, `insert into agent_lock_waiters (lane, owner, expires_at)
		values ('pipeline:prices', 'b', clock_timestamp() - interval '1 hour') returning lane`)
	body := wantTexts(t, server.URL+"/", "pipeline:prices", "somebody",
		`<a href="/lanes">1<span class="aside-text"> waiting for pipeline:prices`)
	assert.True(t, !strings.Contains(body, "pipeline:over"), "the page shows a lane with an expired lease as held")
}

// seedAttentionItems inserts one row of each kind that needs a person, with text in each free text.
func seedAttentionItems(t *testing.T, pool *pgxpool.Pool, text string) {
	t.Helper()
	run := insert(t, pool, `
		insert into agent_executions (trace_id, surface, flow) values ('fl_00000000000000000000000001', 'flow', $1)
		  returning id::text`, text)
	insert(t, pool, `update agent_executions set status = 'running' where id = $1 returning id::text`, run)
	insert(t, pool, `
		update agent_executions set status = 'waiting', waiting_for = 'event', waiting_key = 'k', wait_number = 1,
		       waiting_until = clock_timestamp() - interval '3 hours', updated_at = clock_timestamp() - interval '3 hours'
		 where id = $1 returning id::text`, run)
	pgtest.Exec(t, pool, `
		alter table agent_executions disable trigger user;
		update agent_executions set updated_at = clock_timestamp() - interval '3 hours' where status = 'waiting';
		alter table agent_executions enable trigger user`)
	insert(t, pool, `
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		values ('hb_00000000000000000000000001', $1, 1, '{}', 'x', clock_timestamp() + interval '1 day')
		  returning id::text`, text)
	insert(t, pool, `
		insert into agent_requests (kind, execution_id, trace_id, title) values ('signature', $1, 'fl_1', $2)
		  returning id::text`, run, text)
	insert(t, pool, `insert into agent_objectives (name, goal, status, proposed_by) values ($1, $1, 'proposed', 'agent')
		returning id::text`, text)
	insert(t, pool, `
		insert into agent_memory_conflicts (category, key, value, if_revision, found_revision, trace_id)
		values ('general', left($1, 200), to_jsonb($1::text), 0, 0, 'hb_1') returning id::text`, text)
	insert(t, pool, `
		insert into agent_automations (name, description, prompt, enabled, disabled_by, proposed_by)
		values ($1, $1, 'look', false, 'proposal', 'agent') returning id::text`, text)
	insert(t, pool, `
		insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at)
		values ('fetch', '{}', 'builtin:x', false, 'self-heal', $1, clock_timestamp()) returning id::text`, text)
	insert(t, pool, `
		insert into agent_activity (trace_id, surface, skill_name, status, error_class, error_message, finished_at)
		values ('ch_00000000000000000000000002', 'chat', 'reasoning', 'error', 'stall', $1, clock_timestamp())
		  returning id::text`, text)
	automation := insert(t, pool,
		`insert into agent_automations (name, prompt) values ('nightly', 'look') returning id::text`)
	insert(t, pool, `
		insert into agent_automation_runs (automation_id, scheduled_for, status, error_message)
		values ($1, clock_timestamp(), 'dead', $2) returning id::text`, automation, text)
	insert(t, pool, `
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256,
		  error_message)
		values ('github', 'd1', 'wh_1', 'wh_1', 'dead', '', '', $1) returning id::text`, text)
	target := insert(t, pool, `
		insert into agent_webhook_targets (name, url, secrets, events) values ('ops', 'https://example.com', '{x}', '{*}')
		  returning id::text`)
	insert(t, pool, `
		insert into agent_webhook_outbox (target_id, event, payload, trace_id, status, last_error)
		values ($1, 'execution.failed', '{}', 'hb_00000000000000000000000001', 'dead', $2) returning id::text`, target, text)
	insert(t, pool, `insert into agent_threads (id, channel) values ('t1', 'webhook') returning id`)
	insert(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, status, error_message)
		values ('t1', 1, 1, 'assistant', 'hello', 'failed', $1) returning id::text`, text)
}

func TestAttentionItemsAreCountedAndLinked(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	seedAttentionItems(t, pool, "some text")
	pgtest.Exec(t, pool, `
		insert into agent_channels (name, type, state, error, state_at)
		values ('mail', 'email', 'failing', 'some text', clock_timestamp() - interval '5 minutes')`)
	texts := []string{
		"by self-heal: some text", "/approvals?status=pending", "/deliveries?status=dead",
		"/objectives?status=proposed", "/threads/t1", "/skills/fetch",
	}
	for _, kind := range attentionKinds() {
		kind.Total = 1
		texts = append(texts, `id="need-`+kind.Kind+`"`, `">1<span class="aside-text"> `+kind.Label())
	}
	pgtest.Exec(t, pool, `
		insert into agent_automation_runs (automation_id, scheduled_for, status, error_message)
		select id, clock_timestamp() + n * interval '1 s', 'dead', 'no route ' || n from agent_automations, generate_series(1, 2) n
		 where name = 'nightly'`)
	grouped := wantTexts(t, server.URL+"/", "3 times, the last: no route 2")
	n := strings.Count(grouped, `href="/automations/nightly"`)
	assert.Equal(t, 1, n, "three runs of one automation are named", "times")
	pgtest.Exec(t, pool, `delete from agent_automation_runs where error_message like 'no route%'`)
	body := wantTexts(t, server.URL+"/", texts...)
	assert.True(t, !strings.Contains(body, "Nothing needs attention"), "the page says that nothing needs attention")
	_, part, _ := strings.Cut(body, `<section id="needs"`)
	part, _, _ = strings.Cut(part, "</section>")
	links := regexp.MustCompile(`href="([^"]+)"`).FindAllStringSubmatch(part, -1)
	assert.Equal(t, 27, len(links))
	for _, link := range links {
		if strings.HasPrefix(link[1], "/skills") || strings.HasPrefix(link[1], "/traces") {
			continue // another test covers this page; its trace is empty
		}
		status, _ := testkit.Get(t, server.URL+strings.ReplaceAll(link[1], "&amp;", "&"))
		assert.Truef(t, status == 200, "%s: status %d", link[1], status)
	}
}

func TestNumbersOfOverviewOpenTheirRows(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	putAgent(t, pool, agents.Definition{Name: "sales", Default: true})
	putAgent(t, pool, agents.Definition{Name: "billing"})
	rows.Quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, agent, status, waiting_for, waiting_key, waiting_until,
		  waiting_step, completed_at)
		select lanekeeper.agent_uuid7(now() - days * interval '1 day'), lanekeeper.agent_trace_id('hb'), 'heartbeat', 'heartbeat',
		       agent, status, w.kind, w.kind, case when w.kind <> '' then now() + interval '1 hour' end, w.kind,
		       case when status in ('completed', 'failed') then now() end
		  from unnest(array['completed', 'failed', 'pending', 'waiting']) status,
		       (values ('sales', 0), ('billing', 0), ('billing', 0), ('sales', 20)) a (agent, days),
		       lateral (select case when status = 'waiting' then 'event' end as kind) w`)
	for name, by := range map[string]string{"on": "", "tired": "", "off": "admin", "tried": "self_heal"} {
		rows.Skill(t, pool, name, "", by, "")
	}
	rows.Calls(t, pool, "tired", "error", "too slow", 3)
	rows.Quiet(t, pool, `update agent_skills set trial_at = now() where name = 'tried'`)
	rows.Quiet(t, pool, `insert into agent_threads (id, channel) select 't' || n, 'webhook' from generate_series(1, 5) n`)
	rows.Quiet(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, status)
		select 't' || n, 1, 1, 'assistant', 'hello', 'failed' from generate_series(2, 5) n`)
	number := regexp.MustCompile(`href="([^"]+)">(\d+)(?:<span class="aside-text">)? ` +
		`(runs|failed|ready|waiting|successful ones|disabled|on trial|failing|healthy|Disabled skill|Undelivered messages)<`)
	row := regexp.MustCompile(`<tr id="(execution|skill|thread)-`)
	for path, want := range map[string]int{"/": 11, "/?agent=sales": 11, "/?agent=billing": 11} {
		links := number.FindAllStringSubmatch(wantTexts(t, server.URL+path), -1)
		assert.Equal(t, want, len(links), "numbers of", path)
		for _, link := range links {
			opened := wantTexts(t, server.URL+html.UnescapeString(link[1]))
			assert.Equal(t, link[2], strconv.Itoa(len(row.FindAllString(opened, -1))), path, "leads for", link[3], "to", link[1])
		}
	}
}

func TestOverviewShowsWorkOfAnAgentBesideMuchOther(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	putAgent(t, pool, agents.Definition{Name: "sales", Default: true})
	putAgent(t, pool, agents.Definition{Name: "billing"})
	rows.Quiet(t, pool, `
		with running as (
		  insert into agent_activity (trace_id, agent, skill_name, status)
		  select lanekeeper.agent_trace_id('op'), case n when 1 then 'sales' else 'billing' end, 'skill_' || n, 'running'
		    from generate_series(1, 9) n returning id)
		insert into agent_activity_open (activity_id, kind) select id, 'call' from running`)
	wantTexts(t, server.URL+"/?agent=sales", "<strong>skill_1</strong>")
}

func TestAttentionCountIsBounded(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	pgtest.Exec(t, pool, `
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		select 'hb_1', 'drop', 1, '{}', n::text, clock_timestamp() + interval '1 day' from generate_series(1, 1200) n`)
	wantTexts(t, server.URL+"/", `">1,000+<span class="aside-text"> Approvals requested`)
}

// The overview often queries the items that need a person, and each table except that of skills grows. Each branch has
// an index of only those items. The plan uses it as soon as a scan of the whole table is made expensive.
func TestAttentionItemsAreReadByIndex(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	pgtest.Exec(t, tx, `set local enable_seqscan = off`)
	rows, err := tx.Query(t.Context(), `explain (costs off) `+attentionSQL, pgx.QueryExecModeSimpleProtocol,
		postgres.Strict{"count_limit": countLimit, "limit": maxPerKind, "hide_texts": false})
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	plan := strings.Join(lines, "\n")
	for _, index := range []string{
		"agent_approvals_state", "agent_requests_pending", "agent_objectives_proposed", "agent_memory_conflicts_status",
		"agent_executions_waiting_until", "agent_automation_runs_dead", "agent_webhook_deliveries_open",
		"agent_webhook_outbox_dead",
		"agent_messages_failed",
	} {
		assert.Truef(t, strings.Contains(plan, index+" ") || strings.Contains(plan, index+"\n"),
			"the plan does not use %s", index)
	}
	scanned := slices.Compact(regexp.MustCompile(`Seq Scan on \w+`).FindAllString(plan, -1))
	assert.Truef(t, slices.Equal(scanned, []string{"Seq Scan on agent_skills"}), "table scans: %q", scanned)
}

func TestEveryPageShowsPause(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	_, body := testkit.Get(t, server.URL+"/")
	assert.Truef(t, strings.Contains(body, `action="/act/v1/pause"`) && !strings.Contains(body, "is paused"),
		"the overview does not offer a pause:\n%s", body)
	_, body = testkit.Get(t, server.URL+"/lanes")
	assert.Truef(t, !strings.Contains(body, "/act/v1/pause") && !strings.Contains(body, "is paused"),
		"another page offers a pause:\n%s", body)
	got, err := executions.PauseAll(t.Context(), pool, "ana", "<b>prices</b> look wrong")
	require.NoError(t, err)
	for _, path := range []string{"/", "/lanes", "/traces", "/executions?status=waiting", "/operate"} {
		status, body := testkit.Get(t, server.URL+path)
		for _, want := range []string{
			"Autonomous work is paused", "by ana", "&lt;b&gt;prices&lt;/b&gt; look wrong", `action="/act/v1/resume"`,
			"/traces/" + got.TraceID,
		} {
			assert.Truef(t, status == 200 && strings.Contains(body, want), "%s: status %d, %q is missing", path, status, want)
		}
		assert.Truef(t, strings.Count(body, `id="pause"`) == 1 && !strings.Contains(body, "/act/v1/pause"),
			"%s shows the pause more than once, or offers another pause", path)
	}
	_, err = executions.ResumeAll(t.Context(), pool, "ana", "")
	require.NoError(t, err)
	_, body = testkit.Get(t, server.URL+"/lanes")
	assert.True(t, !strings.Contains(body, "is paused"), "the page still shows the pause")
}

func TestVerdictReasonsAreAcknowledged(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	rows.Skill(t, pool, "fetch_price", "Fetches a price.", "self_heal", "5 consecutive failures")
	room := newRoom(t, Options{Pool: pool})
	s, err := room.monitor().Status(t.Context(), pool)
	require.NoError(t, err)
	wantTexts(t, server.URL+"/", `data-verdict="degraded"`, `action="/act/v1/monitor/acknowledge"`,
		`name="mark" value="`+s.Mark+`"`)
	_, _, err = room.monitor().Acknowledge(t.Context(), pool, s.Mark, "the shop <moves>", "ana")
	require.NoError(t, err)
	body := wantTexts(t, server.URL+"/", `data-verdict="working"`, "Known: ", "skill fetch_price disabled by self-heal",
		"ana: the shop &lt;moves&gt;")
	assert.True(t, !strings.Contains(body, "/act/v1/monitor/acknowledge"), "the page offers an acknowledgement")
}

func TestBrokenChannelNeedsAttention(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	pgtest.Exec(t, pool, `
		insert into agent_channels (name, type, state, error, state_at)
		values ('mail', 'email', 'failing', 'set the environment variable SMTP_PASSWORD', now() - interval '5 minutes')`)
	wantTexts(t, server.URL+"/", "Broken channel", `href="/channels#channel-mail"`,
		"failing: set the environment variable SMTP_PASSWORD")
	wantTexts(t, server.URL+"/channels", `id="channel-mail"`, "set the environment variable SMTP_PASSWORD")
}
