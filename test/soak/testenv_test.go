package soak_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// These are the secrets of a test environment. No output may contain them.
const (
	adminToken   = "admin-9f2c7a51e0b84d36"
	visitorKey   = "visitor-41d6e8a90c7b2f35"
	strangerKey  = "stranger-7e3b5d9018f6a2c4"
	modelKey     = "model-c85a1f3e7d924b60"
	weatherToken = "weather-2b7f94e6a1d3c580"
	shopKey      = "c29hay1vZi13ZWJob29rcy1zZWNyZXQtMDE="
)

// testEnv is a database with the schema `soak` beside the product's, a model, a server for the skills, and an applied
// workspace.
type testEnv struct {
	t     testing.TB
	url   string
	db    *pgxpool.Pool
	model *modeltest.Server
	dir   string
}

// factTables stores what only the test knows.
const factTables = `
	create schema soak;
	create table soak.calls (skill text not null, key text not null, body jsonb not null,
	  at timestamptz not null default clock_timestamp());
	create table soak.deliveries (id text not null, n int not null, type text not null, status int not null);
	create table soak.answers (thread text not null, question int not null, answer text not null);
	create table soak.lanes (lane text not null, owner text not null, token bigint not null);
	create table soak.operated (n int not null, trace_id text not null, answer text not null)`

// newTestEnv creates a test environment with the workspace yaml. %s in it is the address of the skills' server.
func newTestEnv(t testing.TB, yaml string) *testEnv {
	t.Helper()
	w := &testEnv{t: t, url: pgtest.URL(t), model: modeltest.New(t), dir: t.TempDir()}
	w.db = pgtest.Pool(t, w.url, postgres.Options{MaxConns: 8, ApplicationName: "soak"})
	pgtest.Exec(w.t, w.db, factTables)
	served := testkit.Serve(t, http.HandlerFunc(w.serveSkill))
	require.NoError(t, os.Mkdir(filepath.Join(w.dir, "workspace"), 0o755))
	file := filepath.Join(w.dir, "workspace", "all.yaml")
	require.NoError(t, os.WriteFile(file, []byte(strings.ReplaceAll(yaml, "%s", served)), 0o600))
	a := w.startAgent("apply", "workspace")
	require.Truef(t, a.Exit() == 0, "agent apply: %s", a.Err.Tail(30))
	return w
}

// serveSkill answers the skills' requests and stores them.
func (w *testEnv) serveSkill(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client has disconnected
	}
	if len(body) == 0 {
		body = []byte("{}")
	}
	skill := strings.Trim(r.URL.Path, "/")
	_, err = w.db.Exec(r.Context(), `insert into soak.calls (skill, key, body) values ($1, $2, $3)`, skill,
		r.Header.Get("Idempotency-Key"), body)
	if err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	if _, err := fmt.Fprintf(rw, `{"%s": "done", "for": %s}`, skill, body); err != nil {
		return // the client has disconnected
	}
}

// environ returns the environment of a process.
func (w *testEnv) environ(more ...string) []string {
	return append(testkit.Environ(w.url, w.model, "AGENT_ADMIN_TOKEN="+adminToken,
		"AGENT_CHAT_KEY=visitors="+visitorKey+",stranger="+strangerKey, "OPENAI_API_KEY="+modelKey,
		`AGENT_PRICES={"scripted":{"input":2.5,"output":10}}`, "SHOP_SECRET=whsec_"+shopKey, "WEATHER_TOKEN="+weatherToken,
		"AGENT_LOG_FORMAT=json", "AGENT_HEARTBEAT_CRON=0 0 29 2 *"), more...)
}

// startAgent starts the program in the test environment.
func (w *testEnv) startAgent(args ...string) *proctest.Process {
	w.t.Helper()
	return launch(w.t, w.dir, w.environ(), args...)
}

// startServer starts `agent serve` with further settings, and returns its URL when it is ready.
func (w *testEnv) startServer(more ...string) (*proctest.Process, string) {
	w.t.Helper()
	a := launch(w.t, w.dir, w.environ(more...), "serve")
	return a, a.Base()
}

var (
	pendingStep  = regexp.MustCompile(`step ([0-9a-f-]{36}): [^\n]* \(pending\)`)
	question     = regexp.MustCompile(`[Qq]uestion (\d+) of thread (\S+)\.`)
	orderPayload = regexp.MustCompile(`"type":\s*"order.paid"`)
	orderNumber  = regexp.MustCompile(`"n":\s*(\d+)`)
	operateTurn  = regexp.MustCompile(`this is turn (\d+)\.`)
	aboutSupply  = regexp.MustCompile(`About delivery (\d+)`)
)

// modelReply is the model of the soak. It rejects one request in sixty, like providers on a busy day. Its other output
// depends only on its input.
func modelReply(n int, req openai.ChatCompletionRequest) modeltest.Reply {
	if n%60 == 59 {
		return modeltest.Status(503, 0)
	}
	t := readTranscript(req)
	reply := t.reply()
	return reply.Slowly(time.Millisecond)
}

// transcript is the model's input: the task, and the results of its calls.
type transcript struct {
	system, prompt string
	results        []result // of this task's calls, in order
}

type result struct{ name, args, content string }

func (r result) succeeded() bool { return !strings.Contains(r.content, `"error"`) }

