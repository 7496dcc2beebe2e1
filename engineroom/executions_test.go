package engineroom

import (
	"fmt"
	"html"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// Completed executions are in no index of states. The page counts them among the newest executions, and marks the count
// as incomplete if there are more.
func TestCountOfCompletedExecutionsIsBounded(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for range 3 {
		rows.Execution(t, pool, "completed", "chat", "flow")
	}
	wantTexts(t, server.URL+"/executions", "completed")
	counts, err := (&Room{Options: Options{Read: replica.Primary(pool)}}).countStates(t.Context())
	assert.Truef(t, err == nil && counts["completed"] == "3" && counts["failed"] == "0", "counted %v, %v", counts, err)
	rows.Quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, is_external, status, completed_at)
		select lanekeeper.agent_uuid7(clock_timestamp() - interval '1 hour'), 'fl_1', 'flow', 'flow', false, 'failed',
		       clock_timestamp()
		  from generate_series(1, 4 * @limit::int) n`, postgres.Strict{"limit": maxCount})
	counts, err = (&Room{Options: Options{Read: replica.Primary(pool)}}).countStates(t.Context())
	assert.Truef(t, err == nil && counts["completed"] == "3+" && counts["failed"] == "1,000+",
		"counted %v, %v", counts, err)
}

// listedNames returns the names of the ids that have a row on the page.
func listedNames(body string, ids map[string]string) string {
	var names []string
	for _, name := range []string{"pending", "running", "waiting", "completed", "failed", "timeout", "cancelled"} {
		if strings.Contains(body, `id="execution-`+ids[name]+`"`) {
			names = append(names, name)
		}
	}
	return strings.Join(names, " ")
}

func TestListExecutionsByState(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/executions", "No execution yet", "The queue is empty")
	ids := map[string]string{}
	for i, status := range executions.Statuses() {
		ids[status] = rows.Execution(t, pool, status, []string{"chat", "webhook"}[i%2], "flow_"+status)
	}
	// A claimed execution is in no index of its flow.
	rows.Quiet(t, pool, `update agent_executions set claimed_by = lanekeeper.agent_uuid7() where status = 'running'`)
	trace := insert(t, pool, `select trace_id from agent_executions where id = $1`, ids["failed"])
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
		"?trace_id=odd":                          "",
		"?view=waiting":                          "waiting",
		"?view=waiting&for=event":                "waiting",
		"?view=waiting&for=delay":                "",
		"?view=stuck":                            "",
		"?status=!failed":                        "pending running waiting completed timeout cancelled",
		"?surface=!chat":                         "running completed timeout",
		"?flow=!flow_failed&agent=!nobody":       "pending running waiting completed timeout cancelled",
		"?range=1h&flow=flow_failed":             "failed",
		"?until=2020-01-01T00:00:00Z":            "",
		"?since=2020-01-01&failed=1":             "failed timeout",
		"?view=waiting&range=1h":                 "waiting",
		"?view=waiting&until=2020-01-01":         "",
		"?sort=took&surface=!webhook":            "failed cancelled",
		"?sort=took&range=24h&status=running":    "running",
	} {
		body := wantTexts(t, server.URL+"/executions"+query)
		assert.Equal(t, want, listedNames(body, ids), query, "lists")
	}
	for query, want := range map[string]string{
		"?failed=1&flow=flow_failed&range=1h":      `href="/v1/executions?flow=flow_failed&amp;format=csv&amp;since=`,
		"?status=running&surface=webhook":          `href="/v1/executions?format=csv&amp;status=running&amp;surface=webhook" download>`,
		"?status=!failed&agent=a&since=2020-01-01": `since=2020-01-01T00%3A00%3A00Z" download>Download CSV</a>, at most 10,000 rows, without the filters status, agent`,
		"?failed=1": `status=failed%2Ctimeout" download>`,
	} {
		wantTexts(t, server.URL+"/executions"+query, want)
	}
	for surface, flows := range map[string][2]string{
		"webhook": {"flow_running", "flow_pending"},
		"chat":    {"flow_waiting", "flow_running"},
	} {
		body := wantTexts(t, server.URL+"/traces?surface="+surface, flows[0])
		assert.Truef(t, !strings.Contains(body, flows[1]),
			"/traces?surface=%s shows %s, a flow of another surface", surface, flows[1])
	}
	rows.Quiet(t, pool, `update agent_executions set waiting_until = now() - interval '2 hours',
		updated_at = now() - interval '2 hours' where status = 'waiting'`)
	assert.Equal(t, "waiting", listedNames(wantTexts(t, server.URL+"/executions?view=stuck"), ids))
	for query, why := range map[string]string{
		"?status=odd": "pending, running", "?surface=odd": "heartbeat", "?view=odd": "waiting, stuck",
		"?view=waiting&for=odd": "response",
		"?failed=2":             "1", "?for=event": "view=waiting", "?view=stuck&status=failed": "leave out status",
		"?before=odd": "this is not a cursor of this listing", "?view=waiting&before=odd": "not a cursor of this listing",
		"?colour=red":                  "no filter",
		"?status=failed&status=failed": "2 times",
	} {
		wantError(t, server.URL+"/executions"+query, 400, why)
	}
}

