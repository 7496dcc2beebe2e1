package engineroom

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// fakeTurns answers the console's API calls. The message selects the response.
type fakeTurns struct {
	mu      sync.Mutex
	asked   []string // method, path and body of every request
	status  string   // of the turn after a reconnect
	decided chan struct{}
	cut     chan struct{}
}

const (
	startEvent = "event: start\ndata: {\"trace_id\":\"op_01JD3V7K8ZQ6W2M5T9X4C1B0AE\",\"session_id\":\"" + aSession +
		"\",\"execution_id\":\"018f0000-0000-7000-8000-000000000000\"}\n\n"
	doneEvent = "event: done\ndata: {\"ended\":\"answered\",\"trace_id\":\"op_01JD3V7K8ZQ6W2M5T9X4C1B0AE\"}\n\n"
)

func (f *fakeTurns) message(r *http.Request) (body string) {
	text, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, r.Method+" "+r.URL.RequestURI()+" "+string(text))
	return string(text)
}

// requests returns a copy of the recorded requests.
func (f *fakeTurns) requests() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.asked)
}

func (f *fakeTurns) has(words ...string) bool {
	for _, a := range f.requests() {
		all := true
		for _, w := range words {
			all = all && strings.Contains(a, w)
		}
		if all {
			return true
		}
	}
	return false
}

