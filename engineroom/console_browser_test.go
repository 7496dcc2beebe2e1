package engineroom

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

const (
	consoleTrace     = "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE"
	consoleExecution = "018f0000-0000-7000-8000-000000000000"

	startEvent = `event: start
data: {"trace_id":"` + consoleTrace + `","session_id":"` + aSession + `","execution_id":"` + consoleExecution + `"}

`
	doneEvent = `event: done
data: {"ended":"answered","trace_id":"` + consoleTrace + `"}

`
)

// fakeAPI answers the console's API calls. The message of a turn selects the response.
type fakeAPI struct {
	approve   func()        // closes approved
	approved  chan struct{} // closed by the approval of the requested call
	cutStream func()        // closes streamCut
	streamCut chan struct{} // ends the stream of the message "break"

	mu       sync.Mutex
	requests []string // method, path and body of every request
	keys     []string // idempotency keys of the turns
	status   string   // of the execution, after its stream has broken
}

func newFakeAPI() *fakeAPI {
	f := &fakeAPI{approved: make(chan struct{}), streamCut: make(chan struct{}), status: "running"}
	f.approve = sync.OnceFunc(func() { close(f.approved) })
	f.cutStream = sync.OnceFunc(func() { close(f.streamCut) })
	return f
}

// record stores a request and returns its body.
func (f *fakeAPI) record(r *http.Request) (body string) {
	text, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = append(f.requests, r.Method+" "+r.URL.RequestURI()+" "+string(text))
	return string(text)
}

func (f *fakeAPI) setStatus(status string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.status = status
}

func (f *fakeAPI) currentStatus() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.status
}

// wantRequest checks that the API got a request with all texts.
func (f *fakeAPI) wantRequest(t *testing.T, texts ...string) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	found := slices.ContainsFunc(f.requests, func(request string) bool {
		return !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(request, text) })
	})
	assert.Truef(t, found, "no request has %q: %q", texts, f.requests)
}

