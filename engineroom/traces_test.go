package engineroom

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
	"github.com/lanekeeper/lanekeeper/trace"
)

// insertRun inserts a run that began some minutes ago. Unless it is running, it ended three seconds later.
func insertRun(t *testing.T, pool *pgxpool.Pool, surface trace.Surface, status string, minutes int) trace.ID {
	t.Helper()
	id := trace.New(surface)
	exec(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, created_at, started_at)
		select lanekeeper.agent_uuid7(at), @id, @surface, 'beat', 'running', at, at
		  from (select clock_timestamp() - @minutes::int * interval '1 minute' as at) x`,
		postgres.Strict{"id": string(id), "surface": string(surface), "minutes": minutes})
	if status != "running" {
		exec(t, pool, `update agent_executions set status = @status, completed_at = created_at + interval '3 s'
			where trace_id = @id`,
			postgres.Strict{"id": string(id), "status": status})
	}
	return id
}

func TestListTracesWithTotals(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/traces", "No trace yet")
	id := insertRun(t, pool, trace.Heartbeat, "completed", 5)
	exec(t, pool, `
		insert into agent_activity (trace_id, kind, skill_name, status, token_usage, cost_usd, finished_at)
		values (@id, 'model', 'model_call', 'success', '{"total_tokens": 12840}', 0.25, clock_timestamp()),
		       (@id, 'call', 'fetch', 'error', '{}', 0.5, clock_timestamp())`, postgres.Strict{"id": string(id)})
	exec(t, pool, `insert into agent_executions (trace_id, surface, flow, status, parent_id) select trace_id, 'flow',
		'child', 'pending', id from agent_executions`, nil)
	body := wantTexts(t, server.URL+"/traces", `href="/traces/`+string(id)+`"`, "heartbeat", "completed", "3 s", "12,840",
		"$0.75", `href="/traces/`+string(id)+`#errors"`)
	assert.Equal(t, 1, strings.Count(body, `<tr id="trace-`))
}

func TestTraceFiltersCombine(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	old := insertRun(t, pool, trace.Heartbeat, "failed", 3000)
	failed := insertRun(t, pool, trace.Heartbeat, "failed", 30)
	done := insertRun(t, pool, trace.Heartbeat, "completed", 20)
	chat := insertRun(t, pool, trace.Chat, "failed", 10)
	anHourAgo := time.Now().Add(-time.Hour).UTC().Format(time.RFC3339)
	all := []trace.ID{old, failed, done, chat}
	exec(t, pool, `update agent_executions set completed_at = created_at + interval '9 s' where trace_id = @id`,
		postgres.Strict{"id": string(failed)})
	exec(t, pool, `
		insert into agent_activity (trace_id, execution_id, kind, skill_name, status, cost_usd, finished_at)
		select e.trace_id, e.id, x.kind, x.name, x.status, case when e.trace_id = @dear then 2 * x.cost else x.cost end, now()
		  from agent_executions e,
		       (values ('model', 'model_call', 'success', 0.25), ('call', 'fetch', 'error', 0)) x (kind, name, status, cost)
		 where e.trace_id = @id or e.trace_id = @dear`, postgres.Strict{"id": string(done), "dear": string(chat)})
	for query, want := range map[string][]trace.ID{
		"":                   {old, failed, done, chat},
		"?surface=heartbeat": {old, failed, done},
		"?status=failed":     {old, failed, chat},
		"?since=24h":         {failed, done, chat},
		"?surface=heartbeat&status=failed&since=24h": {failed},
		"?surface=webhook":                           {},
		"?range=24h&status=!failed":                  {done},
		"?surface=!heartbeat":                        {chat},
		"?until=" + anHourAgo:                        {old},
		"?since=" + anHourAgo + "&agent=!nobody":     {failed, done, chat},
		"?errors=1":                                  {done, chat},
		"?errors=1&status=completed":                 {done},
		"?errors=1&until=" + anHourAgo:               {},
		"?sort=took":                                 all,
		"?sort=cost&errors=1":                        {done, chat},
	} {
		_, body := testkit.Get(t, server.URL+"/traces"+query)
		for _, id := range all {
			shown, wanted := strings.Contains(body, `href="/traces/`+string(id)+`"`), false
			for _, w := range want {
				wanted = wanted || w == id
			}
			assert.Truef(t, shown == wanted, "%q: the list contains trace %s: %t", query, id, shown)
		}
	}
	wantTexts(t, server.URL+"/traces?surface=webhook", "No trace matches")
	for query, first := range map[string]trace.ID{"?sort=took&range=24h": failed, "?sort=cost": chat, "?errors=1": chat} {
		_, body := testkit.Get(t, server.URL+"/traces"+query)
		_, rows, _ := strings.Cut(body, `<tr id="trace-`)
		row, _, _ := strings.Cut(rows, "</tr>")
		assert.Truef(t, strings.Contains(row, string(first)), "%q does not begin with %s:\n%s", query, first, row)
	}
	runs := map[string]string{}
	for name, id := range map[string]trace.ID{"failed": chat, "completed": done} {
		runs[name] = insert(t, pool, `select id::text from agent_executions where trace_id = $1`, string(id))
	}
	_, body := testkit.Get(t, server.URL+"/executions?sort=cost")
	if assert.Equal(t, "completed failed", listedNames(body, runs)); strings.Index(body, runs["failed"]) >
		strings.Index(body, runs["completed"]) {
		t.Error("the most expensive execution is not first")
	}
	assert.Equal(t, "completed", listedNames(wantTexts(t, server.URL+"/executions?sort=cost&status=!failed"), runs))
	for query, why := range map[string]string{
		"surface=fax": "surface", "status=great": "status", "since=3w": "since", "before=x": "before", "colour=red": "colour",
		"range=3w": "range", "sort=name": "sort", "errors=2": "errors", "status=!great": "status",
	} {
		wantError(t, server.URL+"/traces?"+query, 400, why)
	}
}

