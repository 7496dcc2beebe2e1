package engineroom

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/chromedp/chromedp/kb"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
	"github.com/lanekeeper/lanekeeper/principals"
)

// followRedirects follows redirects. It returns the final path and the page.
func followRedirects(t *testing.T, address string) (path, body string) {
	t.Helper()
	answer, err := http.Get(address)
	require.NoError(t, err)
	defer answer.Body.Close()
	_, body = testkit.Get(t, answer.Request.URL.String())
	return answer.Request.URL.Path, body
}

const (
	fragmentRun   = "01a2d7d3-9f52-7e3c-b8ab-88e6e4f1c345"
	fragmentTrace = "ch_01JD3V7K8ZQ6W2M5T9X44YGH89"
)

// Any part of a displayed id works in an address, a filter and the find box.
func TestPartOfIDIsFoundEverywhere(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Quiet(t, pool, `insert into agent_executions (id, trace_id, surface, flow, status)
		values ($1, $2, 'chat', 'refund_order', 'completed')`,
		fragmentRun, fragmentTrace)
	rows.Quiet(t, pool, `insert into agent_activity (trace_id, surface, skill_name) values ($1, 'chat', 'pay_back')`,
		fragmentTrace)
	for range 3 {
		rows.Execution(t, pool, "completed", "flow", "other")
	}
	wantTexts(t, server.URL+"/executions", ">other<")
	for _, part := range []string{
		"88e6e4f1c345", "f1c345", "01a2d7d3", "01a2d7d3-9f52", "01A2D7D3-9F52-7E3C-B8AB-88E6E4F1C345", "01a2d7d3…c345",
		"7e3cb8ab", server.URL + "/executions/" + fragmentRun, "  88e6e4f1c345 ",
	} {
		escaped := url.PathEscape(strings.TrimSpace(part))
		if !strings.Contains(part, "://") {
			path, _ := followRedirects(t, server.URL+"/executions/"+escaped)
			assert.Equal(t, "/executions/"+fragmentRun, path)
		}
		body := wantTexts(t, server.URL+"/executions?trace_id="+url.QueryEscape(part), "refund_order")
		assert.Truef(t, !strings.Contains(body, ">other<"), "%s: other executions are listed", part)
		wantTexts(t, server.URL+"/find?q="+url.QueryEscape(part), `href="/executions/`+fragmentRun)
	}
	for _, part := range []string{
		fragmentTrace, strings.ToLower(fragmentTrace), "01JD3V7K8ZQ6W2M5T9X44YGH89", "ch_01JD3V", "4YGH89", "…4YGH89",
		"ch_01JD…YGH89", "9X44YG",
		"01JD3V7K8", "88e6e4f1c345",
	} {
		path, _ := followRedirects(t, server.URL+"/traces/"+url.PathEscape(part))
		assert.Truef(t, strings.HasSuffix(path, fragmentTrace) || strings.EqualFold(path, "/traces/"+part),
			"%s leads to %s", part, path)
		wantTexts(t, server.URL+"/executions?trace_id="+url.QueryEscape(part), "refund_order")
		wantTexts(t, server.URL+"/activity?trace="+url.QueryEscape(part), "pay_back")
		wantTexts(t, server.URL+"/audit?trace="+url.QueryEscape(part), "pay_back")
		wantTexts(t, server.URL+"/find?q="+url.QueryEscape(part), `href="/traces/`+fragmentTrace)
	}

	rows.Quiet(t, pool, `insert into agent_activity (trace_id, surface, skill_name)
		values ('ev_01JE3V7K8ZQ6W2M5T9X44YGH89', 'eval', 'check_order')`)
	for _, part := range []string{"ev_01JE3V", "EV_01JE3V7K8ZQ6W2M5T9X44YGH89", "ev_01JE…YGH89"} {
		wantTexts(t, server.URL+"/activity?trace="+url.QueryEscape(part), "check_order")
	}

	// The page lists several matches. Without a match, it says where it searched.
	rows.Quiet(t, pool, `insert into agent_executions (id, trace_id, surface, flow, status)
		values ('01a2d7d3-9f53-7e3c-b8ab-88e6e4f1c345', 'hb_01JD3V7K8ZQ6W2M5T9X44YGH90', 'chat', 'second', 'completed')`)
	path, body := followRedirects(t, server.URL+"/executions/88e6e4f1c345")
	assert.Equal(t, "/find", path)
	assert.Contains(t, body, "second")
	assert.Contains(t, body, "refund_order")
	path, body = followRedirects(t, server.URL+"/traces/0000beef")
	assert.Equal(t, "/find", path)
	assert.Contains(t, body, "among the newest 30,000")
	wantTexts(t, server.URL+"/executions?trace_id=0000beef", "No execution matches")
	wantTexts(t, server.URL+"/activity?trace=0000beef", "No activity matches")
	wantError(t, server.URL+"/traces/hb_01JD3V7K8ZQ6W2M5T9X44YGH99", 404, "no trace has the id")
	wantError(t, server.URL+"/executions/01a2d7d3-0000-7e3c-b8ab-88e6e4f1c345", 404, "there is no execution")
}

