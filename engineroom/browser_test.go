package engineroom

import (
	"context"
	"fmt"
	"html/template"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// rowList is a page /listed with a list. The test sets its rows, and can close the connections of its viewers.
type rowList struct {
	mu               sync.Mutex
	rows             []string
	err              error
	url              string
	closeConnections func()
}

func (l *rowList) set(rows ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rows = rows
}

// fail makes the list unreadable; nil makes it readable again.
func (l *rowList) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.err = err
}

const rowListTemplates = `
	{{define "listed/pause"}}{{end}}
	{{define "listed"}}
	<form class="filters" action="/listed">
	<label>Word <input name="word"></label><button type="submit">Filter</button>
	</form>
	{{.Part "rows"}}
	{{end}}
	{{define "listed/rows"}}
	<section id="rows" class="part" aria-labelledby="rows-title">
	<h2 id="rows-title">Rows</h2>
	<table><tbody>
	{{range .Rows}}
	<tr id="row-{{.}}" data-row="{{.}}">
	<th scope="row"><a href="/listed?row={{.}}">row {{.}}</a></th>
	<td>{{since $.At}}</td>
	<td>
	{{template "action" (dict "Path" (printf "/v1/lanes/%s/break" .) "Label" "Break" "Reason" true)}}
	<details class="more"><summary>More of {{.}}</summary><p>Folded</p></details>
	<button type="button" class="copy" data-copy="text of {{.}}">Copy</button>
	</td>
	</tr>
	{{end}}
	</tbody></table>
	<p>There are {{len .Rows}} rows.</p>
	</section>
	{{end}}`

func serveRowList(t *testing.T) *rowList {
	t.Helper()
	room := newRoom(t, Options{Pool: pgtest.DB(t)})
	l := &rowList{rows: []string{"a", "b"}}
	at := time.Now().Add(-90 * time.Second)
	room.pages = append(room.pages, page{
		path: "/listed", name: "listed", title: "Listed",
		parts: []part{
			{name: "rows", interval: 20 * time.Millisecond, load: func(context.Context, *pageRequest) (any, error) {
				l.mu.Lock()
				defer l.mu.Unlock()
				return map[string]any{"Rows": l.rows, "At": at}, l.err
			}},
			{name: "pause", load: func(context.Context, *pageRequest) (any, error) { return nil, nil }},
		},
	})
	room.templates = template.Must(room.templates.Parse(rowListTemplates))
	server := serveRoom(t, room)
	l.url, l.closeConnections = server.URL+"/listed", server.CloseClientConnections
	return l
}

// open opens the page and waits until it follows its stream.
func (l *rowList) open(t *testing.T, look browser.Look) *browser.Page {
	t.Helper()
	p := browser.Open(t, look)
	p.Go(l.url)
	waitForStream(p)
	return p
}

func wantNoBrowserErrors(t *testing.T, p *browser.Page) {
	t.Helper()
	problems := append(p.Problems(), p.Inaccessible()...)
	assert.Truef(t, len(problems) == 0, "browser errors: %s", strings.Join(problems, "\n"))
}

func TestUpdatesLeaveReaderInputAlone(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := l.open(t, browser.Look{})
	p.Click("#row-b details.more > summary")
	p.Click("#row-b details.action > summary")
	p.Until("the form has the focus", `document.activeElement.name === "reason"`)
	p.Type("#row-b input[name=reason]", "because")
	p.Eval(`document.getElementById("row-b").mark = "the same"`, nil)
	p.Eval(`document.querySelector("#row-b input[name=reason]").setSelectionRange(2, 4)`, nil)
	l.set("c", "a", "b")
	p.Shows("There are 3 rows.")
	var state string
	p.Eval(`(() => {
		const row = document.getElementById("row-b"), input = row.querySelector("input[name=reason]");
		return [
			row.mark, input.value, input === document.activeElement, input.selectionStart, input.selectionEnd,
			row.querySelector(".action").open, row.querySelector(".more").open,
		].join(" ");
	})()`, &state)
	assert.Equal(t, "the same because true 2 4 true true", state)
	p.Press(kb.Escape)
	p.Until("the form is closed, and its summary has the focus",
		`!document.querySelector("#row-b .action").open && document.activeElement.localName === "summary"`)
	l.set("c", "a")
	p.Shows("There are 2 rows.")
	p.Until("the table has the focus of the removed row", `document.activeElement.id === "rows"`)
	p.Until("the clock shows the duration, and its title the time", `(() => {
		const clock = document.querySelector("time.since");
		return /min|h/.test(clock.textContent) && clock.title !== "";
	})()`)
	wantNoBrowserErrors(t, p)
}

