package engineroom

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// seedAllPages inserts data for every page, with text in each free text. It returns an address for each page's path.
func seedAllPages(t *testing.T, pool *pgxpool.Pool, text string) map[string]string {
	t.Helper()
	seedAttentionItems(t, pool, text)
	insertActivities(t, pool, 60)
	id, run := seedTrace(t, pool)
	insertModelCall(t, pool, text, "model-one", "0.75", "0")
	insertModelCall(t, pool, "reflect", "model-two", "0.25", "2 days")
	waiting := rows.Execution(t, pool, "waiting", "flow", "onboarding")
	for _, status := range []string{"pending", "running", "completed", "failed", "timeout", "cancelled"} {
		rows.Execution(t, pool, status, "chat", text)
	}
	insertApproval(t, pool, "consumed", `{"table": "orders", "limit": 10}`, 5)
	approval := insertApproval(t, pool, "pending", fmt.Sprintf(`{"table": "orders", "limit": 20, "why": %s}`,
		quoteJSON(t, text)), 5)
	automation := insertAutomation(t, pool, "weekly")
	insertAutomationRun(t, pool, automation, "success")
	insertAutomationRun(t, pool, automation, "dead")
	delivery, message := insertDelivery(t, pool, "dead", text), insertOutgoing(t, pool, "shop", "dead")
	insertOutgoing(t, pool, "shop", "pending")
	insertObjective(t, pool, "grow")
	insertMemory(t, pool, "facts", "prices", text)
	putAgent(t, pool, agents.Definition{
		Name: "sales", Default: true, Description: text, Instructions: text, Greeting: text,
		Keys: []string{"web"},
	})
	putAgent(t, pool, agents.Definition{Name: "billing", Memory: "own", Instructions: text})
	rows.Calls(t, pool, "fetch", "error", text, 3)
	rows.Calls(t, pool, "fetch", "success", "", 9)
	insertSession(t, pool, text, text, "completed")
	rows.Quiet(t, pool, `insert into agent_threads (id, channel, owner, participant, next_seq)
		values ('talk', 'chat', 'key1', $1, 3)`, text)
	rows.Quiet(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, status)
		  values ('talk', 1, 1, 'user', $1, 'received'),
		       ('talk', 2, 1, 'assistant', $1, 'sent'), ('talk', null, null, 'assistant', $1, 'queued')`, text)
	rows.Quiet(t, pool, `
		insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id) values
		       ('thread:talk', 'x', 1, now() + interval '1 hour', $1::uuid),
		         ('pipeline:prices', 'somebody', 2, now() + interval '1 hour', null)`, waiting)
	model := pgtest.Value[string](t, pool, `select id::text from agent_activity where trace_id = $1 and kind = 'model'`,
		string(id))
	older, newer := seedSuite(t, pool, text)
	rows.Quiet(t, pool, `
		insert into agent_eval_labels (run_id, suite, case_name, trial, principal, answer, answer_digest, good, note)
		values ($1::uuid, 'returns', 'late', 2, 'anna', $2, 'x', false, left($2, 2000))`, newer, text)
	return map[string]string{
		"span": model, "run span": run,
		"/": "/", "/activity": "/activity", "/traces": "/traces", "/traces/{id}": "/traces/" + string(id),
		"/executions": "/executions", "/principals": "/principals", "/principals/{name}": "/principals/root",
		"/channels": "/channels", "/flows": "/flows", "/flows/{name}": "/flows/external:sum",
		"/executions/{id}": "/executions/" + waiting, "/threads": "/threads", "/threads/{id}": "/threads/talk",
		"/approvals":      "/approvals",
		"/approvals/{id}": "/approvals/" + approval, "/agents": "/agents", "/agents/{name}": "/agents/sales",
		"/skills": "/skills", "/skills/{name}": "/skills/fetch", "/automations": "/automations",
		"/automations/{name}": "/automations/weekly", "/objectives": "/objectives", "/objectives/{name}": "/objectives/grow",
		"/memory": "/memory", "/memory/{key...}": "/memory/prices", "/deliveries": "/deliveries",
		"/deliveries/{id}": "/deliveries/" + delivery,
		"/outgoing":        "/outgoing", "/outgoing/{id}": "/outgoing/" + message, "/spend": "/spend",
		"/spend/{day}": "/spend/" + time.Now().UTC().Format(time.DateOnly), "/charts": "/charts?range=24h",
		"/audit": "/audit", "/evals": "/evals", "/evals/{suite}": "/evals/returns",
		"/evals/runs/{id}":              "/evals/runs/" + newer + "?against=" + older,
		"/evals/runs/{id}/cases/{case}": "/evals/runs/" + newer + "/cases/late",
		"/evals/from/{id}":              "/evals/from/" + string(id),
		"/lanes":                        "/lanes", "/operate": "/operate", "/find": "/find?q=sale",
	}
}

// quoteJSON returns a text as JSON.
func quoteJSON(t *testing.T, text string) string {
	t.Helper()
	raw, err := json.Marshal(text)
	require.NoError(t, err)
	return string(raw)
}

// pageAddresses returns an address of each page of the room, and some more. It fails for a new page without one.
func pageAddresses(t *testing.T, pool *pgxpool.Pool, ids map[string]string) []string {
	t.Helper()
	room, err := New(Options{Pool: pool})
	require.NoError(t, err)
	var list []string
	for _, p := range room.pages {
		if ids[p.path] == "" {
			t.Errorf("page %s is not tested: say where one is", p.path)
			continue
		}
		list = append(list, ids[p.path])
	}
	trace := ids["/traces/{id}"]
	list = append(list, trace+"?view=table", "/login")
	for _, tab := range panelTabs {
		list = append(list, trace+"?span="+ids["span"]+"&tab="+tab)
	}
	return append(list, trace+"?span="+ids["run span"], trace+"?tab=why", trace+"?q=fetch&errors=1")
}

// displayModes are browser settings by name.
var displayModes = map[string]browser.Look{
	"light": {}, "dark": {Dark: true},
	"dark phone": {Width: 390, Height: 844, Dark: true},
}

// checkPage opens a page in some display modes. It reports errors of the browser, pages wider than the window and, with
// axe, accessibility problems.
func checkPage(t *testing.T, p *browser.Page, address string, axe bool, modes ...string) {
	t.Helper()
	p.As(displayModes[modes[0]])
	p.Go(address)
	for _, mode := range modes {
		look := displayModes[mode]
		p.As(look)
		if axe {
			for _, fault := range p.Inaccessible() {
				t.Errorf("%s, %s: %s", address, mode, fault)
			}
		}
		var width int64
		p.Eval(`document.documentElement.scrollWidth`, &width)
		assert.Truef(t, look.Width <= 0 || width <= max(look.Width, 390), "%s, %s: the page is %d wide", address, mode, width)
	}
	for _, complaint := range p.Problems() {
		t.Errorf("%s: %s", address, complaint)
	}
}

// The test combines both widths and both colour schemes, but not each with each: the layout does not depend on the
// colours.
func TestEveryPageIsFitForLightDarkAndPhone(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	ids := seedAllPages(t, pool, "It is done. See the list of orders that were refunded.")
	list := pageAddresses(t, pool, ids)
	p := browser.Open(t, browser.Look{})
	if os.Getenv("AGENT_PICTURES") != "" {
		list = nil // make pictures
		pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('agent', now() + interval '1 hour')`)
	}
	for i, address := range list {
		modes := []string{"light", "dark phone"}
		if testing.Short() {
			modes = modes[i%2 : i%2+1]
		}
		checkPage(t, p, server.URL+address, true, modes...)
		for _, width := range []int64{390, 320} { // no page is wider than a phone's window
			p.As(browser.Look{Width: width, Height: 844})
			var wide int64
			p.Eval(`document.documentElement.scrollWidth`, &wide)
			assert.Truef(t, wide <= width, "%s is %d wide at %d", address, wide, width)
		}
		p.As(browser.Look{})
		var overflowing []string
		p.Eval(`[...document.querySelectorAll("td, th")].filter(c => c.clientWidth && c.scrollWidth > c.clientWidth + 1)
			.map(c => c.textContent)`, &overflowing)
		assert.Truef(t, len(overflowing) == 0, "%s: the text of these cells is wider than the cell: %q", address, overflowing)
	}
	takePictures(t, p, server.URL, ids)
}

