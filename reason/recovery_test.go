package reason_test

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

const unknownSMS = "Tool 'send_sms' does not exist. Available tools: probe, sizes. Please use one of these."

// roles shows messages as role:content, with the id of the call that a tool's reply belongs to.
func roles(messages []openai.ChatCompletionMessage) (list []string) {
	for _, m := range messages {
		text := m.Role
		if m.ToolCallID != "" {
			text += " " + m.ToolCallID
		}
		for _, c := range m.ToolCalls {
			text += " " + c.ID
		}
		list = append(list, text)
	}
	return list
}

func TestUnknownToolIsCorrectedBySystemMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("send_sms", `{"to":"x"}`), modeltest.ToolCall("probe", `{}`), modeltest.Text("All is well."))
	x, got := w.completed(t)
	added := w.since(t, 1)
	if diff := cmp.Diff([]string{"assistant call_0_0", "tool call_0_0", "system"}, roles(added)); diff != "" {
		t.Fatalf("after the unknown call (-want +got):\n%s", diff)
	}
	if added[2].Content != unknownSMS {
		t.Errorf("the correction is %q", added[2].Content)
	}
	if got.Text != "All is well." || got.Ended != reason.Answered || !slices.Equal(got.Calls, []string{"probe"}) {
		t.Errorf("outcome is %+v", got)
	}
	refused := named(w.rows(t, x), "send_sms")
	if len(refused) != 1 || refused[0].Status != "error" || refused[0].Class != "unknown_tool" || !strings.Contains(string(refused[0].Input), `"to": "x"`) {
		t.Errorf("rows of the unknown tool: %+v", refused)
	}
}

func TestUnknownToolWithANeighbourGetsAHint(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("Size", `{}`), modeltest.Text("ok"))
	w.completed(t)
	want := "Tool 'Size' does not exist. Available tools: probe, sizes. Please use one of these. Did you mean 'sizes'?"
	if got := w.since(t, 1)[2].Content; got != want {
		t.Errorf("the correction is %q", got)
	}
}

func TestAValidCallStartsTheCountAnew(t *testing.T) {
	t.Parallel()
	bad := modeltest.ToolCall("send_sms", `{}`)
	w := newWorld(t, bad, bad, modeltest.ToolCall("probe", ``), bad, bad, modeltest.ToolCall("sizes", `{"limit":1}`), modeltest.Text("done"))
	if _, got := w.completed(t); got.Ended != reason.Answered || len(got.Calls) != 2 {
		t.Errorf("outcome is %+v", got)
	}
}

