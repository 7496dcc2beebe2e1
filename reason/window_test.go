package reason_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// promptTokens is about what a request comes to, its tools included.
func promptTokens(t *testing.T, r modeltest.Request) int {
	t.Helper()
	var body struct{ Messages []models.Message }
	if err := json.Unmarshal([]byte(r.Body), &body); err != nil {
		t.Fatal(err)
	}
	n := models.EstimateTokens(body.Messages)
	for _, tool := range r.Tools {
		text, err := json.Marshal(tool)
		if err != nil {
			t.Fatal(err)
		}
		n += len(text)/4 + 4
	}
	return n
}

func user(text string) models.Message {
	return models.Message{Role: models.RoleUser, Content: text}
}

func assistant(text string, calls ...string) models.Message {
	m := models.Message{Role: models.RoleAssistant, Content: text}
	for _, id := range calls {
		m.ToolCalls = append(m.ToolCalls, models.ToolCall{ID: id, Name: "probe", Arguments: "{}"})
	}
	return m
}

func result(id, text string) models.Message {
	return models.Message{Role: models.RoleTool, ToolCallID: id, Content: text}
}

// history is 30 exchanges, each with a call.
func history(words int) (list []models.Message) {
	for i := range 30 {
		id := fmt.Sprintf("old_%d", i)
		list = append(list, user(fmt.Sprintf("question %d", i)), assistant("", id), result(id, strings.Repeat("old ", words)), assistant(fmt.Sprintf("answer %d", i)))
	}
	return list
}

func TestATurnOfManyCallsNeverSendsMoreThanItsContext(t *testing.T) {
	t.Parallel()
	const limit = 3000
	w := newWorld(t)
	w.turn.History = history(100)
	w.turn.Prompt = "The task."
	w.loop.Budget = reason.Budget{Context: limit, Iterations: 50, Tokens: 10_000_000}
	w.builtins["sizes"] = func(_ context.Context, c skills.Call) (any, error) {
		var args struct{ Limit int }
		if err := json.Unmarshal(c.Args, &args); err != nil {
			return nil, err
		}
		return strings.Repeat("x", 150*args.Limit), nil
	}
	w.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		if n == 40 {
			return modeltest.Text("Done.")
		}
		return modeltest.ToolCall("sizes", fmt.Sprintf(`{"limit":%d}`, n+1)).AndCall("probe", `{}`)
	})
	if _, got := w.completed(t); got.Text != "Done." {
		t.Fatalf("outcome is %+v", got)
	}
	for n, r := range w.model.Requests() {
		if size := promptTokens(t, r); size > limit {
			t.Errorf("request %d has %d tokens", n, size)
		}
		whole(t, n, r.Messages)
		if r.Messages[0].Content != w.turn.System {
			t.Errorf("request %d opens with %+v", n, r.Messages[0])
		}
		prompts, first := 0, ""
		for _, m := range r.Messages {
			if m.Role == "user" && first == "" {
				first = m.Content
			}
			if m.Content == w.turn.Prompt {
				prompts++
			}
		}
		if prompts != 1 {
			t.Errorf("request %d has the prompt %d times", n, prompts)
		}
		if n == 0 && (first == "question 0" || first == w.turn.Prompt) {
			t.Errorf("of the history the first to stay is %q", first)
		}
		if n == 40 && first != w.turn.Prompt {
			t.Errorf("the history still begins with %q", first)
		}
	}
}

func TestHistoryStandsBetweenTheOpeningAndThePrompt(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok"))
	w.turn.History = []models.Message{
		{Role: models.RoleSystem, Content: "The summary."},
		result("lost", "a result without its call"), user("Hello"), assistant("Let me see.", "a", "b"), result("a", "one of two"), user("Well?"),
		assistant("", "c"), result("c", "all of it"), assistant("Hi."),
	}
	x, _ := w.completed(t)
	var got []string
	for _, m := range w.model.Requests()[0].Messages {
		got = append(got, m.Role+" "+m.Content)
	}
	want := "system You are tested.|system The summary.|user Hello|assistant Let me see.|user Well?|assistant |tool all of it|assistant Hi.|user Look."
	if strings.Join(got, "|") != want {
		t.Errorf("messages are %q", got)
	}
	if row := string(named(w.rows(t, x), "model_call")[0].Input); strings.Contains(row, "Hello") || !strings.Contains(row, "Look.") {
		t.Errorf("the row shows %s", row)
	}
}

func TestAnOverlongMessageIsCutWithAMarker(t *testing.T) {
	t.Parallel()
	long := "BEGIN " + strings.Repeat("middle ", 20_000) + " END"
	for name, change := range map[string]func(*world){
		"prompt":  func(w *world) { w.turn.Prompt = long },
		"summary": func(w *world) { w.turn.History = []models.Message{{Role: "system", Content: long}} },
		"system":  func(w *world) { w.turn.System = long },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, modeltest.Text("ok"))
			w.loop.Budget = reason.Budget{Context: 1000}
			change(w)
			w.completed(t)
			r := w.model.Requests()[0]
			text := r.Body
			if n := promptTokens(t, r); n > 1000 || n < 700 || !strings.Contains(text, "BEGIN") || !strings.Contains(text, "END") || !strings.Contains(text, "bytes shown") {
				t.Errorf("%d tokens: %s", n, text)
			}
		})
	}
}

func TestOverlongArgumentsAreCutAndStayJSON(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{"x":"`+strings.Repeat("y", 10_000)+`"}`), modeltest.Text("ok"))
	w.loop.Budget = reason.Budget{Context: 1000}
	w.completed(t)
	r := w.model.Requests()[1]
	for _, m := range r.Messages {
		for _, c := range m.ToolCalls {
			if !json.Valid([]byte(c.Function.Arguments)) || !strings.Contains(c.Function.Arguments, "bytes of arguments") {
				t.Errorf("arguments are %.100q", c.Function.Arguments)
			}
		}
	}
	if n := promptTokens(t, r); n > 1000 {
		t.Errorf("%d tokens", n)
	}
}
