package engineroom

import (
	"context"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"
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

// rowList is a page with a list. The test sets its rows, and can cut the connections of its viewers.
type rowList struct {
	mu   sync.Mutex
	rows []string
	url  string
	cut  func()
}

func (l *rowList) set(rows ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rows = rows
}

func serveRowList(t *testing.T) *rowList {
	t.Helper()
	room, err := New(Options{Pool: pgtest.DB(t), Agent: "agent"})
	require.NoError(t, err)
	l := &rowList{rows: []string{"a", "b"}}
	at := time.Now().Add(-90 * time.Second)
	room.pages = append(room.pages, page{
		path: "/listed", name: "listed", title: "Listed",
		parts: []part{
			{name: "rows", interval: 20 * time.Millisecond, load: func(context.Context, *pageRequest) (any, error) {
				l.mu.Lock()
				defer l.mu.Unlock()
				return map[string]any{"Rows": l.rows, "At": at}, nil
			}},
			{name: "pause", load: func(context.Context, *pageRequest) (any, error) { return nil, nil }},
		},
	})
	room.templates = template.Must(room.templates.Parse(`{{define "listed/pause"}}{{end}}{{define "listed"}}
		<form class="filters" action="/listed"><label>Word <input name="word"></label><button type="submit">Filter</button></form>{{.Part "rows"}}{{end}}
		{{define "listed/rows"}}<section id="rows" class="part" aria-labelledby="rows-title"><h2 id="rows-title">Rows</h2>
		<table><tbody>{{range .Rows}}<tr id="row-{{.}}" data-row="{{.}}"><th scope="row"><a href="/listed?row={{.}}">row {{.}}</a></th><td>{{since $.At}}</td>
		<td>{{template "action" (dict "Path" (printf "/v1/lanes/%s/break" .) "Word" "Break" "Reason" true)}}
		<details class="more"><summary>More of {{.}}</summary><p>Folded</p></details><button type="button" class="copy" data-copy="text of {{.}}">Copy</button></td></tr>{{end}}</tbody></table>
		<p>There are {{len .Rows}} rows.</p></section>{{end}}`))
	server := serveRoom(t, room)
	l.url, l.cut = server.URL+"/listed", server.CloseClientConnections
	return l
}

// open opens the page and waits until it is live.
func (l *rowList) open(t *testing.T, look browser.Look) *browser.Page {
	t.Helper()
	p := browser.Open(t, look)
	p.Go(l.url)
	p.Until("it is live", `document.getElementById("live-state").dataset.state === "live"`)
	return p
}

func wantNoBrowserErrors(t *testing.T, p *browser.Page) {
	t.Helper()
	all := append(p.Problems(), p.Inaccessible()...)
	assert.Truef(t, len(all) == 0, "browser errors: %s", strings.Join(all, "\n"))
}

func TestUpdatesLeaveReaderInputAlone(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := l.open(t, browser.Look{})
	p.Click("#row-b details.more > summary")
	p.Click("#row-b details.action > summary")
	p.Until("the form has the focus", `document.activeElement.name === "reason"`)
	p.Type("#row-b input[name=reason]", "because")
	p.Eval(
		`document.getElementById("row-b").mark = "the same"; document.querySelector("#row-b input[name=reason]").setSelectionRange(2, 4)`, nil)
	l.set("c", "a", "b")
	p.Shows("There are 3 rows.")
	var kept string
	p.Eval(`(() => { const r = document.getElementById("row-b"), i = r.querySelector("input[name=reason]");
		return [r.mark, i.value, i === document.activeElement, i.selectionStart, i.selectionEnd, r.querySelector(".action").open, r.querySelector(".more").open].join(" ") })()`, &kept)
	assert.Equal(t, "the same because true 2 4 true true", kept)
	p.Press("\x1b") // Escape
	p.Until("Escape closes the form",
		`!document.querySelector("#row-b .action").open && document.activeElement.localName === "summary"`)
	l.set("c", "a")
	p.Shows("There are 2 rows.")
	p.Until("the focus moves to the table", `document.activeElement.id === "rows"`)
	p.Until("clocks count",
		`/min|h/.test(document.querySelector("time.since").textContent) && document.querySelector("time.since").title !== ""`)
	wantNoBrowserErrors(t, p)
}

func TestUpdatesPauseAndResume(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := l.open(t, browser.Look{Dark: true})
	p.Click("#live-pause")
	l.set("c", "d", "a", "b")
	p.Shows("2 new")
	p.Shows("Resume (1 update waiting)")
	p.Shows("There are 2 rows.")
	l.cut()
	p.Until("it is connected again, and still paused", `document.getElementById("live-state").dataset.state === "paused"`)
	p.Expect("ERR_INCOMPLETE_CHUNKED_ENCODING") // the cut connection
	l.set("c", "d", "e", "a", "b")
	p.Shows("3 new")
	wantNoBrowserErrors(t, p)
	p.Click("#live-pause")
	p.Shows("There are 5 rows.")
	p.Until("nothing waits",
		`document.querySelector(".news") === null && document.getElementById("live-pause").textContent === "Pause updates"`)
}

func TestBrokenStreamReconnects(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := l.open(t, browser.Look{})
	p.Eval(
		`window.morphs = []; document.addEventListener("part", () => morphs.push(document.querySelector("#rows > p").textContent))`, nil)
	for i := range 4 {
		l.cut()
		l.set(make([]string, i+3)...)
		p.Shows(fmt.Sprintf("There are %d rows.", i+3))
	}
	var all string
	p.Eval(`morphs.join(" ")`, &all)
	assert.Equal(t, "There are 3 rows. There are 4 rows. There are 5 rows. There are 6 rows.", all)
}

// clickCopy clicks a copy button and waits for its message.
func clickCopy(p *browser.Page, selector string) {
	p.Eval(fmt.Sprintf(`window.said = ""; (b => new MutationObserver(() => { said += b.textContent; })
		.observe(b, {childList: true}))(document.querySelector(%q))`, selector), nil)
	p.Click(selector)
	p.Until("the button confirms the copy", `/Copied|Not copied|Press/.test(said)`)
}

func TestKeysAndThemes(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := l.open(t, browser.Look{})
	p.Press(kb.Tab)
	p.Until("the first stop is the way past the navigation", `document.activeElement.matches("a.skip")`)
	p.Press(kb.Enter)
	p.Until("it leads to the content", `document.activeElement.id === "main"`)
	p.Press("j")
	p.Press("j")
	p.Until("the second row has the focus", `document.activeElement.id === "row-b"`)
	p.Press("k")
	p.Press("\r")
	p.Until("Enter opens the row", `location.search === "?row=a"`)
	p.Until("it is live", `document.getElementById("live-state").dataset.state === "live"`)
	p.Press("/")
	p.Until("the filter has the focus", `document.activeElement.name === "word"`)
	p.Press("j?")
	p.Until("letters are typed there",
		`document.activeElement.value.endsWith("j?") && !document.getElementById("help").open`)
	p.Eval(`document.activeElement.blur()`, nil)
	p.Press("?")
	p.Until("help is open", `document.getElementById("help").open`)
	wantNoBrowserErrors(t, p)
	p.Click("#keys-on")
	p.Press("\x1b")
	p.Until("help is closed", `!document.getElementById("help").open`)
	p.Press("j")
	p.Until("keys are off", `!document.activeElement.closest("tr")`)
	p.Click("#theme")
	p.Click("#theme")
	p.Until("dark was chosen",
		`document.documentElement.dataset.theme === "dark" && getComputedStyle(document.body).backgroundColor === "rgb(14, 15, 19)"`)
	p.Go(l.url)
	p.Until("the choice is kept",
		`document.documentElement.dataset.theme === "dark" && document.getElementById("theme").textContent.includes("dark")`)
	clickCopy(p, "button.copy")
	p.Eval(`document.getElementById("keys-on").click();
		for (const key of ["g", "o"]) document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}))`, nil)
	p.Until("a chord opens a page", `location.pathname === "/"`)
}

func TestRejectedFormKeepsInput(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/executions/" + rows.Execution(t, pool, "failed", "flow", "import"))
	p.Type("#fork input[name=from]", "pay")
	p.Eval(`document.querySelector("#fork textarea").value = ""`, nil)
	p.Type("#fork textarea", `{"rows": 7`)
	p.Click("#fork button[type=submit]")
	p.Shows("input is not JSON")
	const kept = `document.querySelector("#fork input[name=from]").value + " " + document.querySelector("#fork textarea").value`
	p.Until("what was written stands there", kept+` === 'pay {"rows": 7'`)
	p.Reload()
	p.Until("the reloaded form is empty", `!document.querySelector(".flash-bad") && !(`+kept+`).includes("pay")`)
	wantNoBrowserErrors(t, p)
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

func TestPageWorksWithoutScript(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := browser.Open(t, browser.Look{NoScript: true, Width: 390, Height: 800})
	p.Go(l.url)
	text := p.Text("main")
	assert.Contains(t, text, "row a", "There are 2 rows.", " UTC")
	for _, id := range []string{"#theme", "#live-pause", "#help-open"} {
		assert.Equal(t, "", p.Text(id), id, "is shown and does nothing")
	}
}

func TestLoginLink(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := browser.Open(t, browser.Look{})
	p.Go(strings.TrimSuffix(l.url, "/listed") + "/login?next=/listed")
	wantNoBrowserErrors(t, p)
	p.Expect("405") // the test server has no login route
	p.Go(strings.TrimSuffix(l.url, "/listed") + "/login?next=/listed#token=secret")
	p.Until("the token is out of the address", `!location.href.includes("secret")`)
}

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

// displayModes are browser settings by name.
var displayModes = map[string]browser.Look{
	"light": {}, "dark": {Dark: true},
	"dark phone": {Width: 390, Height: 844, Dark: true},
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

// takePictures makes the pictures of the documentation in the folder AGENT_PICTURES (make pictures).
func takePictures(t *testing.T, p *browser.Page, base string, ids map[string]string) {
	t.Helper()
	dir := os.Getenv("AGENT_PICTURES")
	if dir == "" {
		return
	}
	for _, shot := range []struct{ name, page, mode string }{
		{"overview", "/", "light"},
		{"trace", "/traces/{id}", "light"},
		{"approval", "/approvals/{id}", "dark"},
		{"evals", "/evals/runs/{id}/cases/{case}", "light"},
	} {
		p.As(displayModes[shot.mode])
		p.Go(base + ids[shot.page])
		p.Until("the page is live", `document.body.innerText.includes("Live")`)
		p.Screenshot(filepath.Join(dir, shot.name+".png"), false)
	}
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

// fakeTurns answers the console's API calls. The message selects the response.
type fakeTurns struct {
	mu      sync.Mutex
	asked   []string // method, path and body of every request
	status  string   // of the turn after a reconnect
	decided chan struct{}
	cut     chan struct{}
}

const (
	startEvent = "event: start\ndata: {\"trace_id\":\"op_01JD3V7K8ZQ6W2M5T9X4C1B0AE\",\"session_id\":\"" + aSession +
		"\",\"execution_id\":\"018f0000-0000-7000-8000-000000000000\"}\n\n"
	doneEvent = "event: done\ndata: {\"ended\":\"answered\",\"trace_id\":\"op_01JD3V7K8ZQ6W2M5T9X4C1B0AE\"}\n\n"
)

func (f *fakeTurns) message(r *http.Request) (body string) {
	text, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, r.Method+" "+r.URL.RequestURI()+" "+string(text))
	return string(text)
}

// requests returns a copy of the recorded requests.
func (f *fakeTurns) requests() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.asked)
}

func (f *fakeTurns) has(words ...string) bool {
	for _, a := range f.requests() {
		all := true
		for _, w := range words {
			all = all && strings.Contains(a, w)
		}
		if all {
			return true
		}
	}
	return false
}

func (f *fakeTurns) operate(w http.ResponseWriter, r *http.Request) {
	body := f.message(r)
	tell := func(text string) {
		io.WriteString(w, text)
		w.(http.Flusher).Flush()
	}
	if strings.Contains(body, `"busy"`) && !strings.Contains(body, `"wait":true`) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusConflict)
		tell(`{"status":409,"detail":"lane operate is held by <b>ana</b>","holder":"ana"}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	tell(startEvent)
	switch {
	case strings.Contains(body, "break early"): // before the first event
		panic(http.ErrAbortHandler)
	case strings.Contains(body, "break"):
		select {
		case <-f.cut:
		case <-r.Context().Done():
		}
		panic(http.ErrAbortHandler)
	case strings.Contains(body, "approve"):
		tell(`event: approval` + "\n" +
			`data: {"id":"a1","skill":"drop","arguments":{"table":"<i>all</i>","rows":9007199254740993},"expires_at":"2030-01-01T00:00:00Z"}` + "\n\n")
		select {
		case <-f.decided:
		case <-r.Context().Done():
			return
		}
		tell("event: delta\ndata: {\"text\":\"Dropped.\"}\n\n" + doneEvent)
	default:
		for _, e := range []any{
			map[string]any{"delta": map[string]string{"text": "wrong"}},
			map[string]any{"restart": map[string]any{}},
			map[string]any{"tool": map[string]any{
				"id": "t1", "name": "look", "arguments": map[string]string{"q": hostile},
				"status": "started",
			}},
			map[string]any{"tool": map[string]any{
				"id": "t1", "name": "look", "arguments": map[string]string{"q": hostile},
				"status": "success", "result": 7, "duration_ms": 12,
			}},
			map[string]any{"delta": map[string]string{"text": "Here: "}},
			map[string]any{"delta": map[string]string{"text": hostile}},
		} {
			for name, data := range e.(map[string]any) {
				text, _ := json.Marshal(data)
				tell(fmt.Sprintf("event: %s\ndata: %s\n\n", name, text))
			}
		}
		tell(doneEvent)
	}
}

func (f *fakeTurns) rest(w http.ResponseWriter, r *http.Request) {
	body := f.message(r)
	w.Header().Set("Content-Type", "application/json")
	switch {
	case strings.HasPrefix(r.URL.Path, "/v1/approvals/"):
		if strings.Contains(body, "approve") {
			close(f.decided)
		}
		io.WriteString(w, `{}`)
	case strings.HasSuffix(r.URL.Path, "/cancel"):
		f.mu.Lock()
		f.status = "cancelled"
		f.mu.Unlock()
		io.WriteString(w, `{}`)
	case r.URL.Path == "/v1/executions":
		fmt.Fprintf(w,
			`{"items":[{"id":"018f0000-0000-7000-8000-000000000000","trace_id":"op_01JD3V7K8ZQ6W2M5T9X4C1B0AE","thread_id":%q,
			"input":{"message":"break early"},"created_at":"2999-01-01T00:00:00Z"}],"next_cursor":null}`, aSession)
	default:
		f.mu.Lock()
		status := f.status
		f.mu.Unlock()
		fmt.Fprintf(w, `{"status":%q,"cancel_reason":"stopped","result":{"text":"It went on."},"result_summary":""}`, status)
	}
}

func TestOperateConsoleInBrowser(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room, err := New(Options{Pool: pool, Agent: "agent"})
	require.NoError(t, err)
	f := &fakeTurns{decided: make(chan struct{}), cut: make(chan struct{}), status: "running"}
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		if r.Path != "/act/v1/operate" {
			mux.Handle(r.Method+" "+r.Path, r.Handler)
		}
	}
	mux.HandleFunc("POST /v1/operate", f.operate)
	mux.HandleFunc("/v1/", f.rest)
	server := httptest.NewUnstartedServer(mux)
	serverCtx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	server.Config.BaseContext = func(net.Listener) context.Context { return serverCtx }
	server.Start()
	t.Cleanup(func() {
		end() // ends the stream of the open page
		server.Close()
	})
	putAgent(t, pool, agents.Definition{Name: "sales", Default: true})
	putAgent(t, pool, agents.Definition{Name: "billing"})
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/operate")
	p.Eval(`document.getElementById("agent").value = "billing", 1`, new(int))

	// A key sends the message, the answer is streamed, and all of it is text.
	p.Type("#message", "hello")
	p.Eval(
		`document.getElementById("message").dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", ctrlKey: true, bubbles: true, cancelable: true})), 1`, new(int))
	p.Shows("Done. Trace op_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	p.Until("nothing of it is markup", `document.querySelectorAll("#transcript img, #transcript script").length === 0`)
	p.Until("the page shows the text of the message",
		`document.querySelector("#transcript .bubble-assistant .said").textContent.startsWith("Here: <script>alert(1)") &&
		document.querySelector("#transcript .bubble-assistant .said").textContent.includes("⟨U+202E⟩") && !document.body.textContent.includes("wrong")`)
	p.Until("the call is there once, with its end",
		`document.querySelectorAll(".bubble-tool").length === 1 && document.querySelector(".bubble-tool").textContent.includes("✓ success 12 ms")`)
	p.Until("the address has the session", `location.search === "?session=`+aSession+
		`" && document.activeElement.id === "message"`)

	assert.Truef(t, f.has("POST /v1/operate", "hello", `"agent":"billing"`), "the chosen agent was not named: %q", f.requests())
	p.Until("the session keeps its agent", `document.getElementById("agent").disabled`)

	// The page decides an approval in place.
	p.Type("#message", "approve")
	p.Click("#send")
	p.Shows("Approval requested: drop")
	p.Shows("9007199254740993") // not rounded like a JavaScript number
	found := p.Inaccessible()
	assert.Truef(t, len(found) == 0, "not accessible:\n%s", strings.Join(found, "\n"))
	p.Click(`#transcript .approval button[value=approve]`)
	p.Shows("Dropped.")
	p.Until("its turn has ended", `!document.getElementById("send").disabled`)
	assert.Truef(t, f.has("POST /v1/approvals/a1", `"decision":"approve"`) &&
		f.has("POST /v1/operate", `"session_id":"`+aSession+`"`, "approve"), "asked: %q", f.requests())

	// The page names the holder of the lane, and the admin can wait for it.
	p.Expect("409")
	p.Type("#message", "busy")
	p.Click("#send")
	p.Shows("lane operate is held by <b>ana</b>")
	p.Eval(
		`[...document.querySelectorAll("#transcript button")].find(b => b.textContent === "Wait for the lane").click(), 1`,
		new(int))
	p.Until("it waited",
		`[...document.querySelectorAll("#transcript > .bubble")].pop().textContent.startsWith("Done. Trace") && document.getElementById("send").disabled === false`)
	assert.Truef(t, f.has("POST /v1/operate", "busy", `"wait":true`), "asked: %q", f.requests())

	// After its connection broke, the page finds the turn again and can stop it.
	p.Expect("ERR_INCOMPLETE_CHUNKED_ENCODING")
	p.Eval(`document.getElementById("message").value = "", 1`, new(int))
	p.Type("#message", "break")
	p.Click("#send")
	p.Until("it has begun", `!document.getElementById("stop").hidden`)
	close(f.cut)
	p.Shows("The turn continues")
	p.Click("#stop")
	p.Shows("The turn was cancelled: stopped")
	assert.Truef(t, f.has("POST /v1/executions/018f0000-0000-7000-8000-000000000000/cancel", "stopped in the console"),
		"asked: %q", f.requests())

	// The same holds for a turn without any event, and for one in progress when the page loads.
	f.mu.Lock()
	f.status = "completed"
	f.mu.Unlock()
	p.Type("#message", "break early")
	p.Click("#send")
	p.Shows("It went on.")
	insertSession(t, pool, "what did you do?", "", "pending")
	p.Go(server.URL + "/operate?session=" + aSession)
	p.Shows("It went on.")
	problems := p.Problems()
	assert.Truef(t, len(problems) == 0, "browser errors:\n%s", strings.Join(problems, "\n"))
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