func TestFlowFilterShowsItsBounds(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	long := strings.Repeat("x", maxSuggestedLength+1)
	rows.Quiet(t, pool, `
		insert into agent_executions (trace_id, surface, flow)
		select 'fl_1', 'flow', 'import_' || n from generate_series(1, @names::int) n
		union all
		select 'fl_1', 'flow', @long`, postgres.Strict{"names": maxNamesLike + 1, "long": long})
	wantTexts(t, server.URL+"/executions?flow=IMPORT", "IMPORT, only the first 20 names")
	body := wantTexts(t, server.URL+"/executions?flow=import_1")
	assert.True(t, !strings.Contains(body, "only the first"), "a complete name is shown as a part of many names")
	body = wantTexts(t, server.URL+"/executions")
	assert.True(t, !strings.Contains(body, `<option value="xxx`), "the page suggests a part of a long name")
	body = wantTexts(t, server.URL+"/executions?flow="+long)
	assert.Equal(t, 1, strings.Count(body, `<tr id="execution-`), "executions of the flow with the long name")
}

// nextLink returns the target of the first link after a text.
func nextLink(body, after string) string {
	_, link, _ := strings.Cut(body, after+`<a href="`)
	link, _, _ = strings.Cut(link, `"`)
	return html.UnescapeString(link)
}

func TestRareFilterSearchesInPages(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status)
		select lanekeeper.agent_uuid7(clock_timestamp() - n * interval '1 second'), 'fl_' || n, case
		  when n > @searched then 'chat' else 'flow' end, 'f',
		       case when n = @searched + 3 then 'timeout' else 'failed' end
		  from generate_series(1, @searched + 5) n`, postgres.Strict{"searched": maxSearched})
	analyze(t, pool, "agent_executions")
	// timed-out executions have their own window, which reaches further
	for _, filter := range []string{"?surface=chat", "?surface=chat&failed=1"} {
		body := wantTexts(t, server.URL+"/executions"+filter, "among those searched", "Search further back")
		assert.Truef(t, !strings.Contains(body, `id="execution-`), "%s: the first page shows an execution beyond its search",
			filter)
		body = wantTexts(t, server.URL+nextLink(body, "searched.</span> "))
		if n := strings.Count(body, `id="execution-`); n != 5 || strings.Contains(body, "Search further back") {
			t.Errorf("%s: the next page has %d executions", filter, n)
		}
	}
	wantTexts(t, server.URL+"/executions", "1,000&#43;")
}

func TestQueueAndLimits(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Execution(t, pool, "pending", "chat", "greet")
	rows.Execution(t, pool, "pending", "chat", "greet")
	rows.Quiet(t, pool, `insert into agent_limits values ('flow', 'greet', 0), ('surface', 'chat', 3)`)
	wantTexts(t, server.URL+"/executions", `aria-label="2 ready, flow greet, surface chat`, "full", "surface=chat")
}

