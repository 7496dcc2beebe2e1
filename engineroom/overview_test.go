package engineroom

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
	"github.com/lanekeeper/lanekeeper/trace"
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
		texts = append(texts, `id="need-`+kind.Kind+`"`, `">1<span class="aside-text"> `+kind.Word())
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
	assert.Equal(t, 25, len(links))
	for _, link := range links {
		if strings.HasPrefix(link[1], "/skills") || strings.HasPrefix(link[1], "/traces") {
			continue // another test covers this page; its trace is empty
		}
		status, _ := testkit.Get(t, server.URL+strings.ReplaceAll(link[1], "&amp;", "&"))
		assert.Truef(t, status == 200, "%s: status %d", link[1], status)
	}
}

func TestAttentionCountIsBounded(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	pgtest.Exec(t, pool, `
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		select 'hb_1', 'drop', 1, '{}', n::text, clock_timestamp() + interval '1 day' from generate_series(1, 1200) n`)
	wantTexts(t, server.URL+"/", `">1,000+<span class="aside-text"> Approvals requested`)
}

func TestOverviewFiltersAreChecked(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	for query, why := range map[string]string{
		"surface=none": "surface", "status=fine": "status", "skill=" + strings.Repeat("x", 301): "skill",
		"since=yesterday": "since", "until=1": "until", "row=1": "row",
	} {
		wantError(t, server.URL+"/activity?"+query, 400, why)
	}
	wantError(t, server.URL+"/?surface=none", 400, "surface")
	wantError(t, server.URL+"/activity?cursor=x", 400, "page")
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
		postgres.Strict{"count_limit": countLimit, "limit": maxPerKind})
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

// insertActivities inserts n rows of the activity log, named by their number.
func insertActivities(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	pgtest.Exec(t, pool, strings.ReplaceAll(insertActivitiesSQL, "20000", strconv.Itoa(n)))
}

// insertActivitiesSQL inserts 20,000 rows of the activity log.
const insertActivitiesSQL = `
	insert into agent_activity (id, trace_id, skill_name, purpose, status, surface, agent, lane, error_class,
	  error_message, created_at)
	select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'), case n % 2 when 0 then 'even' else 'odd' end,
	       'number ' || n || '.', case n % 3 when 0 then 'error' else 'success' end,
	       case n % 5 when 0 then 'chat' else 'heartbeat' end, 'agent_' || n % 7, 'lane_' || n % 11,
	       case n % 3 when 0 then 'timeout_class' else '' end, case n % 3
	         when 0 then 'too slow' end, at
	  from (select n, clock_timestamp() - make_interval(secs => 3 * (20000 - n)) as at from generate_series(1, 20000) n) x`

func TestActivityFiltersCombine(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertActivities(t, pool, 120)
	rows.Quiet(t, pool, `
		insert into agent_locks (lane, locked_by, fencing_token, expires_at) values ('lane_1', '', 1, now())`)
	for query, want := range map[string]string{
		"/?surface=chat&status=error":                             "120 105 90 75 60 45 30 15",
		"/activity?surface=chat&status=error&skill=even":          "120 90 60 30",
		"/activity?lane=lane_1&agent=agent_1":                     "78 1",
		"/activity?lane=LANE_1&agent=gent_1":                      "120 78 43 1",
		"/activity?skill=VE&lane=ane_5":                           "104 82 60 38 16",
		"/activity?trace=hb_00000000000000000000000042":           "42",
		"/activity?trace=00000000000000000000000042&status=error": "42",
		"/activity?skill=none":                                    "",
		"/activity?since=2999-01-01":                              "",
		"/activity?until=2000-01-01T00:00":                        "",
	} {
		body := wantTexts(t, server.URL+query)
		var got []string
		for _, m := range regexp.MustCompile(`number (\d+)\.`).FindAllStringSubmatch(body, -1) {
			got = append(got, m[1])
		}
		assert.Truef(t, strings.Join(got, " ") == want, "%s has %v, want %s", query, got, want)
	}
	wantTexts(t, server.URL+"/?status=error", "timeout_class", "too slow", `role="log"`, `<option value="error" selected>`)
}

