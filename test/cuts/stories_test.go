package cuts_test

import (
	"context"
	"encoding/json"
	"os"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit/bills"
)

// stories are all stories.
var stories = []story{
	{name: "heartbeat", declared: bills.YAML, prepare: prepareHeartbeat, play: runHeartbeat},
	{name: "chat", declared: bills.ShopYAML, prepare: scriptConversation, play: playOrder},
	{name: "flow", declared: flowYAML, prepare: func(*testEnv) {}, play: playOnboarding},
	{
		name: "idle", declared: flowYAML, prepare: func(*testEnv) {}, play: waitBackground,
		settings: settings{sweep: 200 * time.Millisecond, automations: 200 * time.Millisecond},
	},
}

// prepareHeartbeat gives each phase of a heartbeat something to do.
func prepareHeartbeat(w *testEnv) {
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply { return bills.Model(req) })
	bills.MakeDue(w.t, w.db)
}

// runHeartbeat makes a heartbeat due and waits for its end.
func runHeartbeat(ctx context.Context, w *testEnv) {
	pgtest.Exec(w.t, w.db, `update agent_schedules set next_run_at = clock_timestamp() where name = 'heartbeat'`)
	for w.agent.engine.Tick(ctx) != nil && ctx.Err() == nil { // the sweep ticks if the leader does not
	}
	w.eventually("the heartbeat has ended",
		`select exists (select from agent_executions where flow = 'heartbeat' and completed_at is not null)`)
}

// scriptConversation scripts the model of a conversation.
func scriptConversation(w *testEnv) {
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		switch _, turn := modeltest.Turn(req); turn {
		case 0:
			return modeltest.Text("Let me look.").AndCall("look", `{}`).AndCall("tell", `{}`)
		case 1:
			return modeltest.ToolCall("order", `{"item": 1}`)
		}
		return modeltest.Text("It is on its way.")
	})
}

// playOrder plays a visitor who orders, and the admin who approves.
func playOrder(ctx context.Context, w *testEnv) {
	heard := make(chan string, 1)
	go func() { heard <- w.sendMessage(ctx, "t1", "one, please") }()
	w.eventually("the answer waits for approval",
		`select exists (select from agent_executions where status = 'waiting' and waiting_for = 'approval')`)
	id := pgtest.Value[string](w.t, w.db, `select id::text from agent_approvals`)
	w.requestUntilDone(ctx, "POST", "/v1/approvals/"+id, `{"decision": "approve"}`, "decision")
	select {
	case text := <-heard:
		w.skills.Add(bills.Call{Skill: "the visitor heard", Key: "1", Args: text})
	case <-time.After(pgtest.Timeout):
		w.t.Errorf("the visitor has no answer\n%s", w.log.String())
	}
}

const flowYAML = `
kind: skill
name: look
handler: "http:POST %s/look"
idempotent: true
parameters: {type: object, required: [n], properties: {n: {type: integer}}}
---
kind: skill
name: pay
handler: "http:POST %s/pay"
parameters: {type: object, required: [n], properties: {n: {type: integer}}}
---
kind: flow
name: parent
actions:
  - {actionType: send_message, parameters: {message: "welcome"}}
  - {actionType: skill, saveAs: looked, parameters: {name: look, arguments: {n: 1}}}
  - {actionType: wait_for_event, parameters: {key: "the event"}}
  - {actionType: trigger_agent, timeout: 24h, parameters: {flow: child, input: {n: 2}}}
  - {actionType: delay, parameters: {duration: 20ms}}
  - {actionType: send_message, parameters: {message: "heard [{{eventData.is}}], the child {{childExecutionStatus}}"}}
---
kind: flow
name: child
actions:
  - {actionType: skill, parameters: {name: pay, arguments: {n: "{{input.n}}"}}}
  - {actionType: send_message, parameters: {message: "paid {{input.n}}"}}
`

// playOnboarding starts a flow, sends its event, and waits for its end.
func playOnboarding(ctx context.Context, w *testEnv) {
	answer := w.requestUntilDone(ctx, "POST", "/v1/executions", `{"flow": "parent", "thread_id": "t1"}`, "start")
	var started struct{ ID string }
	if err := json.Unmarshal(answer, &started); err != nil {
		w.t.Errorf("start: %v: %s", err, answer)
		return
	}
	w.eventually("the flow waits", `select exists (select from agent_executions where flow = 'parent'
		and status = 'waiting' and waiting_for = 'event')`)
	w.requestUntilDone(ctx, "POST", "/v1/events", `{"event": "EVENT_COMPLETED", "key": "the event", "data": {"is": "so"}}`, "event")
	w.eventually("the flow ends", `select completed_at is not null from agent_executions where id = $1`, started.ID)
}

// waitBackground waits until all background work of the process has run, then plays a flow.
func waitBackground(ctx context.Context, w *testEnv) {
	late := time.After(1500 * time.Millisecond)
	for over := false; !over && (len(w.ledger.pending()) > 0 || !w.hasCuts); {
		select {
		case <-late:
			over = true
		default:
			over = !pause(ctx)
		}
	}
	w.ledger.startStory()
	playOnboarding(ctx, w)
}

// story is a piece of work of a process, and its end.
type story struct {
	name     string
	declared string // the workspace
	settings settings
	prepare  func(w *testEnv)                      // before the process starts
	play     func(ctx context.Context, w *testEnv) // while the process works; returns at the end of the work
}

// storyResult is the result of a story.
type storyResult struct {
	digest    []string // the final state, see ledger_test.go
	incidents []string // failed attempts of clients
	sent      []countedMessage
	uncut     []cut // cuts that were not made
	leaseLost bool  // a lease was lost; on a stalled machine that needs no cut
	log       string
}

// run plays a story with cuts, and returns its ending.
func (s story) run(t *testing.T, cuts []cut) storyResult {
	t.Helper()
	database := pgtest.URL(t)
	w := newTestEnv(t, database, s.declared, cuts)
	s.prepare(w)
	w.run(database, s.settings, func(ctx context.Context) {
		s.play(ctx, w)
		w.eventually("everything is over", `
			select not exists (select from agent_executions where completed_at is null)
			   and not exists (select from agent_activity_open) and not exists (select from agent_locks_live)`)
	})
	slow := pgtest.Value[int](w.t, w.db, `select count(*) from agent_workers`) > 1
	return storyResult{digest(w), w.reportedIncidents(), w.ledger.messages(), w.ledger.pending(), slow, w.log.String()}
}

func TestMain(m *testing.M) {
	pgtest.AtOnce(8)
	pgtest.Main(m)
}

// cutsAll reports whether every message is cut.
func cutsAll() bool { return os.Getenv("AGENT_CUT_ALL") != "" }
