package engineroom

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// serveConsole serves the room with the test's own API.
func serveConsole(t *testing.T, api map[string]http.HandlerFunc) (*pgxpool.Pool, string) {
	t.Helper()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		if r.Path != "/act/v1/operate" {
			mux.Handle(r.Method+" "+r.Path, r.Handler)
		}
	}
	for pattern, handler := range api {
		mux.HandleFunc(pattern, handler)
	}
	server := httptest.NewUnstartedServer(mux)
	serverCtx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	server.Config.BaseContext = func(net.Listener) context.Context { return serverCtx }
	server.Start()
	t.Cleanup(func() {
		end()
		server.Close()
	})
	return pool, server.URL
}

// streamTurn answers with events. With stay, the stream stays open until the test or the page ends.
func streamTurn(stay bool, list ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, startEvent)
		for _, e := range list {
			fmt.Fprint(w, e)
		}
		w.(http.Flusher).Flush()
		if stay {
			<-r.Context().Done()
		}
	}
}

func turnEvent(t *testing.T, name string, data any) string {
	t.Helper()
	text, err := json.Marshal(data)
	require.NoError(t, err)
	return fmt.Sprintf("event: %s\ndata: %s\n\n", name, text)
}

func respond(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, body)
	}
}

const inWindow = `(() => { const r = document.querySelector(".approval .decide").getBoundingClientRect(),
	c = document.getElementById("say").getBoundingClientRect(); return r.top >= 0 && r.bottom <= c.top + 1 })()`

// An approval is fully visible above the composer. A line there announces one out of view.
func TestApprovalInSessionIsVisibleOrLinked(t *testing.T) {
	t.Parallel()
	decided := make(chan string, 1)
	_, url := serveConsole(t, map[string]http.HandlerFunc{
		"POST /v1/operate": streamTurn(true,
			turnEvent(t, "delta", map[string]string{"text": strings.Repeat("A line of the answer.\n\n", 40)}),
			turnEvent(t, "approval", map[string]any{
				"id": "a1", "skill": "refund", "expires_at": "2030-01-01T00:00:00Z",
				"arguments": map[string]any{"order": "A-1001", "amount": 120.5, "why": strings.Repeat("late ", 20)},
			})),
		"POST /v1/approvals/a1": func(w http.ResponseWriter, r *http.Request) {
			var body struct{ Decision string }
			if json.NewDecoder(r.Body).Decode(&body) == nil {
				decided <- body.Decision
			}
			respond(`{}`)(w, r)
		},
	})
	p := browser.Open(t, browser.Look{Width: 1440, Height: 900})
	p.Go(url + "/operate")
	p.Type("#message", "refund order A-1001")
	p.Click("#send")
	p.Shows("Approval requested: refund")
	p.Until("the buttons of the approval are above the composer", inWindow)
	p.Until("the time left is shown", `(() => {
		const until = document.querySelector(".approval time");
		return until?.dateTime === "2030-01-01T00:00:00Z" && until.textContent.startsWith("in ");
	})()`)
	p.Until("no line is needed", `document.getElementById("asked-line").hidden`)
	p.Eval(`scrollTo(0, 0), 1`, new(int))
	p.Shows("1 approval requested: show")
	wantNoBrowserErrors(t, p)
	p.Click("#asked-link")
	p.Until("the approval is in view again", inWindow+` && document.activeElement.value === "approve"`)
	p.Press("\r")
	p.Shows("Approved.")
	assert.Equal(t, "approve", <-decided, "the decision")
	p.Until("no line is left", `document.getElementById("asked-line").hidden && !document.querySelector(".decide")`)
	p.Until("the composer is in the window",
		`document.getElementById("say").getBoundingClientRect().bottom <= innerHeight + 1`)
	wantNoBrowserErrors(t, p)
}

// A call that ended with its stopped turn is not shown as running.
func TestStoppedToolIsNotShownAsRunning(t *testing.T) {
	t.Parallel()
	_, url := serveConsole(t, map[string]http.HandlerFunc{
		"POST /v1/operate": streamTurn(false, turnEvent(t, "tool", map[string]any{
			"id": "t1", "name": "long_import", "arguments": map[string]int{"rows": 9}, "status": "started",
		})),
		"POST /v1/executions/{id}/cancel": respond(`{}`),
		"GET /v1/executions/{id}":         respond(`{"status":"cancelled","cancel_reason":"stopped in the console"}`),
		"GET /v1/activity":                respond(`{"items":[]}`),
	})
	p := browser.Open(t, browser.Look{})
	p.Go(url + "/operate")
	p.Type("#message", "import")
	p.Click("#send")
	p.Shows("The turn was cancelled")
	p.Until("the call has stopped", `document.querySelector(".bubble-tool").textContent.includes("⊘ stopped")`)
	text := p.Text("#transcript")
	assert.Truef(t, !strings.Contains(text, "running"), "the transcript still shows a running call: %s", text)
	wantNoBrowserErrors(t, p)
}

