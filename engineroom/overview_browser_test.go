package engineroom

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// serveWithApprovals serves the room with a budget of $5 a day, and an API that decides approvals.
func serveWithApprovals(t *testing.T) (*pgxpool.Pool, *httptest.Server) {
	t.Helper()
	pool := pgtest.DB(t)
	api := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var asked struct{ Decision, Reason string }
		err := json.NewDecoder(r.Body).Decode(&asked)
		if err == nil {
			_, err = approvals.Decide(r.Context(), pool, path.Base(r.URL.Path), asked.Decision == "approve", "ana", asked.Reason)
		}
		if err != nil {
			t.Errorf("%s: %v", r.URL.Path, err)
		}
		fmt.Fprint(w, "{}")
	})
	room := newRoom(t, Options{
		Pool: pool, Limits: budgets.Limits{Day: budgets.Limit{USD: 5}},
		API: func() http.Handler { return api },
	})
	return pool, serveRoom(t, room)
}

// seedBusyOverview inserts 20 of everything on the overview: two agents with heartbeats (one fails), approvals with
// arguments, failures with few root errors, locks, objectives, skills in every state, and spend.
func seedBusyOverview(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	pgtest.AvoidMidnight(t)
	putAgent(t, pool, agents.Definition{Name: "sales", Default: true, Description: "Answers customers."})
	putAgent(t, pool, agents.Definition{Name: "billing", Heartbeat: &agents.Heartbeat{Cron: "*/30 * * * *"}})
	rows.Quiet(t, pool, strings.ReplaceAll(busySeed, "SALT", "0000000000000000000"))
	for _, purpose := range []string{"advance_plan", "reflect"} {
		insertModelCall(t, pool, purpose, "model-one", "0.75", "0")
		insertModelCall(t, pool, purpose, "model-two", "1.25", "1 day")
	}
	pgtest.Exec(t, pool, "analyze")
}

