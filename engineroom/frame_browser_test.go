package engineroom

import (
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// The title and the icon of every page show the number of items that need a person, live.
func TestTitleAndIconShowPendingCount(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/memory")
	p.Until("it is live, and nothing waits",
		isLive+` && document.title === "Memory · agent" && document.getElementById("icon").href.includes("/icon.svg")`)
	id := insertApproval(t, pool, "pending", `{"amount": 5}`, 5)
	waitWithin(t, p, 5*time.Second, "one waits",
		`document.title === "(1) Memory · agent" && document.getElementById("icon").href.includes("icon-waits")`)
	assert.Contains(t, wantTexts(t, server.URL+"/skills"), "<title>(1) Skills · agent</title>")
	rows.Quiet(t, pool, `
		update agent_approvals set status = 'rejected', decided_at = now(), decided_by = 'admin' where id = $1::uuid`, id)
	p.Until("nothing waits",
		`document.title === "Memory · agent" && document.getElementById("icon").href.includes("/icon.svg")`)
	wantNoBrowserErrors(t, p)
}

// A click asks for permission. An approval notifies once over all tabs.
func TestNewApprovalNotifiesOnce(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/lanes")
	p.Until("the page is live", isLive)
	const fake = `(w) => {
		w.told = [];
		w.asked = 0;
		w.Notification = class { constructor(text) { w.told.push(text); } };
		w.Notification.permission = "default";
		w.Notification.requestPermission = async () => { w.asked++; w.Notification.permission = "granted"; return "granted"; };
	}`
	p.Eval(`(`+fake+`)(window)`, nil)
	insertApproval(t, pool, "pending", `{"amount": 1}`, 5)
	p.Until("one waits", `document.title.startsWith("(1)")`)
	var asked int
	p.Eval(`asked`, &asked)
	assert.Equal(t, 0, asked, "the page asks for permission without a click")
	p.Click("#notify")
	p.Until("it is on", `document.getElementById("notify").getAttribute("aria-pressed") === "true" && asked === 1`)
	insertApproval(t, pool, "pending", `{"amount": 2}`, 5)
	// The last count is younger than pendingTTL. It must not hide this approval until the next change.
	waitWithin(t, p, 10*time.Second, "one was told", `told.length === 1 && told[0].startsWith("Approval requested: ")`)
	// The test plays a second tab by writing localStorage, since each test page has its own profile.
	// A tab does not repeat the announcement of another tab. This lock request queues behind that of the announcement.
	decided := func() { p.Eval(`navigator.locks.request("lanekeeper-notify", () => null)`, nil) }
	p.Eval(`localStorage.setItem("lanekeeper-announced", "ffffffff-ffff-7fff-bfff-ffffffffffff")`, nil)
	insertApproval(t, pool, "pending", `{"amount": 3}`, 5)
	p.Until("three wait", `document.title.startsWith("(3)")`)
	decided()
	p.Eval(`localStorage.setItem("lanekeeper-announced", "")`, nil)
	p.Click("#notify")
	insertApproval(t, pool, "pending", `{"amount": 4}`, 5)
	p.Until("four wait", `document.title.startsWith("(4)")`)
	decided()
	var told int
	p.Eval(`told.length`, &told)
	assert.Equal(t, 1, told)
	wantNoBrowserErrors(t, p)
}

// An action that only its row shows as running is shown as stopped, without a running clock.
func TestHaltedActionIsNotRunning(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	begin := func(name, execution string) {
		rows.Quiet(t, pool, `
			insert into agent_activity (trace_id, surface, kind, skill_name, status, execution_id, claim, created_at)
			select trace_id, surface, 'call', $2, 'running', id, claim, clock_timestamp() - interval '90 seconds'
			  from agent_executions where id = $1::text::uuid`, execution, name)
	}
	worker := func(left string) string {
		return insert(t, pool, `insert into agent_workers (id, name, expires_at)
			values (gen_random_uuid(), 'a worker', clock_timestamp() + $1::text::interval) returning id::text`, left)
	}
	claimed := func(left string) string {
		id := rows.Execution(t, pool, "running", "flow", "onboarding")
		rows.Quiet(t, pool, `
			update agent_executions set claimed_by = $1::text::uuid, claim = 1 where id = $2::text::uuid`, worker(left), id)
		return id
	}
	cancelled, lost, working := rows.Execution(t, pool, "cancelled", "flow", "stopped"), claimed("-20 seconds"),
		claimed("1 hour")
	begin("waiting_tool", rows.Execution(t, pool, "waiting", "flow", "onboarding"))
	begin("stopped_tool", cancelled)
	begin("lost_tool", lost)
	begin("working_tool", working)
	p := browser.Open(t, browser.Look{})
	for _, path := range []string{"/activity", "/"} {
		p.Go(server.URL + path)
		row := func(skill string) string {
			return `[...document.querySelectorAll("tr[data-row]")].find((r) => r.textContent.includes("` + skill + `"))`
		}
		p.Until(path+" says that it waits", row("waiting_tool")+`.querySelector(".status-waiting") && !`+
			row("waiting_tool")+`.querySelector("time.since")`)
		p.Until(path+" says that it stopped",
			row("stopped_tool")+`.textContent.includes("stopped") && !`+row("stopped_tool")+`.querySelector("time.since")`)
		p.Until(path+" says that its worker is lost",
			row("lost_tool")+`.textContent.includes("worker lost") && /1 min/.test(`+
				row("lost_tool")+`.textContent) && !`+row("lost_tool")+`.querySelector("time.since")`)
		p.Until(path+" counts for what runs", row("working_tool")+`.querySelector("time.since") !== null`)
	}
	for _, path := range []string{"/executions", "/executions/" + lost} {
		p.Go(server.URL + path)
		p.Shows("worker lost")
	}
	wantNoBrowserErrors(t, p)
}

// The server and the browser format a value alike.
func TestBrowserFormatsValuesLikeServer(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../internal/human/testdata/examples.json")
	require.NoError(t, err)
	var examples map[string][][2]any
	require.NoError(t, json.Unmarshal(text, &examples))
	l := serveRowList(t)
	p := browser.Open(t, browser.Look{})
	p.Go(l.url)
	for name, list := range examples {
		input, err := json.Marshal(list)
		require.NoError(t, err)
		var got []string
		p.Eval(`JSON.parse(`+quoteJSON(t, string(input))+`).map(([value]) => human.`+name+`(value))`, &got)
		for i, e := range list {
			if got[i] != e[1] {
				t.Errorf("human.%s(%v) = %q in the browser, want %q", name, e[0], got[i], e[1])
			}
		}
	}
}

// A planned time in the past is shown as due.
func TestPastPlannedRunIsDue(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertAutomation(t, pool, "weekly")
	rows.Quiet(t, pool, `
		update agent_automations set next_run_at = now() - interval '3 minutes' where name = $1`, "weekly")
	assert.Contains(t, wantTexts(t, server.URL+"/automations"), `">due</time>`)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/automations")
	p.Until("it is due", `document.querySelector("#list time.next").textContent === "due"`)
	next := func(ms int) { // from now
		p.Eval(fmt.Sprintf(`document.querySelector("#list time.next").dateTime = new Date(Date.now() + %d).toISOString()`,
			ms), nil)
	}
	next(3_600_000)
	p.Until("the moment is shown", `/\d\d:\d\d:\d\d$/.test(document.querySelector("#list time.next").textContent)`)
	next(1500)
	p.Until("it passes", `document.querySelector("#list time.next").textContent === "due"`)
	wantNoBrowserErrors(t, p)
}