// exec runs statements of a test.
func exec(t *testing.T, pool *pgxpool.Pool, text string, args postgres.Strict) {
	t.Helper()
	if args == nil {
		pgtest.Exec(t, pool, text)
		return
	}
	pgtest.Exec(t, pool, text, args)
}

// seedTrace inserts a run from an hour ago with a child, a phase, a model call, a lost call and its retry, and a wait
// of half an hour. It returns its trace and its execution.
func seedTrace(t *testing.T, pool *pgxpool.Pool) (id trace.ID, run string) {
	t.Helper()
	id = trace.New(trace.Heartbeat)
	err := pool.QueryRow(t.Context(), `
		insert into agent_executions (id, trace_id, surface, flow, status, thread_id, created_at, started_at, wait_number)
		select lanekeeper.agent_uuid7(at), @id, 'heartbeat', 'beat', 'running', 'ops', at, at + interval '1 s', 1
		  from (select clock_timestamp() - interval '1 hour' as at) x
		    returning id::text`, postgres.Strict{"id": string(id)}).Scan(&run)
	require.NoError(t, err)
	exec(t, pool, `
		with e as (select id, created_at as at from agent_executions where id = @run::text::uuid),
		child as (
		  insert into agent_executions (trace_id, surface, flow, status, parent_id, created_at)
		  select @id, 'flow', 'collect', 'pending', e.id, at + interval '9 s' from e),
		phase as (
		  insert into agent_activity (id, trace_id, execution_id, kind, skill_name, step, created_at, finished_at,
		    duration_ms, lane)
		  select lanekeeper.agent_uuid7(at + interval '1 s'), @id, e.id, 'phase', 'advance_plan', 'plan', at + interval '1 s',
		         at + interval '40 min', 2399000, 'heartbeat' from e returning id)
		insert into agent_activity (id, trace_id, execution_id, parent_id, kind, skill_name, step, status, model, token_usage,
		  cost_usd, created_at, finished_at, duration_ms, error_class, error_message, input, idempotency_key)
		select lanekeeper.agent_uuid7(at + s * interval '1 s'), @id, e.id, phase.id, k, n, st, w, m, u::jsonb, c,
		       at + s * interval '1 s', at + (s + 2) * interval '1 s', 2000, cl, nullif(er, ''), '{"to": "ana"}', 'key-1'
		  from e, phase, (values
		    (2, 'model', 'model_call', 'plan/model', 'success', 'gpt-4o-mini',
		      '{"prompt_tokens": 30, "completion_tokens": 12, "total_tokens": 42}', 0.5, '', ''),
		    (4, 'call', 'fetch', 'plan/fetch', 'unknown', '', '{}', 0, 'interrupted', 'nobody knows'),
		    (6, 'call', 'fetch', 'plan/fetch', 'error', '', '{}', 0, 'timeout', 'no answer came')) v (s, k, n, st, w, m, u, c,
		      cl, er)`,
		postgres.Strict{"id": string(id), "run": run})
	exec(t, pool, `update agent_executions set status = 'waiting', waiting_for = 'event', waiting_key = 'go'
		where id = @run::text::uuid`,
		postgres.Strict{"run": run})
	exec(t, pool, `
		insert into agent_checkpoints (execution_id, step, claim, output, waited_for, waited_key, waited_since, created_at)
		select id, 'plan/wait', claim, '{"event": "EVENT_COMPLETED", "data": {}, "timed_out": false}', 'event', 'go',
		       created_at + interval '8 s', created_at + interval '30 min'
		  from agent_executions where id = @run::text::uuid`, postgres.Strict{"run": run})
	exec(t, pool, `update agent_executions set status = 'running' where id = @run::text::uuid`,
		postgres.Strict{"run": run})
	exec(t, pool, `
		update agent_executions set status = 'failed', error_message = 'no prices', failed_step = 'plan/fetch',
		       completed_at = created_at + interval '40 min' where id = @run::text::uuid`, postgres.Strict{"run": run})
	return id, run
}

