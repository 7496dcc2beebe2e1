package engineroom

import (
	"context"
	"fmt"
	"html/template"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// rowList is a page with a list whose rows a test sets. Its server can be cut off from its viewers.
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

func listedPage(t *testing.T) *rowList {
	t.Helper()
	room, err := New(Options{Pool: pgtest.DB(t), Agent: "agent"})
	if err != nil {
		t.Fatal(err)
	}
	l := &rowList{rows: []string{"a", "b"}}
	room.pages = append(room.pages, page{
		path: "/listed", name: "listed", title: "Listed",
		parts: []part{
			{name: "rows", every: 20 * time.Millisecond, load: func(context.Context, *visit) (any, error) {
				l.mu.Lock()
				defer l.mu.Unlock()
				return map[string]any{"Rows": l.rows, "At": time.Now().Add(-90 * time.Second).Truncate(time.Hour)}, nil
			}},
			{name: "pause", load: func(context.Context, *visit) (any, error) { return nil, nil }},
		},
	})
	room.templates = template.Must(room.templates.Parse(`{{define "listed/pause"}}{{end}}{{define "listed"}}
		<form class="filters" action="/listed"><label>Word <input name="word"></label><button type="submit">Filter</button></form>{{.Part "rows"}}{{end}}
		{{define "listed/rows"}}<section id="rows" class="part" aria-labelledby="rows-title"><h2 id="rows-title">Rows</h2>
		<table><tbody>{{range .Rows}}<tr id="row-{{.}}" data-row="{{.}}"><th scope="row"><a href="/listed?row={{.}}">row {{.}}</a></th><td>{{since $.At}}</td>
		<td>{{template "lever" (dict "Path" (printf "/v1/lanes/%s/break" .) "Word" "Break" "Reason" true)}}
		<details class="more"><summary>More of {{.}}</summary><p>Folded</p></details><button type="button" class="copy" data-copy="text of {{.}}">Copy</button></td></tr>{{end}}</tbody></table>
		<p>There are {{len .Rows}} rows.</p></section>{{end}}`))
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		mux.Handle(r.Method+" "+r.Path, r.Handler)
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	l.url, l.cut = server.URL+"/listed", server.CloseClientConnections
	return l
}

// looked opens the page and waits until it is live.
func (l *rowList) looked(t *testing.T, look browser.Look) *browser.Page {
	t.Helper()
	p := browser.Open(t, look)
	p.Go(l.url)
	p.Until("it is live", `document.getElementById("live-state").dataset.state === "live"`)
	return p
}

func noComplaint(t *testing.T, p *browser.Page) {
	t.Helper()
	if all := append(p.Problems(), p.Inaccessible()...); len(all) > 0 {
		t.Errorf("the browser complains: %s", strings.Join(all, "\n"))
	}
}

func TestUpdatesLeaveAloneWhatTheReaderDoes(t *testing.T) {
	t.Parallel()
	l := listedPage(t)
	p := l.looked(t, browser.Look{})
	p.Click("#row-b details.more > summary")
	p.Click("#row-b details.lever > summary")
	p.Until("the form has the focus", `document.activeElement.name === "reason"`)
	p.Type("#row-b input[name=reason]", "because")
	p.Eval(`document.getElementById("row-b").mark = "the same"; document.querySelector("#row-b input[name=reason]").setSelectionRange(2, 4)`, nil)
	l.set("c", "a", "b")
	p.Shows("There are 3 rows.")
	var kept string
	p.Eval(`(() => { const r = document.getElementById("row-b"), i = r.querySelector("input[name=reason]");
		return [r.mark, i.value, i === document.activeElement, i.selectionStart, i.selectionEnd, r.querySelector(".lever").open, r.querySelector(".more").open].join(" ") })()`, &kept)
	if kept != "the same because true 2 4 true true" {
		t.Errorf("after an update the row has %s", kept)
	}
	p.Press("\x1b") // Escape
	p.Until("Escape closes the form", `!document.querySelector("#row-b .lever").open && document.activeElement.localName === "summary"`)
	l.set("c", "a")
	p.Shows("There are 2 rows.")
	p.Until("the focus is where the row was", `document.activeElement.id === "rows"`)
	p.Until("clocks count", `/min|h/.test(document.querySelector("time.since").textContent) && document.querySelector("time.since").title !== ""`)
	noComplaint(t, p)
}

func TestUpdatesCanBePausedAndGoOn(t *testing.T) {
	t.Parallel()
	l := listedPage(t)
	p := l.looked(t, browser.Look{Dark: true})
	p.Click("#live-pause")
	l.set("c", "d", "a", "b")
	p.Shows("2 new")
	p.Shows("Resume (1 update waiting)")
	p.Shows("There are 2 rows.")
	l.cut()
	p.Until("it is connected again, and still paused", `document.getElementById("live-state").dataset.state === "paused"`)
	p.Expect("ERR_INCOMPLETE_CHUNKED_ENCODING") // what it was cut off by
	l.set("c", "d", "e", "a", "b")
	p.Shows("3 new")
	noComplaint(t, p)
	p.Click("#live-pause")
	p.Shows("There are 5 rows.")
	p.Until("nothing waits", `document.querySelector(".news") === null && document.getElementById("live-pause").textContent === "Pause updates"`)
}

func TestABrokenStreamGoesOn(t *testing.T) {
	t.Parallel()
	l := listedPage(t)
	p := l.looked(t, browser.Look{})
	p.Eval(`window.morphs = []; document.addEventListener("part", () => morphs.push(document.querySelector("#rows > p").textContent))`, nil)
	for i := range 4 {
		l.cut()
		l.set(make([]string, i+3)...)
		p.Shows(fmt.Sprintf("There are %d rows.", i+3))
	}
	var all string
	p.Eval(`morphs.join(" ")`, &all)
	if all != "There are 3 rows. There are 4 rows. There are 5 rows. There are 6 rows." {
		t.Errorf("the page was changed so: %s", all)
	}
}

func TestKeysAndThemes(t *testing.T) {
	t.Parallel()
	l := listedPage(t)
	p := l.looked(t, browser.Look{})
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
	p.Until("letters are typed there", `document.activeElement.value.endsWith("j?") && !document.getElementById("help").open`)
	p.Eval(`document.activeElement.blur()`, nil)
	p.Press("?")
	p.Until("help is open", `document.getElementById("help").open`)
	noComplaint(t, p)
	p.Click("#keys-on")
	p.Press("\x1b")
	p.Until("help is closed", `!document.getElementById("help").open`)
	p.Press("j")
	p.Until("keys are off", `!document.activeElement.closest("tr")`)
	p.Click("#theme")
	p.Click("#theme")
	p.Until("dark was chosen", `document.documentElement.dataset.theme === "dark" && getComputedStyle(document.body).backgroundColor === "rgb(14, 15, 19)"`)
	p.Go(l.url)
	p.Until("the choice is kept", `document.documentElement.dataset.theme === "dark" && document.getElementById("theme").textContent.includes("dark")`)
	p.Click("button.copy")
	p.Until("the button says so", `document.querySelector("button.copy").textContent === "Copied" || document.querySelector("button.copy").textContent === "Not copied"`)
}

func TestAFormThatIsRefusedHasAgainWhatWasWritten(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/executions/" + execution(t, pool, "failed", "flow", "import"))
	p.Type("#fork input[name=from]", "pay")
	p.Eval(`document.querySelector("#fork textarea").value = ""`, nil)
	p.Type("#fork textarea", `{"rows": 7`)
	p.Click("#fork button[type=submit]")
	p.Shows("input is not JSON")
	const kept = `document.querySelector("#fork input[name=from]").value + " " + document.querySelector("#fork textarea").value`
	p.Until("what was written stands there", kept+` === 'pay {"rows": 7'`)
	p.Eval(`location.reload()`, nil)
	p.Until("it is asked for anew", `!document.querySelector(".flash-bad") && !(`+kept+`).includes("pay")`)
	noComplaint(t, p)
}

func TestTheNavigationOfAPhoneShowsWhereOneIs(t *testing.T) {
	t.Parallel()
	_, server := open(t)
	p := browser.Open(t, browser.Look{Width: 390, Height: 844})
	for _, path := range []string{"/", "/deliveries", "/lanes"} {
		p.Go(server.URL + path)
		var seen bool
		p.Eval(`(() => { const r = document.querySelector(".side nav a[aria-current]").getBoundingClientRect(); return r.left >= 0 && r.right <= innerWidth && scrollY === 0 })()`, &seen)
		if !seen {
			t.Errorf("%s: its word in the navigation is not to be seen", path)
		}
	}
	noComplaint(t, p)
}

func TestAPageWithoutScriptIsWhole(t *testing.T) {
	t.Parallel()
	l := listedPage(t)
	p := browser.Open(t, browser.Look{NoScript: true, Width: 390, Height: 800})
	p.Go(l.url)
	text := p.Text("main")
	for _, word := range []string{"row a", "There are 2 rows.", " UTC"} {
		if !strings.Contains(text, word) {
			t.Errorf("%q is missing in %s", word, text)
		}
	}
	for _, id := range []string{"#theme", "#live-pause", "#help-open"} {
		if got := p.Text(id); got != "" {
			t.Errorf("%s is shown and does nothing", id)
		}
	}
}

func TestALinkLogsIn(t *testing.T) {
	t.Parallel()
	l := listedPage(t)
	p := browser.Open(t, browser.Look{})
	p.Go(strings.TrimSuffix(l.url, "/listed") + "/login?next=/listed")
	noComplaint(t, p)
	p.Expect("405") // nobody takes the form here
	p.Go(strings.TrimSuffix(l.url, "/listed") + "/login?next=/listed#token=secret")
	p.Until("the token is out of the address", `!location.href.includes("secret")`)
}