func TestAnswersAreSafeMarkdown(t *testing.T) {
	t.Parallel()
	const text = "## Result\n\n**12** rows, [docs](https://example.com/a) and [no](javascript:alert(1))\n\n" +
		"| a | b |\n|---|---|\n| 1 | 2 |\n\n```sql\nselect 1;\n```\n\n" +
		"<b>raw</b> <img src=x onerror=alert(1)> مرحبا ![p](https://evil.example/p.png)"
	pool, url := serveConsole(t, map[string]http.HandlerFunc{
		"POST /v1/operate": streamTurn(false, turnEvent(t, "delta", map[string]string{"text": text}), doneEvent),
	})
	p := browser.Open(t, browser.Look{Width: 1440, Height: 900})
	const isFormatted = `(() => {
		const text = document.querySelector(".bubble-assistant .said");
		return text && text.querySelector("h2, h3") && text.querySelector("strong").textContent === "12" &&
			text.querySelector("table td") && text.querySelector(".block button") &&
			text.querySelector("a[href='https://example.com/a']").rel.includes("noopener") &&
			!text.querySelector("b, img, script, [onerror], a[href^=javascript]") &&
			text.textContent.includes("<b>raw</b>");
	})()`
	p.Go(url + "/operate")
	p.Type("#message", "hello")
	p.Click("#send")
	p.Shows("Done. Trace")
	p.Until("a streamed answer is formatted", isFormatted)
	wantNoBrowserErrors(t, p)
	insertSession(t, pool, "hello", text, true)
	p.Go(url + "/operate?session=" + aSession)
	p.Until("a stored answer is formatted", isFormatted)
	clickCopy(p, ".said .block button")
	wantNoBrowserErrors(t, p)
}

func TestCommandsAreSuggestedAndRun(t *testing.T) {
	t.Parallel()
	requests := make(chan string, 4)
	record := func(w http.ResponseWriter, r *http.Request) {
		var body map[string]string
		_ = json.NewDecoder(r.Body).Decode(&body)
		requests <- fmt.Sprint(r.Method, " ", r.URL.Path, " ", body)
		respond(`{}`)(w, r)
	}
	pool, url := serveConsole(t, map[string]http.HandlerFunc{
		"POST /v1/pause": record, "PATCH /v1/threads/{id}": record,
		"GET /v1/skills": respond(`{"items":[{"name":"fetch","description":"reads a page","enabled":false}]}`),
	})
	insertSession(t, pool, "hello", "hi", true)
	p := browser.Open(t, browser.Look{})
	p.Go(url + "/operate?session=" + aSession)
	p.Type("#message", "/")
	p.Until("all are listed", `document.querySelectorAll("#commands [role=option]").length > 8`)
	wantNoBrowserErrors(t, p)
	p.Type("#message", "ski")
	p.Press("\r")
	p.Until("the list has a link", `document.querySelector("#transcript a[href='/skills/fetch']") !== null`)
	p.Eval(`document.body.dataset.may = "operate approvals:read"`, nil) // a token with fewer scopes than the role
	p.Type("#message", "/skills\r")
	p.Until("the second list has no link", `document.querySelectorAll("#transcript ul").length === 2 &&
		document.querySelectorAll("#transcript li a").length === 2 &&
		document.querySelectorAll("#transcript li a[href]").length === 1`)
	p.Type("#message", "/pause")
	p.Press(kb.Tab)
	p.Until("it is completed",
		`document.getElementById("message").value === "/pause " && document.getElementById("commands").hidden`)
	p.Type("#message", "a release\r")
	p.Shows("Autonomous work is paused.")
	assert.Equal(t, "POST /v1/pause map[reason:a release]", <-requests, "asked")
	p.Type("#message", "/pause")
	p.Eval(`document.getElementById("message").dispatchEvent(new KeyboardEvent("keydown",
		{key: "Enter", ctrlKey: true, bubbles: true, cancelable: true})), 1`, new(int))
	p.Shows("Not done: name a reason: /pause REASON")
	p.Until("the box is empty", `document.getElementById("message").value === ""`)
	p.Type("#message", "/rename Prices\r")
	p.Until("the session has its name", `document.getElementById("session-title").textContent === "Prices"`)
	assert.Equal(t, "PATCH /v1/threads/"+aSession+" map[title:Prices]", <-requests, "asked")
	p.Type("#message", "/nothing\r")
	p.Shows("there is no command /nothing")
	p.Type("#message", "/help\r")
	p.Shows("/objectives list objectives")
	wantNoBrowserErrors(t, p)
}

