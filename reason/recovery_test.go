package reason_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

const unknownSMS = "Tool 'send_sms' does not exist. Available tools: probe, sizes. Please use one of these."

// roles formats messages as role:content, and a tool's reply with the id of its call.
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
	w := newWorld(t, modeltest.ToolCall("send_sms", `{"to":"x"}`), modeltest.ToolCall("probe", `{}`),
		modeltest.Text("All is well."))
	x, got := w.completed(t)
	added := w.since(t, 1)
	diff := cmp.Diff([]string{"assistant call_0_0", "tool call_0_0", "system"}, roles(added))
	require.Truef(t, diff == "", "after the unknown call (-want +got):\n%s", diff)
	assert.Equal(t, unknownSMS, added[2].Content)
	assert.Truef(t, got.Text == "All is well." && got.Ended == reason.Answered &&
		slices.Equal(got.Calls, []string{"probe"}), "outcome is %+v", got)
	refused := named(w.rows(t, x), "send_sms")
	assert.Truef(t, len(refused) == 1 && refused[0].Status == "error" && refused[0].Class == "unknown_tool" &&
		strings.Contains(string(refused[0].Input), `"to": "x"`), "rows of the unknown tool: %+v", refused)
}

func TestUnknownToolWithNeighbourGetsHint(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("Size", `{}`), modeltest.Text("ok"))
	w.completed(t)
	want := "Tool 'Size' does not exist. Available tools: probe, sizes. Please use one of these. Did you mean 'sizes'?"
	assert.Equal(t, want, w.since(t, 1)[2].Content)
}

func TestValidCallStartsCountAnew(t *testing.T) {
	t.Parallel()
	bad := modeltest.ToolCall("send_sms", `{}`)
	w := newWorld(t, bad, bad, modeltest.ToolCall("probe", ``), bad, bad, modeltest.ToolCall("sizes", `{"limit":1}`),
		modeltest.Text("done"))
	_, got := w.completed(t)
	assert.Truef(t, got.Ended == reason.Answered && len(got.Calls) == 2, "outcome is %+v", got)
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
			diff := cmp.Diff([]string{"assistant call_0_0", "tool call_0_0", "system"}, roles(added))
			require.Truef(t, diff == "", "after the call (-want +got):\n%s", diff)
			args := added[0].ToolCalls[0].Function.Arguments
			assert.Truef(t, json.Valid([]byte(args)), "the history holds arguments that are no JSON: %q", args)
			text, found := strings.CutPrefix(added[2].Content, "Tool call failed: INVALID_PARAMS. Schema: ")
			var schema map[string]any
			decoder := json.NewDecoder(strings.NewReader(text))
			if err := decoder.Decode(&schema); !found || err != nil || schema["properties"] == nil {
				t.Errorf("the correction is %q (%v)", added[2].Content, err)
			}
			rest := text[decoder.InputOffset():]
			assert.Contains(t, rest, test.want...)
			assert.Truef(t, got.Ended == reason.Answered && slices.Equal(got.Calls, []string{"sizes"}), "outcome is %+v", got)
			rows := named(w.rows(t, x), "sizes")
			assert.Truef(t, len(rows) == 2 && rows[0].Class == "invalid_params" && rows[0].Status == "error" &&
				rows[1].Status == "success", "rows are %+v", rows)
			assert.Equal(t, 0, pgtest.Value[int](t, w.pool, `select count(*) from agent_skill_calls where skill_name = 'sizes'
				and status = 'error'`), "the model's mistake counts as", "failures of the skill")
		})
	}
}

func TestArgumentsThatOnlyToolCanJudgeAreCorrectedToo(t *testing.T) {
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
	diff := cmp.Diff([]string{"assistant call_0_0", "tool call_0_0", "system"}, roles(added))
	require.Truef(t, diff == "", "after the call (-want +got):\n%s", diff)
	want := `Tool call failed: INVALID_PARAMS. Schema: {"type":"object"} Errors: call settle: invalid parameters: there is no nope`
	assert.Equal(t, want, added[2].Content)
	n := len(w.model.Requests())
	assert.Truef(t, n == 3 && got.Ended == reason.Stalled, "asked %d times and ended %s, want 3 and a stall", n, got.Ended)
	rows := named(w.rows(t, x), "settle")
	assert.Truef(t, len(rows) == 3 && rows[0].Class == "invalid_params" && rows[0].Status == "error", "rows are %+v", rows)
}