const busySeed = `
	insert into agent_workers (id, name, expires_at)
	values ('018f0000-0000-7000-8000-000000000001', 'worker-1', now() + interval '1 hour');
	insert into agent_schedules (name, flow, surface, agent, cron, timezone, next_run_at, last_run_at) values
	       ('heartbeat', 'heartbeat', 'heartbeat', 'sales', '*/30 * * * *', 'UTC', now() + interval '14 minutes',
	         now() - interval '16 minutes'),
	       ('heartbeat:billing', 'heartbeat', 'heartbeat', 'billing', '*/30 * * * *', 'UTC', now() + interval '19 minutes',
	         now() - interval '11 minutes');
	insert into agent_executions (id, trace_id, surface, agent, flow, status, result_summary, created_at, updated_at,
	  completed_at)
	select lanekeeper.agent_uuid7(at), 'hb_SALT' || lpad(n::text, 7, '0'), 'heartbeat', a.agent, 'heartbeat', 'completed',
	       'advanced 2 plans, nothing due', at, at, at + interval '8 s'
	  from generate_series(1, 20) n, (values ('sales', interval '16 minutes'), ('billing', interval '11 minutes')) a(agent,
	    since)
	 cross join lateral (select now() - a.since - (n - 1) * interval '30 minutes' as at) x;
	insert into agent_executions (id, trace_id, surface, agent, flow, status, created_at, updated_at, completed_at)
	select lanekeeper.agent_uuid7(at), 'fl_SALT' || lpad(n::text, 7, '0'), 'flow', 'sales', 'nightly_report', 'completed',
	       at, at, at + interval '40 s'
	  from (select n, now() - n * n * interval '37 seconds' as at from generate_series(1, 45) n) x;
	insert into agent_executions (id, trace_id, surface, agent, flow, status, error_message, created_at, updated_at,
	  completed_at)
	select lanekeeper.agent_uuid7(at), 'fl_SALT1' || lpad(n::text, 6, '0'), 'flow', 'billing', case n % 2
	  when 0 then 'import_orders' else 'reconcile_ledger' end,
	       'failed', 'step fetch: skill fetch_orders: dial tcp 10.0.0.' || n || ':443: connect: connection refused', at,
	         at, at
	  from (select n, now() - n * interval '7 minutes' as at from generate_series(1, 20) n) x;
	insert into agent_executions (id, trace_id, surface, agent, flow, status, error_message, created_at, updated_at,
	  completed_at)
	select lanekeeper.agent_uuid7(at), 'fl_SALT2' || lpad(n::text, 6, '0'), 'flow', 'sales', 'sync_customers', 'failed',
	       'customer ' || n * 7919 || ' has no address', at, at, at
	  from (select n, now() - n * interval '50 minutes' as at from generate_series(1, 20) n) x;
	insert into agent_executions (id, trace_id, surface, agent, flow, status, created_at, updated_at, completed_at)
	values (lanekeeper.agent_uuid7(now() - interval '2 minutes'), 'fl_SALT2999999', 'flow', 'sales', 'sync_customers',
	  'completed', now(), now(), now());
	insert into agent_executions (id, trace_id, surface, agent, flow, status, claimed_by, claim, created_at, updated_at)
	select lanekeeper.agent_uuid7(now() - n * interval '9 s'), 'ch_SALT3' || lpad(n::text, 6, '0'), 'chat', 'sales',
	       'chat', 'running', '018f0000-0000-7000-8000-000000000001', 1, now(),
	       now() - n * interval '9 s' from generate_series(1, 20) n;
	insert into agent_skills (name, description, tool_definition, handler, trust) values
	       ('issue_refund', 'Pays money back to a customer.', '{}', 'http:x', 'approve');
	insert into agent_skills (name, tool_definition, handler) select 'healthy_skill_' || n, '{}', 'builtin:x'
	  from generate_series(1, 9) n;
	insert into agent_skills (name, tool_definition, handler) select 'skill_that_always_fails_' || n, '{}', 'builtin:x'
	  from generate_series(1, 5) n;
	insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at)
	select 'disabled_skill_with_a_long_name_' || n, '{}', 'builtin:x', false, 'self_heal',
	  '5 of its last 5 calls failed: connection refused', now() - n * interval '1 hour'
	  from generate_series(1, 4) n;
	insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at, trial_at)
	values ('skill_on_trial', '{}', 'builtin:x', false, 'self_heal', '5 of its last 5 calls failed',
	  now() - interval '2 hours', now() - interval '1 minute');
	insert into agent_activity (id, trace_id, surface, agent, skill_name, status, error_class, error_message, duration_ms,
	  created_at)
	select lanekeeper.agent_uuid7(at), 'hb_SALT' || lpad(n::text, 7, '0'), 'heartbeat', 'sales',
	       case n % 4 when 0 then 'skill_that_always_fails_' || 1 + n % 5 else 'healthy_skill_' || 1 + n % 9 end,
	       case n % 4 when 0 then 'error' else 'success' end, case n % 4 when 0 then 'timeout' else '' end,
	       case n % 4 when 0 then 'no answer within ' || 30 + n || ' s from https://orders.example.com/api/v2/orders?page=' || n end, 30 + n, at
	  from (select n, now() - n * interval '3 minutes' as at from generate_series(1, 80) n) x;
	insert into agent_approvals (id, trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash,
	  expires_at, created_at)
	select lanekeeper.agent_uuid7(now() - n * interval '4 minutes'), 'ch_SALT3' || lpad(n::text, 6, '0'),
	       (select e.id from agent_executions e where e.trace_id = 'ch_SALT3' || lpad(n::text, 6, '0')), 'issue_refund', 1,
	       jsonb_build_object('order', 'A-' || 1000 + n, 'amount', 120.5 + n, 'currency', 'EUR', 'reason',
	         'the goods never arrived; the carrier confirmed the loss'),
	       'h' || n, now() + interval '20 hours', now() - n * interval '4 minutes' from generate_series(1, 20) n;
	insert into agent_locks (lane, locked_by, fencing_token, locked_at, expires_at, execution_id)
	select 'thread:customer-with-a-long-name-' || n, e.id || '#1', n, now() - n * interval '20 s',
	       now() + interval '10 minutes', e.id
	  from generate_series(1, 20) n join agent_executions e on e.trace_id = 'ch_SALT3' || lpad(n::text, 6, '0');
	insert into agent_requests (kind, execution_id, trace_id, title)
	select 'signature', e.id, e.trace_id, 'INE, CURP and proof of address of customer ' || n
	  from generate_series(1, 20) n join agent_executions e on e.trace_id = 'ch_SALT3' || lpad(n::text, 6, '0');
	insert into agent_objectives (name, goal) select 'keep the database of region ' || n || ' healthy', 'g'
	  from generate_series(1, 20) n;
	insert into agent_objective_steps (objective_id, position, title) select o.id, 1, 'x' from agent_objectives o;
	insert into agent_objectives (name, goal, status, proposed_by) select 'propose ' || n,
	  'answer every customer within an hour', 'proposed', 'sales' from generate_series(1, 20) n;
	insert into agent_budgets (scope, tokens, cost_usd)
	select 'day:' || to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD') || s, 2000, 1.5
	  from unnest(array['', ':agent:sales']) s;
	insert into agent_memory (category, key, value) select 'category ' || n % 20, 'k' || n, to_jsonb('value ' || n)
	  from generate_series(1, 100) n;
	insert into agent_automations (name, prompt, cron, next_run_at) select 'automation ' || n, 'look', '@daily',
	  now() + interval '1 hour' from generate_series(1, 20) n;
	insert into agent_automation_runs (automation_id, scheduled_for, status, error_message)
	select a.id, now(), 'dead', 'relation "caretaker_notes" does not exist' from agent_automations a;
	insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256,
	  error_message)
	select 'github', 'd' || n, 'wh_1', 'wh_1', 'dead', '', '', 'the flow refused it' from generate_series(1, 20) n`