func TestActivityRowExpands(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := insert(t, pool, `
		insert into agent_activity (trace_id, skill_name, input, output, error_message, step, idempotency_key, token_usage)
		values ('hb_00000000000000000000000001', 'look', jsonb_build_object('text', $1::text), to_jsonb(repeat('z', 1000000)),
		  $1, $1, $1, '{"prompt_tokens": 1200, "completion_tokens": 34}') returning id::text`, hostile)
	folded := wantTexts(t, server.URL+"/activity", `aria-expanded="false"`, "row="+id)
	assert.True(t, !strings.Contains(folded, "zzzz") && !strings.Contains(folded, "1,200 read"),
		"a folded row contains the omitted text")
	wantTexts(t, server.URL+"/activity?row="+id, `aria-expanded="true"`, "1,200 prompt, 34 completion", "zzzz", "in all")
	wantEscaped(t, server.URL+"/activity?row="+id)
	wantTexts(t, server.URL+"/activity?row=018f0000-0000-7000-8000-000000000000", "look")
}

// insertModelCall inserts a model call.
func insertModelCall(t *testing.T, pool *pgxpool.Pool, purpose, model, cost, ago string) {
	t.Helper()
	insert(t, pool, `
		insert into agent_activity (id, trace_id, kind, skill_name, purpose, model, surface, cost_usd, token_usage,
		  created_at, duration_ms)
		select lanekeeper.agent_uuid7(at), 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'model', 'model_call', $1, $2, 'heartbeat',
		       $3::text::numeric, '{"prompt_tokens": 900, "completion_tokens": 100, "total_tokens": 1000}', at, 1234
		  from (select clock_timestamp() - $4::text::interval as at) x returning id::text`, purpose, model, cost, ago)
}

func TestSpendByPurposeSurfaceAndModel(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/spend", "No model was called", "agent heartbeat")
	insertModelCall(t, pool, "advance_plan", "model-one", "0.75", "0")
	insertModelCall(t, pool, "reflect", "model-two", "0.25", "0")
	insertModelCall(t, pool, "reflect", "model-two", "9", "10 days")
	wantTexts(t, server.URL+"/spend?days=1", "$1.00 and 2,000 tokens today", "no skill", "100 %", "<svg", "Show as table")
	wantTexts(t, server.URL+"/spend?days=1&by=purpose", "advance_plan", "75 %")
	wantTexts(t, server.URL+"/spend?days=30&by=purpose", "$10.00 and 3,000 tokens in 30 days",
		"by=model&amp;days=30&amp;purpose=reflect#calls")
	wantTexts(t, server.URL+"/spend?by=model", "model-two", "25 %")
	wantTexts(t, server.URL+"/spend?by=surface&per=hour", "heartbeat", "100 %")
	pgtest.Exec(t, pool, `
		update agent_activity set token_usage = token_usage || '{"unknown_tokens": 400, "unknown_usd": 0.1}'
		 where model = 'model-one'`)
	wantTexts(t, server.URL+"/spend?days=1", "$0.10 and 400 tokens of it are unknown")
	body := wantTexts(t, server.URL+"/spend?days=30&by=model&purpose=reflect", "$9.25", "Newest model calls")
	assert.True(t, !strings.Contains(body, "model-one"), "the page shows a model without calls")
	wantTexts(t, server.URL+"/", "$1.00 · 2,000 tokens", "Most of it, 7 days", "Skill health")
}

func TestSpendRejectsInvalidFilters(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	for query, why := range map[string]string{
		"days=3": "days is", "by=lane": "by is", "per=week": "per is", "per=hour&days=30": "1 or 7 days",
		"surface=moon":       "surface is",
		"by=purpose&skill=a": "by skill or by purpose", "by=skill&purpose=a": "by skill or by purpose",
		"skill=" + strings.Repeat("x", 301): "skill is not text",
	} {
		wantError(t, server.URL+"/spend?"+query, 400, why)
	}
}

