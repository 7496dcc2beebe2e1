package reason_test

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

var (
	cutMarker = regexp.MustCompile(
		` … \((\d+) of \d+ bytes shown; for more call read_result with result_id "(r\d+)" and offset (\d+)\)$`)
	nextMarker = regexp.MustCompile(`^\(bytes \d+ to \d+ of \d+ of r\d+; (?:go on at offset (\d+)|this is the end)\)\n`)
)

// reader is a model that calls probe and then reads its result to the end. text returns what it read.
func (w *world) reader() (text func() string) {
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		last := req.Messages[len(req.Messages)-1]
		if last.Role != openai.ChatMessageRoleTool {
			return modeltest.ToolCall("probe", `{}`)
		}
		if m := cutMarker.FindStringSubmatch(last.Content); m != nil {
			return modeltest.ToolCall("read_result", fmt.Sprintf(`{"result_id":%q,"offset":%s}`, m[2], m[3]))
		}
		if m := nextMarker.FindStringSubmatch(last.Content); m != nil && m[1] != "" {
			return modeltest.ToolCall("read_result", fmt.Sprintf(`{"result_id":"r1","offset":%s}`, m[1]))
		}
		return modeltest.Text("Read.")
	})
	return func() string {
		requests := w.model.Requests()
		var whole strings.Builder
		for _, m := range requests[len(requests)-1].Messages {
			if m.Role == openai.ChatMessageRoleTool {
				whole.WriteString(nextMarker.ReplaceAllString(cutMarker.ReplaceAllString(m.Content, ""), ""))
			}
		}
		return whole.String()
	}
}

// long returns a result of about 50,000 bytes with multi-byte letters.
func long() map[string]any {
	return map[string]any{"n": json.Number("1.50e3"), "list": strings.Split(strings.Repeat("é€x,", 7000), ",")}
}

const longAsText = `"n":1500`

func TestLongResultCanBeReadToItsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return long(), nil }
	text := w.reader()
	x, got := w.completed(t)
	whole := text()
	var back map[string]any
	err := json.Unmarshal([]byte(whole), &back)
	assert.Truef(t, err == nil && len(back["list"].([]any)) == 7001 && strings.Contains(whole, longAsText) &&
		got.Text == "Read.", "read %d bytes, %v", len(whole), err)
	for n, r := range w.model.Requests() {
		offered := strings.Contains(fmt.Sprint(toolNames(r)), "read_result")
		assert.Equal(t, n > 0, offered, n, toolNames(r))
	}
	rows := named(w.rows(t, x), "read_result")
	assert.Truef(t, len(rows) == len(w.model.Requests())-2 && rows[0].Status == "success" && len(rows[0].Output) <= 200,
		"rows are %+v", rows)
}

func TestLongResultIsSameAfterCrash(t *testing.T) {
	t.Parallel()
	for at := 4; at <= 9; at++ { // from the first request with the result
		t.Run(fmt.Sprintf("before new step %d", at), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return long(), nil }
			text := w.reader()
			c := newCrash()
			w.crashBefore(at, c)
			x := w.survive(t, c)
			if !json.Valid([]byte(text())) || !c.done.Load() || x.Status != executions.Completed {
				t.Errorf("execution is %s; read %d bytes", x.Status, len(text()))
			}
			w.transcripts(t)
		})
	}
}

func TestReadingResultThatIsNotThereIsCorrected(t *testing.T) {
	t.Parallel()
	for name, args := range map[string]string{
		"unknown": `{"result_id":"r9","offset":0}`, "beyond": `{"result_id":"r1","offset":99999}`,
		"no offset": `{"result_id":"r1"}`,
		"before":    `{"result_id":"r1","offset":-1}`,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.ToolCall("read_result", args), modeltest.Text("ok"))
			w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return long(), nil }
			w.completed(t)
			messages := w.since(t, 2)
			assert.Truef(t, len(messages) == 3 && strings.HasPrefix(messages[2].Content, "Tool call failed: INVALID_PARAMS."),
				"the model got %+v", messages)
		})
	}
}

func TestResultCutToFitContextCanBeReadOn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`).AndCall("probe", `{"a":1}`).AndCall("probe", `{"a":2}`),
		modeltest.Text("ok"))
	w.put(t, skills.Definition{Name: "probe", Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"a": map[string]any{"type": "integer"}},
	}})
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return strings.Repeat("a", 1900), nil }
	w.loop.Budget = reason.Budget{Context: 1200}
	w.completed(t)
	r := w.model.Requests()[1]
	for _, m := range r.Messages[3:] {
		if !cutMarker.MatchString(m.Content) {
			t.Errorf("a result ends %q", m.Content[max(0, len(m.Content)-120):])
		}
	}
	n := promptTokens(t, r)
	assert.Truef(t, n <= 1200, "%d tokens", n)
}