// The overview shows whether the agent works.
func TestOverviewShowsHealth(t *testing.T) {
	t.Parallel()
	pool, server := serveWithApprovals(t)
	seedBusyOverview(t, pool)
	p := browser.Open(t, browser.Look{Width: 1440, Height: 900})
	p.Go(server.URL + "/")
	assert.Contains(t, p.Text("#verdict"), "Degraded", "2 flows failing since", "5 skills failing since",
		"4 skills disabled by self-heal", "skill skill_on_trial on trial", "completed 1", " min ago", "advanced 2 plans",
		"in 1", "$1.50 of $5.00", "40 failed")
	p.Until("each agent has a strip", `document.querySelectorAll("#verdict tbody tr").length === 2 + 24`)
	p.Until("an hour has a tooltip", `/^\d\d:00 UTC: \d+ runs?, \d+ failed$/.test(
		document.querySelector("#verdict .hour:last-of-type title").textContent)`)
	p.Click(`#verdict nav a[href="/?agent=billing"]`)
	p.Until("the page is about billing", `location.search === "?agent=billing" && document.readyState === "complete" &&
		document.querySelector("#verdict nav a[aria-current]").innerText.includes("billing")`)
	text := p.Text("#verdict")
	assert.Contains(t, text, "Degraded", "2 flows failing since")
	assert.Truef(t, !strings.Contains(text, "skills failing") && !strings.Contains(p.Text("#failing"), "no answer within"),
		"the page shows failures of another agent: %s", text)
	p.Click("#verdict .verdict-why a") // the two flows
	p.Until("the reason leads to what fails", `location.hash === "#failing"`)
	_, err := executions.PauseAll(t.Context(), pool, "ana", "prices look wrong")
	require.NoError(t, err)
	p.Until("a pause is shown as it happens", `document.querySelector("#verdict-title").innerText.includes("Stopped")`)
	assert.Contains(t, p.Text(".verdict-why"), "paused by ana since")
	wantNoBrowserErrors(t, p)
}