func TestFindByPartOfName(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Skill(t, pool, "fetch_price", "Fetches what oil costs.", "", "")
	insertAutomation(t, pool, "weekly_report")
	insertObjective(t, pool, "grow_sales")
	insertMemory(t, pool, "facts", "Price_of_oil", "90")
	rows.Execution(t, pool, "failed", "flow", "import_orders")
	rows.Quiet(t, pool, `insert into agent_threads (id, channel, participant) values ('talk-7', 'chat', 'Ana Müller')`)
	for text, want := range map[string]string{
		"FETCH": "/skills/fetch_price", "oil costs": "/skills/fetch_price", "week": "/automations/weekly_report",
		"SALES": "/objectives/grow_sales", "price_of": "/memory/Price_of_oil", "IMPORT": "/executions?flow=import_orders",
		"müller": "/threads/talk-7", "talk": "/threads/talk-7", "spend": `"/spend"`, "AGENT_WORK": "AGENT_WORKERS",
		"how many background executions": "AGENT_WORKERS", "100%": "Nothing has",
	} {
		wantTexts(t, server.URL+"/find?q="+url.QueryEscape(text), want)
	}
	for path, want := range map[string]string{
		"/skills/price": "/skills/fetch_price", "/automations/WEEKLY": "/automations/weekly_report",
		"/objectives/sales": "/objectives/grow_sales", "/threads/müller": "/threads/talk-7",
	} {
		got, _ := followRedirects(t, server.URL+path)
		assert.Equal(t, want, got)
	}
	const further = "There are more. A longer part of the name finds fewer."
	for n := range hitsShown {
		insertMemory(t, pool, "facts", fmt.Sprintf("weather_%d", n), "rain")
	}
	body := wantTexts(t, server.URL+"/find?q=weather_")
	assert.True(t, !strings.Contains(body, further), "the page announces more hits, but shows all")
	insertMemory(t, pool, "facts", "weather_more", "rain")
	wantTexts(t, server.URL+"/find?q=weather_", further)
	wantTexts(t, server.URL+"/executions?flow=IMPORT", "import_orders")
	wantTexts(t, server.URL+"/executions?flow=nothing", "No execution matches")
	wantError(t, server.URL+"/skills/zzz", 404, "there is no skill")
}

func TestFindDialogWithKeys(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Skill(t, pool, "fetch_price", "Fetches.", "", "")
	rows.Skill(t, pool, "fetch_news", "Fetches.", "", "")
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/skills/fetch_price")
	p.Go(server.URL + "/lanes")
	p.Until("the script runs", `document.querySelector("#find-open kbd:not([hidden])") !== null`)
	p.Eval(
		`document.dispatchEvent(new KeyboardEvent("keydown", {key: "k", ctrlKey: true, bubbles: true, cancelable: true})), 1`,
		new(int))
	p.Until("the dialog has the focus", `document.activeElement.id === "find-q"`)
	p.Shows("Visited last")
	p.Type("#find-q", "fetch")
	p.Until("both are options", `document.querySelectorAll("#find-list [role=option]").length >= 2 &&
		document.querySelector("#find-list [aria-selected=true]")`)
	wantNoBrowserErrors(t, p)
	var first string
	const chosen = `document.getElementById("find-q").getAttribute("aria-activedescendant")`
	p.Eval(chosen, &first)
	p.PressUntil(kb.ArrowDown, chosen+` !== "`+first+`"`)
	p.PressUntil(kb.ArrowUp, chosen+` === "`+first+`"`)
	p.PressUntil(kb.Escape, `!document.getElementById("find").open`)
	p.Click("#find-open")
	p.Eval(`document.getElementById("find-q").value = "", 1`, new(int))
	p.Type("#find-q", "fetch_n")
	p.Until("one is chosen", `document.getElementById("find-q").value === "fetch_n" &&
		document.querySelector("#find-list [aria-selected=true]")?.textContent.includes("fetch_news")`)
	p.PressUntil("\r", `!document.getElementById("find").open`) // a second Enter would open it again
	p.Until("the skill is opened", `location.pathname === "/skills/fetch_news"`)

	withoutScript := browser.Open(t, browser.Look{NoScript: true})
	withoutScript.Go(server.URL + "/")
	withoutScript.Click("#find-open")
	withoutScript.Type("#find-text", "fetch_n")
	withoutScript.Press("\r")
	withoutScript.Click(`a[href="/skills/fetch_news"]`)
	withoutScript.Until("the link opens the skill", `document.querySelector("h1")?.textContent.includes("fetch_news")`)
}