func TestTraceHeadShowsOpenChildren(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id, run := seedTrace(t, pool)
	page := server.URL + "/traces/" + string(id)
	wantTexts(t, page, "children still open: 1")
	exec(t, pool, `update agent_executions set status = 'cancelled', completed_at = now()
		where parent_id = @run::text::uuid`,
		postgres.Strict{"run": run})
	assert.True(t, !strings.Contains(wantTexts(t, page, "no prices"), "children still open"), "the child has ended")
}

func TestTraceByAnyFormOfID(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id, run := seedTrace(t, pool)
	for _, form := range []string{string(id), id.OTel(), id.Suffix()} {
		status, body := testkit.Get(t, server.URL+"/traces/"+form)
		require.Equal(t, 200, status, form, "status")
		assert.Contains(t, body, `data-copy="`+string(id)+`"`, `data-copy="`+id.OTel()+`"`, "/executions/"+run,
			"/threads/ops", "heartbeat",
			"Errors", "no prices", "no answer came", "$0.50", "39 min")
	}
	for path, want := range map[string]int{
		"/traces/" + string(trace.New(trace.Chat)): 404, "/traces/hb_nonsense": 404, "/traces/" +
			string(id) + "?view=pie": 400,
		"/traces/" + string(id) + "?span=x": 400, "/traces/" + string(id) + "?sort=up": 400,
	} {
		status, _ := testkit.Get(t, server.URL+path)
		assert.Equal(t, want, status, path, "status")
	}
}

func TestWaterfallLineKinds(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id, _ := seedTrace(t, pool)
	_, body := testkit.Get(t, server.URL+"/traces/"+string(id))
	assert.Contains(t, body, `kind-run">run<`, `kind-phase">phase<`, `kind-model">model call<`, `kind-call">skill call<`,
		`kind-retry">attempt 2<`, `kind-wait">wait<`, "bar-queue", "bar-wait", "bar-bad", "bar-halted", `class="wf-gap"`,
		"in which no call ran", "for an event", `role="treegrid"`, `aria-level="3"`)
	assert.True(t, !strings.Contains(body, "style="), "the page has a style attribute, which its policy forbids")
	_, body = testkit.Get(t, server.URL+"/traces/"+string(id)+"?view=table")
	assert.Contains(t, body, "plan/fetch", "gpt-4o-mini", "attempt 2", "EVENT_COMPLETED", "<caption>",
		`?view=table">4</a>`)
}