func TestWaitingExecutionShowsItsWait(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := rows.Execution(t, pool, "waiting", "flow", "greet")
	body := wantTexts(t, server.URL+"/executions/"+id, "Waits for event", "EVENT_COMPLETED", `name="key" value="news"`,
		`action="/act/v1/events"`,
		"wait for news", `action="/act/v1/executions/`+id+`/cancel"`, `action="/act/v1/executions/`+id+`/fork"`,
		"No step is recorded yet",
		"It holds no lane", "It has sent no message", "no parent, children or forks")
	assert.True(t, !strings.Contains(body, "/retry"), "the page offers a retry of a running execution")
	for kind, want := range map[string]string{
		"approval": `href="/approvals/news"`, "agent": `href="/executions/news"`, "lane": `href="/lanes"`,
		"delay": "the clock",
	} {
		rows.Quiet(t, pool, `update agent_executions set waiting_for = $2 where id = $1`, id, kind)
		body := wantTexts(t, server.URL+"/executions/"+id, want)
		assert.Truef(t, !strings.Contains(body, "/act/v1/events"), "the page offers to end a wait for %s", kind)
	}
	// a form would send a different key
	for _, key := range []string{"password=hunter22", "\u202eyek"} {
		rows.Quiet(t, pool, `update agent_executions set waiting_for = 'event', waiting_key = $2 where id = $1`, id, key)
		body := wantTexts(t, server.URL+"/executions/"+id)
		assert.Truef(t, !strings.Contains(body, "/act/v1/events") && !strings.Contains(body, "hunter22"),
			"%.20q is a field of a form", key)
	}
	longest := strings.Repeat("k", 2400)
	rows.Quiet(t, pool, `update agent_executions set waiting_key = $2 where id = $1`, id, longest)
	wantTexts(t, server.URL+"/executions/"+id, `name="key" value="`+longest+`"`)
	wantError(t, server.URL+"/executions/01890000-0000-7000-8000-000000000000", 404, "there is no execution")
	wantError(t, server.URL+"/executions/nonsense", 404, "no execution has the id")
	wantError(t, server.URL+"/executions/"+id+"?before=odd", 400, "not a cursor of this listing")
	wantError(t, server.URL+"/executions/"+id+"?colour=red", 400, "no filter")
}

func TestFailedExecutionCanBeRetried(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := rows.Execution(t, pool, "failed", "flow", "greet")
	rows.Quiet(t, pool, `
		update agent_executions set error_message = 'the roof is off', failed_step = 'lift' where id = $1`, id)
	body := wantTexts(t, server.URL+"/executions/"+id, `action="/act/v1/executions/`+id+`/retry"`, "the roof is off",
		"Failed step", "Ended: failed")
	assert.True(t, !strings.Contains(body, "/cancel") && !strings.Contains(body, "Emit the event"),
		"the page of an ended execution offers a cancellation, or shows a wait")
}