// operate answers a turn.
func (f *fakeAPI) operate(t *testing.T) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body := f.record(r)
		f.mu.Lock()
		f.keys = append(f.keys, r.Header.Get("Idempotency-Key"))
		f.mu.Unlock()
		send := func(text string) {
			io.WriteString(w, text)
			w.(http.Flusher).Flush()
		}
		waitFor := func(signal chan struct{}) {
			select {
			case <-signal:
			case <-r.Context().Done():
			}
		}
		if strings.Contains(body, `busy"`) && !strings.Contains(body, `"wait":true`) {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusConflict)
			send(`{"status":409,"detail":"lane operate is held by <b>ana</b>","holder":"ana"}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		send("")
		if strings.Contains(body, "break early") { // before the first event
			panic(http.ErrAbortHandler)
		}
		send(startEvent)
		switch {
		case strings.Contains(body, "break"):
			waitFor(f.streamCut)
			panic(http.ErrAbortHandler)
		case strings.Contains(body, "approve"):
			send(`event: approval
data: {"id":"a1","skill":"drop","arguments":{"table":"<i>all</i>","rows":9007199254740993},` +
				`"expires_at":"2030-01-01T00:00:00Z"}` + "\n\n")
			waitFor(f.approved)
			send(turnEvent(t, "delta", map[string]string{"text": "Dropped."}) + doneEvent)
		default:
			call := map[string]any{
				"id": "t1", "name": "look", "arguments": map[string]string{"q": hostile}, "status": "started",
			}
			send(turnEvent(t, "delta", map[string]string{"text": "wrong"}))
			send(turnEvent(t, "restart", map[string]any{}))
			send(turnEvent(t, "tool", call))
			call["status"], call["result"], call["duration_ms"] = "success", 7, 12
			send(turnEvent(t, "tool", call))
			send(turnEvent(t, "delta", map[string]string{"text": "Here: "}))
			send(turnEvent(t, "delta", map[string]string{"text": hostile}))
			send(doneEvent)
		}
	}
}

// serveOther answers the requests for approvals and executions.
func (f *fakeAPI) serveOther(w http.ResponseWriter, r *http.Request) {
	body := f.record(r)
	w.Header().Set("Content-Type", "application/json")
	switch {
	case strings.HasPrefix(r.URL.Path, "/v1/approvals/"):
		if strings.Contains(body, "approve") {
			f.approve()
		}
		io.WriteString(w, `{}`)
	case strings.HasSuffix(r.URL.Path, "/cancel"):
		f.setStatus("cancelled")
		io.WriteString(w, `{}`)
	case r.URL.Path == "/v1/executions":
		fmt.Fprintf(w, `{"items": [{
			"id": %q, "trace_id": %q, "thread_id": %q,
			"input": {"message": "break early"}, "created_at": "2999-01-01T00:00:00Z"
		}], "next_cursor": null}`, consoleExecution, consoleTrace, aSession)
	default:
		fmt.Fprintf(w, `{"status": %q, "cancel_reason": "stopped", "result": {"text": "It went on."}, "result_summary": ""}`,
			f.currentStatus())
	}
}

// openConsole opens the console for a new session with the agent billing, over a fake API.
func openConsole(t *testing.T) (*browser.Page, *fakeAPI, *pgxpool.Pool, string) {
	t.Helper()
	api := newFakeAPI()
	pool, url := serveConsole(t, map[string]http.HandlerFunc{
		"POST /v1/operate": api.operate(t), "/v1/": api.serveOther,
	})
	putAgent(t, pool, agents.Definition{Name: "sales", Default: true})
	putAgent(t, pool, agents.Definition{Name: "billing"})
	p := browser.Open(t, browser.Look{})
	p.Go(url + "/operate")
	p.Eval(`document.getElementById("agent").value = "billing"`, nil)
	return p, api, pool, url
}

// say sends a message in the console.
func say(p *browser.Page, message string) {
	p.Type("#message", message)
	p.Click("#send")
}

func TestConsoleStreamsAnswerAsText(t *testing.T) {
	t.Parallel()
	p, api, _, _ := openConsole(t)
	p.Type("#message", "hello")
	p.Eval(`document.getElementById("message").dispatchEvent(new KeyboardEvent("keydown",
		{key: "Enter", ctrlKey: true, bubbles: true, cancelable: true})), 1`, new(int))
	p.Shows("Done. Trace " + consoleTrace)
	p.Until("no text of the answer is markup",
		`document.querySelectorAll("#transcript img, #transcript script").length === 0`)
	p.Until("the page shows the text of the answer since the restart", `(() => {
		const text = document.querySelector("#transcript .bubble-assistant .said").textContent;
		return text.startsWith("Here: <script>alert(1)") && text.includes("⟨U+202E⟩") &&
			!document.body.textContent.includes("wrong");
	})()`)
	p.Until("the page shows the call once, with its outcome", `(() => {
		const calls = document.querySelectorAll(".bubble-tool");
		return calls.length === 1 && calls[0].textContent.includes("✓ success 12 ms");
	})()`)
	p.Until("the address has the session", `location.search === "?session=`+aSession+`"`)
	p.Until("the message field has the focus", `document.activeElement.id === "message"`)
	api.wantRequest(t, "POST /v1/operate", "hello", `"agent":"billing"`)
	p.Until("the session keeps its agent", `document.getElementById("agent").disabled`)
	wantNoProblems(t, p, "/operate")
}

// A retry by a browser or a proxy must not start a second turn.
func TestConsoleSendsIdempotencyKeys(t *testing.T) {
	t.Parallel()
	p, api, _, _ := openConsole(t)
	for n := range 2 {
		say(p, "hello")
		p.Until("the turn has ended", fmt.Sprintf(`!document.getElementById("send").disabled &&
			document.getElementById("transcript").textContent.split("Done.").length === %d`, n+2))
	}
	api.mu.Lock()
	defer api.mu.Unlock()
	require.Equal(t, 2, len(api.keys))
	assert.Truef(t, len(api.keys[0]) > 6 && api.keys[0] != api.keys[1], "keys: %q", api.keys)
}

func TestConsoleDecidesApproval(t *testing.T) {
	t.Parallel()
	p, api, _, _ := openConsole(t)
	say(p, "hello")
	p.Shows("Done. Trace")
	say(p, "approve")
	p.Shows("Approval requested: drop")
	p.Shows("9007199254740993") // not rounded like a JavaScript number
	wantAccessible(t, p, "the requested approval")
	p.Click(`#transcript .approval button[value=approve]`)
	p.Shows("Dropped.")
	p.Until("the turn has ended", `!document.getElementById("send").disabled`)
	api.wantRequest(t, "POST /v1/approvals/a1", `"decision":"approve"`)
	api.wantRequest(t, "POST /v1/operate", `"session_id":"`+aSession+`"`, "approve")
	wantNoProblems(t, p, "/operate")
}