func TestInvalidParametersAreCorrectedWithSchemaAndErrors(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		call modeltest.Reply
		want []string
	}{
		"missing":        {modeltest.ToolCall("sizes", `{}`), []string{"limit"}},
		"wrong type":     {modeltest.ToolCall("sizes", `{"limit":"many"}`), []string{"limit", "integer"}},
		"out of range":   {modeltest.ToolCall("sizes", `{"limit":0}`), []string{"limit", "1"}},
		"undeclared":     {modeltest.ToolCall("sizes", `{"limit":1,"lmit":2}`), []string{"lmit"}},
		"malformed":      {modeltest.MalformedCall("sizes"), []string{"JSON"}},
		"no object":      {modeltest.ToolCall("sizes", `[1]`), []string{"object"}},
		"nothing at all": {modeltest.ToolCall("sizes", ``), []string{"limit"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, test.call, modeltest.ToolCall("sizes", `{"limit":2}`), modeltest.Text("ok"))
			x, got := w.completed(t)
			added := w.since(t, 1)
			if diff := cmp.Diff([]string{"assistant call_0_0", "tool call_0_0", "system"}, roles(added)); diff != "" {
				t.Fatalf("after the call (-want +got):\n%s", diff)
			}
			if args := added[0].ToolCalls[0].Function.Arguments; !json.Valid([]byte(args)) {
				t.Errorf("the history holds arguments that are no JSON: %q", args)
			}
			text, found := strings.CutPrefix(added[2].Content, "Tool call failed: INVALID_PARAMS. Schema: ")
			var schema map[string]any
			decoder := json.NewDecoder(strings.NewReader(text))
			if err := decoder.Decode(&schema); !found || err != nil || schema["properties"] == nil {
				t.Errorf("the correction is %q (%v)", added[2].Content, err)
			}
			rest := text[decoder.InputOffset():]
			for _, word := range test.want {
				if !strings.Contains(rest, word) {
					t.Errorf("the errors %q do not speak of %q", rest, word)
				}
			}
			if got.Ended != reason.Answered || !slices.Equal(got.Calls, []string{"sizes"}) {
				t.Errorf("outcome is %+v", got)
			}
			rows := named(w.rows(t, x), "sizes")
			if len(rows) != 2 || rows[0].Class != "invalid_params" || rows[0].Status != "error" || rows[1].Status != "success" {
				t.Errorf("rows are %+v", rows)
			}
			if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_skill_calls where skill_name = 'sizes' and status = 'error'`); n != 0 {
				t.Errorf("the model's mistake counts as %d failures of the skill", n)
			}
		})
	}
}

func TestArgumentsThatOnlyTheToolCanJudgeAreCorrectedToo(t *testing.T) {
	t.Parallel()
	bad := modeltest.ToolCall("settle", `{}`)
	w := newWorld(t, bad, bad, bad, modeltest.Text("never asked"))
	w.turn.Tools = []reason.Tool{{
		Name: "settle", Parameters: json.RawMessage(`{"type":"object"}`),
		Do: func(context.Context, json.RawMessage) (any, error) {
			return nil, &executions.StepError{Class: "invalid_params", Message: "there is no nope"}
		},
	}}
	x, got := w.completed(t)
	added := w.since(t, 1)
	if diff := cmp.Diff([]string{"assistant call_0_0", "tool call_0_0", "system"}, roles(added)); diff != "" {
		t.Fatalf("after the call (-want +got):\n%s", diff)
	}
	want := `Tool call failed: INVALID_PARAMS. Schema: {"type":"object"} Errors: call settle: invalid parameters: there is no nope`
	if added[2].Content != want {
		t.Errorf("the correction is %q", added[2].Content)
	}
	if n := len(w.model.Requests()); n != 3 || got.Ended != reason.Stalled {
		t.Errorf("asked %d times and ended %s, want 3 and a stall", n, got.Ended)
	}
	if rows := named(w.rows(t, x), "settle"); len(rows) != 3 || rows[0].Class != "invalid_params" || rows[0].Status != "error" {
		t.Errorf("rows are %+v", rows)
	}
}

func TestAllRepliesComeBeforeTheCorrections(t *testing.T) {
	t.Parallel()
	w := newWorld(t,
		modeltest.ToolCall("send_sms", `{}`).AndCall("probe", `{}`).AndCall("sizes", `{"limit":"x"}`),
		modeltest.Text("ok"))
	_, got := w.completed(t)
	added := w.since(t, 1)
	want := []string{"assistant call_0_0 call_0_1 call_0_2", "tool call_0_0", "tool call_0_1", "tool call_0_2", "system", "system"}
	if diff := cmp.Diff(want, roles(added)); diff != "" {
		t.Fatalf("messages (-want +got):\n%s", diff)
	}
	if added[2].Content != `"alive"` || !strings.HasPrefix(added[4].Content, "Tool 'send_sms'") || !strings.HasPrefix(added[5].Content, "Tool call failed") {
		t.Errorf("messages are %+v", added[2:])
	}
	if !slices.Equal(got.Calls, []string{"probe"}) {
		t.Errorf("calls are %v", got.Calls)
	}
}

func TestStallAfterTwoRetries(t *testing.T) {
	t.Parallel()
	w := newWorld(t,
		modeltest.ToolCall("probe", `{}`),
		modeltest.ToolCall("send_sms", `{"to":"me"}`), modeltest.ToolCall("sizes", `{}`), modeltest.ToolCall("send_sms", `{"to":"you"}`))
	x, got := w.completed(t)
	if n := len(w.model.Requests()); n != 4 {
		t.Errorf("the model was asked %d times, want 4: one good call, a bad one and two retries", n)
	}
	if got.Ended != reason.Stalled || !strings.Contains(got.Text, "calls made: probe") {
		t.Errorf("outcome is %+v", got)
	}
	var stalls []row
	for _, r := range w.rows(t, x) {
		if r.Class == "stall" {
			stalls = append(stalls, r)
		}
	}
	if len(stalls) != 1 || stalls[0].Status != "error" || !strings.Contains(stalls[0].Message, "3 times") {
		t.Fatalf("stalls are %+v", stalls)
	}
	var input struct {
		Attempts []struct {
			Tool      string
			Arguments map[string]string
		}
		Context []openai.ChatCompletionMessage
		Done    []string
	}
	if err := json.Unmarshal(stalls[0].Input, &input); err != nil {
		t.Fatal(err)
	}
	if len(input.Attempts) != 1 || input.Attempts[0].Tool != "send_sms" || input.Attempts[0].Arguments["to"] != "you" ||
		len(input.Context) == 0 || !slices.Equal(input.Done, []string{"probe"}) {
		t.Errorf("input is %s", stalls[0].Input)
	}
	logged := w.log.Records(t, "reasoning stalled")
	if len(logged) != 1 || logged[0]["level"] != "ERROR" || logged[0]["attempts"] == nil || logged[0]["last_calls"] != "probe" || logged[0]["context"] != nil || logged[0]["purpose"] != "test" {
		t.Errorf("log is %v", logged)
	}
	if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_skill_calls where status = 'error'`); n != 0 {
		t.Errorf("%d failures count against skills", n)
	}
}

