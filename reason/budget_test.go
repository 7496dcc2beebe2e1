package reason_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

func TestEachBudgetEndsATurnGracefully(t *testing.T) {
	t.Parallel()
	probe := modeltest.ToolCall("probe", `{}`)
	for name, test := range map[string]struct {
		budget reason.Budget
		reply  modeltest.Reply
		asked  int
		calls  string
	}{
		"iterations": {reason.Budget{Iterations: 3}, probe, 3, "calls made: probe, probe, probe"},
		"tokens":     {reason.Budget{Tokens: 2000}, probe.WithUsage(300, 700, 0), 2, "calls made: probe, probe"},
		"money":      {reason.Budget{CostUSD: 0.2, Tokens: 10_000_000}, probe.WithUsage(100, 250_000, 0), 2, "calls made: probe, probe"},
		"time":       {reason.Budget{Time: 3 * time.Second}, modeltest.Hang(), 1, "nothing was done"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.plan(test.reply)
			w.loop.Budget = test.budget
			x, got := w.completed(t)
			want := "Stopped because the budget of " + name + " ran out; " + test.calls + "."
			if got.Ended != name || got.Text != want || x.ResultSummary != want {
				t.Errorf("outcome is %+v", got)
			}
			if n := len(w.model.Requests()); n != test.asked {
				t.Errorf("the model was asked %d times, want %d", n, test.asked)
			}
		})
	}
}

func TestALoopWithChangingArgumentsLeavesAStall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		return modeltest.ToolCall("sizes", fmt.Sprintf(`{"limit": %d}`, n+1))
	})
	w.loop.Budget = reason.Budget{Iterations: 7}
	x, got := w.completed(t)
	if got.Ended != "iterations" {
		t.Errorf("outcome is %+v", got)
	}
	rows := named(w.rows(t, x), "reasoning")
	if len(rows) != 1 || rows[0].Status != "error" || rows[0].Class != "stall" {
		t.Fatalf("the rows of the stall are %+v", rows)
	}
	for _, said := range []string{"called tools 7 times in a row and came to no answer", got.Text} {
		if !strings.Contains(rows[0].Message, said) {
			t.Errorf("%q does not say %q", rows[0].Message, said)
		}
	}
	if !strings.Contains(string(rows[0].Input), `{"limit": 7}`) {
		t.Errorf("the evidence lacks the last attempt: %s", rows[0].Input)
	}
}

func TestTimeThatRanOutDuringASkillEndsTheTurnBeforeTheNextRequest(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`))
	w.builtins["probe"] = func(ctx context.Context, _ skills.Call) (any, error) {
		timer := time.NewTimer(3500 * time.Millisecond)
		defer timer.Stop()
		<-timer.C
		return "slow", nil
	}
	w.loop.Budget = reason.Budget{Time: 3 * time.Second}
	x, got := w.completed(t)
	if got.Ended != "time" || !slices.Equal(got.Calls, []string{"probe"}) {
		t.Errorf("outcome is %+v", got)
	}
	rows := named(w.rows(t, x), "model_call")
	if len(rows) != 2 || rows[1].Class != "budget" || rows[1].Status != "error" {
		t.Errorf("rows are %+v", rows)
	}
}

func TestTimeIsCountedOnce(t *testing.T) {
	t.Parallel()
	probe := modeltest.ToolCall("probe", `{}`)
	w := newWorld(t, probe, probe, probe, modeltest.Text("Done."))
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) {
		timer := time.NewTimer(1200 * time.Millisecond)
		defer timer.Stop()
		<-timer.C
		return "slow", nil
	}
	w.loop.Budget = reason.Budget{Time: 7 * time.Second}
	if _, got := w.completed(t); got.Ended != reason.Answered {
		t.Errorf("outcome is %+v", got)
	}
}

func TestPruningKeepsTheOpeningAndWholeExchanges(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	long := strings.Repeat("long ", 200)
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return long, nil }
	w.turn.Prompt = "The task."
	w.loop.Budget = reason.Budget{Context: 1200, Iterations: 9}
	replies := []modeltest.Reply{}
	for range 4 {
		replies = append(replies, modeltest.ToolCall("probe", `{}`).AndCall("probe", `{}`).AndCall("nope", `{}`), modeltest.ToolCall("nope", `{}`))
	}
	w.model.Add(append(replies, modeltest.Text("Done."))...)
	if _, got := w.completed(t); got.Ended != reason.Answered {
		t.Fatalf("outcome is %+v", got)
	}
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
	if !pruned {
		t.Error("nothing was pruned")
	}
}

// whole fails when a call is without its replies or a reply without its call.
func whole(t *testing.T, n int, messages []openai.ChatCompletionMessage) {
	t.Helper()
	open := map[string]bool{}
	for _, m := range messages {
		switch {
		case m.Role == openai.ChatMessageRoleTool:
			if !open[m.ToolCallID] {
				t.Errorf("request %d has a reply without its call: %v", n, roles(messages))
			}
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
	if len(added) != 2 || len(text) > 17_000 || !strings.Contains(text, "bytes shown") || strings.ContainsRune(text, '\uFFFD') {
		t.Errorf("the result has %d bytes and ends %q", len(text), text[len(text)-40:])
	}
}

func TestAFailingSkillIsToldToTheModel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("Too bad."))
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) {
		return nil, &skills.CallError{Class: "http_status", Message: "the service answered 503"}
	}
	x, got := w.completed(t)
	if text := w.since(t, 1)[1].Content; text != `{"error":"http_status","message":"the service answered 503"}` {
		t.Errorf("the model was told %s", text)
	}
	if rows := named(w.rows(t, x), "probe"); len(rows) != 1 || rows[0].Class != "http_status" || got.Text != "Too bad." {
		t.Errorf("rows are %+v, outcome %+v", rows, got)
	}
	if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_skill_calls where skill_name = 'probe' and status = 'error'`); n != 1 {
		t.Errorf("%d failures count", n)
	}
}