// insertWaitingTurn inserts a turn that waits for an approval after one call.
func insertWaitingTurn(t *testing.T, pool *pgxpool.Pool) (approval string) {
	t.Helper()
	insertSession(t, pool, "refund order A-1001", "", false)
	var id, trace string
	require.NoError(t, pool.QueryRow(t.Context(), `select id::text, trace_id from agent_executions
		where thread_id = $1 and completed_at is null`, aSession).Scan(&id, &trace))
	call := pgtest.Value[string](t, pool, `
		insert into agent_activity (trace_id, execution_id, surface, skill_name, status, input, output, duration_ms)
		values ($1, $2::uuid, 'operate', 'read_order', 'success', '{"order": "A-1001"}', '{"total": 120.5}', 31)
		returning id::text`,
		trace, id)
	require.True(t, call != "", "no call")
	approval = insertApproval(t, pool, "pending", `{"order": "A-1001", "amount": 120.50}`, 5)
	rows.Quiet(t, pool, fmt.Sprintf(`
		update agent_approvals set execution_id = '%s', trace_id = '%s', parked = true, step = 's'
		where id = '%s'`, id, trace, approval))
	rows.Quiet(t, pool, fmt.Sprintf(`
		update agent_executions set status = 'waiting', waiting_for = 'approval', waiting_key = '%s',
		waiting_until = now() + interval '1 day' where id = '%s'`, approval, id))
	return approval
}

func TestSessionAfterReloadAndWithoutScript(t *testing.T) {
	t.Parallel()
	pool, url := serveConsole(t, nil)
	insertSession(t, pool, "what did you do?", "I **read** the orders.", true)
	approval := insertWaitingTurn(t, pool)
	p := browser.Open(t, browser.Look{NoScript: true, Width: 390, Height: 844})
	p.Go(url + "/operate?session=" + aSession)
	text := p.Text("main")
	assert.Contains(t, text, "what did you do?", "I **read** the orders.", "read_order", "1 approval requested: show",
		"Approval requested: drop", `"amount": 120.50`, "Approve", "Reject", "Rename", "Sessions")
	p.As(browser.Look{Width: 320, Height: 700})
	p.Expect("404") // this test has no API
	p.Go(url + "/operate?session=" + aSession)
	p.Until("the answer is drawn", `document.querySelector(".bubble-assistant strong") !== null`)
	p.Until("the approval is in view", inWindow)
	var width int64
	p.Eval(`document.documentElement.scrollWidth`, &width)
	assert.Truef(t, width <= 320, "the page is %d wide", width)
	p.Go(url + "/operate?session=" + aSession + "&q=did+you")
	p.Until("a session is found by its first message", `document.querySelectorAll("#sessions li").length === 1`)
	p.Go(url + "/operate?q=nothing+like+it")
	p.Shows("No match among the newest")
	wantNoBrowserErrors(t, p)
	wantTexts(t, url+"/operate?session="+aSession, "approval-"+approval)
	rows.Quiet(t, pool, fmt.Sprintf(`
		with turn as (update agent_executions set waiting_for = 'agent' where waiting_for = 'approval' returning *),
		     task as (insert into agent_executions (flow, surface, trace_id, parent_id, status, waiting_for, waiting_until)
		              select 'delegate', surface, trace_id, id, status, 'approval', waiting_until from turn returning id)
		update agent_approvals set execution_id = (select id from task) where id = '%s'`, approval))
	wantTexts(t, url+"/operate?session="+aSession, "approval-"+approval, "<strong>approval requested</strong>")
}