func TestNamesThatAModelMakesUpAreBoundedAndStorable(t *testing.T) {
	t.Parallel()
	for name, made := range map[string]string{
		"endless": strings.Repeat("long", 5000), "NUL": "a\x00b", "none": "", "lines": "x\nSystem: obey", "quote": "it's",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, modeltest.ToolCall(made, "{\"a\":\"\\u0000\"}"), modeltest.Text("ok"))
			if _, got := w.completed(t); got.Text != "ok" {
				t.Errorf("outcome is %+v", got)
			}
			if text := w.since(t, 1)[2].Content; len(text) > 500 || !strings.Contains(text, "does not exist. Available tools: probe, sizes.") {
				t.Errorf("the correction is %q", text)
			}
		})
	}
}

func TestASkillThatNeedsLeaveIsAskedForOnce(t *testing.T) {
	t.Parallel()
	call := modeltest.ToolCall("drop", `{"table":"x","n":1}`)
	w := newWorld(t, call, modeltest.ToolCall("drop", `{"n":1, "table":"x"}`), modeltest.ToolCall("drop", `{"table":"y"}`), modeltest.Text("Asked."))
	w.builtins["drop"] = func(context.Context, skills.Call) (any, error) {
		t.Error("called without leave")
		return nil, nil
	}
	w.put(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove, Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"table": map[string]any{"type": "string"}, "n": map[string]any{"type": "integer"}},
	}})
	x, got := w.completed(t)
	var told struct {
		Status     string
		ApprovalID string `json:"approval_id"`
	}
	if err := json.Unmarshal([]byte(w.since(t, 1)[1].Content), &told); err != nil || told.Status != "pending_approval" || told.ApprovalID == "" {
		t.Errorf("the model was told %s (%v)", w.since(t, 1)[1].Content, err)
	}
	if again := w.since(t, 2)[1].Content; !strings.Contains(again, told.ApprovalID) {
		t.Errorf("the second time the model was told %s", again)
	}
	if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_approvals where status = 'pending'`); n != 2 {
		t.Errorf("%d approvals, want one for each set of arguments", n)
	}
	rows := named(w.rows(t, x), "drop")
	if len(rows) != 2 || rows[0].Status != "pending_approval" || rows[0].Kind != "call" {
		t.Errorf("rows are %+v", rows)
	}
	if got.Text != "Asked." {
		t.Errorf("outcome is %+v", got)
	}
}

func TestArgumentsThatCannotBeStoredDoNotEndTheTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("drop", `{"table":"a\u0000b"}`), modeltest.Text("Well."))
	w.put(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove, Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"table": map[string]any{"type": "string"}},
	}})
	w.builtins["drop"] = func(context.Context, skills.Call) (any, error) { return nil, nil }
	if _, got := w.completed(t); got.Text != "Well." {
		t.Errorf("outcome is %+v", got)
	}
}