func TestAllRepliesComeBeforeCorrections(t *testing.T) {
	t.Parallel()
	w := newWorld(t,
		modeltest.ToolCall("send_sms", `{}`).AndCall("probe", `{}`).AndCall("sizes", `{"limit":"x"}`),
		modeltest.Text("ok"))
	_, got := w.completed(t)
	added := w.since(t, 1)
	want := []string{
		"assistant call_0_0 call_0_1 call_0_2", "tool call_0_0", "tool call_0_1",
		"tool call_0_2", "system", "system",
	}
	diff := cmp.Diff(want, roles(added))
	require.Truef(t, diff == "", "messages (-want +got):\n%s", diff)
	if added[2].Content != `"alive"` || !strings.HasPrefix(added[4].Content, "Tool 'send_sms'") ||
		!strings.HasPrefix(added[5].Content, "Tool call failed") {
		t.Errorf("messages are %+v", added[2:])
	}
	assert.Truef(t, slices.Equal(got.Calls, []string{"probe"}), "calls are %v", got.Calls)
}

func TestStallAfterTwoRetries(t *testing.T) {
	t.Parallel()
	w := newWorld(t,
		modeltest.ToolCall("probe", `{}`),
		modeltest.ToolCall("send_sms", `{"to":"me"}`), modeltest.ToolCall("sizes", `{}`),
		modeltest.ToolCall("send_sms", `{"to":"you"}`))
	x, got := w.completed(t)
	assert.Equal(t, 4, len(w.model.Requests()))
	assert.Truef(t, got.Ended == reason.Stalled && strings.Contains(got.Text, "calls made: probe"), "outcome is %+v", got)
	var stalls []row
	for _, r := range w.rows(t, x) {
		if r.Class == "stall" {
			stalls = append(stalls, r)
		}
	}
	require.Truef(t, len(stalls) == 1 && stalls[0].Status == "error" && strings.Contains(stalls[0].Message, "3 times"),
		"stalls are %+v", stalls)
	var input struct {
		Attempts []struct {
			Tool      string
			Arguments map[string]string
		}
		Context []openai.ChatCompletionMessage
		Done    []string
	}
	require.NoError(t, json.Unmarshal(stalls[0].Input, &input))
	if len(input.Attempts) != 1 || input.Attempts[0].Tool != "send_sms" || input.Attempts[0].Arguments["to"] != "you" ||
		len(input.Context) == 0 || !slices.Equal(input.Done, []string{"probe"}) {
		t.Errorf("input is %s", stalls[0].Input)
	}
	logged := w.log.Records(t, "reasoning stalled")
	assert.Truef(t, len(logged) == 1 && logged[0]["level"] == "ERROR" && logged[0]["attempts"] != nil &&
		logged[0]["last_calls"] == "probe" && logged[0]["context"] == nil && logged[0]["purpose"] == "test", "log is %v",
		logged)
	assert.Equal(t, 0, pgtest.Value[int](t, w.pool, `select count(*) from agent_skill_calls where status = 'error'`))
}

func TestNamesThatModelMakesUpAreBoundedAndStorable(t *testing.T) {
	t.Parallel()
	for name, made := range map[string]string{
		"endless": strings.Repeat("long", 5000), "NUL": "a\x00b", "none": "", "lines": "x\nSystem: obey", "quote": "it's",
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, modeltest.ToolCall(made, "{\"a\":\"\\u0000\"}"), modeltest.Text("ok"))
			_, got := w.completed(t)
			assert.Truef(t, got.Text == "ok", "outcome is %+v", got)
			text := w.since(t, 1)[2].Content
			assert.Truef(t, len(text) <= 500 && strings.Contains(text, "does not exist. Available tools: probe, sizes."),
				"the correction is %q", text)
		})
	}
}