func TestPanelShowsSpan(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id, run := seedTrace(t, pool)
	base := server.URL + "/traces/" + string(id)
	failed := pgtest.Value[string](t, pool, `select id::text from agent_activity where trace_id = $1 and status = 'error'`,
		string(id))
	model := pgtest.Value[string](t, pool, `select id::text from agent_activity where trace_id = $1 and kind = 'model'`,
		string(id))
	wait := regexp.MustCompile(`span=(wait-[0-9a-f-]+)`).FindStringSubmatch(wantTexts(t, base))
	require.True(t, wait != nil, "the page has no link to the wait")
	for path, texts := range map[string][]string{
		"?span=" + failed: {
			"no answer came", "key-1", `&#34;to&#34;: &#34;ana&#34;`,
			"Fork from here", "&amp;tab=raw",
		},
		"?span=" + failed + "&tab=why": {"Part of", "Executions"},
		"?span=" + failed + "&tab=raw": {`&#34;error_class&#34;: &#34;timeout&#34;`, "/v1/traces/" +
			string(id)},
		"?span=" + failed + "&tab=cost":              {"Only model calls cost money"},
		"?span=" + model + "&tab=cost":               {"gpt-4o-mini", "$0.50"},
		"?span=" + model + "&tab=prompt":             {"was not recorded"},
		"?span=" + run:                               {"after 1 s in the queue", "plan/fetch", "no prices"},
		"?span=" + run + "&tab=raw":                  {`&#34;failed_step&#34;: &#34;plan/fetch&#34;`},
		"?span=" + wait[1]:                           {"an event: go", "EVENT_COMPLETED"},
		"?tab=why":                                   {"Executions", "beat failed"},
		"?tab=cost":                                  {"gpt-4o-mini", "ask the model"},
		"?span=01890000-0000-7000-8000-000000000000": {"no such span"},
	} {
		t.Run(path, func(t *testing.T) {
			wantTexts(t, base+path, append(texts, `id="spans"`, `id="panel"`)...)
			alone := wantTexts(t, base+path+"&part=panel", texts...)
			assert.Truef(t, strings.HasPrefix(strings.TrimSpace(alone), `<section id="panel"`) &&
				!strings.Contains(alone, `id="spans"`), "part=panel is\n%s", alone)
		})
	}
	wantError(t, base+"?part=none", 404, "no part")
	for _, query := range []string{"tab=x", "kind=x", "span=wait-x", "span=" + failed + "x"} {
		wantError(t, base+"?"+query, 400, "")
	}
}

// A heartbeat of many automations has a line of each. The total covers also those that are not listed.
func TestPanelTotalsCostOfAllPurposes(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	const id = "hb_01J8052XG1XHJAZ95GX5TCNBAZ"
	rows.Quiet(t, pool, `
		insert into agent_activity (trace_id, surface, skill_name, kind, status, purpose, model, cost_usd)
		select $1, 'heartbeat', 'model_call', 'model', 'success', 'automation ' || n, 'm', 0.5
		  from generate_series(1, $2::int) n`, id, maxCosts+10)
	body := wantTexts(t, server.URL+"/traces/"+id+"?tab=cost&part=panel", ">$30.00<", "The list is cut after 50")
	assert.Equal(t, maxCosts, strings.Count(body, ">work on automation "))
}

