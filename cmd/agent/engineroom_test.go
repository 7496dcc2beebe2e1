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

// walk is somebody who has the Engine Room of a serving agent open, and a terminal on the same database.
type walk struct {
	program
	pool   *pgxpool.Pool
	served *started
	base   string
	*browser.Page
}

// newWalk serves, opens a page and logs in. The page may have no complaint at the end of the test that was not
// expected.
func newWalk(t *testing.T, look browser.Look, settings ...string) *walk {
	t.Helper()
	url := pgtest.URL(t)
	return walkOn(t, on(t, url, settings...), connect(t, url), look)
}

// walkOn is a walk with a program's own settings.
func walkOn(t *testing.T, p program, pool *pgxpool.Pool, look browser.Look) *walk {
	t.Helper()
	p.environ = slices.Concat([]string{token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=0 0 1 1 *"}, p.environ, []string{"AGENT_LOG_LEVEL=info"})
	w := &walk{program: p, pool: pool}
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

// logIn goes to the overview at a port, which has a login of its own.
func (w *walk) logIn(base string) {
	w.t.Helper()
	w.Go(base + "/")
	w.Shows("Log in to the Engine Room")
	w.Type("#token", strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="))
	w.Click("#login button")
	w.Until("the overview is there", `location.pathname === "/" && document.querySelector("#feed")`)
}

// serve starts the agent.
func (w *walk) serve() {
	w.t.Helper()
	w.served = w.start("serve")
	w.base = w.served.find(w.t, `msg=serving listen=(\S+)`)
}

// down ends the agent in good order.
func (w *walk) down() {
	w.t.Helper()
	w.served.stop()
	if code := <-w.served.ended; code != 0 {
		w.t.Fatalf("agent serve: exit %d, stderr: %s", code, w.served.err.String())
	}
}

// live waits until what happens is streamed, and leaves a mark that a reload would take away.
func (w *walk) live() {
	w.t.Helper()
	w.state("live")
	w.Eval(`window.mark = "here"`, new(string))
}

func (w *walk) state(name string) {
	w.t.Helper()
	w.Until("the updates are "+name, fmt.Sprintf(`document.getElementById("live-state").dataset.state === %q`, name))
}

// stayed fails when the page was loaded again since live.
func (w *walk) stayed() {
	w.t.Helper()
	var same bool
	w.Eval(`window.mark === "here"`, &same)
	if !same {
		w.t.Error("the page was loaded again")
	}
}

// logged are the activities, newest first.
func (w *walk) logged() []string {
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

// feedIsLog waits until the feed is the log: each activity once, the newest first. There may be 50 at most.
func (w *walk) feedIsLog() {
	w.t.Helper()
	want, err := json.Marshal(w.logged())
	if err != nil {
		w.t.Fatal(err)
	}
	w.Until("each activity is in the feed once", fmt.Sprintf(`JSON.stringify(%s) === %q`, feedRows, want))
}

// pull opens the lever that is in what a selector finds, gives a reason and sends it.
func (w *walk) pull(selector string) {
	w.t.Helper()
	w.Click(selector + " summary")
	w.Type(selector+" input[name=reason]", "on a walk")
	w.Click(selector + " form button")
}

// rooms are the pages of the navigation.
func (w *walk) rooms() []string {
	w.t.Helper()
	var list []string
	w.Eval(`[...document.querySelectorAll("nav[aria-label=Pages] a")].map(a => a.getAttribute("href"))`, &list)
	if len(list) < 14 {
		w.t.Fatalf("the navigation has %q", list)
	}
	return list
}

func TestWhatTheTerminalDoesIsSeenInTheRoom(t *testing.T) {
	t.Parallel()
	w := newWalk(t, browser.Look{})
	w.Shows("The agent has not done anything yet")
	w.live()
	var beat struct {
		Trace struct {
			TraceID string `json:"trace_id"`
		}
	}
	w.mustJSON(&beat, "heartbeat")
	w.Until("its trace is in the feed", fmt.Sprintf(`document.querySelector('#feed a[href="/traces/%s"]')`, beat.Trace.TraceID))
	w.feedIsLog()
	w.stayed()
	w.Click(fmt.Sprintf(`#feed a[href="/traces/%s"]`, beat.Trace.TraceID))
	w.Until("the trace is there", fmt.Sprintf(`location.pathname === "/traces/%s"`, beat.Trace.TraceID))
	w.Shows("self_heal")
}

// What an admin's turn waits for is decided in the room, and the process that serves goes on with the turn.
func TestAnApprovalIsGivenInTheRoom(t *testing.T) {
	t.Parallel()
	d := newDesk(t, modeltest.ToolCall("wipe", `{}`), modeltest.Text("It is over."))
	w := walkOn(t, d.program, d.pool, browser.Look{})
	w.live()
	if got := d.run("operate", "Wipe."); got.code != exitFailed || !strings.Contains(got.err, "waits for approval") {
		t.Fatalf("exit %d, stderr: %s", got.code, got.err)
	}
	w.Until("the overview asks for it", `document.querySelector("#need-approval li a")`)
	w.stayed()
	w.Click("#need-approval li a")
	w.Until("its page is there", `location.pathname.startsWith("/approvals/") && document.querySelector(".levers")`)
	w.pull(".levers details:nth-of-type(1)")
	w.Shows("The decision is recorded")
	w.Click(`#decision a[href^="/executions/"]`)
	w.Until("its execution is completed", `location.pathname.startsWith("/executions/") && document.querySelector("main .status-completed")`)
	w.Shows("It is over.")
	if got := single[string](t, w.pool, `select a.status || ' ' || x.status from agent_approvals a join agent_executions x on x.id = a.execution_id`); got != "consumed completed" {
		t.Errorf("approval and execution are %s", got)
	}
}

func TestALaneComesAndGoesInTheRoom(t *testing.T) {
	t.Parallel()
	w := newWalk(t, browser.Look{})
	for path, part := range map[string]string{"/": "#locks", "/lanes": "#held"} {
		w.Go(w.base + path)
		w.live()
		w.Until("no lane is held", fmt.Sprintf(`document.querySelector(%q).innerText.includes("No lane is held")`, part))
		if !single[bool](t, w.pool, `select try_acquire_agent_lock('night shift', 'ana', 600)`) {
			t.Fatal("the lane was not to be had")
		}
		w.Until("the lane is shown", fmt.Sprintf(`[...document.querySelectorAll("%s tbody tr")].some(r => r.innerText.includes("night shift") && r.innerText.includes("ana"))`, part))
		if !single[bool](t, w.pool, `select release_agent_lock('night shift', 'ana')`) {
			t.Fatal("the lane was not held")
		}
		w.Until("the lane is gone", fmt.Sprintf(`document.querySelector(%q).innerText.includes("No lane is held")`, part))
		w.stayed()
	}
}

func TestTheAgentIsPausedInTheRoom(t *testing.T) {
	t.Parallel()
	w := newWalk(t, browser.Look{})
	w.pull("#pause")
	w.Shows("Autonomous work is paused.")
	contains(t, w.must("heartbeat"), "skipped: autonomous work is paused since", "on a walk")
	for _, path := range w.rooms() {
		w.Go(w.base + path)
		w.Until("the banner is on "+path, `document.querySelector("#pause.paused").innerText.includes("on a walk")`)
	}
	w.Go(w.base + "/spend")
	w.pull("#pause")
	w.Shows("Autonomous work goes on.")
	w.Until("the banner is gone", `!document.querySelector("#pause.paused")`)
	contains(t, w.must("heartbeat"), "✓ completed")

	w.live()
	w.must("pause", "--reason", "from a terminal")
	w.Until("the banner comes by itself", `document.querySelector("#pause.paused").innerText.includes("from a terminal")`)
	w.must("resume")
	w.Until("the banner goes by itself", `!document.querySelector("#pause.paused")`)
	w.stayed()
}

// A stream that the network broke goes on with what was missed.
func TestNothingIsMissedOrTwiceWhileThePageIsOffline(t *testing.T) {
	t.Parallel()
	w := newWalk(t, browser.Look{})
	between := newWire(t, strings.TrimPrefix(w.base, "http://"))
	w.logIn("http://" + between.Addr().String())
	w.follow()
	w.Offline(true)
	between.cut()
	w.state("waiting")
	w.must("heartbeat")
	var reached bool
	if w.Eval(`fetch("/login", {method: "HEAD"}).then(() => true, () => false)`, &reached); reached {
		t.Error("the page is not offline")
	}
	w.Offline(false)
	w.state("live")
	w.feedIsLog()
	w.must("heartbeat")
	w.feedIsLog()
	w.followed()
}

// So does one that broke because the server began anew.
func TestNothingIsMissedOrTwiceWhenTheServerStartsAgain(t *testing.T) {
	t.Parallel()
	w := newWalk(t, browser.Look{}, "AGENT_LISTEN="+freeAddress(t))
	w.follow()
	w.down()
	w.state("waiting")
	w.must("heartbeat")
	at := w.base
	w.serve()
	if w.base != at {
		t.Fatalf("it came back at %s, not at %s", w.base, at)
	}
	w.state("live")
	w.feedIsLog()
	w.must("heartbeat")
	w.feedIsLog()
	w.followed()
}

// follow looks from now on for rows that are in the feed twice, be it for a moment.
func (w *walk) follow() {
	w.t.Helper()
	w.Expect("net::ERR_") // while nobody answers
	w.live()
	w.must("heartbeat")
	w.feedIsLog()
	w.Eval(`window.twice = [], new MutationObserver(() => {
		const rows = `+feedRows+`;
		if (new Set(rows).size !== rows.length) twice.push(rows);
	}).observe(document.body, {childList: true, subtree: true}), 1`, new(int))
}

func (w *walk) followed() {
	w.t.Helper()
	w.stayed()
	var twice [][]string
	if w.Eval(`twice`, &twice); len(twice) > 0 {
		w.t.Errorf("rows were in the feed twice: %q", twice)
	}
}

func TestUpdatesWaitWhileTheReaderPausesThem(t *testing.T) {
	t.Parallel()
	w := newWalk(t, browser.Look{})
	w.live()
	w.must("heartbeat")
	w.feedIsLog()
	w.Click("#live-pause")
	w.state("paused")
	before := w.logged()
	w.must("heartbeat")
	fresh := len(w.logged()) - len(before)
	w.Until("the title counts what is new", fmt.Sprintf(`document.querySelector("#feed h2 .news")?.textContent === "%d new"`, fresh))
	w.Until("the button counts what waits", `/^Resume \([0-9]+ updates? waiting\)$/.test(document.getElementById("live-pause").textContent)`)
	var shown []string
	if w.Eval(feedRows, &shown); !slices.Equal(shown, before) {
		t.Errorf("the feed went on: %q, it was %q", shown, before)
	}
	w.Click("#live-pause")
	w.feedIsLog()
	w.Until("nothing is new", `!document.querySelector("#feed .news") && document.getElementById("live-pause").textContent === "Pause updates"`)
	w.stayed()
}

func TestTheRoomWithoutJavaScript(t *testing.T) {
	t.Parallel()
	w := newWalk(t, browser.Look{NoScript: true})
	w.must("heartbeat")
	for _, path := range w.rooms() {
		w.Go(w.base + path)
		w.Until(path+" can be read", `document.querySelector("h1").innerText !== "" && document.querySelector("main").innerText.trim() !== "" && !document.querySelector(".trouble")`)
	}
	w.Go(w.base + "/")
	w.feedIsLog()
	w.Shows("Live updates need JavaScript")
	w.pull("#pause")
	w.Until("it says what was done", `document.querySelector(".flash")?.innerText.includes("Autonomous work is paused.")`)
	contains(t, w.must("heartbeat"), "skipped: autonomous work is paused since", "on a walk")
}

func TestTheRoomByKeyboard(t *testing.T) {
	t.Parallel()
	w := newWalk(t, browser.Look{})
	w.must("heartbeat")
	w.Go(w.base + "/")
	w.live()
	w.Press(kb.Tab)
	w.Until("the first stop is the way past the navigation", `document.activeElement.matches("a.skip")`)
	w.Press(kb.Enter)
	w.Until("it leads to the content", `document.activeElement.id === "main"`)
	w.Press("?")
	w.Until("the help is open", `document.getElementById("help").open && document.getElementById("help").innerText.includes("Executions")`)
	w.Press(kb.Escape)
	w.Until("the help is closed", `!document.getElementById("help").open`)
	w.stayed()
	w.keys("ge", "/executions")
	w.Press("j")
	w.Until("a row has the focus", `document.activeElement.matches("main tbody tr")`)
	w.Press(kb.Enter)
	w.Until("the row is opened", `location.pathname.startsWith("/executions/")`)
	w.keys("go", "/")
}

// keys presses keys until they have led to a path: the second counts only soon after the first, and machines are slow.
func (w *walk) keys(keys, path string) {
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