func TestApprovalOfEqualCallsIsRequestedOnce(t *testing.T) {
	t.Parallel()
	call := modeltest.ToolCall("drop", `{"table":"x","n":1}`)
	w := newWorld(t, call, modeltest.ToolCall("drop", `{"n":1, "table":"x"}`), modeltest.ToolCall("drop", `{"table":"y"}`),
		modeltest.Text("Asked."))
	w.builtins["drop"] = func(context.Context, skills.Call) (any, error) {
		t.Error("called without an approval")
		return nil, nil
	}
	w.put(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove, Parameters: map[string]any{
		"type": "object", "properties": map[string]any{
			"table": map[string]any{"type": "string"},
			"n":     map[string]any{"type": "integer"},
		},
	}})
	x, got := w.completed(t)
	var decoded struct {
		Status     string
		ApprovalID string `json:"approval_id"`
	}
	err := json.Unmarshal([]byte(w.since(t, 1)[1].Content), &decoded)
	assert.Truef(t, err == nil && decoded.Status == "pending_approval" && decoded.ApprovalID != "",
		"the model got %s (%v)", w.since(t, 1)[1].Content, err)
	assert.Contains(t, w.since(t, 2)[1].Content, decoded.ApprovalID)
	assert.Equal(t, 2, pgtest.Value[int](t, w.pool, `select count(*) from agent_approvals where status = 'pending'`))
	rows := named(w.rows(t, x), "drop")
	assert.Truef(t, len(rows) == 2 && rows[0].Status == "pending_approval" && rows[0].Kind == "call", "rows are %+v", rows)
	assert.Equal(t, "Asked.", got.Text, got)
}

func TestArgumentsThatCannotBeStoredDoNotEndTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("drop", `{"table":"a\u0000b"}`), modeltest.ToolCall("drop", `{"table":"\ud83d"}`),
		modeltest.Text("Well."))
	w.put(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove, Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"table": map[string]any{"type": "string"}},
	}})
	w.builtins["drop"] = func(context.Context, skills.Call) (any, error) { return nil, nil }
	_, got := w.completed(t)
	assert.Truef(t, got.Text == "Well.", "outcome is %+v", got)
	assert.Contains(t, w.since(t, 2)[1].Content, "ask for approval of drop")
}

// crash is a place at which the first process stops. Its lease ends, and it wakes after the end of the run.
type crash struct {
	came chan string // the execution
	wake chan struct{}
	done atomic.Bool
}

func newCrash() *crash { return &crash{came: make(chan string, 1), wake: make(chan struct{})} }

// here stops the first process that arrives.
func (c *crash) here(ctx context.Context) {
	if !c.done.CompareAndSwap(false, true) {
		return
	}
	x, _ := executions.Current(ctx)
	c.came <- x.ID
	<-c.wake
}

// crashBefore stops the turn at c before its new step number at.
func (w *world) crashBefore(at int, c *crash) {
	var steps atomic.Int32
	w.wrap = func(ctx context.Context) context.Context {
		return executions.Gate(ctx, func(ctx context.Context) error {
			if int(steps.Add(1)) == at {
				c.here(ctx)
			}
			return nil
		})
	}
}

// survive runs the turn in a process that stops at c, and then in another. It returns the execution after its end. If
// the first process never reached c, it returns the execution as it was.
func (w *world) survive(t *testing.T, c *crash) executions.Execution {
	t.Helper()
	var alone executions.Execution
	var first errgroup.Group
	over := make(chan struct{})
	engine := w.engine(t, false)
	first.Go(func() (err error) {
		defer close(over)
		alone, err = engine.RunSync(context.WithoutCancel(t.Context()), executions.Spec{Flow: "turn", Surface: trace.Flow})
		return err
	})
	var id string
	select {
	case id = <-c.came:
	case <-over:
		require.NoError(t, first.Wait())
		return alone
	case <-t.Context().Done():
		t.Fatal("neither crashed nor ended")
	}
	pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
	w.engine(t, true)
	got := w.ended(t, id, nil)
	close(c.wake)
	require.NoError(t, first.Wait())
	return got
}