// The overview shows failed executions.
func TestFailuresAreGroupedByRootError(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	seedBusyOverview(t, pool)
	p := browser.Open(t, browser.Look{Width: 1440, Height: 900})
	p.Go(server.URL + "/")
	assert.Contains(t, p.Text("#failing"), "connection refused", "flow reconcile_ledger, flow import_orders",
		"20 failed runs since",
		"no answer within", "20 failed calls since", "and 1 more", "1 error of the last 24 hours, recovered since")
	p.Click("#recovered > summary")
	assert.Contains(t, p.Text("#recovered"), "has no address", "flow sync_customers", "20 failed runs")
	p.Click("#failing .failures a[href^='/traces/']")
	p.Until("the newest trace says so", `location.pathname === "/traces/fl_00000000000000000001000001" &&
		document.body?.innerText.includes("connection refused")`)
}

// Skill health starts with the worst skills, and a skill with 0 % success is not green.
func TestWorstSkillsComeFirst(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	seedBusyOverview(t, pool)
	p := browser.Open(t, browser.Look{Width: 1440, Height: 900})
	for _, list := range []struct{ address, rows, want string }{
		{"/", "#health tbody tr", "disabled disabled disabled disabled on trial failing"},
		{"/skills", "#list tbody tr", "disabled disabled disabled disabled on trial failing failing failing failing failing" +
			strings.Repeat(" enabled", 10)},
	} {
		p.Go(server.URL + list.address)
		var states, green string
		p.Eval(`[...document.querySelectorAll("`+list.rows+` .status")]
			.map(s => s.innerText.replace(/^\S+\s/, "").trim()).join(" ")`, &states)
		assert.Equal(t, list.want, states)
		p.Eval(`[...document.querySelectorAll("tr")]
			.filter(row => /(^|\s)0 %/.test(row.innerText) && row.querySelector(".tone-good"))
			.map(row => row.innerText).join("; ")`, &green)
		assert.Equal(t, "", green, "rows with 0 % that are green")
	}
	assert.Contains(t, p.Text("#failing"), "failing")
	p.Go(server.URL + "/skills?state=failing")
	p.Until("the failing ones are listed", `document.querySelectorAll("#list tbody tr").length === 5`)
}

// clippedElements lists the elements of a page that hide or scroll a part of their content.
const clippedElements = `[...document.querySelectorAll("main *")].filter(e => {
	const style = getComputedStyle(e), isVisible = style.overflowX === "visible" && style.overflowY === "visible";
	return !e.matches(".aside-text") && !isVisible && e.clientHeight > 0 &&
		(e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1);
}).map(e => (e.id || e.className || e.localName) + " in " + e.closest("section")?.id + ": " +
	e.clientWidth + "x" + e.clientHeight + " of " + e.scrollWidth + "x" + e.scrollHeight).join("; ")`

// No box clips its content.
func TestOverviewIsNotClipped(t *testing.T) {
	t.Parallel()
	pool, server := serveWithApprovals(t)
	seedBusyOverview(t, pool)
	p := browser.Open(t, browser.Look{Width: 1440, Height: 900})
	for _, address := range []string{"/", "/?agent=billing"} {
		p.Go(server.URL + address)
		var hidden string
		p.Eval(clippedElements, &hidden)
		assert.Equal(t, "", hidden)
	}
	p.Go(server.URL + "/")
	text := p.Text("main")
	assert.Contains(t, text, "All 20 approvals requested", "All 20 unanswered requests", "All 20 failed automation runs",
		"All 20 running", "All 20 skills", "All 20 locks", "All 20 active objectives")
	var order string
	p.Eval(`[...document.querySelectorAll("main > .part, .board .part")].map(e => e.id).join(" ")`, &order)
	assert.Equal(t, "verdict needs failing now health feed spend locks objectives memory", order)
	wantNoBrowserErrors(t, p)
	p.As(browser.Look{Width: 1280, Height: 800})
	p.Eval(`document.documentElement.style.fontSize = "200%"`, nil) // enlarges text alone: media queries do not change
	p.Until("nothing is wider than the window with large text", `document.documentElement.scrollWidth <= 1280`)
	p.Eval(`document.documentElement.style.fontSize = ""`, nil)
	p.As(browser.Look{Width: 320, Height: 640, Dark: true})
	p.Until("nothing is wider than a small phone", `document.documentElement.scrollWidth <= 320`)
	wantNoBrowserErrors(t, p)
}