func TestTraceShowsApprovalDecision(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id, run := seedTrace(t, pool)
	approval := insert(t, pool, `
		insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		values ($1, $2::text::uuid, 'drop', 1, '{}', 'x', clock_timestamp() + interval '1 hour') returning id::text`,
		string(id), run)
	row := insert(t, pool, `
		insert into agent_activity (trace_id, execution_id, kind, skill_name, status, output, finished_at)
		values ($1, $2::text::uuid, 'call', 'drop', 'pending_approval', jsonb_build_object('approval_id', $3::text),
		        clock_timestamp()) returning id::text`, string(id), run, approval)
	base := server.URL + "/traces/" + string(id)
	wantTexts(t, base, "◷</span>pending approval")
	for _, test := range []struct{ change, state, who string }{
		{`expires_at = clock_timestamp() - interval '1 hour'`, "expired", ""},
		{
			`decided_by = 'ana', decided_via = 'slack', decided_at = now(), reason = 'not <now>', status = 'rejected'`,
			"rejected", "by ana via slack: not &lt;now&gt;",
		},
		{
			`reason = '', status = 'approved', expires_at = clock_timestamp() + interval '1 hour'`, "approved",
			"by ana via slack",
		},
		{`status = 'consumed'`, "approved", "by ana via slack"},
	} {
		rows.Quiet(t, pool, `update agent_approvals set `+test.change+` where id = $1::text::uuid`, approval)
		for _, view := range []string{"", "?view=table", "?span=" + row} {
			body := wantTexts(t, base+view, "</span>"+test.state+"</span>", test.who)
			assert.Truef(t, !strings.Contains(body, "pending approval"), "%s%s: %s", test.state, view, body)
			assert.Truef(t, !strings.Contains(body, `class="wf-why">by ana`), "%s%s: a decision looks like an error", test.state,
				view)
		}
	}
}

func TestPanelFindsApprovalAmongMany(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id, run := seedTrace(t, pool)
	call := insert(t, pool, `
		insert into agent_activity (trace_id, execution_id, kind, skill_name, step, status, finished_at)
		values ($1, $2::text::uuid, 'call', 'drop', 's', 'success', clock_timestamp()) returning id::text`, string(id), run)
	addApproval := func(step, activity string) string {
		return insert(t, pool, `
			insert into agent_approvals (trace_id, execution_id, step, activity_id, skill_name, skill_revision, arguments,
			  arguments_hash, expires_at)
			values ($1, $2::text::uuid, $3, nullif($4, '')::uuid, 'drop', 1, '{}', gen_random_uuid()::text,
			  clock_timestamp() + interval '1 hour') returning id::text`, string(id), run, step, activity)
	}
	page := server.URL + "/traces/" + string(id) + "?span=" + call
	addApproval("s", "")
	ofStep := addApproval("s", "")
	for n := range traceWaits {
		addApproval(fmt.Sprint("other ", n), "")
	}
	wantTexts(t, page, `href="/approvals/`+ofStep)
	ofCall := addApproval("", call)
	addApproval("s", "")
	wantTexts(t, page, `href="/approvals/`+ofCall)
}

func TestWaterfallFilters(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id, _ := seedTrace(t, pool)
	hidden := regexp.MustCompile(`<div role="row" class="wf-row[^>]* hidden>`)
	for query, want := range map[string]string{
		"":                    "",
		"?errors=1":           "3 of 7 lines", // the run, its phase and the call
		"?kind=model":         "3 of 7 lines",
		"?kind=wait":          "3 of 7 lines",
		"?q=FETCH":            "4 of 7 lines",
		"?q=fetch&errors=1":   "3 of 7 lines",
		"?q=nothing+like+it":  "0 of 7 lines",
		"?q=gpt-4o&kind=call": "0 of 7 lines",
	} {
		body := wantTexts(t, server.URL+"/traces/"+string(id)+query, want)
		shown := 7 - len(hidden.FindAllString(body, -1))
		assert.Truef(t, (want == "" || strings.HasPrefix(want, fmt.Sprint(shown)+" ")) && (want != "" || shown == 7),
			"%s shows %d lines", query, shown)
	}
}

func TestWaterfallShowsOpenWaits(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := trace.New(trace.Chat)
	exec(t, pool, `insert into agent_executions (trace_id, surface, flow, status, claim)
		values (@id, 'chat', 'one', 'running', 4), (@id, 'chat', 'two', 'running', 1)`,
		postgres.Strict{"id": string(id)})
	exec(t, pool, `update agent_executions set status = 'waiting', waiting_for = 'approval', waiting_key = 'a/b',
		waiting_step = 'leave' where flow = 'two'`, nil)
	exec(t, pool, `insert into agent_lock_waiters (lane, owner, expires_at)
		select 'operate', id || '#4', clock_timestamp() + interval '1 minute' from agent_executions where flow = 'one'`, nil)
	base := server.URL + "/traces/" + string(id)
	body := wantTexts(t, base, "for an approval", `kind-lane">lane wait<`, "for operate", "wf-open")
	spans := regexp.MustCompile(`span=(wait-[0-9a-f-]+)`).FindAllStringSubmatch(body, -1)
	var panels strings.Builder
	for _, span := range spans {
		panels.WriteString(wantTexts(t, base+"?span="+span[1]))
	}
	assert.Contains(t, panels.String(), `href="/approvals/a%2Fb"`, "still waiting, at most until", "holding its process")
}