func TestEveryPageEscapesHostileText(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	text := hostile + strings.Repeat("W", 2000)
	list := pageAddresses(t, pool, seedAllPages(t, pool, text))
	fillTextColumns(t, pool, text+strings.Repeat("W", 1<<14))
	for _, address := range list {
		wantEscaped(t, server.URL+address)
	}
	p := browser.Open(t, browser.Look{})
	for _, address := range list {
		checkPage(t, p, server.URL+address, !testing.Short(), "dark phone")
		var unexpected []string
		p.Eval(
			`[...document.querySelectorAll("script:not([src]), img, iframe, object, [onerror], [onload], [style]")].map(e => e.outerHTML.slice(0, 200))`, &unexpected)
		assert.Truef(t, len(unexpected) == 0, "%s has elements that no template makes: %v", address, unexpected)
		var failedPart bool
		p.Eval(`document.querySelector(".trouble") !== null`, &failedPart)
		assert.Truef(t, !failedPart, "%s: a part could not be read", address)
	}
}

// fillTextColumns writes a text into every column of free text or JSON, of every row. It skips columns whose
// constraints reject it, and columns that pages search by.
func fillTextColumns(t *testing.T, pool *pgxpool.Pool, text string) {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
		select c.table_name::text, c.column_name::text, c.data_type::text from information_schema.columns c
		  join information_schema.tables t using (table_schema, table_name)
		 where c.table_schema = current_schema() and t.table_type = 'BASE TABLE' and c.table_name like 'agent\_%'
		   and c.data_type in ('text', 'jsonb')
		   and c.is_generated = 'NEVER' and c.table_name !~ '^agent_(activity_\d|limits)'
		   and c.column_name !~ '^(id|name|key|kind|suite|case_name|status|surface|role|channel|category|cause|trigger|queue|scope|trust|handler|lane|thread_id|skill_name|flow|endpoint|event|conversation_id|step|cron|timezone|.*trace_id|waiting_for|result_type|decided_by|token_usage|headers|outcome|calls|judgements|subject|body_sha256|.*hash)$'`)
	require.NoError(t, err)
	type column struct{ Table, Name, Type string }
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[column])
	require.NoError(t, err)
	filledColumns := 0
	for _, c := range columns {
		value := "$1::text"
		if c.Type == "jsonb" {
			value = "jsonb_build_object(left($1::text, 300), $1::text, 'n', 1, 'list', jsonb_build_array($1::text))"
		}
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `set local session_replication_role = replica`); err != nil {
				return err
			}
			_, err := tx.Exec(t.Context(), fmt.Sprintf("update %s set %s = %s", pgx.Identifier{c.Table}.Sanitize(),
				pgx.Identifier{c.Name}.Sanitize(), value), text)
			return err
		})
		switch {
		case err == nil:
			filledColumns++
		case !postgres.IsCode(err, "23514", "23505", "54000", "22001", "22P02"): // the schema rejects it
			t.Fatalf("%s.%s: %v", c.Table, c.Name, err)
		}
	}
	require.Truef(t, filledColumns >= 40, "only %d of %d columns could be written", filledColumns, len(columns))
}

func TestPhoneNavigationMarksCurrentPage(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	p := browser.Open(t, browser.Look{Width: 390, Height: 844})
	for path, where := range map[string]string{
		"/": "> ul > li > a[aria-current]", "/executions": "> ul > li > a[aria-current]",
		"/deliveries": ".thumb-more:has([aria-current]) > summary",
	} {
		p.Go(server.URL + path)
		var visible bool
		p.Eval(`(() => { const r = document.querySelector(".thumb `+where+`").getBoundingClientRect();
			return r.left >= 0 && r.right <= innerWidth && r.bottom <= innerHeight && r.top > innerHeight - 80 && r.height >= 44 && scrollY === 0 })()`, &visible)
		assert.Truef(t, visible, "%s: the link of the current page is not visible", path)
	}
	wantNoBrowserErrors(t, p)
}

// A system's forced colours hide backgrounds, so a border shows the current item.
func TestForcedColoursMarkCurrentItem(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	p := browser.Open(t, browser.Look{Forced: true})
	p.Go(server.URL + "/executions?status=failed")
	p.Until("one tab has a line", `(tabs => tabs.filter(a => getComputedStyle(a).borderBottomColor ===
		getComputedStyle(tabs.find(a => a.ariaCurrent)).borderBottomColor).length === 1)([...document.querySelectorAll("nav.tabs a")])`)
	p.Until("one page is outlined", `[...document.querySelectorAll(".side nav a")]
		.filter(a => getComputedStyle(a).outlineStyle !== "none").map(a => a.ariaCurrent).join() === "page"`)
}