// A page with an unreadable part does not say that it is live.
func TestUnreadablePartIsNotLive(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := l.open(t, browser.Look{})
	l.fail(problem.New(http.StatusServiceUnavailable, "the database does not answer"))
	p.Shows("This could not be read")
	p.Until("the page says so", `document.getElementById("live-state").innerText === "Data unreadable"`)
	l.fail(nil)
	p.Shows("There are 2 rows.")
	p.Until("the page is live", isLive)
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
	l.closeConnections()
	p.Until("the page is connected again, and still paused",
		`document.getElementById("live-state").dataset.state === "paused"`)
	p.Expect("ERR_INCOMPLETE_CHUNKED_ENCODING") // the closed connection
	l.set("c", "d", "e", "a", "b")
	p.Shows("3 new")
	wantNoBrowserErrors(t, p)
	p.Click("#live-pause")
	p.Shows("There are 5 rows.")
	p.Until("no update is waiting", `document.querySelector(".news") === null &&
		document.getElementById("live-pause").textContent === "Pause updates"`)
}

func TestBrokenStreamReconnects(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := l.open(t, browser.Look{})
	p.Eval(`(() => {
		window.updates = [];
		document.addEventListener("part", () => updates.push(document.querySelector("#rows > p").textContent));
	})()`, nil)
	names := []string{"a", "b", "c", "d", "e", "f"}
	for n := 3; n <= len(names); n++ {
		l.closeConnections()
		l.set(names[:n]...)
		p.Shows(fmt.Sprintf("There are %d rows.", n))
	}
	var updates string
	p.Eval(`updates.join(" ")`, &updates)
	assert.Equal(t, "There are 3 rows. There are 4 rows. There are 5 rows. There are 6 rows.", updates)
}

// clickCopy clicks a copy button and waits for its message.
func clickCopy(p *browser.Page, selector string) {
	p.Eval(fmt.Sprintf(`(button => {
		window.message = "";
		new MutationObserver(() => { message += button.textContent; }).observe(button, {childList: true});
	})(document.querySelector(%q))`, selector), nil)
	p.Click(selector)
	p.Until("the button shows a message", `/Copied|Not copied/.test(message)`)
}

func TestCopyButtonShowsMessage(t *testing.T) {
	t.Parallel()
	p := serveRowList(t).open(t, browser.Look{})
	clickCopy(p, "button.copy")
	wantNoBrowserErrors(t, p)
}

func TestKeyboardNavigation(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := l.open(t, browser.Look{})
	p.Press(kb.Tab)
	p.Until("the skip link is the first stop", `document.activeElement.matches("a.skip")`)
	p.Press(kb.Enter)
	p.Until("the skip link leads to the content", `document.activeElement.id === "main"`)
	p.Press("jj")
	p.Until("j moves the focus down, to the second row", `document.activeElement.id === "row-b"`)
	p.Press("k")
	p.Until("k moves the focus up", `document.activeElement.id === "row-a"`)
	p.Press(kb.Enter)
	p.Until("Enter opens the row", `location.search === "?row=a"`)
	waitForStream(p)
	p.Press("/")
	p.Until("the slash leads to the filter", `document.activeElement.name === "word"`)
	p.Press("j?")
	p.Until("keys in a field are text",
		`document.activeElement.value.endsWith("j?") && !document.getElementById("help").open`)
	wantNoBrowserErrors(t, p)
}

func TestKeysOpenHelpAndPages(t *testing.T) {
	t.Parallel()
	p := serveRowList(t).open(t, browser.Look{})
	p.Press("?")
	p.Until("the question mark opens the help", `document.getElementById("help").open`)
	wantNoBrowserErrors(t, p)
	p.Click("#keys-on")
	p.Press(kb.Escape)
	p.Until("Escape closes the help", `!document.getElementById("help").open`)
	p.Press("j")
	p.Until("keys are off", `!document.activeElement.closest("tr")`)
	p.Eval(`document.getElementById("keys-on").click()`, nil)
	p.Eval(`for (const key of ["g", "o"]) {
		document.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
	}`, nil)
	p.Until("g and o open the overview", `location.pathname === "/"`)
}