func TestARuntimeToolThatFailsIsToldToTheModel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("note", `{}`), modeltest.ToolCall("note", `{"x":1}`), modeltest.Text("ok"))
	w.turn.Tools = []reason.Tool{{
		Name: "note", Parameters: []byte(`{"type":"object","additionalProperties":false}`),
		Do: func(context.Context, json.RawMessage) (any, error) {
			return nil, &executions.StepError{Class: "refused", Message: "not now"}
		},
	}}
	w.completed(t)
	if text := w.since(t, 1)[1].Content; text != `{"error":"refused","message":"not now"}` {
		t.Errorf("the model was told %s", text)
	}
	if text := w.since(t, 2)[2].Content; !strings.HasPrefix(text, "Tool call failed: INVALID_PARAMS. Schema: {") {
		t.Errorf("the correction is %s", text)
	}
}

func TestTroubleOfTheProvider(t *testing.T) {
	t.Parallel()
	ok := modeltest.Text("Fine.")
	for name, test := range map[string]struct {
		replies []modeltest.Reply
		failure string // empty: the turn ends well
	}{
		"too many requests, once": {[]modeltest.Reply{modeltest.Status(429, time.Second), ok}, ""},
		"server errors, twice":    {[]modeltest.Reply{modeltest.Status(500, 0), modeltest.Status(503, 0), ok}, ""},
		"cut stream":              {[]modeltest.Reply{modeltest.CutStream("Fi"), ok}, ""},
		"ended early":             {[]modeltest.Reply{modeltest.EndedStream("Fi"), ok}, ""},
		"error in the middle":     {[]modeltest.Reply{modeltest.MidStreamError("Fi", "overloaded"), ok}, ""},
		"reset":                   {[]modeltest.Reply{modeltest.Reset(), ok}, ""},
		"no usage":                {[]modeltest.Reply{ok.NoUsage()}, ""},
		"down":                    {[]modeltest.Reply{modeltest.Status(500, 0), modeltest.Status(500, 0), modeltest.Status(500, 0)}, "500"},
		"too many, for long":      {[]modeltest.Reply{modeltest.Status(429, time.Hour)}, "429"},
		"bad key":                 {[]modeltest.Reply{modeltest.Refusal(401, "invalid_request_error", "", "Incorrect API key provided", 0)}, "Incorrect API key"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, test.replies...)
			x, got := w.run(t)
			rows := named(w.rows(t, x), "model_call")
			if test.failure == "" {
				if x.Status != executions.Completed || got.Text != "Fine." || got.Usage.TotalTokens == 0 || len(rows) != 1 {
					t.Errorf("execution is %s, outcome %+v, rows %+v", x.Status, got, rows)
				}
				if name == "no usage" && !got.Usage.Estimated {
					t.Error("an estimate is not marked")
				}
				return
			}
			if x.Status != executions.Failed || !strings.Contains(testkit.Deref(x.ErrorMessage), test.failure) || !strings.Contains(testkit.Deref(x.ErrorMessage), "ask the model") {
				t.Errorf("execution is %s: %s", x.Status, testkit.Deref(x.ErrorMessage))
			}
			if len(rows) != 1 || rows[0].Status != "error" || rows[0].Class != "model" {
				t.Errorf("rows are %+v", rows)
			}
		})
	}
}

