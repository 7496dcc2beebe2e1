package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/chromedp/kb"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// browserTest is a browser at the Engine Room of a serving agent, and a terminal on the same database.
type browserTest struct {
	program
	pool   *pgxpool.Pool
	served *started
	base   string
	*browser.Page
}

// newBrowserTest serves, opens a page and logs in. Unexpected browser errors fail the test at its end.
func newBrowserTest(t *testing.T, look browser.Look, settings ...string) *browserTest {
	t.Helper()
	url := pgtest.URL(t)
	return newBrowserTestOn(t, newProgram(t, url, settings...), connect(t, url), look)
}

// newBrowserTestOn uses a program with its own settings.
func newBrowserTestOn(t *testing.T, p program, pool *pgxpool.Pool, look browser.Look) *browserTest {
	t.Helper()
	p.environ = slices.Concat([]string{token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=0 0 1 1 *"}, p.environ, []string{"AGENT_LOG_LEVEL=info"})
	w := &browserTest{program: p, pool: pool}
	w.serve()
	w.Page = browser.Open(t, look)
	t.Cleanup(func() {
		if list := w.Problems(); len(list) > 0 {
			t.Errorf("the browser complains:\n%s", strings.Join(list, "\n"))
		}
	})
	w.logIn(w.base)
	return w
}

// logIn logs in at the overview of a port.
func (w *browserTest) logIn(base string) {
	w.t.Helper()
	w.Go(base + "/")
	w.Shows("Log in to the Engine Room")
	w.Type("#token", strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="))
	w.Click("#login button")
	w.Until("the overview is there", `location.pathname === "/" && document.querySelector("#feed")`)
}

// serve starts the agent.
func (w *browserTest) serve() {
	w.t.Helper()
	w.served = w.start("serve")
	w.base = w.served.find(w.t, `msg=serving listen=(\S+)`)
}

// stopServer shuts the agent down.
func (w *browserTest) stopServer() {
	w.t.Helper()
	w.served.stop()
	if code := <-w.served.ended; code != 0 {
		w.t.Fatalf("agent serve: exit %d, stderr: %s", code, w.served.err.String())
	}
}

// waitLive waits for the stream and sets a mark that a reload would remove.
func (w *browserTest) waitLive() {
	w.t.Helper()
	w.waitState("live")
	w.Eval(`window.mark = "here"`, new(string))
}

func (w *browserTest) waitState(name string) {
	w.t.Helper()
	w.Until("the updates are "+name, fmt.Sprintf(`document.getElementById("live-state").dataset.state === %q`, name))
}

// checkNotReloaded fails if the page was reloaded after waitLive.
func (w *browserTest) checkNotReloaded() {
	w.t.Helper()
	var same bool
	w.Eval(`window.mark === "here"`, &same)
	if !same {
		w.t.Error("the page was loaded again")
	}
}

// logEntries returns the activities, newest first.
func (w *browserTest) logEntries() []string {
	w.t.Helper()
	rows, err := w.pool.Query(w.t.Context(), `select id::text from agent_activity order by id desc`)
	if err != nil {
		w.t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		w.t.Fatal(err)
	}
	return list
}

const feedRows = `[...document.querySelectorAll("#feed tr[data-row]")].map(r => r.dataset.row)`

// checkFeed waits until the feed equals the log: each activity once, newest first, at most 50.
func (w *browserTest) checkFeed() {
	w.t.Helper()
	want, err := json.Marshal(w.logEntries())
	if err != nil {
		w.t.Fatal(err)
	}
	w.Until("each activity is in the feed once", fmt.Sprintf(`JSON.stringify(%s) === %q`, feedRows, want))
}

// submitForm opens the form at a selector, enters a reason and submits it.
func (w *browserTest) submitForm(selector string) {
	w.t.Helper()
	w.Click(selector + " summary")
	w.Type(selector+" input[name=reason]", "on a walk")
	w.Click(selector + " form button")
}

// pages returns the pages of the navigation.
func (w *browserTest) pages() []string {
	w.t.Helper()
	var list []string
	w.Eval(`[...document.querySelectorAll("nav[aria-label=Pages] a")].map(a => a.getAttribute("href"))`, &list)
	if len(list) < 14 {
		w.t.Fatalf("the navigation has %q", list)
	}
	return list
}

func TestPageShowsCommands(t *testing.T) {
	t.Parallel()
	w := newBrowserTest(t, browser.Look{})
	w.Shows("No activity yet")
	w.waitLive()
	var beat struct {
		Trace struct {
			TraceID string `json:"trace_id"`
		}
	}
	w.mustJSON(&beat, "heartbeat")
	w.Until("its trace is in the feed", fmt.Sprintf(`document.querySelector('#feed a[href="/traces/%s"]')`, beat.Trace.TraceID))
	w.checkFeed()
	w.checkNotReloaded()
	w.Click(fmt.Sprintf(`#feed a[href="/traces/%s"]`, beat.Trace.TraceID))
	w.Until("the trace is there", fmt.Sprintf(`location.pathname === "/traces/%s"`, beat.Trace.TraceID))
	w.Shows("self_heal")
}

// An approval on the page lets the serving process continue the turn.
func TestApproveOnPage(t *testing.T) {
	t.Parallel()
	d := newOperateTest(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("It is over."))
	w := newBrowserTestOn(t, d.program, d.pool, browser.Look{})
	w.waitLive()
	if got := d.run("operate", "Wipe."); got.code != exitFailed || !strings.Contains(got.err, "waits for approval") {
		t.Fatalf("exit %d, stderr: %s", got.code, got.err)
	}
	w.Until("the overview asks for it", `document.querySelector("#need-approval li a")`)
	w.checkNotReloaded()
	w.Click("#need-approval li a")
	w.Until("its page is there", `location.pathname.startsWith("/approvals/") && document.querySelector(".actions")`)
	w.submitForm(".actions details:nth-of-type(1)")
	w.Shows("The decision is recorded")
	w.Click(`#decision a[href^="/executions/"]`)
	w.Until("its execution is completed", `location.pathname.startsWith("/executions/") && document.querySelector("main .status-completed")`)
	w.Shows("It is over.")
	if got := pgtest.Value[string](t, w.pool, `select a.status || ' ' || x.status from agent_approvals a join agent_executions x on x.id = a.execution_id`); got != "consumed completed" {
		t.Errorf("approval and execution are %s", got)
	}
}

func TestLanesOnPage(t *testing.T) {
	t.Parallel()
	w := newBrowserTest(t, browser.Look{})
	for path, part := range map[string]string{"/": "#locks", "/lanes": "#held"} {
		w.Go(w.base + path)
		w.waitLive()
		w.Until("no lane is held", fmt.Sprintf(`document.querySelector(%q).innerText.includes("No lane is held")`, part))
		if !pgtest.Value[bool](t, w.pool, `select try_acquire_agent_lock('night shift', 'ana', 600)`) {
			t.Fatal("the lane was not to be had")
		}
		w.Until("the lane is shown", fmt.Sprintf(`[...document.querySelectorAll("%s tbody tr")].some(r => r.innerText.includes("night shift") && r.innerText.includes("ana"))`, part))
		if !pgtest.Value[bool](t, w.pool, `select release_agent_lock('night shift', 'ana')`) {
			t.Fatal("the lane was not held")
		}
		w.Until("the lane is gone", fmt.Sprintf(`document.querySelector(%q).innerText.includes("No lane is held")`, part))
		w.checkNotReloaded()
	}
}

func TestPauseOnPage(t *testing.T) {
	t.Parallel()
	w := newBrowserTest(t, browser.Look{})
	w.submitForm("#pause")
	w.Shows("Autonomous work is paused.")
	contains(t, w.must("heartbeat"), "skipped: autonomous work is paused since", "on a walk")
	for _, path := range w.pages() {
		w.Go(w.base + path)
		w.Until("the banner is on "+path, `document.querySelector("#pause.paused").innerText.includes("on a walk")`)
	}
	w.Go(w.base + "/spend")
	w.submitForm("#pause")
	w.Shows("Autonomous work is resumed.")
	w.Until("the banner is gone", `!document.querySelector("#pause.paused")`)
	contains(t, w.must("heartbeat"), "✓ completed")

	w.waitLive()
	w.must("pause", "--reason", "from a terminal")
	w.Until("the banner comes by itself", `document.querySelector("#pause.paused").innerText.includes("from a terminal")`)
	w.must("resume")
	w.Until("the banner goes by itself", `!document.querySelector("#pause.paused")`)
	w.checkNotReloaded()
}

// After a network failure the stream resumes with the missed rows.
func TestFeedAfterOfflinePage(t *testing.T) {
	t.Parallel()
	w := newBrowserTest(t, browser.Look{})
	between := newCutProxy(t, strings.TrimPrefix(w.base, "http://"))
	w.logIn("http://" + between.Addr().String())
	w.startFollowing()
	w.Offline(true)
	between.cut()
	w.waitState("waiting")
	w.must("heartbeat")
	var reached bool
	if w.Eval(`fetch("/login", {method: "HEAD"}).then(() => true, () => false)`, &reached); reached {
		t.Error("the page is not offline")
	}
	w.Offline(false)
	w.waitState("live")
	w.checkFeed()
	w.must("heartbeat")
	w.checkFeed()
	w.checkFollowed()
}

// A server restart does the same.
func TestFeedAfterServerRestart(t *testing.T) {
	t.Parallel()
	w := newBrowserTest(t, browser.Look{}, "AGENT_LISTEN="+freeAddress(t))
	w.startFollowing()
	w.stopServer()
	w.waitState("waiting")
	w.must("heartbeat")
	at := w.base
	w.serve()
	if w.base != at {
		t.Fatalf("it came back at %s, not at %s", w.base, at)
	}
	w.waitState("live")
	w.checkFeed()
	w.must("heartbeat")
	w.checkFeed()
	w.checkFollowed()
}

// startFollowing records from now on any duplicate row of the feed.
func (w *browserTest) startFollowing() {
	w.t.Helper()
	w.Expect("net::ERR_") // while nobody answers
	w.waitLive()
	w.must("heartbeat")
	w.checkFeed()
	w.Eval(`window.twice = [], new MutationObserver(() => {
		const rows = `+feedRows+`;
		if (new Set(rows).size !== rows.length) twice.push(rows);
	}).observe(document.body, {childList: true, subtree: true}), 1`, new(int))
}

func (w *browserTest) checkFollowed() {
	w.t.Helper()
	w.checkNotReloaded()
	var twice [][]string
	if w.Eval(`twice`, &twice); len(twice) > 0 {
		w.t.Errorf("rows were in the feed twice: %q", twice)
	}
}

func TestPausedUpdates(t *testing.T) {
	t.Parallel()
	w := newBrowserTest(t, browser.Look{})
	w.waitLive()
	w.must("heartbeat")
	w.checkFeed()
	w.Click("#live-pause")
	w.waitState("paused")
	before := w.logEntries()
	w.must("heartbeat")
	fresh := len(w.logEntries()) - len(before)
	w.Until("the title counts what is new", fmt.Sprintf(`document.querySelector("#feed h2 .news")?.textContent === "%d new"`, fresh))
	w.Until("the button counts what waits", `/^Resume \([0-9]+ updates? waiting\)$/.test(document.getElementById("live-pause").textContent)`)
	var shown []string
	if w.Eval(feedRows, &shown); !slices.Equal(shown, before) {
		t.Errorf("the feed went on: %q, it was %q", shown, before)
	}
	w.Click("#live-pause")
	w.checkFeed()
	w.Until("nothing is new", `!document.querySelector("#feed .news") && document.getElementById("live-pause").textContent === "Pause updates"`)
	w.checkNotReloaded()
}

func TestPageWithoutJavaScript(t *testing.T) {
	t.Parallel()
	w := newBrowserTest(t, browser.Look{NoScript: true})
	w.must("heartbeat")
	for _, path := range w.pages() {
		w.Go(w.base + path)
		w.Until(path+" can be read", `document.querySelector("h1").innerText !== "" && document.querySelector("main").innerText.trim() !== "" && !document.querySelector(".trouble")`)
	}
	w.Go(w.base + "/")
	w.checkFeed()
	w.Shows("Live updates need JavaScript")
	w.submitForm("#pause")
	w.Until("it says what was done", `document.querySelector(".flash")?.innerText.includes("Autonomous work is paused.")`)
	contains(t, w.must("heartbeat"), "skipped: autonomous work is paused since", "on a walk")
}

func TestPageByKeyboard(t *testing.T) {
	t.Parallel()
	w := newBrowserTest(t, browser.Look{})
	w.must("heartbeat")
	w.Go(w.base + "/")
	w.waitLive()
	w.Press(kb.Tab)
	w.Until("the first stop is the way past the navigation", `document.activeElement.matches("a.skip")`)
	w.Press(kb.Enter)
	w.Until("it leads to the content", `document.activeElement.id === "main"`)
	w.Press("?")
	w.Until("the help is open", `document.getElementById("help").open && document.getElementById("help").innerText.includes("Executions")`)
	w.Press(kb.Escape)
	w.Until("the help is closed", `!document.getElementById("help").open`)
	w.checkNotReloaded()
	w.keys("ge", "/executions")
	w.Press("j")
	w.Until("a row has the focus", `document.activeElement.matches("main tbody tr")`)
	w.Press(kb.Enter)
	w.Until("the row is opened", `location.pathname.startsWith("/executions/")`)
	w.keys("go", "/")
}

// keys repeats key presses until they reach a path; a chord needs its second key soon after the first.
func (w *browserTest) keys(keys, path string) {
	w.t.Helper()
	w.Until("the page listens", `document.getElementById("help-open")?.hidden === false`)
	pgtest.Eventually(w.t, pgWait, func() bool {
		w.Press(keys)
		var there bool
		w.Eval(fmt.Sprintf(`location.pathname === %q`, path), &there)
		return there
	}, keys+" leads to "+path)
	w.Until("that page listens", fmt.Sprintf(`location.pathname === %q && document.getElementById("help-open")?.hidden === false`, path))
}
