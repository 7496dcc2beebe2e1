//go:build unix

package failover_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/migrations"
)

const (
	adminToken = "admin-4d0c7be2915fa836"
	visitorKey = "visitor-b9135c0e77d24af8"
)

const workspaceYAML = `
kind: skill
name: look
description: May be repeated.
handler: "http:POST %s/look"
timeout: 3m
idempotent: true
parameters: {type: object, required: [n], properties: {n: {type: integer}}}
---
kind: skill
name: pay
description: Must not be repeated.
handler: "http:POST %s/pay"
timeout: 3m
parameters: {type: object, required: [n], properties: {n: {type: integer}}}
---
kind: flow
name: errand
actions:
  - {actionType: send_message, parameters: {message: "{{input.n}} begins"}}
  - {actionType: skill, parameters: {name: look, arguments: {n: "{{input.n}}"}}}
  - {actionType: wait_for_event, timeout: 24h, onTimeout: fail, parameters: {key: "event {{input.n}}"}}
  - {actionType: skill, parameters: {name: pay, arguments: {n: "{{input.n}}"}}}
  - {actionType: send_message, parameters: {message: "{{input.n}} got [{{eventData.is}}]"}}
---
kind: objective
name: rounds
goal: See that all is well.
review_every: 1m
steps: [Look around]
`

// world is a database with a workspace, the model and the skills, and the processes that serve.
type world struct {
	t      testing.TB
	url    string
	db     *pgxpool.Pool
	model  *modeltest.Server
	dir    string
	lease  string
	agents []*proctest.Process
	bases  []string // where they serve

	mu    sync.Mutex
	calls []called
	gate  chan struct{} // closed: calls pass
	held  map[string]int
}

type called struct{ skill, key, body string }

// newWorld migrates the database and applies the workspace.
func newWorld(t testing.TB, url, lease string) *world {
	t.Helper()
	w := &world{
		t: t, url: url, model: modeltest.New(t), dir: t.TempDir(), lease: lease, gate: make(chan struct{}),
		held: map[string]int{},
	}
	close(w.gate)
	t.Cleanup(w.open) // what is held up lets go before the servers are closed
	w.connect()
	_, err := migrations.Up(t.Context(), w.db)
	require.NoError(t, err)
	pgtest.Exec(w.t, w.db, told)
	w.model.Handle(w.think)
	served := testkit.Serve(t, http.HandlerFunc(w.serveSkill))
	t.Cleanup(w.open)
	file := filepath.Join(w.dir, "all.yaml")
	require.NoError(t, os.WriteFile(file, []byte(strings.ReplaceAll(workspaceYAML, "%s", served)), 0o600))
	a := launch(t, w.dir, w.environ(), "apply", ".")
	require.Truef(t, a.Exit() == 0, "agent apply: %s", a.Err.Tail(30))
	return w
}

func (w *world) connect() {
	w.t.Helper()
	w.db = pgtest.Pool(w.t, w.url, postgres.Options{MaxConns: 8, ApplicationName: "test"})
}

// environ is what a process of this world gets.
func (w *world) environ() []string {
	return testkit.Environ(w.url, w.model, "AGENT_ADMIN_TOKEN="+adminToken, "AGENT_CHAT_KEY=visitors="+visitorKey,
		"AGENT_LOG_FORMAT=json", "AGENT_HEARTBEAT_CRON=@every 3s", "AGENT_WORKER_LEASE="+w.lease, "AGENT_WORKERS=6")
}

// serve starts so many processes, and returns when they are ready.
func (w *world) serve(processes int) {
	w.t.Helper()
	for range processes {
		a := launch(w.t, w.dir, w.environ(), "serve")
		w.agents, w.bases = append(w.agents, a), append(w.bases, a.Base())
	}
	w.ready("at the beginning")
}

// ready waits until every process says that it is ready.
func (w *world) ready(when string) {
	w.t.Helper()
	for _, base := range w.bases {
		pgtest.Eventually(w.t, patience, func() bool { return probe(w.t, base+"/readyz").status == http.StatusOK },
			"a process is ready "+when)
	}
}

// unready waits until every process says that it is not, and sees that it is alive.
func (w *world) unready(failing string) {
	w.t.Helper()
	for i, base := range w.bases {
		pgtest.Eventually(w.t, patience, func() bool {
			got := probe(w.t, base+"/readyz")
			return got.status == http.StatusServiceUnavailable && !got.Checks[failing].OK
		}, "a process says that it is not ready")
		got := probe(w.t, base+"/healthz")
		assert.Truef(w.t, got.status == http.StatusOK, "without a database /healthz of process %d answers %d", i, got.status)
	}
}

// probed is an answer to a probe; status 0 for none.
type probed struct {
	status int
	Checks map[string]struct {
		OK     bool
		Detail string
	}
}

func probe(t testing.TB, url string) (got probed) {
	response, err := testkit.Do(t.Context(), http.DefaultClient, http.MethodGet, url, "")
	if err != nil || json.Unmarshal(response.Body, &got) != nil {
		return got
	}
	got.status = response.Status
	return got
}

// survived sees that no process has ended.
func (w *world) survived() {
	w.t.Helper()
	for i, a := range w.agents {
		select {
		case <-a.Ended():
			w.t.Errorf("process %d has ended: %s", i, a.Err.Tail(30))
		default:
		}
	}
}

// heldMost is how many calls of a kind are held up; the others pass, so that not all workers wait.
const heldMost = 2

// shut holds up calls of skills and of the model that come from now on.
func (w *world) shut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gate, w.held = make(chan struct{}), map[string]int{}
}

// open lets go of them.
func (w *world) open() {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.gate:
	default:
		close(w.gate)
	}
}

// pass is where a call is held up.
func (w *world) pass(ctx context.Context, what string) {
	w.mu.Lock()
	gate := w.gate
	w.held[what]++
	mine := w.held[what] <= heldMost
	w.mu.Unlock()
	if !mine {
		return
	}
	select {
	case <-gate:
	case <-ctx.Done():
	}
}

// holds reports whether a call of each kind is held up.
func (w *world) holds(kinds ...string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, kind := range kinds {
		if w.held[kind] == 0 {
			return false
		}
	}
	return true
}

// serveSkill answers the skills' requests and remembers them.
func (w *world) serveSkill(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client went away
	}
	skill := strings.Trim(r.URL.Path, "/")
	w.mu.Lock()
	w.calls = append(w.calls, called{skill, r.Header.Get("Idempotency-Key"), string(body)})
	w.mu.Unlock()
	w.pass(r.Context(), skill)
	rw.Header().Set("Content-Type", "application/json")
	if _, err := fmt.Fprintf(rw, `{"%s": "done"}`, skill); err != nil {
		return // the client went away
	}
}

// think is the model: visitors get an answer to what they said last, everybody else hears that all is well.
func (w *world) think(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
	last := modeltest.Said(req.Messages[len(req.Messages)-1])
	if strings.HasPrefix(last, "question ") {
		w.pass(w.t.Context(), "model")
		return modeltest.Text("answer to " + last)
	}
	return modeltest.Text("All is well.")
}