// As in F1, on the overview: an admin decides an approval in place, with its exact arguments in view.
func TestApprovalIsDecidedOnOverview(t *testing.T) {
	t.Parallel()
	pool, server := serveWithApprovals(t)
	refund := insertApproval(t, pool, "pending", `{"order": "A-17", "amount": 9007199254740993, "note": "`+
		strings.Repeat("x", 60)+`"}`, 5)
	long := insertApproval(t, pool, "pending", `{"note": "`+strings.Repeat("y", maxInlineArguments)+`"}`, 5)
	p := browser.Open(t, browser.Look{NoScript: true})
	p.Go(server.URL + "/")
	assert.Contains(t, p.Text("#decide-"+refund), "drop", `"amount": 9007199254740993`, `"order": "A-17"`)
	assert.Contains(t, p.Text("#decide-"+long), "The arguments have", "Read them and decide")
	inPlace := fmt.Sprintf(`#decide-%s [value="approve"]`, long)
	p.As(browser.Look{})
	p.Go(server.URL + "/")
	p.Until("there is no approval of shortened arguments", `document.querySelector('`+inPlace+`') === null`)
	wantNoBrowserErrors(t, p)
	p.Type("#decide-"+refund+" input[name=reason]", "the goods came")
	p.Click("#decide-" + refund + ` [value="reject"]`)
	p.Shows("The decision is recorded")
	p.Until("the item is gone", `document.getElementById("decide-`+refund+`") === null`)
	assert.Equal(t, "rejected by ana: the goods came", pgtest.Value[string](t, pool,
		`select status || ' by ' || decided_by || ': ' || reason from agent_approvals where id = $1::text::uuid`, refund))
	pgtest.Exec(t, pool, `update agent_skills set revision = 2`)
	insertApproval(t, pool, "pending", `{"n": 1}`, 5)
	p.Go(server.URL + "/")
	p.Shows("The skill has changed since this request, so it can only be rejected.")
	p.Until("a void approval is not offered", `document.querySelector('#needs [value="approve"]') === null`)
}

// A new approval becomes the first. It must not move under a pointer that is about to approve another one.
func TestButtonStaysUnderPointer(t *testing.T) {
	t.Parallel()
	pool, server := serveWithApprovals(t)
	first := insertApproval(t, pool, "pending", `{"order": "A-17"}`, 5)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/")
	p.Until("the page is live", `document.body.innerText.includes("Live")`)
	p.Hover("#decide-" + first + ` [value="approve"]`)
	second := insertApproval(t, pool, "pending", `{"order": "A-18"}`, 5)
	p.Until("the change is known", `document.title.includes("2")`)
	var under string
	p.Eval(`document.querySelector("form.decide:hover").closest("li").id`, &under)
	assert.Equal(t, "decide-"+first, under)
	p.Hover("h1")
	p.Until("the new one is shown", `document.getElementById("decide-`+second+`") !== null`)
}