func TestLargeTraceIsBounded(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := trace.New(trace.Flow)
	exec(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, created_at)
		values (@id, 'flow', 'import', 'running', clock_timestamp() - interval '6 hours')`, postgres.Strict{"id": string(id)})
	exec(t, pool, `
		insert into agent_activity (id, trace_id, execution_id, skill_name, status, created_at, finished_at, duration_ms,
		  cost_usd)
		select lanekeeper.agent_uuid7(e.created_at + n * interval '1 s'), @id, e.id, 'row_' || n, case n
		  when 10000 then 'error' else 'success' end,
		       e.created_at + n * interval '1 s', e.created_at + n * interval '1 s', 0, 0.001
		  from agent_executions e, generate_series(1, 20000) n where e.trace_id = @id`, postgres.Strict{"id": string(id)})
	_, body := testkit.Get(t, server.URL+"/traces/"+string(id))
	assert.Contains(t, body, "20,000 activities", "row_1<", "row_1500<", "row_10000<", "row_19501<", "row_20000<",
		"17,999 more activities", "$20.00",
		"not all shown", `wf-cost">$20.00`)
	assert.Truef(t, !strings.Contains(body, ">row_1501<") && len(body) <= 2_000_000,
		"the page shows too many rows, or is too long: %d bytes", len(body))
	seen := 0
	next := "/traces/" + string(id) + "?view=table"
	for range 3 {
		_, body = testkit.Get(t, server.URL+next)
		assert.Contains(t, body, fmt.Sprintf(">row_%d<", seen+1), fmt.Sprintf(">row_%d<", seen+tracePerPage))
		seen += tracePerPage
		at := strings.LastIndex(body[:strings.Index(body, "Later activities")], `href="`)
		next = strings.ReplaceAll(strings.SplitN(body[at+6:], `"`, 2)[0], "&amp;", "&")
	}
	// Beyond 20,000 rows, the totals of the execution are lower bounds.
	exec(t, pool, `
		insert into agent_activity (trace_id, execution_id, skill_name, status, finished_at, cost_usd)
		select e.trace_id, e.id, 'row', 'success', clock_timestamp(), 0.001
		  from agent_executions e, generate_series(1, 100) where e.trace_id = @id`, postgres.Strict{"id": string(id)})
	_, body = testkit.Get(t, server.URL+"/traces/"+string(id))
	assert.Contains(t, body, "20,000 or more activities", `wf-cost">≥ $20.00`)
}

// The page draws 200 executions. The total of their parent lacks the cost of the others.
func TestTotalOfUndrawnExecutionsIsLowerBound(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := insertRun(t, pool, trace.Heartbeat, "running", 5)
	exec(t, pool, `
		with children as (
		  insert into agent_executions (trace_id, surface, flow, status, parent_id)
		  select trace_id, 'flow', 'child', 'running', id from agent_executions, generate_series(1, @count)
		  returning id, trace_id)
		insert into agent_activity (trace_id, execution_id, skill_name, status, finished_at, cost_usd)
		select c.trace_id, c.id, 'row', 'success', clock_timestamp(), 0.01 from children c`,
		postgres.Strict{"count": traceRuns + 9})
	wantTexts(t, server.URL+"/traces/"+string(id), ">$2.09<", `wf-cost">≥ $1.99`)
}

