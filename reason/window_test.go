package reason_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// promptTokens estimates the size of a request with its tools.
func promptTokens(t *testing.T, r modeltest.Request) int {
	t.Helper()
	var body struct{ Messages []models.Message }
	require.NoError(t, json.Unmarshal([]byte(r.Body), &body))
	n := models.EstimateTokens(body.Messages)
	for _, tool := range r.Tools {
		text, err := json.Marshal(tool)
		require.NoError(t, err)
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

// history returns 30 exchanges, each with a call.
func history(words int) (list []models.Message) {
	for i := range 30 {
		id := fmt.Sprintf("old_%d", i)
		list = append(list, user(fmt.Sprintf("question %d", i)), assistant("", id), result(id, strings.Repeat("old ", words)),
			assistant(fmt.Sprintf("answer %d", i)))
	}
	return list
}

func TestTurnOfManyCallsNeverSendsMoreThanItsContext(t *testing.T) {
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
	_, got := w.completed(t)
	require.Truef(t, got.Text == "Done.", "outcome is %+v", got)
	for n, r := range w.model.Requests() {
		size := promptTokens(t, r)
		assert.Truef(t, size <= limit, "request %d has %d tokens", n, size)
		whole(t, n, r.Messages)
		assert.Equal(t, w.turn.System, r.Messages[0].Content, n, r.Messages[0])
		prompts, first := 0, ""
		for _, m := range r.Messages {
			if m.Role == "user" && first == "" {
				first = m.Content
			}
			if m.Content == w.turn.Prompt {
				prompts++
			}
		}
		assert.Equal(t, 1, prompts, n)
		assert.Truef(t, n != 0 || first != "question 0" && first != w.turn.Prompt,
			"of the history the first to stay is %q", first)
		assert.Truef(t, n != 40 || first == w.turn.Prompt, "the history still begins with %q", first)
	}
}

func TestHistoryStandsBetweenOpeningAndPrompt(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok"))
	w.turn.History = []models.Message{
		{Role: models.RoleSystem, Content: "The summary."},
		result("lost", "a result without its call"), user("Hello"), assistant("Let me see.", "a", "b"),
		result("a", "one of two"), user("Well?"),
		assistant("", "c"), result("c", "all of it"), assistant("Hi."),
	}
	x, _ := w.completed(t)
	var got []string
	for _, m := range w.model.Requests()[0].Messages {
		got = append(got, m.Role+" "+m.Content)
	}
	want := "system You are tested.|system The summary.|user Hello|assistant Let me see.|user Well?|assistant |tool all " +
		"of it|assistant Hi.|user Look."
	assert.Equal(t, want, strings.Join(got, "|"), got)
	row := string(named(w.rows(t, x), "model_call")[0].Input)
	assert.Truef(t, !strings.Contains(row, "Hello") && strings.Contains(row, "Look."), "the row shows %s", row)
}

func TestOverlongMessageIsCutWithMarker(t *testing.T) {
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
			n := promptTokens(t, r)
			assert.Truef(t, n <= 1000 && n >= 700 && strings.Contains(text, "BEGIN") && strings.Contains(text, "END") &&
				strings.Contains(text, "bytes shown"), "%d tokens: %s", n, text)
		})
	}
}

// Images and reasoning go before the rules and the question.
func TestImagesAndReasoningLeaveRulesAndQuestion(t *testing.T) {
	t.Parallel()
	thought := strings.Repeat("think ", 20_000)
	w := newWorld(t, modeltest.ToolCall("probe", `{}`).WithReasoning(thought), modeltest.Text("ok"))
	w.loop.Budget = reason.Budget{Context: 12_000}
	w.turn.System = "RULES " + strings.Repeat("rule ", 400)
	w.turn.Prompt = "QUESTION " + strings.Repeat("word ", 200)
	for range 8 {
		w.turn.Images = append(w.turn.Images, models.Part{Image: &models.Image{URL: "data:image/png;base64,aGVsbG8="}})
	}
	w.completed(t)
	for n, r := range w.model.Requests() {
		var body struct{ Messages []models.Message }
		require.NoError(t, json.Unmarshal([]byte(r.Body), &body))
		images := 0
		for _, p := range body.Messages[1].Parts {
			if p.Image != nil {
				images++
			}
		}
		assert.Equal(t, w.turn.System, body.Messages[0].Content, n)
		assert.Contains(t, body.Messages[1].Text(), w.turn.Prompt)
		assert.Truef(t, images >= 6 && promptTokens(t, r) <= 12_000, "request %d has %d images, %d tokens", n, images,
			promptTokens(t, r))
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
			assert.Truef(t, json.Valid([]byte(c.Function.Arguments)) &&
				strings.Contains(c.Function.Arguments, "bytes of arguments"), "arguments are %.100q", c.Function.Arguments)
		}
	}
	n := promptTokens(t, r)
	assert.Truef(t, n <= 1000, "%d tokens", n)
}

func TestPruningKeepsOpeningAndWholeExchanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	long := strings.Repeat("long ", 200)
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return long, nil }
	w.turn.Prompt = "The task."
	w.loop.Budget = reason.Budget{Context: 1200, Iterations: 9}
	replies := []modeltest.Reply{}
	for range 4 {
		replies = append(replies, modeltest.ToolCall("probe", `{}`).AndCall("probe", `{}`).AndCall("nope", `{}`),
			modeltest.ToolCall("nope", `{}`))
	}
	w.model.Add(append(replies, modeltest.Text("Done."))...)
	_, got := w.completed(t)
	require.Truef(t, got.Ended == reason.Answered, "outcome is %+v", got)
	pruned := false
	for n, r := range w.model.Requests() {
		m := r.Messages
		if m[0].Role != "system" || m[0].Content != w.turn.System || m[1].Role != "user" || m[1].Content != "The task." {
			t.Fatalf("request %d opens with %v", n, roles(m[:2]))
		}
		whole(t, n, m)
		if n > 0 {
			if tail := m[len(m)-1]; tail.Role != "system" || !strings.Contains(tail.Content, "does not exist") {
				t.Errorf("request %d lost the newest exchange: %v", n, roles(m))
			}
			pruned = pruned || len(m) < len(w.model.Requests()[n-1].Messages)
		}
	}
	assert.True(t, pruned, "nothing was pruned")
}

// whole reports a call without replies, and a reply without its call.
func whole(t *testing.T, n int, messages []openai.ChatCompletionMessage) {
	t.Helper()
	open := map[string]bool{}
	for _, m := range messages {
		switch {
		case m.Role == openai.ChatMessageRoleTool:
			assert.Truef(t, open[m.ToolCallID], "request %d has a reply without its call: %v", n, roles(messages))
			delete(open, m.ToolCallID)
		case len(open) > 0:
			t.Errorf("request %d has calls without replies: %v", n, roles(messages))
		}
		for _, c := range m.ToolCalls {
			open[c.ID] = true
		}
	}
}

func TestOneHugeExchangeIsStillSent(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("ok"))
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return strings.Repeat("é", 50_000), nil }
	w.loop.Budget = reason.Budget{Context: 50}
	w.completed(t)
	added := w.since(t, 1)
	text := added[1].Content
	if len(added) != 2 || len(text) > 17_000 || !strings.Contains(text, "bytes shown") ||
		strings.ContainsRune(text, '\uFFFD') {
		t.Errorf("the result has %d bytes and ends %q", len(text), text[len(text)-40:])
	}
}