func TestBudgetLines(t *testing.T) {
	t.Parallel()
	pool, _ := openRoom(t)
	pgtest.Exec(t, pool, `
		insert into agent_budgets (scope, tokens, cost_usd, reserved_tokens, reserved_usd, unknown_tokens)
		select 'day:' || to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD') || s, 5000, 4, 1000, 1, 700
		  from unnest(array['', ':chat', ':agent:sales', ':agent:other']) s`)
	pgtest.Exec(t, pool, `
		insert into agent_agents (name, version, digest, definition, is_default)
		values ('sales', 1, 'x', '{"limits": {"day_usd": 10}}', true), ('other', 1, 'x', '{}', false)`)
	room := &Room{Options: Options{Read: replica.Primary(pool), Agents: &agents.Directory{}, Limits: budgets.Limits{
		Day: budgets.Limit{USD: 10}, Surface: map[trace.Surface]budgets.Limit{trace.Chat: {Tokens: 5000}},
	}}}
	got, err := room.budgetLines(t.Context(), nil)
	require.NoError(t, err)
	want := []budgetLine{
		{
			Spent: "$4.00", Reserved: "$1.00", Limit: "$10.00", Left: "$5.00", UsedShare: .4, ReservedShare: .1,
			Percent: "40 %",
		},
		{Spent: "5,000 tokens", Unknown: "700 tokens", Reserved: "1,000 tokens"},
		{
			Scope: "chat", Spent: "5,000 tokens", Unknown: "700 tokens", Reserved: "1,000 tokens", Limit: "5,000 tokens",
			Left: "0 tokens", UsedShare: 1, Over: true, Percent: "100 %",
		},
		{
			Scope: "agent sales", Spent: "$4.00", Reserved: "$1.00", Limit: "$10.00", Left: "$5.00", UsedShare: .4,
			ReservedShare: .1,
			Percent:       "40 %",
		},
	}
	assert.NoDiff(t, any(want), got)
	limited, err := New(Options{Pool: pool, Agent: "agent", Limits: budgets.Limits{Day: budgets.Limit{Tokens: 5000}}})
	require.NoError(t, err)
	wantTexts(t, serveRoom(t, limited).URL+"/", "5,000 tokens</a> of 5,000 tokens")
}

func TestCostOfHeartbeat(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertModelCall(t, pool, "reflect", "m", "1.50", "0")
	for _, sql := range []string{
		`insert into agent_executions (trace_id, surface, flow) select 'hb_' || n, 'heartbeat', 'heartbeat'
			from generate_series(1, 4) n`,
		`update agent_executions set status = 'running'`,
		`update agent_executions set status = case trace_id when 'hb_3' then 'failed' else 'completed' end,
		        result_summary = case trace_id when 'hb_4' then 'skipped: an admin is at work' else '' end`,
	} {
		pgtest.Exec(t, pool, sql)
	}
	wantTexts(t, server.URL+"/", "$0.75 · 500 tokens", "2 successful ones")
}

func TestChartScaleAndTable(t *testing.T) {
	t.Parallel()
	c := chart{
		Title: "Calls", About: "What was called.", Series: []series{{"good", "bar-good"}, {"bad", "bar-bad"}},
		Write: countTick,
		Points: []point{
			{"Monday", "Mo", []float64{30, 0}},
			{"Tuesday", "Tu", []float64{0, 0}},
			{"<Wednesday>", "We", []float64{10, 70}},
		},
	}
	assert.Equal(t, 20, c.step())
	bars := c.Bars()
	assert.Truef(t, len(bars) == 3 && bars[2].Y == "8" && bars[1].Text == "<Wednesday>: 10 good",
		"bars %+v: want three, the highest from the top", bars)
	ticks := c.Ticks()
	assert.Truef(t, len(ticks) == 5 && ticks[4].Text == "80", "ticks %+v", ticks)
	rows := c.Rows()
	assert.Truef(t, rows[0][2] == "70" && rows[2][0] == "Monday", "rows %v", rows)
	body := renderChart(t, c)
	assert.Contains(t, body, `role="img"`, `class="bar-bad"`, "&lt;Wednesday&gt;: 70 bad", `<th scope="row">Tuesday</th>`)
	assert.True(t, !strings.Contains(body, "style="), "the chart has a style attribute, which the policy forbids")
}

// renderChart returns a chart as HTML.
func renderChart(t *testing.T, c chart) string {
	t.Helper()
	parsed, err := parseTemplates()
	require.NoError(t, err)
	room := &Room{templates: parsed}
	body, err := room.execute("chart", c)
	require.NoError(t, err)
	return string(body)
}

func TestEmptyChart(t *testing.T) {
	t.Parallel()
	c := chart{Series: []series{{"x", "bar-accent"}}, Points: []point{{"a", "a", []float64{0}}}, Write: moneyTick}
	assert.True(t, c.Empty() && len(c.Bars()) == 0, "a chart without values has bars")
	for v, want := range map[float64]string{
		0: "$0.00", 0.00002: "$0.000020", 0.0123: "$0.0123", 2.5: "$2.50", 20: "$20.00",
	} {
		assert.Equal(t, want, moneyTick(v), v)
	}
	for v, want := range map[float64]string{950: "950", 9999: "9999", 15_000: "15k", 2_500_000: "2.5M", 3e9: "3G"} {
		assert.Equal(t, want, countTick(v), v)
	}
}

func TestVerdictReasonsAreAcknowledged(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	rows.Skill(t, pool, "fetch_price", "Fetches a price.", "self_heal", "5 consecutive failures")
	room, err := New(Options{Pool: pool})
	require.NoError(t, err)
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