func TestTimelinePages(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := rows.Execution(t, pool, "waiting", "flow", "greet")
	rows.Quiet(t, pool, `
		insert into agent_checkpoints (execution_id, step, claim, failed, output, created_at)
		select @id::uuid, 'step ' || n, 1 + n / 50, n = 60, case
		  when n = 61 then '{"event": "EVENT_COMPLETED", "timed_out": false}'::jsonb
		         when n = 62 then '{"event": "EVENT_COMPLETED", "timed_out": true}'::jsonb else to_jsonb(n) end,
		           now() - (100 - n / 2) * interval '1 second'
		  from generate_series(1, 90) n`, postgres.Strict{"id": id})
	rows.Quiet(t, pool, `update agent_executions set created_at = now() - interval '1 hour',
		started_at = now() - interval '1 hour', wait_number = 3 where id = $1`, id)
	path, seen := "/executions/"+id, map[string]int{}
	for pages := 0; path != ""; pages++ {
		require.True(t, pages <= 5, "the pages do not end")
		body := wantTexts(t, server.URL+path, `<svg class="strip"`, `role="img"`)
		if pages == 0 {
			wantTexts(t, server.URL+path, "Waits, for the 3rd time", "Wait ended by EVENT_COMPLETED", "Wait timed out",
				`class="moment-failed"`)
			assert.True(t, regexp.MustCompile(`since its first claim: (59 min|1 h)`).MatchString(body),
				"the strip of a page does not count from the first claim")
		}
		_, list, _ := strings.Cut(body, `<ol class="moments">`)
		list, _, _ = strings.Cut(list, "</ol>")
		seen["all"] += strings.Count(list, "Fork from here")
		if strings.Contains(body, "Claimed again (claim 2)") {
			seen["claim"]++
		}
		path = strings.TrimSuffix(nextLink(body, `<p class="pager">`), "#timeline")
		if !strings.Contains(body, "Earlier steps") {
			path = ""
			assert.True(t, strings.Contains(body, "Created: pending"), "the first page does not show the start of the execution")
		}
	}
	assert.Truef(t, seen["all"] == 90 && seen["claim"] == 1, "entries on all pages: %v", seen)
	wantTexts(t, server.URL+"/executions/"+id+"?from="+url.QueryEscape("step 7"), `name="from" value="step 7"`)
}

func TestTimelineShowsItsBounds(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := rows.Execution(t, pool, "running", "flow", "external:crawler")
	address := server.URL + "/executions/" + id
	addChanges := func(from, to int) {
		rows.Quiet(t, pool, `
			insert into agent_status_changes (execution_id, n, status)
			select $1::uuid, n, 'running' from generate_series($2::int, $3::int) n`, id, from, to)
	}
	addChanges(1, maxStatusChanges)
	const omitted = "Earlier changes of status are not shown"
	assert.True(t, !strings.Contains(wantTexts(t, address), omitted), "the page reports omitted changes, but shows all")
	addChanges(maxStatusChanges+1, maxStatusChanges+1)
	wantTexts(t, address, omitted)
	rows.Quiet(t, pool, `
		insert into agent_checkpoints (execution_id, step, claim)
		select $1::uuid, n || repeat('x', $2::int), 1 from generate_series(1, $3::int) n`, id, maxFilterBytes, stepsShown+1)
	wantTexts(t, address, "Earlier steps are not shown")
}

func TestExecutionShowsParentChildrenAndForks(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	root, here, child, fork := rows.Execution(t, pool, "waiting", "flow", "root"),
		rows.Execution(t, pool, "running", "flow", "here"),
		rows.Execution(t, pool, "completed", "flow", "child"), rows.Execution(t, pool, "pending", "flow", "forked")
	rows.Quiet(t, pool, `update agent_executions set parent_id = $1 where id = $2`, root, here)
	rows.Quiet(t, pool, `update agent_executions set parent_id = $1 where id = $2`, here, child)
	rows.Quiet(t, pool, `update agent_executions set forked_from = $1, forked_step = 'pay' where id = $2`, here, fork)
	rows.Quiet(t, pool, `insert into agent_checkpoints (execution_id, step, claim, created_at)
		values ($1, 'before', 1, now() - interval '1 day')`, fork)
	wantTexts(t, server.URL+"/executions/"+here, "(this one)", `id="relative-`+root, `id="relative-`+child,
		`id="fork-`+fork,
		"from step", "Started by")
	wantTexts(t, server.URL+"/executions/"+fork, "Forked from", "before step", ">copied<")
	wantTexts(t, server.URL+"/executions", "child of", ">parent</span>", "fork of")
	rows.Quiet(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, parent_id) select 'x', 'flow', 'many',
		'pending', $1 from generate_series(1, 120)`, child)
	rows.Quiet(t, pool, `insert into agent_executions (trace_id, surface, flow, status, parent_id)
		select 'x', 'flow', 'more', 'pending', id from agent_executions where flow = 'many'`)
	body := wantTexts(t, server.URL+"/executions/"+here, "The list is cut")
	assert.Equal(t, maxTree+2, strings.Count(body, `id="relative-`))
}