// The first Enter must not open what the list showed before, and the second must not end in the form.
func TestFindOpensAfterTwoEnters(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	rows.Skill(t, pool, "fetch_price", "Fetches.", "", "")
	mux := muxOf(room)
	entered := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/find/results" && r.FormValue("q") != "" {
			<-entered
		}
		assert.True(t, r.URL.Path != "/find", "the form is sent")
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/lanes")
	p.Click("#find-open")
	p.Until("the first list is there", `document.getElementById("find-q").getAttribute("aria-expanded") === "true"`)
	p.Eval(`(() => {
		const input = document.getElementById("find-q");
		input.value = "fetch";
		for (let n = 0; n < 2; n++) {
			input.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true, cancelable: true}));
		}
		return 1;
	})()`, new(int))
	close(entered)
	p.Until("the skill is opened", `location.pathname === "/skills/fetch_price"`)
}

func TestFindSaysWhyItIsRefused(t *testing.T) {
	t.Parallel()
	room := newRoom(t, Options{Pool: pgtest.DB(t)})
	mux := muxOf(room)
	var status atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/find/results" {
			w.WriteHeader(int(status.Load()))
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	p := browser.Open(t, browser.Look{})
	for code, want := range map[int64]string{401: "The login has ended.", 403: "You may no longer search."} {
		status.Store(code)
		p.Expect(fmt.Sprint(code))
		p.Go(server.URL + "/lanes")
		p.Click("#find-open")
		p.Until("the dialog says why", fmt.Sprintf(`document.getElementById("find-list").textContent === %q`, want))
	}
}

// A viewer may not search.
func TestViewerIsNotOfferedFind(t *testing.T) {
	t.Parallel()
	server := serveAs(t, pgtest.DB(t), func(*http.Request) (string, principals.Role) { return "ana", principals.Viewer })
	p := browser.Open(t, browser.Look{})
	p.Go(server + "/lanes")
	p.Until("the script runs", `document.querySelector("#find-open kbd:not([hidden])") !== null`)
	var offered []string
	p.Eval(`(() => {
		document.dispatchEvent(new KeyboardEvent("keydown", {key: "k", ctrlKey: true, bubbles: true, cancelable: true}));
		const offered = [];
		if (document.getElementById("find").open) offered.push("Ctrl-K");
		if (document.getElementById("help").textContent.includes("Find")) offered.push("keys");
		if (document.querySelector(".thumb").textContent.includes("Find")) offered.push("menu");
		return offered;
	})()`, &offered)
	assert.Equal(t, 0, len(offered), offered)
}

// On a phone, rows are cards and the navigation is at the bottom.
func TestPhoneShowsCardsAndBottomNavigation(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	seedAllPages(t, pool, "It is done.")
	for _, width := range []int64{390, 320} {
		p := browser.Open(t, browser.Look{Width: width, Height: 844})
		p.Go(server.URL + "/executions")
		var first int64
		p.Eval(`Math.round(document.querySelector("#list tbody tr").getBoundingClientRect().top)`, &first)
		assert.Truef(t, first <= 420, "the first row is %d px down at %d", first, width)
		p.Until("a row is a card", `getComputedStyle(document.querySelector("#list tbody tr")).display === "flex"`)
		p.Until("the filters are folded", `!document.querySelector("details.sheet .filters").checkVisibility()`)
		p.Click("details.sheet > summary")
		p.Until("they open", `document.querySelector("details.sheet .filters").checkVisibility()`)
		p.Click(".thumb-more > summary")
		p.Click(`.thumb-pages a[href="/memory"]`)
		p.Until("More has the other pages", `location.pathname === "/memory"`)
		p.Until("it shows where one is", `document.querySelector(".thumb-more [aria-current]") !== null`)
		wantNoBrowserErrors(t, p)
	}
}