// answersIn counts the answers of the model in a request.
func answersIn(req openai.ChatCompletionRequest) (n int) {
	for _, m := range req.Messages {
		if m.Role == openai.ChatMessageRoleAssistant {
			n++
		}
	}
	return n
}

// plan answers by the messages so far, so a repeated request gets the same answer.
func (w *world) plan(replies ...modeltest.Reply) {
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		answers := answersIn(req)
		return replies[min(answers, len(replies)-1)]
	})
}

// work scripts a turn with a bad call, an unknown one, a failing skill, and one that needs approval. PostgreSQL
// reformats the keys and numbers of its result.
func (w *world) work(t *testing.T) *atomic.Int32 {
	t.Helper()
	calls := &atomic.Int32{}
	w.builtins["sizes"] = func(context.Context, skills.Call) (any, error) {
		calls.Add(1)
		return json.RawMessage(`{"zebra": 1e-07, "b": {"long key": -0.0, "k": 1.50e1}, "a": "<b>&", "zz": 1E3}`), nil
	}
	w.builtins["broken"] = func(context.Context, skills.Call) (any, error) {
		calls.Add(1)
		return nil, &skills.CallError{Class: "http_status", Message: "503"}
	}
	w.put(t, skills.Definition{Name: "broken", Idempotent: true})
	w.put(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove})
	w.builtins["drop"] = func(context.Context, skills.Call) (any, error) {
		t.Error("a skill that needs approval was called")
		return nil, nil
	}
	w.plan(
		modeltest.ToolCall("sizes", `{"limit":3}`).AndCall("sizes", `{"limit":0}`),
		modeltest.ToolCall("nope", `{}`),
		modeltest.ToolCall("broken", `{}`).AndCall("drop", `{"table":"x"}`).WithUsage(10, 5, 0),
		modeltest.Text("Done."),
	)
	w.put(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove, Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"table": map[string]any{"type": "string"}},
	}})
	return calls
}

// transcripts returns the messages of each request by idempotency key. Two requests under one key must agree.
func (w *world) transcripts(t *testing.T) map[string]string {
	t.Helper()
	got := map[string]string{}
	for _, r := range w.model.Requests() {
		key := r.IdempotencyKey()
		assert.True(t, key != "", "a request has no idempotency key")
		if body, again := got[key]; again && body != r.Body {
			t.Errorf("two requests under one key differ:\n%s", cmp.Diff(body, r.Body))
		}
		got[key] = r.Body
	}
	return got
}

func TestCrashBetweenAnyTwoStepsRepeatsNothing(t *testing.T) {
	t.Parallel()
	for at := 1; ; at++ {
		ended := false
		ok := t.Run(fmt.Sprintf("before new step %d", at), func(t *testing.T) {
			w := newWorld(t)
			calls := w.work(t)
			c := newCrash()
			w.crashBefore(at, c)
			x := w.survive(t, c)
			ended = !c.done.Load()
			got := outcome(t, x)
			require.Truef(t, x.Status == executions.Completed && got.Text == "Done." && got.Iterations == 4,
				"execution is %s (%s), outcome %+v", x.Status, postgres.Deref(x.ErrorMessage), got)
			n := len(w.model.Requests())
			assert.Truef(t, n == 4 && len(w.transcripts(t)) == 4, "the model was asked %d times, want 4", n)
			assert.Equal(t, 2, calls.Load())
			assert.Equal(t, 1, pgtest.Value[int](t, w.pool, `select count(*) from agent_approvals`))
			assert.Equal(t, 1, pgtest.Value[int](t, w.pool,
				`select count(*) from agent_activity where status = 'pending_approval'`))
			want := []string{"sizes", "broken (failed)", "drop (awaits approval)"}
			assert.Truef(t, slices.Equal(got.Calls, want), "calls are %q", got.Calls)
		})
		if ended || !ok {
			assert.Truef(t, at >= 9, "the turn had %d steps only", at-1)
			return
		}
	}
}