// A list sums up 501 actions of an execution. Of more than 500, the cost is a lower bound.
func TestListedCostOfManyActionsIsLowerBound(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for _, n := range []int{500, 501} {
		id := rows.Execution(t, pool, "completed", "flow", "greet")
		rows.Quiet(t, pool, `insert into agent_activity (trace_id, execution_id, skill_name, status, cost_usd)
			select 'fl_1', $1, 'row', 'success', 0.01 from generate_series(1, $2::int)`, id, n)
	}
	wantTexts(t, server.URL+"/executions", `data-label="Cost">$5.00<`, `data-label="Cost">≥ $5.01<`)
}

// A fork begins with claim 1, of the copied steps, so its first worker has claim 2.
func TestForkIsClaimedOnce(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	original, fork := rows.Execution(t, pool, "completed", "flow", "greet"),
		rows.Execution(t, pool, "completed", "flow", "greet")
	rows.Quiet(t, pool, `update agent_executions set forked_from = $1 where id = $2`, original, fork)
	rows.Quiet(t, pool, `insert into agent_checkpoints (execution_id, step, claim, created_at)
		values ($1, 'copied', 1, now() - interval '1 day'), ($1, 'own', 2, now()), ($1, 'later', 3, now() + interval '1 ms')`,
		fork)
	body := wantTexts(t, server.URL+"/executions/"+fork, ">copied<", "Claimed again (claim 3)")
	assert.True(t, !strings.Contains(body, "Claimed again (claim 2)"), "the first claim of a fork is shown as a second")
	traceID := insert(t, pool, `update agent_executions set claim = 2 where id = $1::text::uuid returning trace_id`, fork)
	wantTexts(t, server.URL+"/traces/"+traceID+"?span="+fork, "<dt>Claim</dt><dd>number 2")
}

func TestExecutionWithOnlyForksShowsThem(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	original, fork := rows.Execution(t, pool, "completed", "flow", "greet"),
		rows.Execution(t, pool, "completed", "flow", "greet")
	const none = "no parent, children or forks"
	wantTexts(t, server.URL+"/executions/"+original, none)
	rows.Quiet(t, pool, `update agent_executions set forked_from = $1 where id = $2`, original, fork)
	body := wantTexts(t, server.URL+"/executions/"+original, `id="fork-`+fork)
	assert.True(t, !strings.Contains(body, none), "the page with a fork says that there is none")
}

