package reason_test

import (
	"context"
	"encoding/json"
	"math"
	"slices"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// tool returns its arguments.
func tool(name, schema string) reason.Tool {
	return reason.Tool{
		Name: name, Description: "does " + name, Parameters: json.RawMessage(schema),
		Do: func(_ context.Context, args json.RawMessage) (any, error) { return "got " + string(args), nil },
	}
}

// heard returns the tool results in the model's last request.
func heard(w *world) (results []string) {
	requests := w.model.Requests()
	for _, m := range requests[len(requests)-1].Messages {
		if m.Role == openai.ChatMessageRoleTool {
			results = append(results, m.Content)
		}
	}
	return results
}

// Two turns may offer different tools of one name. Each call must match the schema of its turn.
func TestToolsOfOneNameHaveTheirOwnSchemas(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"a", "b"} {
		w.model.Add(modeltest.ToolCall("put", `{"`+name+`":1}`), modeltest.Text("Done."))
		w.turn.Tools = []reason.Tool{tool("put", `{"type":"object","additionalProperties":false,"required":["`+name+
			`"],"properties":{"`+name+`":{"type":"integer"}}}`)}
		if _, got := w.completed(t); len(got.Calls) != 1 || got.Calls[0] != "put" {
			t.Errorf("the tool that takes %s was called %v: %v", name, got.Calls, heard(w))
		}
	}
}

func TestToolWithoutParametersTakesNone(t *testing.T) {
	w := newWorld(t, modeltest.ToolCall("ping", ``), modeltest.Text("Done."))
	w.turn.Tools = []reason.Tool{tool("ping", ``)}
	if _, got := w.completed(t); len(got.Calls) != 1 {
		t.Errorf("called %v: %v", got.Calls, heard(w))
	}
	assert.Contains(t, w.model.Requests()[0].Body, `"name":"ping","description":"does ping","parameters":{`)
}

// Servers reject two tools of one name. If a skill and a tool share a name, the turn offers the tool only.
func TestSkillWithNameOfToolIsNotOffered(t *testing.T) {
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.turn.Tools = []reason.Tool{tool("probe", `{"type":"object"}`)}
	w.completed(t)
	offered, got := toolNames(w.model.Requests()[0]), heard(w)
	assert.Truef(t, slices.Equal(offered, []string{"probe", "sizes"}) && slices.Equal(got, []string{`"got {}"`}),
		"offered %q, answered %q", offered, got)
}

// A caller's bug is reported at once. The model is not blamed for it.
func TestTurnThatCannotBeTakenIsRefused(t *testing.T) {
	right := tool("t", `{"type":"object"}`)
	for want, spoil := range map[string]func(w *world){
		"needs Pool, Model and Skills": func(w *world) { w.loop.Model = nil },
		"is not a tool's":              func(w *world) { w.turn.Tools = []reason.Tool{tool("a b", `{}`)} },
		"two tools are named t":        func(w *world) { w.turn.Tools = []reason.Tool{right, right} },
		"the tool t has no Do":         func(w *world) { w.turn.Tools = []reason.Tool{{Name: "t"}} },
		"compile the parameters of t":  func(w *world) { w.turn.Tools = []reason.Tool{tool("t", `{"type":"objekt"}`)} },
		"parameters of t are no JSON":  func(w *world) { w.turn.Tools = []reason.Tool{tool("t", `{"type":`)} },
		"CostUSD":                      func(w *world) { w.loop.Budget.CostUSD = math.NaN() },
	} {
		w := newWorld(t)
		spoil(w)
		x, err := w.engine(t, false).RunSync(t.Context(), executions.Spec{Flow: "turn", Surface: "flow"})
		assert.Truef(t, err == nil && x.Status == executions.Failed && strings.Contains(postgres.Deref(x.ErrorMessage), want),
			"%s: %s, %q, %v", want, x.Status, postgres.Deref(x.ErrorMessage), err)
	}
}

func TestLoopNeedsNoLogger(t *testing.T) {
	w := newWorld(t, modeltest.ToolCall("nothing", `{}`), modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.loop.Logger = nil
	w.turn.OnTool = func(reason.ToolEvent) { panic("in a callback") }
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return "alive", nil }
	w.completed(t)
}