// The buttons of an approval are in reach of a thumb.
func TestApprovalButtonsOnPhone(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Skill(t, pool, "refund", "Refunds.", "", "")
	insertApproval(t, pool, "pending", `{"order": 1042, "amount": "12.50"}`, 5)
	for _, width := range []int64{390, 320} {
		p := browser.Open(t, browser.Look{Width: width, Height: 844})
		p.Go(server.URL + "/approvals")
		var far string
		p.Eval(`(() => {
			const card = document.querySelector(".approval").getBoundingClientRect();
			const boxes = [...document.querySelectorAll(".approval button:not([hidden])")].map(b => b.getBoundingClientRect());
			if (boxes.length < 2) return "there are no two buttons";
			return boxes.filter(b => b.height < 44 || b.width < 44 || card.bottom - b.bottom > 140 || b.left < 0 ||
				b.right > innerWidth).map(b => JSON.stringify(b)).join(" ");
		})()`, &far)
		assert.Equal(t, "", far, "at", width)
		wantNoBrowserErrors(t, p)
	}
}

// The dialog turns keys off, for approvals too.
func TestKeysCanBeTurnedOff(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Skill(t, pool, "refund", "Refunds.", "", "")
	insertApproval(t, pool, "pending", `{"order": 1042}`, 5)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/approvals")
	for _, want := range []string{"approve", ""} {
		var chosen string
		p.Press("a")
		p.Eval(`document.activeElement.value || ""`, &chosen)
		assert.Equal(t, want, chosen)
		p.Eval(`document.getElementById("keys-on").click()`, nil)
		p.Reload()
	}
}

func TestFilterChipsAndSavedViews(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for _, flow := range []string{"import_orders", "import_orders", "import_prices", "other"} {
		rows.Execution(t, pool, "failed", "flow", flow)
	}
	body := wantTexts(t, server.URL+"/executions?flow=IMPORT&failed=1", "import_orders", "import_prices",
		`<option value="import_orders" label="2">`)
	assert.Equal(t, 3, strings.Count(body, `id="execution-`), "executions that a part of the flow name finds")
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/executions?flow=IMPORT&failed=1&before=")
	p.Click(".view-save")
	p.Type(".view-form input", "\b")
	p.Eval(`document.querySelector(".view-form input").value = "", 1`, new(int))
	p.Type(".view-form input", "Broken imports\r")
	p.Until("the view is there", `document.querySelector(".view [aria-current]")?.textContent === "Broken imports"`)
	wantNoBrowserErrors(t, p)
	p.Click(`.chips a[aria-label="Remove filter Flow: IMPORT"]`)
	p.Until("the other filter stays", `location.search === "?failed=1" && document.querySelector(".chips") === null`)
	p.Go(server.URL + "/executions")
	p.Click(".view a")
	p.Until("the view is an address", `location.search === "?flow=IMPORT&failed=1"`)
	p.Click(".view button")
	p.Until("it is deleted", `document.querySelector(".view") === null`)
	p.Go(server.URL + "/traces?surface=chat")
	p.Until("views are of one page",
		`document.querySelector(".view-save") !== null && document.querySelector(".view") === null`)
}

// No list is wider than its window. The first cell says what happened, the last has the id.
func TestListLayout(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	seedAllPages(t, pool, "The order was refunded.")
	seedLists(t, pool)
	p := browser.Open(t, browser.Look{Width: 1280, Height: 800})
	for path, want := range map[string]string{
		"/executions": "was refunded in full", "/traces": "502 Bad Gateway", "/activity": "502 Bad Gateway",
		"/audit":   "refund_order",
		"/threads": "Where is my order", "/deliveries": "The order was refunded.", "/automations": "no route to host",
		"/memory":     "It costs 12 EUR",
		"/objectives": "goal_report", "/lanes": "held by", "/agents": "Answers what customers", "/skills": "Makes the report",
	} {
		p.Go(server.URL + path)
		var first, wide string
		p.Eval(`[...document.querySelectorAll(":is(#list, #rows, #entries, #held) tbody tr > :first-child")]
			.map(e => e.textContent).join("\n")`, &first)
		assert.Contains(t, first, want)
		p.Eval(`[...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth)
			.map(e => e.getAttribute("aria-labelledby")).join(" ")`, &wide)
		assert.Equal(t, "", wide, path, "has lists that are wider than their window")
		assert.Truef(t, strings.Count(wantTexts(t, server.URL+path), `<th scope="col"`) != 0, "%s has no table", path)
	}
}