func TestThemeChoiceIsRemembered(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := l.open(t, browser.Look{})
	p.Click("#theme")
	p.Click("#theme")
	const isDark = `document.documentElement.dataset.theme === "dark"`
	p.Until("the page is dark", isDark+` && getComputedStyle(document.body).backgroundColor === "rgb(14, 15, 19)"`)
	p.Go(l.url)
	p.Until("the next page is dark", isDark+` && document.getElementById("theme").textContent.includes("dark")`)
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
	const input = `[...document.querySelectorAll("#fork input[name=from], #fork textarea")].map(e => e.value).join(" ")`
	p.Until("the form has the rejected input", input+` === 'pay {"rows": 7'`)
	p.Reload()
	p.Until("the reloaded form is empty", `!document.querySelector(".flash-bad") && !`+input+`.includes("pay")`)
	wantNoBrowserErrors(t, p)
}

func TestPageWorksWithoutScript(t *testing.T) {
	t.Parallel()
	l := serveRowList(t)
	p := browser.Open(t, browser.Look{NoScript: true, Width: 390, Height: 800})
	p.Go(l.url)
	assert.Contains(t, p.Text("main"), "row a", "There are 2 rows.", " UTC")
	for _, id := range []string{"#theme", "#live-pause", "#help-open"} {
		assert.Equal(t, "", p.Text(id), id, "is visible, but needs a script")
	}
}

func TestLoginLink(t *testing.T) {
	t.Parallel()
	login := strings.TrimSuffix(serveRowList(t).url, "/listed") + "/login?next=/listed"
	p := browser.Open(t, browser.Look{})
	p.Go(login)
	wantNoBrowserErrors(t, p)
	p.Expect("405") // the test server has no route that logs in
	p.Go(login + "#token=secret")
	p.Until("the address does not contain the token", `!location.href.includes("secret")`)
}

// A browser with a login keeps the form of a link, which may be of another principal.
func TestLoginLinkOfAnotherPrincipal(t *testing.T) {
	t.Parallel()
	mux := muxOf(newRoom(t, Options{Pool: pgtest.DB(t)}))
	var redirects atomic.Int32
	mux.HandleFunc("HEAD /login", func(w http.ResponseWriter, r *http.Request) {
		redirects.Add(1)
		http.Redirect(w, r, "/lanes", http.StatusSeeOther)
	})
	mux.HandleFunc("POST /login", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "logged in with %s", r.FormValue("link"))
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/login?link=ABC")
	p.Shows("replaces another login of this browser")
	wantNoBrowserErrors(t, p)
	p.Click("#login-link button")
	p.Shows("logged in with ABC")
	assert.Equal(t, 0, redirects.Load())
}

// A principal without a role has no page to return to, but can log out.
func TestRefusedPrincipalCanLogOut(t *testing.T) {
	t.Parallel()
	room := newRoom(t, Options{Pool: pgtest.DB(t)})
	p := browser.Open(t, browser.Look{})
	p.Expect("403")
	p.Go(testkit.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/" {
			room.Refuse(w, r, problem.New(http.StatusForbidden, "no").Kind("missing-scope", "Missing scope"))
			return
		}
		muxOf(room).ServeHTTP(w, r)
	})))
	p.Shows("An admin can change the role.")
	p.Until("the page offers the logout, and not itself", `document.querySelector("form[action='/logout'] button") &&
		!document.body.innerText.includes("To the overview")`)
	wantNoBrowserErrors(t, p)
}

// Chrome applies the policy for forms to the redirects of a form, too.
func TestLoginOffersIssuerOfAnotherSite(t *testing.T) {
	t.Parallel()
	issuer := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(issuer.Close)
	room := newRoom(t, Options{Pool: pgtest.DB(t), OIDC: true})
	mux := muxOf(room)
	mux.HandleFunc("GET /login/oidc", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, issuer.URL+"/?"+r.URL.RawQuery, http.StatusSeeOther)
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/login?next=" + url.QueryEscape("/lanes?agent=a&lane=b"))
	wantNoBrowserErrors(t, p)
	p.Click(`[href^="/login/oidc"], [action="/login/oidc"] button`)
	p.Until("the issuer is open", fmt.Sprintf(`location.origin === %q &&
		new URLSearchParams(location.search).get("next") === "/lanes?agent=a&lane=b"`, issuer.URL))
}
