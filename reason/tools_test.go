package reason_test

import (
	"context"
	"encoding/json"
	"math"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// tool is one that says what it was called with.
func tool(name, schema string) reason.Tool {
	return reason.Tool{
		Name: name, Description: "does " + name, Parameters: json.RawMessage(schema),
		Do: func(_ context.Context, args json.RawMessage) (any, error) { return "got " + string(args), nil },
	}
}

// heard are the results of tools that the model was told with its last request.
func heard(w *world) (results []string) {
	requests := w.model.Requests()
	for _, m := range requests[len(requests)-1].Messages {
		if m.Role == openai.ChatMessageRoleTool {
			results = append(results, m.Content)
		}
	}
	return results
}

// Two turns may offer tools of one name that take different things: each is held to its own schema.
func TestToolsOfOneNameHaveTheirOwnSchemas(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"a", "b"} {
		w.model.Add(modeltest.ToolCall("put", `{"`+name+`":1}`), modeltest.Text("Done."))
		w.turn.Tools = []reason.Tool{tool("put", `{"type":"object","additionalProperties":false,"required":["`+name+`"],"properties":{"`+name+`":{"type":"integer"}}}`)}
		if _, got := w.completed(t); len(got.Calls) != 1 || got.Calls[0] != "put" {
			t.Errorf("the tool that takes %s was called %v: %v", name, got.Calls, heard(w))
		}
	}
}

func TestAToolWithoutParametersTakesNone(t *testing.T) {
	w := newWorld(t, modeltest.ToolCall("ping", ``), modeltest.Text("Done."))
	w.turn.Tools = []reason.Tool{tool("ping", ``)}
	if _, got := w.completed(t); len(got.Calls) != 1 {
		t.Errorf("called %v: %v", got.Calls, heard(w))
	}
	if sent := w.model.Requests()[0].Body; !strings.Contains(sent, `"name":"ping","description":"does ping","parameters":{`) {
		t.Errorf("sent %s", sent)
	}
}

// Servers refuse two tools of one name: of a skill and a tool the tool is meant, and alone offered.
func TestASkillWithTheNameOfAToolIsNotOffered(t *testing.T) {
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.turn.Tools = []reason.Tool{tool("probe", `{"type":"object"}`)}
	w.completed(t)
	named := 0
	for _, offered := range w.model.Requests()[0].Tools {
		if offered.Function.Name == "probe" {
			named++
		}
	}
	if got := heard(w); named != 1 || len(got) != 1 || got[0] != `"got {}"` {
		t.Errorf("offered %d times, answered %q", named, got)
	}
}

// What is wrong with the program is said at once, and is not the model's fault.
func TestATurnThatCannotBeTakenIsRefused(t *testing.T) {
	right := tool("t", `{"type":"object"}`)
	for says, spoil := range map[string]func(w *world){
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
		if err != nil || x.Status != executions.Failed || !strings.Contains(testkit.Deref(x.ErrorMessage), says) {
			t.Errorf("%s: %s, %q, %v", says, x.Status, testkit.Deref(x.ErrorMessage), err)
		}
	}
}

func TestALoopNeedsNoLogger(t *testing.T) {
	w := newWorld(t, modeltest.ToolCall("nothing", `{}`), modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.loop.Logger = nil
	w.turn.OnTool = func(reason.ToolEvent) { panic("in a callback") }
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return "alive", nil }
	w.completed(t)
}
