package engineroom

import (
	"context"
	"fmt"
	"html/template"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
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
