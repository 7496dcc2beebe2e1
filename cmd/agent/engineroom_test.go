package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// browserTest is a browser at the Engine Room of a serving agent, and a terminal on the same database.
type browserTest struct {
	program
	pool   *pgxpool.Pool
	server *started
	base   string
	*browser.Page
}

// newBrowserTest serves and opens the Engine Room.
func newBrowserTest(t *testing.T, p program, pool *pgxpool.Pool) *browserTest {
	t.Helper()
	p.environ = slices.Concat([]string{token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_HEARTBEAT_CRON=0 0 1 1 *"}, p.environ,
		[]string{"AGENT_LOG_LEVEL=info"})
	server := p.start("serve")
	w := openEngineRoom(t, p, pool, server.find(t, `msg=serving listen=(\S+)`))
	w.server = server
	return w
}

// openEngineRoom opens the overview of a serving agent and logs in. Unexpected browser errors fail the test at its end.
func openEngineRoom(t *testing.T, p program, pool *pgxpool.Pool, base string) *browserTest {
	t.Helper()
	w := &browserTest{program: p, pool: pool, base: base, Page: browser.Open(t, browser.Look{})}
	t.Cleanup(func() {
		list := w.Problems()
		assert.Truef(t, len(list) == 0, "the browser complains:\n%s", strings.Join(list, "\n"))
	})
	w.Go(w.base + "/")
	w.Shows("Log in to the Engine Room")
	w.Type("#token", strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="))
	w.Click("#login button")
	w.Until("the overview is there", `location.pathname === "/" && document.querySelector("#feed")`)
	return w
}

// serve starts the agent.
func (w *browserTest) serve() {
	w.t.Helper()
	w.server = w.start("serve")
	w.base = w.server.find(w.t, `msg=serving listen=(\S+)`)
}

// waitLive waits for the stream and sets a mark that a reload would remove.
func (w *browserTest) waitLive() {
	w.t.Helper()
	w.Until("the updates are live", `document.getElementById("live-state").dataset.state === "live"`)
	w.Eval(`window.mark = "here"`, new(string))
}

// checkNotReloaded fails if the page was reloaded after waitLive.
func (w *browserTest) checkNotReloaded() {
	w.t.Helper()
	var same bool
	w.Eval(`window.mark === "here"`, &same)
	assert.True(w.t, same, "the page was loaded again")
}

// checkFeed waits until the feed equals the log: each activity once, newest first, at most 50.
func (w *browserTest) checkFeed() {
	w.t.Helper()
	newest := pgtest.Column[string](w.t, w.pool, `select id::text from agent_activity order by id desc limit 12`)
	want, err := json.Marshal(newest)
	require.NoError(w.t, err)
	w.Until("the newest activities are in the feed, each once",
		fmt.Sprintf(`JSON.stringify([...document.querySelectorAll("#feed tr[data-row]")].map(r => r.dataset.row)) === %q`,
			want))
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
	require.Truef(w.t, len(list) >= 14, "the navigation has %q", list)
	return list
}

// A page link without a login, or with an expired one, leads to the login and back to the page.
func TestLoginRedirectsToRequestedPage(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	w := newBrowserTest(t, newProgram(t, url), connect(t, url))
	const deep = "/executions?status=failed&flow=a%2Bb%26c"
	logIn := func(p *browser.Page, place string) {
		t.Helper()
		p.Until("the login is asked for", `location.pathname === "/login" && document.querySelector("#token")`)
		p.Type("#token", strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="))
		p.Click("#login button")
		p.Until("the login leads back", fmt.Sprintf(`location.pathname + location.search === %q`, place))
	}
	fresh := browser.Open(t, browser.Look{}) // without a cookie
	fresh.Go(w.base + deep)
	fresh.Expect("401")
	fresh.Type("#token", "wrong")
	fresh.Click("#login button")
	fresh.Shows("This is not the admin token.")
	logIn(fresh, deep)
	list := fresh.Problems()
	assert.Truef(t, len(list) == 0, "the browser complains:\n%s", strings.Join(list, "\n"))

	expire := func() {
		pgtest.Exec(t, w.pool, `update agent_sessions set expires_at = clock_timestamp() - interval '1 second'`)
	}
	w.Expect("401")
	w.Go(w.base + deep)
	w.waitLive()
	expire()
	w.Until("the page says that the login has ended",
		`document.querySelector("#live-state").textContent.includes("The login has ended")`)
	w.Click("#live-state a")
	logIn(w.Page, deep)
	expire()
	w.Click(`nav[aria-label=Pages] a[href="/traces"]`)
	logIn(w.Page, "/traces")
	w.Go(w.base + deep)
	expire()
	w.Go(w.base + deep)
	logIn(w.Page, deep)
}

func TestPageShowsCommands(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	w := newBrowserTest(t, newProgram(t, url), connect(t, url))
	w.Shows("No activity yet")
	w.waitLive()
	var beat struct {
		Trace struct {
			TraceID string `json:"trace_id"`
		}
	}
	w.mustJSON(&beat, "heartbeat")
	w.Until("its trace is in the feed",
		fmt.Sprintf(`document.querySelector('#feed a[href="/traces/%s"]')`, beat.Trace.TraceID))
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
	w := newBrowserTest(t, d.program, d.pool)
	w.waitLive()
	if got := d.run("operate", "Wipe."); got.code != exitFailed || !strings.Contains(got.err, "waits for approval") {
		t.Fatalf("exit %d, stderr: %s", got.code, got.err)
	}
	w.Until("the overview asks for it", `document.querySelector("#need-approval li a")`)
	w.checkNotReloaded()
	w.Click("#need-approval li a")
	w.Until("its page is there", `location.pathname.startsWith("/approvals/") && document.querySelector("form.decide")`)
	w.Click(`form.decide [value="approve"]`)
	w.Shows("The decision is recorded")
	w.Click(`#decision a[href^="/executions/"]`)
	w.Until("its execution is completed",
		`location.pathname.startsWith("/executions/") && document.querySelector("main .status-completed")`)
	w.Shows("It is over.")
	pgtest.Equal(t, w.pool, "consumed completed", `select a.status || ' ' || x.status from agent_approvals a
		join agent_executions x on x.id = a.execution_id`)
}

func TestPauseOnPage(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	w := newBrowserTest(t, newProgram(t, url), connect(t, url))
	w.submitForm("#pause")
	w.Shows("Autonomous work is paused.")
	assert.Contains(t, w.must("heartbeat"), "skipped: autonomous work is paused since", "on a walk")
	for _, path := range w.pages() {
		w.Go(w.base + path)
		w.Until("the banner is on "+path, `document.querySelector("#pause.paused").innerText.includes("on a walk")`)
	}
	w.Go(w.base + "/spend")
	w.submitForm("#pause")
	w.Shows("Autonomous work is resumed.")
	w.Until("the banner is gone", `!document.querySelector("#pause.paused")`)
	assert.Contains(t, w.must("heartbeat"), "✓ completed")

	w.waitLive()
	w.must("pause", "--reason", "from a terminal")
	w.Until("the banner comes by itself", `document.querySelector("#pause.paused").innerText.includes("from a terminal")`)
	w.must("resume")
	w.Until("the banner goes by itself", `!document.querySelector("#pause.paused")`)
	w.checkNotReloaded()
}

// After a restart of the server the stream resumes with the missed rows.
func TestFeedAfterServerRestart(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	w := newBrowserTest(t, newProgram(t, url, "AGENT_LISTEN="+testkit.FreeAddress(t)), connect(t, url))
	w.Expect("net::ERR_") // while no server runs
	w.waitLive()
	w.must("heartbeat")
	w.checkFeed()
	w.server.stop()
	require.Equal(t, 0, <-w.server.ended, w.server.err.String())
	w.must("heartbeat")
	w.serve()
	w.checkFeed()
	w.must("heartbeat")
	w.checkFeed()
	w.checkNotReloaded()
}
