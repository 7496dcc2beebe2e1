package engineroom

import (
	"encoding/json"
	"fmt"
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

// The test combines both widths and both colour schemes, but not each with each: the layout does not depend on the
// colours. The short test checks each page in one of the two.
func TestEveryPageIsFitForLightDarkAndPhone(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	addresses := seedAllPages(t, pool, "It is done. See the list of orders that were refunded.")
	p := browser.Open(t, browser.Look{})
	for i, address := range pageAddresses(t, pool, addresses) {
		modes := []string{"light", "dark phone"}
		if testing.Short() {
			modes = modes[i%2 : i%2+1]
		}
		p.As(displayModes[modes[0]])
		p.Go(server.URL + address)
		for _, mode := range modes {
			p.As(displayModes[mode])
			wantAccessible(t, p, address+", "+mode)
		}
		wantFitsWindow(t, p, address, 390)
		wantFitsWindow(t, p, address, 320)
		p.As(browser.Look{})
		wantCellsFit(t, p, address)
		wantNoProblems(t, p, address)
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
	p := browser.Open(t, displayModes["dark phone"])
	for _, address := range list {
		p.Go(server.URL + address)
		if !testing.Short() {
			wantAccessible(t, p, address)
		}
		wantFitsWindow(t, p, address, 390)
		var unexpected []string
		p.Eval(`[...document.querySelectorAll(
			"script:not([src]), img, iframe, object, [onerror], [onload], [style]",
		)].map(e => e.outerHTML.slice(0, 200))`, &unexpected)
		assert.Truef(t, len(unexpected) == 0, "%s has elements that no template makes: %v", address, unexpected)
		var hasFailed bool
		p.Eval(`document.querySelector(".trouble") !== null`, &hasFailed)
		assert.Truef(t, !hasFailed, "%s: a part could not be read", address)
		wantNoProblems(t, p, address)
	}
}

// displayModes are browser settings by name.
var displayModes = map[string]browser.Look{
	"light":      {},
	"dark phone": {Width: 390, Height: 844, Dark: true},
}

// pageAddresses returns an address of each page of the room, and some more. It fails for a page without an address.
func pageAddresses(t *testing.T, pool *pgxpool.Pool, addresses map[string]string) []string {
	t.Helper()
	room := newRoom(t, Options{Pool: pool})
	var list []string
	for _, p := range room.pages {
		if addresses[p.path] == "" {
			t.Errorf("page %s is not tested: add its address to seedAllPages", p.path)
			continue
		}
		list = append(list, addresses[p.path])
	}
	trace := addresses["/traces/{id}"]
	list = append(list, trace+"?view=table", "/login")
	for _, tab := range panelTabs {
		list = append(list, trace+"?span="+addresses["span"]+"&tab="+tab)
	}
	return append(list, trace+"?span="+addresses["run span"], trace+"?tab=why", trace+"?q=fetch&errors=1")
}

// wantAccessible checks the open page with axe-core.
func wantAccessible(t *testing.T, p *browser.Page, name string) {
	t.Helper()
	for _, finding := range p.Inaccessible() {
		t.Errorf("%s: %s", name, finding)
	}
}

// wantFitsWindow checks that the open page is not wider than a window.
func wantFitsWindow(t *testing.T, p *browser.Page, address string, window int64) {
	t.Helper()
	p.As(browser.Look{Width: window, Height: 844})
	var width int64
	p.Eval(`document.documentElement.scrollWidth`, &width)
	assert.Truef(t, width <= window, "%s is %d wide in a window of %d", address, width, window)
}

// wantCellsFit checks that no text of the open page is wider than its table cell.
func wantCellsFit(t *testing.T, p *browser.Page, address string) {
	t.Helper()
	var overflowing []string
	p.Eval(`[...document.querySelectorAll("td, th")]
		.filter(cell => cell.clientWidth && cell.scrollWidth > cell.clientWidth + 1)
		.map(cell => cell.textContent)`, &overflowing)
	assert.Truef(t, len(overflowing) == 0, "%s: the text of these cells is wider than the cell: %q", address, overflowing)
}

// wantNoProblems checks that the browser reports no error.
func wantNoProblems(t *testing.T, p *browser.Page, address string) {
	t.Helper()
	for _, problem := range p.Problems() {
		t.Errorf("%s: %s", address, problem)
	}
}

func TestPhoneNavigationMarksCurrentPage(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	p := browser.Open(t, browser.Look{Width: 390, Height: 844})
	for path, selector := range map[string]string{
		"/":           "> ul > li > a[aria-current]",
		"/executions": "> ul > li > a[aria-current]",
		"/deliveries": ".thumb-more:has([aria-current]) > summary",
	} {
		p.Go(server.URL + path)
		var visible bool
		p.Eval(`(() => {
			const box = document.querySelector(".thumb `+selector+`").getBoundingClientRect();
			return scrollY === 0 && box.height >= 44 && box.left >= 0 && box.right <= innerWidth &&
				box.top > innerHeight - 80 && box.bottom <= innerHeight;
		})()`, &visible)
		assert.Truef(t, visible, "%s: the link of the current page is not visible at the lower edge", path)
	}
	wantNoBrowserErrors(t, p)
}

// A system's forced colours hide backgrounds, so a border shows the current item.
func TestForcedColoursMarkCurrentItem(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	p := browser.Open(t, browser.Look{Forced: true})
	p.Go(server.URL + "/executions?status=failed")
	p.Until("one tab has a border of another colour", `(() => {
		const tabs = [...document.querySelectorAll("nav.tabs a")], colour = a => getComputedStyle(a).borderBottomColor;
		const current = tabs.find(a => a.ariaCurrent);
		return tabs.filter(a => colour(a) === colour(current)).length === 1;
	})()`)
	p.Until("one page is outlined", `[...document.querySelectorAll(".side nav a")]
		.filter(a => getComputedStyle(a).outlineStyle !== "none").map(a => a.ariaCurrent).join() === "page"`)
}

// seedAllPages inserts data for every page, with text in each free text. It returns the address of a page of
// each path, and of spans of a trace.
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
	approval := insertApproval(t, pool, "pending",
		fmt.Sprintf(`{"table": "orders", "limit": 20, "why": %s}`, quoteJSON(t, text)), 5)
	automation := insertAutomation(t, pool, "weekly")
	insertAutomationRun(t, pool, automation, "success")
	insertAutomationRun(t, pool, automation, "dead")
	delivery := insertDelivery(t, pool, "dead", text)
	message := insertOutgoing(t, pool, "shop", "dead")
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
	insertSession(t, pool, text, text, false)
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
	addresses := map[string]string{
		"span": model, "run span": run,
		"/approvals/{id}":               "/approvals/" + approval,
		"/agents/{name}":                "/agents/sales",
		"/automations/{name}":           "/automations/weekly",
		"/charts":                       "/charts?range=24h",
		"/deliveries/{id}":              "/deliveries/" + delivery,
		"/evals/{suite}":                "/evals/returns",
		"/evals/runs/{id}":              "/evals/runs/" + newer + "?against=" + older,
		"/evals/runs/{id}/cases/{case}": "/evals/runs/" + newer + "/cases/late",
		"/evals/from/{id}":              "/evals/from/" + string(id),
		"/executions/{id}":              "/executions/" + waiting,
		"/find":                         "/find?q=sale",
		"/flows/{name}":                 "/flows/external:sum",
		"/memory/{key...}":              "/memory/prices",
		"/objectives/{name}":            "/objectives/grow",
		"/outgoing/{id}":                "/outgoing/" + message,
		"/principals/{name}":            "/principals/root",
		"/skills/{name}":                "/skills/fetch",
		"/spend/{day}":                  "/spend/" + time.Now().UTC().Format(time.DateOnly),
		"/threads/{id}":                 "/threads/talk",
		"/traces/{id}":                  "/traces/" + string(id),
	}
	for _, path := range []string{
		"/", "/activity", "/agents", "/approvals", "/audit", "/automations", "/channels", "/deliveries", "/evals",
		"/executions", "/flows", "/lanes", "/memory", "/objectives", "/operate", "/outgoing", "/principals", "/skills",
		"/spend", "/threads", "/traces",
	} {
		addresses[path] = path
	}
	return addresses
}

// quoteJSON returns a text as JSON.
func quoteJSON(t *testing.T, text string) string {
	t.Helper()
	raw, err := json.Marshal(text)
	require.NoError(t, err)
	return string(raw)
}

// searchedColumns are text columns whose values pages and joins look up. fillTextColumns leaves them alone.
var searchedColumns = []string{
	"calls", "case_name", "category", "cause", "channel", "conversation_id", "cron", "decided_by", "endpoint", "event",
	"flow", "handler", "headers", "id", "judgements", "key", "kind", "lane", "name", "outcome", "queue", "result_type",
	"role", "scope", "skill_name", "status", "step", "subject", "suite", "surface", "thread_id", "timezone",
	"token_usage", "trigger", "trust", "waiting_for", "body_sha256",
}

// fillTextColumns writes a text into every column of free text or JSON, of every row. It skips columns whose
// constraints reject the text.
func fillTextColumns(t *testing.T, pool *pgxpool.Pool, text string) {
	t.Helper()
	type column struct{ Table, Name, Type string }
	columns, err := postgres.Rows[column](t.Context(), pool, "list columns", `
		select c.table_name::text as table, c.column_name::text as name, c.data_type::text as type
		  from information_schema.columns c
		  join information_schema.tables t using (table_schema, table_name)
		 where c.table_schema = current_schema() and t.table_type = 'BASE TABLE' and c.table_name like 'agent\_%'
		   and c.table_name !~ '^agent_(activity_\d|limits)'
		   and c.data_type in ('text', 'jsonb') and c.is_generated = 'NEVER'
		   and c.column_name <> all ($1::text[]) and c.column_name !~ '(trace_id|hash)$'`, searchedColumns)
	require.NoError(t, err)
	filled := 0
	for _, c := range columns {
		value := "$1::text"
		if c.Type == "jsonb" {
			value = "jsonb_build_object(left($1::text, 300), $1::text, 'n', 1, 'list', jsonb_build_array($1::text))"
		}
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `set local session_replication_role = replica`); err != nil { // no triggers
				return err
			}
			_, err := tx.Exec(t.Context(), fmt.Sprintf("update %s set %s = %s", pgx.Identifier{c.Table}.Sanitize(),
				pgx.Identifier{c.Name}.Sanitize(), value), text)
			return err
		})
		switch {
		case err == nil:
			filled++
		case !postgres.IsCode(err, rejections...):
			t.Fatalf("%s.%s: %v", c.Table, c.Name, err)
		}
	}
	require.Truef(t, filled >= 40, "only %d of %d columns could be written", filled, len(columns))
}

// rejections are the SQLSTATEs with which the schema rejects a text.
var rejections = []string{
	"23514", // check_violation
	"23505", // unique_violation
	"54000", // program_limit_exceeded: too long for an index
	"22001", // string_data_right_truncation
	"22P02", // invalid_text_representation
}