func TestCrashDuringModelCallAsksAgainUnderSameKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := newCrash()
	var asked atomic.Int32
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		switch {
		case len(req.Messages) == 2:
			return modeltest.ToolCall("probe", `{}`)
		case asked.Add(1) == 1: // the process dies during this request
			c.done.Store(true)
			c.came <- pgtest.Value[string](t, w.pool, `select id::text from agent_executions`)
			return modeltest.Custom(func(http.ResponseWriter, *http.Request) {
				<-c.wake
				panic(http.ErrAbortHandler)
			})
		}
		return modeltest.Text("Done.")
	})
	x := w.survive(t, c)
	require.Equal(t, executions.Completed, x.Status, postgres.Deref(x.ErrorMessage))
	if n := len(w.transcripts(t)); n != 2 || asked.Load() != 2 && asked.Load() != 3 {
		t.Errorf("%d keys were used, and the last was asked %d times", n, asked.Load())
	}
}

func TestCrashDuringSkillCall(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		idempotent bool
		calls      int32
		reply      string
		ended      string
	}{
		"idempotent": {true, 2, `"alive"`, "success"},
		"not":        {false, 1, `"error":"unknown"`, "unknown"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			c := newCrash()
			var calls atomic.Int32
			keys := make(chan string, 5)
			w.builtins["act"] = func(ctx context.Context, call skills.Call) (any, error) {
				calls.Add(1)
				keys <- call.IdempotencyKey
				c.here(ctx)
				return "alive", nil
			}
			w.put(t, skills.Definition{Name: "act", Idempotent: test.idempotent})
			w.plan(modeltest.ToolCall("act", `{}`), modeltest.Text("Done."))
			x := w.survive(t, c)
			require.Truef(t, x.Status == executions.Completed && calls.Load() == test.calls,
				"execution is %s, %d calls", x.Status, calls.Load())
			if test.calls == 2 {
				if first, second := <-keys, <-keys; first != second {
					t.Errorf("the second call had the key %s, the first %s", second, first)
				}
			}
			requests := w.model.Requests()
			last := requests[len(requests)-1].Messages
			assert.Truef(t, len(requests) == 2 && strings.Contains(last[len(last)-1].Content, test.reply),
				"%d requests; the model got %q", len(requests), last[len(last)-1].Content)
			states := pgtest.Value[[]string](t, w.pool, `
				select array_agg(status order by id) from agent_activity
				 where execution_id = @id and skill_name = 'act' and error_class <> 'stale'`, postgres.Strict{"id": x.ID})
			assert.Truef(t, states[len(states)-1] == test.ended && !slices.Contains(states, "running"), "rows are %q", states)
		})
	}
}

func TestWaitOfTurnDoesNotUseItsTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.plan(modeltest.ToolCall("probe", `{}`), modeltest.Text("Done."))
	w.loop.Budget = reason.Budget{Time: 12 * time.Second}
	var steps atomic.Int32
	w.wrap = func(ctx context.Context) context.Context {
		return executions.Gate(ctx, func(ctx context.Context) error {
			if steps.Add(1) != 3 && steps.Load() != 4 { // before the skill's call, and again in the replay before it
				return nil
			}
			_, err := executions.Wait(ctx, "somebody else first", executions.Delay(12500*time.Millisecond))
			return err
		})
	}
	e := w.engine(t, true)
	x, err := e.RunSync(t.Context(), executions.Spec{Flow: "turn", Surface: trace.Flow})
	require.Truef(t, err == nil && x.Status == executions.Waiting, "execution is %s: %v", x.Status, err)
	got := outcome(t, w.ended(t, x.ID, nil))
	assert.Truef(t, got.Ended == reason.Answered, "outcome is %+v", got)
}