func TestExecutionShowsWorkerAndLanes(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id, other := rows.Execution(t, pool, "running", "flow", "external:crawler"),
		rows.Execution(t, pool, "running", "flow", "other")
	rows.Quiet(t, pool, `
		with w as (insert into agent_workers (name, kind, owner, lock_id, expires_at)
		  values ('w', 'outside', 'the crawler', 'a secret of a lock', now() + interval '1 minute') returning id)
		update agent_executions set claimed_by = w.id, claim = 7, started_at = now() from w
		  where agent_executions.id = $1`, id)
	rows.Quiet(t, pool, `insert into agent_status_changes (execution_id, n, status) values ($1, 1, 'pending'),
		($1, 2, 'running')`, id)
	rows.Quiet(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id) values
		('pipeline:prices', 'x', 1, now() + interval '1 hour', $1), ('thread:t1', 'x', 2, now() + interval '1 hour', $1),
		('pipeline:lent', 'y', 3, now() + interval '1 hour', $2)`, id, other)
	rows.Quiet(t, pool, `insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds)
		values ('thread:t1', 1, $2, $1, 60), ('pipeline:lent', 1, $1, $2, 60)`, id, other)
	rows.Quiet(t, pool, `insert into agent_messages (thread_id, seq, turn, role, content, status, execution_id)
		values ('t1', 1, 1, 'assistant', 'here it is', 'sent', $1)`, id)
	body := wantTexts(t, server.URL+"/executions/"+id, "the crawler", "number 7", "pipeline:prices", "borrowed from",
		"lent to", "here it is", "Became running")
	assert.True(t, !strings.Contains(body, "a secret of a lock"), "the page shows the secret of a lock")
}

func TestExecutionValuesAreRedacted(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := rows.Execution(t, pool, "completed", "flow", "greet")
	rows.Quiet(t, pool, `update agent_executions set input = '{"password": "hunter22", "n": 9007199254740993}',
		result = '{"ok": true}' where id = $1`, id)
	body := wantTexts(t, server.URL+"/executions/"+id, "[redacted]", "9007199254740993", "&#34;ok&#34;: true",
		"has values that are not shown")
	assert.True(t, !strings.Contains(body, "hunter22"), "the page shows a secret")
	rows.Quiet(t, pool, `update agent_executions set input = '{"n": 9007199254740993}' where id = $1`, id)
	body = wantTexts(t, server.URL+"/executions/"+id)
	_, form, _ := strings.Cut(body, `<textarea name="input"`)
	assert.True(t, strings.Contains(form[:300], "9007199254740993"), "the form does not begin with the input")
	for name, input := range map[string]string{
		"long": fmt.Sprintf(`{"a": %q}`, strings.Repeat("a", 9000)), "turned": "{\"a\": \"\u202e\"}",
		"deep": strings.Repeat("[", 1500) + strings.Repeat("]", 1500),
	} {
		rows.Quiet(t, pool, `update agent_executions set input = $2::jsonb where id = $1`, id, input)
		body = wantTexts(t, server.URL+"/executions/"+id, "The input is not shown here")
		assert.Truef(t, len(body) <= 100_000, "%s: the page has %d bytes", name, len(body))
	}
}

var (
	actionForm  = regexp.MustCompile(`(?s)<form[^>]* action="/act([^"]+)"[^>]*>(.*?)</form>`)
	actionField = regexp.MustCompile(`<(?:input|textarea|select)[^>]* name="([^"]+)"`)
)

// formRoutes checks that every form of a page is an action of the room, with known fields. It returns the routes.
func formRoutes(t *testing.T, body string) []string {
	t.Helper()
	mux, fields := http.NewServeMux(), map[string][]string{}
	for _, a := range actions() {
		mux.Handle(a.method+" "+a.path, http.NotFoundHandler())
		for _, f := range a.fields {
			fields[a.method+" "+a.path] = append(fields[a.method+" "+a.path], f.name)
		}
	}
	var routes []string
	for _, form := range actionForm.FindAllStringSubmatch(body, -1) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, html.UnescapeString(form[1]), http.NoBody)
		_, pattern := mux.Handler(r)
		if pattern == "" {
			t.Errorf("there is no action %s", form[1])
		}
		for _, name := range actionField.FindAllStringSubmatch(form[2], -1) {
			assert.Truef(t, name[1] == backField || slices.Contains(fields[pattern], name[1]),
				"%s does not take %s", pattern, name[1])
		}
		routes = append(routes, strings.TrimPrefix(pattern, "POST /v1/"))
	}
	slices.Sort(routes)
	return slices.Compact(routes)
}

func TestExecutionAndThreadPagesUseListedActions(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	waiting, failed := rows.Execution(t, pool, "waiting", "flow", "greet"),
		rows.Execution(t, pool, "failed", "flow", "greet")
	rows.Quiet(t, pool, `update agent_executions set flow_version = 2`)
	rows.Quiet(t, pool, `insert into agent_threads (id, channel) values ('a/b:ü ?#%', 'chat')`)
	rows.Quiet(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at)
		values ('thread:a/b:ü ?#%', 'x', 1, now() + interval '1 hour')`)
	for path, want := range map[string]string{
		"/executions/" + waiting:            "events executions/{id}/cancel executions/{id}/fork",
		"/executions/" + failed:             "executions/{id}/fork executions/{id}/retry",
		"/threads/a%2Fb:%C3%BC%20%3F%23%25": "lanes/{lane}/break threads/{id}/messages",
	} {
		assert.Equal(t, want, strings.Join(formRoutes(t, wantTexts(t, server.URL+path)), " "), path, "pulls")
	}
}
