package reason_test

import (
	"context"
	"encoding/json"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/reason"
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