func TestOnlySkillsInScopeAndInServiceAreOffered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("ok"))
	noop := func(context.Context, skills.Call) (any, error) { return nil, nil }
	for name, scope := range map[string]string{
		"inner": skills.ScopeInternal, "outer": skills.ScopeExternal, "any": skills.ScopeBoth, "off": skills.ScopeInternal,
		"resting": skills.ScopeInternal, "tried": skills.ScopeInternal, "tried_outer": skills.ScopeExternal,
	} {
		w.builtins[name] = noop
		w.put(t, skills.Definition{Name: name, Scope: scope})
	}
	pgtest.Exec(t, w.pool, `update agent_skills set enabled = false, disabled_by = 'admin' where name = 'off'`)
	pgtest.Exec(t, w.pool, `update agent_skills set enabled = false, disabled_by = 'self_heal', disabled_at = clock_timestamp() where name in ('resting', 'tried', 'tried_outer')`)
	pgtest.Exec(t, w.pool, `update agent_skills set trial_at = clock_timestamp() where name like 'tried%'`)
	w.completed(t)
	var offered []string
	for _, tool := range w.model.Requests()[0].Tools {
		offered = append(offered, tool.Function.Name)
	}
	slices.Sort(offered)
	if want := []string{"any", "inner", "probe", "sizes", "tried"}; !slices.Equal(offered, want) {
		t.Errorf("offered %q, want %q", offered, want)
	}
}

func TestASkillTakenOutOfServiceDuringTheTurnIsNotCalled(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("ok"))
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) {
		t.Error("a disabled skill was called")
		return nil, nil
	}
	handle := modeltest.ToolCall("probe", `{}`)
	w.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		if n > 0 {
			return modeltest.Text("ok")
		}
		if _, err := skills.Disable(t.Context(), w.pool, "probe", "admin", "it misbehaves", nil); err != nil {
			t.Error(err)
		}
		return handle
	})
	w.completed(t)
	if text := w.since(t, 1)[1].Content; !strings.Contains(text, `"error":"disabled"`) || !strings.Contains(text, "it misbehaves") {
		t.Errorf("the model was told %s", text)
	}
}

func TestASkillOnTrialIsCalledOnceAndReturnsToService(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`), modeltest.Text("ok"))
	pgtest.Exec(t, w.pool, `update agent_skills set enabled = false, disabled_by = 'self_heal', disabled_at = clock_timestamp(), trial_at = clock_timestamp() where name = 'probe'`)
	x, got := w.completed(t)
	if !slices.Equal(got.Calls, []string{"probe"}) {
		t.Errorf("outcome is %+v", got)
	}
	if s, err := skills.Get(t.Context(), w.pool, "probe"); err != nil || !s.Enabled {
		t.Errorf("skill is %+v, %v", s, err)
	}
	if rows := named(w.rows(t, x), "settle_trial"); len(rows) != 1 || rows[0].Status != "success" {
		t.Errorf("rows are %+v", rows)
	}
}

func TestATrialThatFailsIsNotTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.ToolCall("probe", `{}`).AndCall("probe", `{}`), modeltest.Text("ok"))
	called := 0
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) {
		called++
		return nil, errBroken
	}
	pgtest.Exec(t, w.pool, `update agent_skills set enabled = false, disabled_by = 'self_heal', disabled_at = clock_timestamp(), trial_at = clock_timestamp() where name = 'probe'`)
	w.completed(t)
	added := w.since(t, 1)
	if called != 1 || !strings.Contains(added[1].Content, "it broke") || !strings.Contains(added[2].Content, `"error":"disabled"`) {
		t.Errorf("called %d times; told %+v", called, added[1:])
	}
	if s, err := skills.Get(t.Context(), w.pool, "probe"); err != nil || s.Enabled || s.TrialAt != nil {
		t.Errorf("skill is %+v, %v", s, err)
	}
}