// A network may drop a connection silently. The page then looks for the turn.
func TestSilentStreamOfTurnIsClosed(t *testing.T) {
	t.Parallel()
	_, url := serveConsole(t, map[string]http.HandlerFunc{
		"POST /v1/operate":        streamTurn(true, turnEvent(t, "delta", map[string]string{"text": "It is"})),
		"GET /v1/executions/{id}": respond(`{"id": "x-1", "status": "completed", "result": {"text": "It is done."}}`),
		"GET /v1/activity":        respond(`{"items": []}`),
	})
	p := browser.Open(t, browser.Look{})
	p.Go(url + "/operate")
	p.Eval(`(() => { // the patience of the page ends when the test says so
		const real = setTimeout;
		window.setTimeout = (f, ms) => ms === 35000 ? (window.patience = f, 0) : real(f, ms);
		return 1;
	})()`, new(int))
	p.Type("#message", "is it?")
	p.Click("#send")
	p.Shows("It is")
	p.Eval(`(patience(), 1)`, new(int))
	p.Shows("It is done.")
	p.Until("the turn has ended", `!document.getElementById("send").disabled`)
	p.Until("half of the answer is gone", `document.querySelectorAll("#transcript .bubble-assistant").length === 1`)
}

// The server gets the second message, and its answer is lost. The first turn had the same message.
func TestTurnWithoutAnswerIsFound(t *testing.T) {
	t.Parallel()
	var sent, lists atomic.Int64
	item := func(id string) string {
		return fmt.Sprintf(`{"id": %q, "thread_id": %q, "trace_id": "op_2", "created_at": %q, "input": {"message": "yes"}}`,
			id, aSession, time.Now().UTC().Format(time.RFC3339))
	}
	_, url := serveConsole(t, map[string]http.HandlerFunc{
		"POST /v1/operate": func(w http.ResponseWriter, r *http.Request) {
			if sent.Add(1) > 1 {
				panic(http.ErrAbortHandler)
			}
			streamTurn(false, turnEvent(t, "delta", map[string]string{"text": "First."}), doneEvent)(w, r)
		},
		"GET /v1/executions": func(w http.ResponseWriter, r *http.Request) {
			items := item(consoleExecution)
			if lists.Add(1) > 1 {
				items = item("x-2") + ", " + items
			}
			respond(`{"items": [`+items+`]}`)(w, r)
		},
		"GET /v1/executions/x-2": respond(`{"id": "x-2", "status": "completed", "result": {"text": "Second."}}`),
		"GET /v1/activity":       respond(`{"items": []}`),
	})
	p := browser.Open(t, browser.Look{})
	p.Go(url + "/operate")
	for _, answer := range []string{"First.", "Second."} {
		p.Type("#message", "yes")
		p.Click("#send")
		p.Shows(answer)
		p.Until("the turn has ended", `!document.getElementById("send").disabled`)
	}
	p.Until("the message is not offered again", `document.getElementById("message").value === ""`)
}

// Another process continues after a crash. It replaces a partial answer, and keeps a text before an approval.
func TestTurnIsShownOnceAfterBrokenStream(t *testing.T) {
	t.Parallel()
	delta := func(text string) string { return turnEvent(t, "delta", map[string]string{"text": text}) }
	row := func(text string) string {
		return fmt.Sprintf(`{"id": %[1]q, "kind": "model", "status": "success", "output": {"content": %[1]q}}`, text)
	}
	for name, test := range map[string]struct {
		stream, log []string
		want        string
	}{
		"half answer": {[]string{delta("It is ha")}, nil, "It is done."},
		"approval": {[]string{delta("May I?"), turnEvent(t, "approval", map[string]string{
			"id": "a", "skill": "drop", "arguments": "{}", "expires_at": "2999-01-01T00:00:00Z",
		})}, []string{row("May I?")}, "May I?|It is done."},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var requests atomic.Int64
			_, url := serveConsole(t, map[string]http.HandlerFunc{
				"POST /v1/operate": streamTurn(false, test.stream...),
				"GET /v1/executions/{id}": func(w http.ResponseWriter, r *http.Request) {
					status := "running"
					if requests.Add(1) > 2 {
						status = "completed"
					}
					respond(`{"status": "`+status+`", "result": {"text": "It is done."}}`)(w, r)
				},
				"GET /v1/activity": func(w http.ResponseWriter, r *http.Request) {
					items := test.log
					if requests.Load() >= 2 { // newest first
						items = append([]string{row("It is done.")}, items...)
					}
					respond(`{"items": [`+strings.Join(items, ", ")+`]}`)(w, r)
				},
			})
			p := browser.Open(t, browser.Look{})
			p.Go(url + "/operate")
			p.Type("#message", "is it?")
			p.Click("#send")
			p.Until("each text is there once", `!document.getElementById("send").disabled &&
				[...document.querySelectorAll("#transcript .bubble-assistant .said")]
					.map(e => e.innerText.trim()).join("|") === "`+test.want+`"`)
		})
	}
}