// seedLists fills the lists: 20 or more of each kind, with failures, waits, retries, long names and several agents.
func seedLists(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	for _, name := range []string{"sales", "billing", "support_for_large_customers"} {
		putAgent(t, pool, agents.Definition{Name: name, Description: "Answers what customers of " + name + " ask."})
	}
	rows.Quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, agent, status, attempt, created_at, started_at, updated_at,
		  completed_at, result_summary, error_message, waiting_for, waiting_key, waiting_until, waiting_step)
		select lanekeeper.agent_uuid7(x.at), lanekeeper.agent_trace_id((array['hb', 'op', 'ch', 'wh', 'fl'])[1 + n % 5]),
		       (array['heartbeat', 'operate', 'chat', 'webhook', 'flow'])[1 + n % 5],
		       (array['heartbeat', 'operate', 'chat', 'import_orders',
		         'onboarding_of_a_customer_with_a_long_name'])[1 + n % 5],
		       (array['sales', 'billing', 'support_for_large_customers'])[1 + n % 3], x.status, n % 4 / 3, x.at, x.at, x.at,
		       case when x.status not in ('running', 'waiting', 'pending') then x.at + n * interval '1.7 seconds' end,
		       case when x.status = 'completed'
		         then 'Order ' || 1000 + n || ' was refunded in full; the customer was told by mail.' else '' end,
		       case when x.status in ('failed', 'timeout')
		         then 'step pay: POST https://shop.example/refunds: 502 Bad Gateway after 3 tries' end,
		       case when x.status = 'waiting' then 'approval' end, case when x.status = 'waiting'
		         then gen_random_uuid()::text end,
		       case when x.status = 'waiting' then x.at + interval '2 days' end, case when x.status = 'waiting'
		         then 'refund' end
		  from (select n, clock_timestamp() - n * n * interval '40 seconds' as at,
		          (array['completed', 'completed', 'failed', 'running', 'waiting', 'completed', 'timeout',
		            'cancelled'])[1 + n % 8] as status
		          from generate_series(1, 60) n) x`)
	rows.Quiet(t, pool, `
		insert into agent_activity (id, trace_id, execution_id, surface, agent, kind, skill_name, purpose, status,
		  error_message, error_class, cost_usd, duration_ms, token_usage, created_at)
		select lanekeeper.agent_uuid7(e.created_at + k * interval '1 second'), e.trace_id, e.id, e.surface, e.agent,
		       case k when 1 then 'model' else 'call' end, case k when 1 then 'model_call' else 'refund_order' end,
		       case k when 1 then 'decide what to refund' else '' end, case when e.status = 'failed' and k = 2 then 'error'
		         else 'success' end,
		       case when e.status = 'failed' and k = 2 then 'POST https://shop.example/refunds: 502 Bad Gateway' end,
		       case when e.status = 'failed' and k = 2 then 'http_status' else '' end, case k when 1 then 0.0123 else 0 end,
		         900 * k,
		       case k when 1 then '{"total_tokens": 2300}' else '{}' end::jsonb, e.created_at + k * interval '1 second'
		  from agent_executions e, generate_series(1, 2) k`)
	for n := range 20 {
		name := fmt.Sprintf("report_%02d_of_the_week", n)
		insertAutomationRun(t, pool, insertAutomation(t, pool, name), []string{"success", "dead", "error"}[n%3])
		insertObjective(t, pool, "goal_"+name)
		insertMemory(t, pool, []string{"facts", "lessons"}[n%2], "price_of_"+name, "It costs 12 EUR since Monday.")
		rows.Skill(t, pool, "skill_"+name, "Makes the report of the week and sends it.", "", "")
		insertApproval(t, pool, "pending", fmt.Sprintf(`{"order": %d, "amount": "12.50", "reason": "broken on arrival"}`, n),
			5)
		rows.Quiet(t, pool, `insert into agent_threads (id, channel, owner, participant, agent, next_seq)
			values ($1, 'chat', 'shop', 'Customer ' || $1, 'sales', 2)`, fmt.Sprintf("visitor:%d", n))
		rows.Quiet(t, pool, `insert into agent_messages (thread_id, seq, turn, role, content, status)
			values ($1, 1, 1, 'user', 'Where is my order 1042? I was told on Monday that it is on its way.',
			'received')`, fmt.Sprintf("visitor:%d", n))
		rows.Quiet(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at)
			values ($1, 'somebody', 1, now() + interval '1 hour')`,
			fmt.Sprintf("pipeline:prices:%d", n))
	}
}