// These are five tasks of a new user, from the overview, with their clicks. docs/five-tasks.md has the counts; make
// pictures makes its pictures.
func TestFiveTasksFromTheOverview(t *testing.T) {
	t.Parallel()
	pool, server := serveWithApprovals(t)
	seedBusyOverview(t, pool)
	pgtest.Exec(t, pool, `delete from agent_approvals; delete from agent_executions where status = 'running'`)
	run := insert(t, pool, `insert into agent_executions (trace_id, surface, agent, flow, status, claimed_by, claim)
		values ('ch_00000000000000000000000042', 'chat', 'sales', 'answer_customer', 'running',
		'018f0000-0000-7000-8000-000000000001', 1)
		returning id::text`)
	call := insert(t, pool, `insert into agent_activity (trace_id, execution_id, skill_name, status)
		values ('ch_00000000000000000000000042', $1::text::uuid, 'look_up_order', 'running') returning id::text`, run)
	pgtest.Exec(t, pool, `insert into agent_activity_open (activity_id, execution_id, kind)
		values ($1::text::uuid, $2::text::uuid, 'call')`,
		call, run)
	refund := insert(t, pool, `
		insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash,
		  expires_at)
		values ('ch_00000000000000000000000042', $1::text::uuid, 'issue_refund', 1,
		  '{"order": "A-1042", "amount": 80, "currency": "EUR"}', 'x',
		        now() + interval '1 day') returning id::text`, run)
	p := browser.Open(t, browser.Look{Width: 1440, Height: 900})
	pictures := os.Getenv("AGENT_PICTURES")
	picture := func(name string) {
		if pictures != "" {
			p.Screenshot(filepath.Join(pictures, name+".png"), false)
		}
	}
	clicks, screens, began := 0, 0, time.Now()
	click := func(selector string) {
		clicks++
		p.Click(selector)
	}
	read := func(selector string) string { // scrolls where it must
		var scrolled int
		p.Eval(`(() => { const at = document.querySelector("`+selector+`").getBoundingClientRect().top + 80 - innerHeight;
			if (at > 0) scrollBy(0, at + innerHeight - 160);
			return Math.max(0, Math.ceil(at / innerHeight)) })()`, &scrolled)
		screens += scrolled
		return p.Text(selector)
	}
	open := func() {
		p.Go("about:blank")
		clicks, screens, began = 0, 0, time.Now()
		p.Go(server.URL + "/")
	}
	done := func(name, task string, most int) {
		t.Logf("%s: %d clicks, %d screens further down, %.1f s of the browser", task, clicks, screens,
			time.Since(began).Seconds())
		assert.Truef(t, clicks <= most, "%s takes %d clicks, want at most %d", task, clicks, most)
		if name != "refund" { // this page is the form
			picture("task-" + name)
		}
	}

	open()
	assert.Contains(t, read("#now"), "look_up_order for", "answer_customer · chat")
	done("now", "what does it do now", 0)

	open()
	assert.Contains(t, read("#verdict"), "Degraded", "2 flows failing since")
	done("healthy", "is it healthy", 0)

	open()
	assert.Contains(t, p.Text("#failing li"), "connection refused", "flow reconcile_ledger")
	click("#failing li a[href^='/traces/']")
	p.Until("the trace says the same",
		`location.pathname.startsWith("/traces/") && document.body?.innerText.includes("connection refused")`)
	done("failed", "why did the last failed flow fail", 1)

	open()
	assert.Contains(t, read("#decide-"+refund), "issue_refund", `"amount": 80`, `"currency": "EUR"`, `"order": "A-1042"`)
	assert.Contains(t, p.Text("#need-approval"), "1", "Approval requested")
	picture("task-refund")
	click("#decide-" + refund + ` [value="approve"]`) // a reason is optional
	p.Shows("The decision is recorded")
	pgtest.Equal(t, pool, "approved", `select status from agent_approvals where id = $1::text::uuid`, refund)
	done("refund", "approve a refund after reading its arguments", 1)

	open()
	assert.Contains(t, read("#yesterday"), "$2.50", "2,000 tokens", "advance_plan $1.25 (50 %)", "reflect $1.25 (50 %)")
	done("yesterday", "what did yesterday cost, and why", 0)
	wantNoBrowserErrors(t, p)
	if pictures == "" {
		return
	}
	insert(t, pool, `
		insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		select 'ch_00000000000000000000000042', $1::text::uuid, 'issue_refund', 1,
		       jsonb_build_object('order', 'A-' || 1042 + n, 'amount', 35 * n, 'currency', 'EUR'), 'x' || n,
		       now() + interval '1 day' from generate_series(1, 3) n returning id::text`, run)
	p.As(displayModes["dark phone"])
	for name, path := range map[string]string{"phone": "/", "phone-approvals": "/approvals"} {
		p.Go(server.URL + path)
		waitForStream(p)
		picture(name)
	}
}