func (f *fakeTurns) operate(w http.ResponseWriter, r *http.Request) {
	body := f.message(r)
	tell := func(text string) {
		io.WriteString(w, text)
		w.(http.Flusher).Flush()
	}
	if strings.Contains(body, `"busy"`) && !strings.Contains(body, `"wait":true`) {
		w.Header().Set("Content-Type", "application/problem+json")
		w.WriteHeader(http.StatusConflict)
		tell(`{"status":409,"detail":"lane operate is held by <b>ana</b>","holder":"ana"}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	tell(startEvent)
	switch {
	case strings.Contains(body, "break early"): // before the first event
		panic(http.ErrAbortHandler)
	case strings.Contains(body, "break"):
		select {
		case <-f.cut:
		case <-r.Context().Done():
		}
		panic(http.ErrAbortHandler)
	case strings.Contains(body, "approve"):
		tell(`event: approval` + "\n" +
			`data: {"id":"a1","skill":"drop","arguments":{"table":"<i>all</i>","rows":9007199254740993},"expires_at":"2030-01-01T00:00:00Z"}` + "\n\n")
		select {
		case <-f.decided:
		case <-r.Context().Done():
			return
		}
		tell("event: delta\ndata: {\"text\":\"Dropped.\"}\n\n" + doneEvent)
	default:
		for _, e := range []any{
			map[string]any{"delta": map[string]string{"text": "wrong"}},
			map[string]any{"restart": map[string]any{}},
			map[string]any{"tool": map[string]any{
				"id": "t1", "name": "look", "arguments": map[string]string{"q": hostile},
				"status": "started",
			}},
			map[string]any{"tool": map[string]any{
				"id": "t1", "name": "look", "arguments": map[string]string{"q": hostile},
				"status": "success", "result": 7, "duration_ms": 12,
			}},
			map[string]any{"delta": map[string]string{"text": "Here: "}},
			map[string]any{"delta": map[string]string{"text": hostile}},
		} {
			for name, data := range e.(map[string]any) {
				text, _ := json.Marshal(data)
				tell(fmt.Sprintf("event: %s\ndata: %s\n\n", name, text))
			}
		}
		tell(doneEvent)
	}
}

func (f *fakeTurns) rest(w http.ResponseWriter, r *http.Request) {
	body := f.message(r)
	w.Header().Set("Content-Type", "application/json")
	switch {
	case strings.HasPrefix(r.URL.Path, "/v1/approvals/"):
		if strings.Contains(body, "approve") {
			close(f.decided)
		}
		io.WriteString(w, `{}`)
	case strings.HasSuffix(r.URL.Path, "/cancel"):
		f.mu.Lock()
		f.status = "cancelled"
		f.mu.Unlock()
		io.WriteString(w, `{}`)
	case r.URL.Path == "/v1/executions":
		fmt.Fprintf(w,
			`{"items":[{"id":"018f0000-0000-7000-8000-000000000000","trace_id":"op_01JD3V7K8ZQ6W2M5T9X4C1B0AE","thread_id":%q,
			"input":{"message":"break early"},"created_at":"2999-01-01T00:00:00Z"}],"next_cursor":null}`, aSession)
	default:
		f.mu.Lock()
		status := f.status
		f.mu.Unlock()
		fmt.Fprintf(w, `{"status":%q,"cancel_reason":"stopped","result":{"text":"It went on."},"result_summary":""}`, status)
	}
}

func TestOperateConsoleInBrowser(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room, err := New(Options{Pool: pool, Agent: "agent"})
	require.NoError(t, err)
	f := &fakeTurns{decided: make(chan struct{}), cut: make(chan struct{}), status: "running"}
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		if r.Path != "/act/v1/operate" {
			mux.Handle(r.Method+" "+r.Path, r.Handler)
		}
	}
	mux.HandleFunc("POST /v1/operate", f.operate)
	mux.HandleFunc("/v1/", f.rest)
	server := httptest.NewUnstartedServer(mux)
	serverCtx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	server.Config.BaseContext = func(net.Listener) context.Context { return serverCtx }
	server.Start()
	t.Cleanup(func() {
		end() // ends the stream of the open page
		server.Close()
	})
	putAgent(t, pool, agents.Definition{Name: "sales", Default: true})
	putAgent(t, pool, agents.Definition{Name: "billing"})
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/operate")
	p.Eval(`document.getElementById("agent").value = "billing", 1`, new(int))

	// A key sends the message, the answer is streamed, and all of it is text.
	p.Type("#message", "hello")
	p.Eval(
		`document.getElementById("message").dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", ctrlKey: true, bubbles: true, cancelable: true})), 1`, new(int))
	p.Shows("Done. Trace op_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	p.Until("nothing of it is markup", `document.querySelectorAll("#transcript img, #transcript script").length === 0`)
	p.Until("the page shows the text of the message",
		`document.querySelector("#transcript .bubble-assistant .said").textContent.startsWith("Here: <script>alert(1)") &&
		document.querySelector("#transcript .bubble-assistant .said").textContent.includes("⟨U+202E⟩") && !document.body.textContent.includes("wrong")`)
	p.Until("the call is there once, with its end",
		`document.querySelectorAll(".bubble-tool").length === 1 && document.querySelector(".bubble-tool").textContent.includes("✓ success 12 ms")`)
	p.Until("the address has the session", `location.search === "?session=`+aSession+
		`" && document.activeElement.id === "message"`)

	assert.Truef(t, f.has("POST /v1/operate", "hello", `"agent":"billing"`), "the chosen agent was not named: %q", f.requests())
	p.Until("the session keeps its agent", `document.getElementById("agent").disabled`)

	// The page decides an approval in place.
	p.Type("#message", "approve")
	p.Click("#send")
	p.Shows("Approval requested: drop")
	p.Shows("9007199254740993") // not rounded like a JavaScript number
	found := p.Inaccessible()
	assert.Truef(t, len(found) == 0, "not accessible:\n%s", strings.Join(found, "\n"))
	p.Click(`#transcript .approval button[value=approve]`)
	p.Shows("Dropped.")
	p.Until("its turn has ended", `!document.getElementById("send").disabled`)
	assert.Truef(t, f.has("POST /v1/approvals/a1", `"decision":"approve"`) &&
		f.has("POST /v1/operate", `"session_id":"`+aSession+`"`, "approve"), "asked: %q", f.requests())

	// The page names the holder of the lane, and the admin can wait for it.
	p.Expect("409")
	p.Type("#message", "busy")
	p.Click("#send")
	p.Shows("lane operate is held by <b>ana</b>")
	p.Eval(
		`[...document.querySelectorAll("#transcript button")].find(b => b.textContent === "Wait for the lane").click(), 1`,
		new(int))
	p.Until("it waited",
		`[...document.querySelectorAll("#transcript > .bubble")].pop().textContent.startsWith("Done. Trace") && document.getElementById("send").disabled === false`)
	assert.Truef(t, f.has("POST /v1/operate", "busy", `"wait":true`), "asked: %q", f.requests())

	// After its connection broke, the page finds the turn again and can stop it.
	p.Expect("ERR_INCOMPLETE_CHUNKED_ENCODING")
	p.Eval(`document.getElementById("message").value = "", 1`, new(int))
	p.Type("#message", "break")
	p.Click("#send")
	p.Until("it has begun", `!document.getElementById("stop").hidden`)
	close(f.cut)
	p.Shows("The turn continues")
	p.Click("#stop")
	p.Shows("The turn was cancelled: stopped")
	assert.Truef(t, f.has("POST /v1/executions/018f0000-0000-7000-8000-000000000000/cancel", "stopped in the console"),
		"asked: %q", f.requests())

	// The same holds for a turn without any event, and for one in progress when the page loads.
	f.mu.Lock()
	f.status = "completed"
	f.mu.Unlock()
	p.Type("#message", "break early")
	p.Click("#send")
	p.Shows("It went on.")
	insertSession(t, pool, "what did you do?", "", "pending")
	p.Go(server.URL + "/operate?session=" + aSession)
	p.Shows("It went on.")
	problems := p.Problems()
	assert.Truef(t, len(problems) == 0, "browser errors:\n%s", strings.Join(problems, "\n"))
}