// readTranscript finds the task: the user's last message, and the calls since.
func readTranscript(req openai.ChatCompletionRequest) transcript {
	var t transcript
	last := 0
	for i, m := range req.Messages {
		switch m.Role {
		case openai.ChatMessageRoleSystem:
			t.system += m.Content
		case openai.ChatMessageRoleUser:
			last = i
		}
	}
	t.prompt = modeltest.Said(req.Messages[last])
	calls := map[string]openai.FunctionCall{}
	for _, m := range req.Messages[last:] {
		for _, c := range m.ToolCalls {
			calls[c.ID] = c.Function
		}
		if m.Role == openai.ChatMessageRoleTool {
			c := calls[m.ToolCallID]
			t.results = append(t.results, result{c.Name, c.Arguments, m.Content})
		}
	}
	return t
}

// lastSuccess returns the last successful result of a tool, or nil.
func (t transcript) lastSuccess(name string) *result {
	for _, r := range slices.Backward(t.results) {
		if r.name == name && r.succeeded() {
			return &r
		}
	}
	return nil
}

// reply returns the model's next reply.
func (t transcript) reply() modeltest.Reply {
	switch {
	case strings.Contains(t.system, "You pursue one objective"):
		return t.objectiveReply()
	case strings.Contains(t.prompt, "Ship what was paid"):
		return t.shipReply()
	case strings.Contains(t.prompt, "Count one more"):
		if reply, counted := t.countReply(); !counted {
			return reply
		}
		if m := operateTurn.FindStringSubmatch(t.prompt); m != nil {
			return modeltest.Text("Counted in turn " + m[1] + ".")
		}
		return modeltest.Text("Counted.")
	case question.MatchString(t.prompt):
		return t.visitorReply()
	case aboutSupply.MatchString(t.prompt):
		n := aboutSupply.FindStringSubmatch(t.prompt)[1]
		if t.lastSuccess("look_up") == nil {
			return modeltest.ToolCall("look_up", fmt.Sprintf(`{"about": "delivery %s"}`, n))
		}
		return modeltest.Text("Looked into delivery " + n + ".")
	}
	return modeltest.Text("All is well.")
}

// visitorReply replies to visitors.
func (t transcript) visitorReply() modeltest.Reply {
	all := question.FindAllStringSubmatch(t.prompt, -1)
	m := all[len(all)-1]
	if t.lastSuccess("look_up") == nil {
		return modeltest.Text("Let me look. ").AndCall("look_up", fmt.Sprintf(`{"about": "question %s of %s"}`, m[1], m[2]))
	}
	return modeltest.Text(fmt.Sprintf("This is the answer to question %s of thread %s.", m[1], m[2]))
}

// countReply reads the counter and writes it back, until no other write came first.
func (t transcript) countReply() (reply modeltest.Reply, counted bool) {
	if t.lastSuccess("memory_write") != nil {
		return reply, true
	}
	if len(t.results) == 0 || t.results[len(t.results)-1].name != "memory_search" {
		return modeltest.ToolCall("memory_search", `{"query": "counter", "category": "soak"}`), false
	}
	var found struct {
		Memories []struct {
			Key   string `json:"key"`
			Value int    `json:"value"`
		} `json:"memories"`
	}
	if err := json.Unmarshal([]byte(t.results[len(t.results)-1].content), &found); err != nil {
		return modeltest.Text("I cannot read my memory: " + err.Error()), false
	}
	value := 0
	for _, m := range found.Memories {
		if m.Key == "counter" {
			value = m.Value
		}
	}
	return modeltest.ToolCall("memory_write", modeltest.Arguments(map[string]any{
		"category": "soak", "key": "counter", "value": value + 1,
	})), false
}

// shipReply replies to the automation that an order starts.
func (t transcript) shipReply() modeltest.Reply {
	n := orderNumber.FindStringSubmatch(t.prompt)
	if n == nil || !orderPayload.MatchString(t.prompt) {
		return modeltest.Text("There is no order in: " + t.prompt)
	}
	if t.lastSuccess("ship") == nil {
		return modeltest.ToolCall("ship", `{"order": `+n[1]+`}`)
	}
	if reply, counted := t.countReply(); !counted {
		return reply
	}
	return modeltest.Text("Shipped order " + n[1] + ".")
}

// objectiveReply takes one step after the other: look, count, report.
func (t transcript) objectiveReply() modeltest.Reply {
	reported := 0
	for _, r := range t.results {
		if r.name == "complete_step" && r.succeeded() {
			reported++
		}
	}
	steps := pendingStep.FindAllStringSubmatch(t.prompt, -1)
	switch {
	case reported == len(steps):
		return modeltest.Text("The stock is counted.")
	case t.lastSuccess("look_up") == nil:
		return modeltest.ToolCall("look_up", `{"about": "the stock"}`)
	}
	if reply, counted := t.countReply(); !counted {
		return reply
	}
	return modeltest.ToolCall("complete_step",
		modeltest.Arguments(map[string]string{"step_id": steps[reported][1], "result": "counted"}))
}

// program is the program under test, built once.
var program string

func TestMain(m *testing.M) { proctest.Main(m, "soak", &program) }

// launch starts the program in a folder, with exactly the given environment.
func launch(t testing.TB, dir string, environ []string, args ...string) *proctest.Process {
	t.Helper()
	return proctest.Start(t, pgtest.Timeout, dir, proctest.Environ(environ...), append([]string{program}, args...)...)
}