func TestDeepAndCircularParents(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	deep, circle := trace.New(trace.Operate), trace.New(trace.Operate)
	exec(t, pool, `
		with ids as (select n, lanekeeper.agent_uuid7(clock_timestamp() + n * interval '1 ms') as id
		  from generate_series(1, 1000) n)
		insert into agent_activity (id, trace_id, parent_id, skill_name, created_at, finished_at, duration_ms, kind, cost_usd)
		select i.id, @id, p.id, 'level_' || i.n, clock_timestamp() + i.n * interval '1 ms',
		       clock_timestamp() + interval '2 s', 1, 'phase', 0.01
		  from ids i left join ids p on p.n = i.n - 1`, postgres.Strict{"id": string(deep)})
	exec(t, pool, `
		with ids as (select n, lanekeeper.agent_uuid7() as id from generate_series(0, 2) n)
		insert into agent_activity (id, trace_id, parent_id, skill_name, finished_at)
		select i.id, @id, p.id, 'round_' || i.n, clock_timestamp() from ids i
		  join ids p on p.n = (i.n + 1) % 3`, postgres.Strict{"id": string(circle)})
	_, body := testkit.Get(t, server.URL+"/traces/"+string(deep))
	assert.Contains(t, body, ">level_1<", ">level_200<", ">level_1000<", "level 999", `aria-level="1000"`)
	n := maxNesting(body, "<div", "</div>")
	assert.Truef(t, n <= 12, "elements are nested %d deep", n)
	_, body = testkit.Get(t, server.URL+"/traces/"+string(circle))
	for n := range 3 {
		count := strings.Count(body, fmt.Sprintf(`#panel">round_%d</a>`, n))
		assert.Truef(t, count == 1, "the page shows round_%d %d times", n, count)
	}
}

// maxNesting returns the greatest depth of an element.
func maxNesting(body, begin, end string) (most int) {
	depth := 0
	for i := range body {
		switch {
		case strings.HasPrefix(body[i:], begin):
			depth++
			most = max(most, depth)
		case strings.HasPrefix(body[i:], end):
			depth--
		}
	}
	return most
}

func TestEndedTraceIsReadOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	id, _ := seedTrace(t, pool)
	v := pageRequest{path: func(string) string { return string(id) }}
	loads := 0
	load := func() {
		t.Helper()
		_, err := room.openTrace(t.Context(), &v)
		require.NoError(t, err)
		about, _ := v.Subject.(*traceSubject)
		_, err = room.loadUnlessEnded(t.Context(), about, "view", func(traceState) (any, bool, error) {
			loads++
			return loads, false, nil
		})
		require.NoError(t, err)
	}
	load()
	load()
	require.Equal(t, 2, loads, "loads for two requests while the child runs")
	exec(t, pool, `update agent_executions set status = 'cancelled' where completed_at is null`, nil)
	load()
	load()
	load()
	require.Equal(t, 3, loads, "loads after the end of the child")
	exec(t, pool, `insert into agent_activity (trace_id, kind, skill_name, finished_at)
		values (@id, 'note', 'break_lane', clock_timestamp())`,
		postgres.Strict{"id": string(id)})
	load()
	require.Equal(t, 4, loads, "loads after a later note")
}

