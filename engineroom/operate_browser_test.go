package engineroom

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// fakeTurns answers what the console asks the API, by what was said.
type fakeTurns struct {
	mu      sync.Mutex
	asked   []string // method, path and body of every request
	status  string   // of the turn that is found again
	decided chan struct{}
	cut     chan struct{}
}

const (
	startEvent = "event: start\ndata: {\"trace_id\":\"op_01JD3V7K8ZQ6W2M5T9X4C1B0AE\",\"session_id\":\"" + aSession + "\",\"execution_id\":\"018f0000-0000-7000-8000-000000000000\"}\n\n"
	doneEvent  = "event: done\ndata: {\"ended\":\"answered\",\"trace_id\":\"op_01JD3V7K8ZQ6W2M5T9X4C1B0AE\"}\n\n"
)

func (f *fakeTurns) said(r *http.Request) (body string) {
	text, _ := io.ReadAll(r.Body)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, r.Method+" "+r.URL.RequestURI()+" "+string(text))
	return string(text)
}

func (f *fakeTurns) has(words ...string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.asked {
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
	body := f.said(r)
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
	case strings.Contains(body, "break early"): // before the page has heard anything
		panic(http.ErrAbortHandler)
	case strings.Contains(body, "break"):
		select {
		case <-f.cut:
		case <-r.Context().Done():
		}
		panic(http.ErrAbortHandler)
	case strings.Contains(body, "approve"):
		tell(`event: approval` + "\n" + `data: {"id":"a1","skill":"drop","arguments":{"table":"<i>all</i>","rows":9007199254740993},"expires_at":"2030-01-01T00:00:00Z"}` + "\n\n")
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
			map[string]any{"tool": map[string]any{"id": "t1", "name": "look", "arguments": map[string]string{"q": hostile}, "status": "started"}},
			map[string]any{"tool": map[string]any{"id": "t1", "name": "look", "arguments": map[string]string{"q": hostile}, "status": "success", "result": 7, "duration_ms": 12}},
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
	body := f.said(r)
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
		fmt.Fprintf(w, `{"items":[{"id":"018f0000-0000-7000-8000-000000000000","trace_id":"op_01JD3V7K8ZQ6W2M5T9X4C1B0AE","thread_id":%q,
			"input":{"message":"break early"},"created_at":"2999-01-01T00:00:00Z"}],"next_cursor":null}`, aSession)
	default:
		f.mu.Lock()
		status := f.status
		f.mu.Unlock()
		fmt.Fprintf(w, `{"status":%q,"cancel_reason":"stopped","result":{"text":"It went on."},"result_summary":""}`, status)
	}
}

func TestTheConsoleInABrowser(t *testing.T) {
	pool := pgtest.DB(t)
	room, err := New(Options{Pool: pool, Agent: "agent"})
	if err != nil {
		t.Fatal(err)
	}
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
	living, end := context.WithCancel(context.WithoutCancel(t.Context()))
	server.Config.BaseContext = func(net.Listener) context.Context { return living }
	server.Start()
	t.Cleanup(func() {
		end() // the page that is open follows what happens
		server.Close()
	})
	acts(t, pool, agents.Definition{Name: "sales", Default: true})
	acts(t, pool, agents.Definition{Name: "billing"})
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/operate")
	p.Eval(`document.getElementById("agent").value = "billing", 1`, new(int))

	// Keys send, the answer is streamed, and all of it is text.
	p.Type("#message", "hello")
	p.Eval(`document.getElementById("message").dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", ctrlKey: true, bubbles: true, cancelable: true})), 1`, new(int))
	p.Shows("Done. Trace op_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	p.Until("nothing of it is markup", `document.querySelectorAll("#transcript img, #transcript script").length === 0`)
	p.Until("it reads as it was said", `document.querySelector("#transcript .bubble-assistant .said").textContent.startsWith("Here: <script>alert(1)") &&
		document.querySelector("#transcript .bubble-assistant .said").textContent.includes("⟨U+202E⟩") && !document.body.textContent.includes("wrong")`)
	p.Until("the call is there once, with its end", `document.querySelectorAll(".bubble-tool").length === 1 && document.querySelector(".bubble-tool").textContent.includes("✓ success 12 ms")`)
	p.Until("the address has the session", `location.search === "?session=`+aSession+`" && document.activeElement.id === "message"`)

	if !f.has("POST /v1/operate", "hello", `"agent":"billing"`) {
		t.Errorf("the chosen agent was not named: %q", f.asked)
	}
	p.Until("the session keeps its agent", `document.getElementById("agent").disabled`)

	// An approval is decided where it is asked for.
	p.Type("#message", "approve")
	p.Click("#send")
	p.Shows("This call needs your leave")
	p.Shows("9007199254740993") // not as a script rounds it
	if found := p.Inaccessible(); len(found) > 0 {
		t.Errorf("not accessible:\n%s", strings.Join(found, "\n"))
	}
	p.Click(`#transcript [role="group"] button`)
	p.Shows("Dropped.")
	if !f.has("POST /v1/approvals/a1", `"decision":"approve"`) || !f.has("POST /v1/operate", `"session_id":"`+aSession+`"`, "approve") {
		t.Errorf("asked: %q", f.asked)
	}

	// Who holds the lane is named, and one can wait.
	p.Expect("409")
	p.Type("#message", "busy")
	p.Click("#send")
	p.Shows("lane operate is held by <b>ana</b>")
	p.Eval(`[...document.querySelectorAll("#transcript button")].find(b => b.textContent === "Wait for the lane").click(), 1`, new(int))
	p.Until("it waited", `[...document.querySelectorAll("#transcript > div")].pop().textContent.startsWith("Done. Trace") && document.getElementById("send").disabled === false`)
	if !f.has("POST /v1/operate", "busy", `"wait":true`) {
		t.Errorf("asked: %q", f.asked)
	}

	// A turn whose connection broke is found again, and can be stopped.
	p.Expect("ERR_INCOMPLETE_CHUNKED_ENCODING")
	p.Eval(`document.getElementById("message").value = "", 1`, new(int))
	p.Type("#message", "break")
	p.Click("#send")
	p.Until("it has begun", `!document.getElementById("stop").hidden`)
	close(f.cut)
	p.Shows("The turn goes on elsewhere")
	p.Click("#stop")
	p.Shows("The turn was cancelled: stopped")
	if !f.has("POST /v1/executions/018f0000-0000-7000-8000-000000000000/cancel", "stopped in the console") {
		t.Errorf("asked: %q", f.asked)
	}

	// So is one of which the page has heard nothing, and one that is under way when it is loaded.
	f.mu.Lock()
	f.status = "completed"
	f.mu.Unlock()
	p.Type("#message", "break early")
	p.Click("#send")
	p.Shows("It went on.")
	spoken(t, pool, "what did you do?", "", "pending")
	p.Go(server.URL + "/operate?session=" + aSession)
	p.Shows("It went on.")
	if problems := p.Problems(); len(problems) > 0 {
		t.Errorf("the browser complains:\n%s", strings.Join(problems, "\n"))
	}
}
