//go:build unix

package crashtest_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/telemetry/otlptest"
	"github.com/lanekeeper/lanekeeper/trace"
)

// A heartbeat that pursues an objective: it looks, pays, and has a flow do the rest, as a child.
const tracedYAML = `
kind: skill
name: look
description: See what is due.
handler: "http:GET %[1]s/look"
idempotent: true
---
kind: skill
name: pay
description: Pay an amount.
handler: "http:POST %[1]s/pay"
parameters:
  type: object
  required: [amount]
  properties:
    amount: {type: integer}
---
kind: skill
name: settle
description: Have the rest settled.
handler: "flow:settlement"
---
kind: flow
name: settlement
actions:
  - {actionType: delay, parameters: {duration: 1s}}
  - {actionType: skill, parameters: {name: look}}
  - {actionType: end, parameters: {summary: settled}}
---
kind: objective
name: bills
goal: Pay what is due.
steps: [Look at what is due and pay it]
`

// newTraced is a scene in which a heartbeat has a model call, skills, a wait and a child, and a receiver of its traces.
func newTraced(t *testing.T) (*scene, *otlptest.Server) {
	t.Helper()
	s := newStage(t, pgtest.URL(t), tracedYAML)
	s.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		said := 0
		for _, m := range req.Messages {
			if m.Role == openai.ChatMessageRoleAssistant {
				said++
			}
		}
		switch pursues := strings.Contains(req.Messages[0].Content, "You pursue one objective"); {
		case pursues && said == 0:
			return modeltest.ToolCall("look", `{}`).AndCall("pay", `{"amount": 1}`)
		case pursues && said == 1:
			return modeltest.ToolCall("settle", `{}`)
		case pursues && said == 2:
			id := stepID.FindStringSubmatch(req.Messages[1].Content)
			return modeltest.ToolCall("complete_step", modeltest.Arguments(map[string]string{"step_id": id[1], "result": "paid"}))
		case pursues:
			return modeltest.Text("The bills are paid.")
		}
		return modeltest.Text("It went well.")
	})
	receiver := otlptest.New(t)
	s.more = append(s.more, "OTEL_EXPORTER_OTLP_ENDPOINT="+receiver.URL())
	return s, receiver
}

// otel is the id under which tracing tools know an execution's trace.
func (s *scene) otel(execution string) string {
	s.t.Helper()
	return trace.ID(one[string](s, `select trace_id from agent_executions where id = $1`, execution)).OTel()
}

// sent waits until all spans of a trace have come, as many as SQL says that there are, and returns them.
func (s *scene) sent(from *otlptest.Server, execution string) []otlptest.Span {
	s.t.Helper()
	eventually(s.t, "all executions of the trace end", func() bool {
		return one[bool](s, `
			select count(*) filter (where completed_at is null) = 0 from agent_executions
			 where trace_id = (select trace_id from agent_executions where id = $1)`, execution)
	})
	want := one[int](s, `
		select (select count(*) from agent_activity where trace_id = x.trace_id and status <> 'running')
		     + (select count(*) from agent_executions where trace_id = x.trace_id and completed_at is not null)
		  from agent_executions x where x.id = $1`, execution)
	id := s.otel(execution)
	rows := func() int {
		return len(slices.DeleteFunc(from.Trace(id), func(one otlptest.Span) bool { return strings.HasPrefix(one.Name, "wait ") }))
	}
	eventually(s.t, fmt.Sprintf("%d spans of rows come", want), func() bool { return rows() >= want })
	if n := rows(); n != want {
		s.t.Errorf("%d spans of rows came, SQL has %d", n, want)
	}
	return from.Trace(id)
}

// mirrored checks each span against its row, and that the whole is a well-formed trace.
func (s *scene) mirrored(spans []otlptest.Span) {
	s.t.Helper()
	for _, wrong := range otlptest.Check(spans) {
		s.t.Error(wrong)
	}
	for _, one_ := range spans {
		if id, ok := one_.Attributes["agent.activity.id"].(string); ok {
			got := one[string](s, `
				select concat_ws(' ', trace_id, status, coalesce(token_usage ->> 'prompt_tokens', '-'), case kind when 'model' then cost_usd::float8 end,
				       abs(extract(epoch from created_at) - $2::float8) < 0.001, abs(extract(epoch from finished_at) - $3::float8) < 0.01)
				  from agent_activity where id = $1`, id, float64(one_.Start.UnixNano())/1e9, float64(one_.End.UnixNano())/1e9)
			tokens, cost := "-", ""
			if n, ok := one_.Attributes["gen_ai.usage.input_tokens"]; ok {
				tokens, cost = fmt.Sprint(n), fmt.Sprint(one_.Attributes["agent.llm.cost_usd"])+" "
			}
			want := fmt.Sprintf("%s %s %s %st t", one_.Attributes["agent.trace_ref"], one_.Attributes["agent.status"], tokens, cost)
			if got != want {
				s.t.Errorf("span %s says %q, its row %q", one_.Name, want, got)
			}
		}
	}
}

// names counts spans by name.
func names(spans []otlptest.Span) map[string]int {
	counts := map[string]int{}
	for _, one := range spans {
		counts[one.Name]++
	}
	return counts
}

// TestAHeartbeatIsAWholeTrace: a heartbeat with model calls, skills, a wait and a child comes to a receiver as one trace, under
// the id that SQL has.
func TestAHeartbeatIsAWholeTrace(t *testing.T) {
	t.Parallel()
	s, receiver := newTraced(t)
	held := s.holdSkill("look", 1)
	s.serve("")
	id := s.begin()
	held.wait()
	s.exec(`select try_acquire_agent_lock('operate', 'admin', 300)`) // an admin comes: the heartbeat waits
	held.free()
	eventually(t, "the heartbeat waits for the admin", func() bool { return s.status(id) == "waiting" })
	s.exec(`select release_agent_lock('operate', 'admin')`)
	s.ends(id, "completed")
	spans := s.sent(receiver, id)
	s.mirrored(spans)
	got := names(spans)
	for name, want := range map[string]int{
		"invoke_workflow heartbeat": 1, "invoke_workflow settlement": 1, "execute_tool look": 2, "execute_tool pay": 1, "execute_tool settle": 1,
		"wait lane": 1, "wait delay": 1, "phase advance_plan": 1, "chat " + modeltest.Model: 5,
	} {
		if got[name] != want {
			t.Errorf("%d spans %q, want %d; all: %v", got[name], name, want, got)
		}
	}
	for _, one := range spans {
		if one.Resource["service.name"] != "lanekeeper" {
			t.Errorf("the resource is %v", one.Resource)
		}
		if one.Name == "invoke_workflow settlement" && one.Parent != trace.SpanID(id) {
			t.Errorf("the child is filed under %s, want the heartbeat", one.Parent)
		}
		for key := range one.Attributes {
			if strings.Contains(key, "messages") || strings.Contains(key, "arguments") {
				t.Errorf("content was sent, and nobody had asked for it: %s", key)
			}
		}
	}
}