// The page draws the oldest executions of a trace. Their root may end after hundreds of its children.
func TestEndOfRootReloadsLargeTrace(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	id := insertRun(t, pool, trace.Heartbeat, "running", 5)
	exec(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, parent_id)
		select trace_id, 'flow', 'child', 'running', id from agent_executions, generate_series(1, @count)`,
		postgres.Strict{"count": traceRuns})
	exec(t, pool, `
		update agent_executions set status = 'completed', completed_at = now() where parent_id is not null`, nil)
	subject := &traceSubject{ID: string(id), cache: map[string]cachedPart{}}
	loads := 0
	load := func() {
		t.Helper()
		_, err := room.loadUnlessEnded(t.Context(), subject, "view", func(traceState) (any, bool, error) {
			loads++
			return loads, false, nil
		})
		require.NoError(t, err)
	}
	load()
	exec(t, pool, `update agent_executions set status = 'completed', completed_at = now() where parent_id is null`, nil)
	load()
	require.Equal(t, 2, loads, "loads before and after the end of the root")
	load()
	require.Equal(t, 2, loads, "loads of the ended trace")
}

func TestTraceScaleKeepsOrder(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 11, 21, 4, 30, 0, 0, time.UTC)
	at := func(d time.Duration) *time.Time { return new(start.Add(d)) }
	call := func(from, to time.Duration) *spanNode {
		return &spanNode{Type: "call", From: *at(from), To: at(to), Row: &spanRow{Kind: "call"}}
	}
	wait := &spanNode{Type: "wait", From: *at(4 * time.Second), To: at(72 * time.Hour)}
	nodes := []*spanNode{
		call(0, 2*time.Second), call(2*time.Second, 4*time.Second), wait,
		call(72*time.Hour, 72*time.Hour+4*time.Second),
	}
	scale := newTraceScale(nodes)
	scale.setBars(nodes)
	gaps := scale.gaps()
	require.Truef(t, len(gaps) == 1 && (gaps[0].Label() == "2 d 23 h" || gaps[0].Label() == "3 d"), "gaps are %+v", gaps)
	before := -1.0
	for _, moment := range []time.Duration{
		0, time.Second, 2 * time.Second, 4 * time.Second, 30 * time.Hour,
		72 * time.Hour, 72*time.Hour + 4*time.Second,
	} {
		x := scale.position(*at(moment))
		assert.Truef(t, x > before && x <= 100, "%s is at %f, not right of %f", moment, x, before)
		before = x
	}
	for after, want := range map[time.Duration]string{
		42500 * time.Millisecond: "42.5 s", 1250 * time.Millisecond: "1.25 s", 42 * time.Second: "42 s",
	} {
		assert.Equal(t, want, tickLabel(after))
	}
	if two, four := scale.position(*at(2 * time.Second)), scale.position(*at(4 * time.Second)); four-two < 15 {
		t.Errorf("two seconds of work have %.2f percent of the width, beside a wait of three days", four-two)
	}
}

func TestModelCallShowsPrompt(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	call := insert(t, pool, `
		insert into agent_activity (trace_id, surface, skill_name, kind, status, token_usage)
		values ($1, 'operate', 'model_call', 'model', 'success',
		  '{"prompt_tokens": 1200, "cached_tokens": 1000, "cache_write_tokens": 50, "total_tokens": 1210}')
		returning id::text`, trace)
	assert.Contains(t, wantTexts(t, server.URL+"/traces/"+trace+"?span="+call+"&tab=prompt"),
		"was not recorded, or has been deleted")
	wantTexts(t, server.URL+"/traces/"+trace+"?span="+call, "1,000 cached", "50 cache writes")
	insert(t, pool, `
		with part as (
		  insert into agent_prompt_parts (digest, body) select sha256(b::bytea), b
		    from unnest(array['[{"type": "function"}]', '{"role": "user", "content": "Is <b>it</b> so?"}',
		                repeat('é<b>', 100000)]) b returning digest)
		insert into agent_prompts (activity_id, tools, messages)
		select $1::text::uuid, sha256('[{"type": "function"}]'),
		       array[sha256('{"role": "user", "content": "Is <b>it</b> so?"}'), sha256(repeat('é<b>', 100000)::bytea),
		       sha256('gone')]
		returning activity_id::text`, call)
	body := wantTexts(t, server.URL+"/traces/"+trace+"?span="+call+"&tab=prompt")
	assert.Contains(t, body, "<summary>tools", "A part that is no longer kept",
		`<details id="part-0" class="bubble bubble-user" open>`, `<p class="bubble-text">Is &lt;b&gt;it&lt;/b&gt; so?</p>`)
	assert.True(t, strings.Index(body, "<summary>tools") >= strings.Index(body, "Is &lt;b&gt;it"),
		"the tools come before the messages")
	assert.Truef(t, len(body) <= 300_000 && !strings.Contains(body, "é<b>"), "the page has %d bytes", len(body))
}

func TestRawJSONIsCutByCharacters(t *testing.T) {
	t.Parallel()
	body := `{"text":"` + strings.Repeat("é", maxSpanText-len(`{"text":""}`)) + `"}`
	assert.True(t, rawValue(body, int64(len(body))).Whole, "a value of the longest shown length is shown as a part")
	body += " "
	assert.True(t, !rawValue(body, int64(len(body))).Whole, "a cut value is shown as a whole")
}