func TestConsoleWaitsForLane(t *testing.T) {
	t.Parallel()
	p, api, _, _ := openConsole(t)
	p.Expect("409")
	say(p, "busy")
	p.Shows("lane operate is held by <b>ana</b>")
	p.Eval(`[...document.querySelectorAll("#transcript button")]
		.find(b => b.textContent === "Wait for the lane").click(), 1`, new(int))
	p.Shows("Done. Trace")
	p.Until("the turn has ended", `!document.getElementById("send").disabled`)
	p.Until("the composer has no copy", `document.getElementById("message").value === ""`)
	api.wantRequest(t, "POST /v1/operate", "busy", `"wait":true`)
	wantNoProblems(t, p, "/operate")
}

// A message with a slash is typed with two. With one it would be a command.
func TestConsoleReturnsRefusedMessageAsTyped(t *testing.T) {
	t.Parallel()
	p, _, _, _ := openConsole(t)
	p.Expect("409")
	for _, message := range []string{"//busy", "busy"} {
		p.Eval(`(document.getElementById("message").value = "", 1)`, new(int))
		say(p, message)
		p.Until("the composer has the message", fmt.Sprintf(`document.getElementById("message").value === %q`, message))
	}
}

func TestConsoleKeepsTextOfInputMethod(t *testing.T) {
	t.Parallel()
	p, _, _, _ := openConsole(t)
	p.Type("#message", "/he")
	p.Until("the command is suggested", `!document.getElementById("commands").hidden`)
	p.Eval(`document.getElementById("message").dispatchEvent(new KeyboardEvent("keydown",
		{key: "Enter", keyCode: 229, bubbles: true, cancelable: true})), 1`, new(int))
	p.Until("the command has not run", `document.getElementById("message").value === "/he"`)
}

func TestConsoleWorksAfterBack(t *testing.T) {
	t.Parallel()
	p, _, _, _ := openConsole(t)
	p.Eval(`(["pagehide", "pageshow"].forEach((name) => // as a browser that keeps the page
		dispatchEvent(new PageTransitionEvent(name, {persisted: true}))), 1)`, new(int))
	say(p, "hello")
	p.Shows("Done. Trace")
	p.Until("the turn has ended", `!document.getElementById("send").disabled`)
}

// After its connection broke, the page finds the turn again, and can stop it.
func TestConsoleStopsTurnAfterBrokenStream(t *testing.T) {
	t.Parallel()
	p, api, _, _ := openConsole(t)
	p.Expect("ERR_INCOMPLETE_CHUNKED_ENCODING")
	say(p, "break")
	p.Until("the turn has begun", `!document.getElementById("stop").hidden`)
	api.cutStream()
	p.Shows("The turn continues")
	p.Click("#stop")
	p.Shows("The turn was cancelled: stopped")
	api.wantRequest(t, "POST /v1/executions/"+consoleExecution+"/cancel", "stopped in the console")
	wantNoProblems(t, p, "/operate")
}

func TestConsoleFindsTurnWithoutEvent(t *testing.T) {
	t.Parallel()
	p, api, _, _ := openConsole(t)
	api.setStatus("completed")
	p.Expect("ERR_INCOMPLETE_CHUNKED_ENCODING")
	say(p, "break early")
	p.Shows("It went on.")
	wantNoProblems(t, p, "/operate")
}

func TestConsoleFollowsTurnOfSession(t *testing.T) {
	t.Parallel()
	p, api, pool, url := openConsole(t)
	api.setStatus("completed")
	insertSession(t, pool, "what did you do?", "", false)
	p.Go(url + "/operate?session=" + aSession)
	p.Shows("It went on.")
	wantNoProblems(t, p, "/operate")
}
