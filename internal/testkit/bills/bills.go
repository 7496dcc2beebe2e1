// Package bills has fixtures for tests of whole processes: a server of skills that records its calls, workspaces of an
// agent that pays bills and of a shop, and a model. The bills have work for each phase of a heartbeat.
package bills

import (
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// Call is one HTTP request of a skill.
type Call struct{ Skill, Key, Args string }

// Skills is a server of skills. It records their calls.
type Skills struct {
	mu     sync.Mutex
	calls  []Call
	before func(Call)
}

// Apply applies a workspace and serves its skills. %s in the workspace is the address of the server.
func Apply(tb testing.TB, db *pgxpool.Pool, declared string) *Skills {
	tb.Helper()
	s := &Skills{}
	text := strings.ReplaceAll(declared, "%s", testkit.Serve(tb, s))
	files, err := workspace.Load(fstest.MapFS{"all.yaml": {Data: []byte(text)}})
	require.NoError(tb, err)
	_, err = workspace.Apply(tb.Context(), db, files, workspace.Options{})
	require.NoError(tb, err)
	return s
}

// ServeHTTP records a call and answers it.
func (s *Skills) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client disconnected
	}
	c := Call{strings.TrimPrefix(r.URL.Path, "/"), r.Header.Get("Idempotency-Key"), string(body)}
	s.Add(c)
	s.mu.Lock()
	before := s.before
	s.mu.Unlock()
	if before != nil {
		before(c)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]string{"done": c.Skill + c.Args}) // the client may have disconnected
}

// Before sets a function to call before each answer; nil for none. It may block.
func (s *Skills) Before(f func(Call)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before = f
}

// Add records a call.
func (s *Skills) Add(c Call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, c)
}

// Calls returns the calls as they arrived.
func (s *Skills) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// SkillsYAML are the skills that read bills and pay them.
const SkillsYAML = `
kind: skill
name: look
description: See what is due.
handler: "http:GET %s/look"
idempotent: true
---
kind: skill
name: pay
description: Pay an amount.
handler: "http:POST %s/pay"
parameters:
  type: object
  required: [amount]
  properties:
    amount: {type: integer}
---`

// ObjectiveYAML is the objective of the heartbeat.
const ObjectiveYAML = `
kind: objective
name: bills
goal: Pay what is due.
steps: [Look at what is due and pay it]
---`

// YAML is the workspace of the heartbeat.
const YAML = SkillsYAML + ObjectiveYAML + `
kind: skill
name: broken
handler: "http:GET %s/broken"
---
kind: automation
name: nightly
cron: "@daily"
skill: pay
arguments: {amount: 7}
max_attempts: 1
`

// ShopYAML declares three skills of a shop. One is idempotent, one is not, and one needs approval.
const ShopYAML = `
kind: skill
name: look
handler: "http:GET %s/look"
scope: both
idempotent: true
---
kind: skill
name: tell
handler: "http:POST %s/tell"
scope: both
---
kind: skill
name: order
handler: "http:POST %s/order"
scope: both
trust: approve
parameters:
  type: object
  required: [item]
  properties:
    item: {type: integer}
---`

// MakeDue makes the automation due, approves a call, and records three failures of a skill.
func MakeDue(tb testing.TB, db *pgxpool.Pool) {
	tb.Helper()
	pgtest.Exec(tb, db, `update agent_automations set next_run_at = clock_timestamp() - interval '1 second'`)
	pgtest.Exec(tb, db, `
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, status, expires_at)
		select 'op_0', name, revision, '{"amount": 3}', 'hash', 'approved', clock_timestamp() + interval '1 day'
		  from agent_skills where name = 'pay'`)
	pgtest.Exec(tb, db, `
		insert into agent_activity (trace_id, skill_name, skill_id, status, error_class, error_message, finished_at)
		select 'op_0', name, id, 'error', 'http_status', 'broken', clock_timestamp()
		  from agent_skills, generate_series(1, 3) where name = 'broken'`)
}

// Model is the model of a heartbeat. Its answer depends only on the request, so a repeated request gets the same
// answer. For an objective it calls look and pay, makes the replies of steps in order, and completes the step of the
// objective.
func Model(req openai.ChatCompletionRequest, steps ...modeltest.Reply) modeltest.Reply {
	_, turn := modeltest.Turn(req)
	pursues := strings.Contains(req.Messages[0].Content, "You pursue one objective")
	steps = append([]modeltest.Reply{modeltest.ToolCall("look", `{}`).AndCall("pay", `{"amount": 1}`)}, steps...)
	switch {
	case pursues && turn < len(steps):
		return steps[turn]
	case pursues && turn == len(steps):
		id := stepID.FindStringSubmatch(req.Messages[1].Content)
		if id == nil {
			return modeltest.Text("There is no step.")
		}
		return modeltest.ToolCall("complete_step", modeltest.Arguments(map[string]string{"step_id": id[1], "result": "paid"}))
	case pursues:
		return modeltest.Text("The bills are paid.")
	case turn == 0:
		return modeltest.ToolCall("remember", `{"key": "lesson", "value": "bills come daily"}`)
	}
	return modeltest.Text("It went well.")
}

var stepID = regexp.MustCompile(`step ([0-9a-f-]{36}): `)
