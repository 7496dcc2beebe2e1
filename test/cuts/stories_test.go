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
	{name: "heartbeat", declared: bills.YAML, begin: due, tell: beat},
	{name: "chat", declared: bills.ShopYAML, begin: converse, tell: order},
	{name: "flow", declared: flowYAML, begin: func(*world) {}, tell: onboard},
	{
		name: "idle", declared: flowYAML, begin: func(*world) {}, tell: rest,
		settings: settings{sweep: 200 * time.Millisecond, automations: 200 * time.Millisecond},
	},
}

// due gives each phase of a heartbeat something to do.
func due(w *world) {
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply { return bills.Model(req) })
	bills.MakeDue(w.t, w.db)
}

// beat makes a heartbeat due and waits for its end.
func beat(ctx context.Context, w *world) {
	pgtest.Exec(w.t, w.db, `update agent_schedules set next_run_at = clock_timestamp() where name = 'heartbeat'`)
	for w.agent.engine.Tick(ctx) != nil && ctx.Err() == nil { // the sweep ticks if the leader does not
	}
	w.eventually("the heartbeat has ended",
		`select exists (select from agent_executions where flow = 'heartbeat' and completed_at is not null)`)
}

// converse scripts the model of a conversation.
func converse(w *world) {
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

// order plays a visitor who orders, and the admin who approves.
func order(ctx context.Context, w *world) {
	heard := make(chan string, 1)
	go func() { heard <- w.say(ctx, "t1", "one, please") }()
	w.eventually("the answer waits for approval",
		`select exists (select from agent_executions where status = 'waiting' and waiting_for = 'approval')`)
	id := pgtest.Value[string](w.t, w.db, `select id::text from agent_approvals`)
	w.ask(ctx, "POST", "/v1/approvals/"+id, `{"decision": "approve"}`, "decision")
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

// onboard starts a flow, sends its event, and waits for its end.
func onboard(ctx context.Context, w *world) {
	answer := w.ask(ctx, "POST", "/v1/executions", `{"flow": "parent", "thread_id": "t1"}`, "start")
	var started struct{ ID string }
	if err := json.Unmarshal(answer, &started); err != nil {
		w.t.Errorf("start: %v: %s", err, answer)
		return
	}
	w.eventually("the flow waits", `select exists (select from agent_executions where flow = 'parent'
		and status = 'waiting' and waiting_for = 'event')`)
	w.ask(ctx, "POST", "/v1/events", `{"event": "EVENT_COMPLETED", "key": "the event", "data": {"is": "so"}}`, "event")
	w.eventually("the flow ends", `select completed_at is not null from agent_executions where id = $1`, started.ID)
}

// rest waits until all background work of the process has run, then plays a flow.
func rest(ctx context.Context, w *world) {
	late := time.After(1500 * time.Millisecond)
	for over := false; !over && (len(w.ledger.left()) > 0 || !w.cutting); {
		select {
		case <-late:
			over = true
		default:
			over = !pause(ctx)
		}
	}
	w.ledger.begins()
	onboard(ctx, w)
}

// story is a piece of work of a process, and its end.
type story struct {
	name     string
	declared string // the workspace
	settings settings
	begin    func(w *world)                      // before the process starts
	tell     func(ctx context.Context, w *world) // while the process works; returns at the end of the work
}

// ending is the result of a story.
type ending struct {
	digest    []string // the final state, see ledger_test.go
	incidents []string // failed attempts of clients
	sent      []sent
	left      []cut // cuts that were not made
	slow      bool  // a lease was lost; on a stalled machine that needs no cut
	log       string
}

// end plays a story with cuts, and returns its ending.
func (s story) end(t *testing.T, cuts []cut) ending {
	t.Helper()
	database := pgtest.URL(t)
	w := newWorld(t, database, s.declared, cuts)
	s.begin(w)
	w.run(database, s.settings, func(ctx context.Context) {
		s.tell(ctx, w)
		w.eventually("everything is over", `
			select not exists (select from agent_executions where completed_at is null)
			   and not exists (select from agent_activity_open) and not exists (select from agent_locks_live)`)
	})
	slow := pgtest.Value[int](w.t, w.db, `select count(*) from agent_workers`) > 1
	return ending{digest(w), w.reported(), w.ledger.all(), w.ledger.left(), slow, w.log.String()}
}

func TestMain(m *testing.M) {
	pgtest.AtOnce(8)
	pgtest.Main(m)
}

// whole reports whether every message is cut.
func whole() bool { return os.Getenv("AGENT_CUT_ALL") != "" }
