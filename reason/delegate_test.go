package reason_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// delegating returns a world whose turn may delegate. replies has the model's replies by prompt; a prompt without a
// further reply gets status 400.
func delegating(t *testing.T, replies map[string][]modeltest.Reply) (*world, *executions.Engine) {
	t.Helper()
	w := newWorld(t)
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		answers := answersIn(req)
		planned := replies[req.Messages[1].Content]
		if answers >= len(planned) {
			return modeltest.Status(http.StatusBadRequest, 0)
		}
		return planned[answers]
	})
	w.delegates(t)
	return w, w.engine(t, true)
}

// offeredTo returns the names of the tools in the first request with a prompt.
func (w *world) offeredTo(prompt string) (names []string) {
	for _, r := range w.model.Requests() {
		if r.Messages[1].Content == prompt {
			return toolNames(r)
		}
	}
	return nil
}

func TestDelegatedTaskAnswersItsTurn(t *testing.T) {
	t.Parallel()
	w, e := delegating(t, map[string][]modeltest.Reply{
		"Look.": {modeltest.ToolCall("delegate", `{"task":"Size it up.","skills":["sizes"],"tokens":9000}`).WithUsage(
			100, 10, 0), modeltest.Text("All told.").WithUsage(200, 10, 0)},
		"Size it up.": {
			modeltest.ToolCall("sizes", `{"limit":1}`).WithUsage(300, 10, 0),
			modeltest.Text("orders").WithUsage(400, 10, 0),
		},
	})
	parent := enginetest.Await(t, w.pool, begin(t, w, e), executions.Completed)
	child := w.child(t, parent.ID)
	if child.TraceID != parent.TraceID || child.Status != executions.Completed || child.Surface != parent.Surface {
		t.Errorf("the child is %s in %s, the parent in %s", child.Status, child.TraceID, parent.TraceID)
	}
	got := outcome(t, parent)
	assert.Truef(t, got.Text == "All told." && slices.Equal(got.Calls, []string{"delegate"}) &&
		got.Usage.TotalTokens == 1040, "outcome is %+v", got)
	names := w.offeredTo("Size it up.")
	assert.Truef(t, slices.Equal(names, []string{"delegate", "sizes"}), "the child was offered %v", names)
	messages := w.model.Requests()[len(w.model.Requests())-1].Messages
	assert.Contains(t, messages[len(messages)-1].Content, `"answer":"orders"`)
	row := named(w.rows(t, parent), "delegate")
	assert.Truef(t, len(row) == 1 && row[0].Kind == "phase" && strings.Contains(string(row[0].Output), child.ID),
		"rows of the delegation: %+v", row)
	run := budgets.RunScope(trace.ID(parent.TraceID))
	for scope, tokens := range map[string]int64{run: 1040, run + "/" + child.ID: 720} {
		spent, err := budgets.Of(t.Context(), w.pool, scope)
		assert.Truef(t, err == nil && spent.Tokens == tokens && spent.ReservedTokens == 0,
			"%s has %+v (%v), want %d tokens", scope, spent, err, tokens)
	}
}

func TestDelegatedTaskIsNeverWiderThanItsTurn(t *testing.T) {
	t.Parallel()
	w, e := delegating(t, map[string][]modeltest.Reply{
		"Look.": {modeltest.ToolCall("delegate", `{"task":"Deep.","tokens":1000000}`), modeltest.Text("ok")},
		"Deep.": {
			modeltest.ToolCall("delegate", `{"task":"Deeper.","skills":["hidden"]}`),
			modeltest.ToolCall("delegate", `{"task":"Deeper.","skills":["probe"]}`), modeltest.Text("ok"),
		},
		"Deeper.": {
			modeltest.ToolCall("hidden", `{}`), modeltest.ToolCall("delegate", `{"task":"Deepest."}`), modeltest.Text("ok"),
		},
	})
	w.builtins["hidden"] = func(context.Context, skills.Call) (any, error) {
		t.Error("a skill out of scope was called")
		return nil, nil
	}
	w.put(t, skills.Definition{Name: "hidden", Scope: skills.ScopeExternal})
	w.loop.Budget = reason.Budget{Tokens: 50_000, CostUSD: 0.5, Iterations: 8}
	parent := enginetest.Await(t, w.pool, begin(t, w, e), executions.Completed)
	child := w.child(t, parent.ID)
	if names := w.offeredTo("Deep."); slices.Contains(names, "hidden") || !slices.Contains(names, "delegate") {
		t.Errorf("the child was offered %v", names)
	}
	names := w.offeredTo("Deeper.")
	assert.Truef(t, slices.Equal(names, []string{"probe"}), "the grandchild was offered %v", names)
	grandchild := w.child(t, child.ID)
	limits := func(x executions.Execution) (b reason.Budget) {
		text := pgtest.Value[string](t, w.pool, `select input ->> 'budget' from agent_executions where id = $1`, x.ID)
		require.NoError(t, json.Unmarshal([]byte(text), &b))
		return b
	}
	c, g := limits(child), limits(grandchild)
	assert.Truef(t, c.Tokens < 50_000 && c.Iterations < 8 && g.Tokens <= c.Tokens/3 && g.Iterations < c.Iterations,
		"tokens and iterations: child %+v, grandchild %+v", c, g)
	assert.Truef(t, c.CostUSD > 0 && c.CostUSD <= 0.5 && g.CostUSD > 0 && g.CostUSD < c.CostUSD/2,
		"dollars: child %v, grandchild %v", c.CostUSD, g.CostUSD)
}

func TestDelegatedTaskSpendsItsTurnsBudget(t *testing.T) {
	t.Parallel()
	w, e := delegating(t, map[string][]modeltest.Reply{
		"Look.": {
			modeltest.ToolCall("delegate", `{"task":"Spend."}`).WithUsage(500, 20, 0),
			modeltest.Text("That was all.").WithUsage(600, 10, 0),
		},
		"Spend.": {
			modeltest.ToolCall("probe", `{}`).WithUsage(1000, 100, 0), modeltest.ToolCall("probe", `{}`).WithUsage(2000, 100, 0),
			modeltest.Text("never said"),
		},
	})
	w.loop.Budget = reason.Budget{Tokens: 6000} // a third of the remaining 5480 allows the child one call
	got := outcome(t, enginetest.Await(t, w.pool, begin(t, w, e), executions.Completed))
	messages := w.model.Requests()[len(w.model.Requests())-1].Messages
	last := messages[len(messages)-1].Content
	assert.Truef(t, strings.Contains(last, `"ended":"tokens"`) && strings.Contains(last, "leaves too little") &&
		len(w.model.Requests()) == 3, "after %d requests the turn got %q", len(w.model.Requests()), last)
	assert.Truef(t, got.Text == "That was all." && got.Usage.TotalTokens == 520+1100+610, "outcome is %+v", got)
}

func TestDelegatedTaskThatFailsIsResult(t *testing.T) {
	t.Parallel()
	w, e := delegating(t, map[string][]modeltest.Reply{
		"Look.": {modeltest.ToolCall("delegate", `{"task":"Fail."}`), modeltest.Text("It did not work.")},
	}) // without a reply for "Fail.", so the model call of the child fails
	parent := enginetest.Await(t, w.pool, begin(t, w, e), executions.Completed)
	got := outcome(t, parent)
	assert.Truef(t, got.Text == "It did not work.", "outcome is %+v", got)
	messages := w.model.Requests()[len(w.model.Requests())-1].Messages
	last := messages[len(messages)-1]
	assert.Truef(t, strings.Contains(last.Content, `"error":"delegate"`) &&
		strings.Contains(last.Content, "ended as failed"), "the turn got %q", last.Content)
	row := named(w.rows(t, parent), "delegate")
	assert.Truef(t, len(row) == 1 && row[0].Status == "success" && strings.Contains(string(row[0].Output), "failed"),
		"rows of the delegation: %+v", row)
}

func TestCancellingTurnCancelsWhatItDelegated(t *testing.T) {
	t.Parallel()
	w, e := delegating(t, map[string][]modeltest.Reply{
		"Look.": {modeltest.ToolCall("delegate", `{"task":"Hang."}`)}, "Hang.": {modeltest.Hang()},
	})
	id := begin(t, w, e)
	child := w.child(t, id)
	enginetest.Await(t, w.pool, child.ID, executions.Running)
	enginetest.Await(t, w.pool, id, executions.Waiting)
	_, err := e.Cancel(t.Context(), id, "admin", "enough")
	require.NoError(t, err)
	enginetest.Await(t, w.pool, child.ID, executions.Cancelled)
}

func TestApprovalInDelegatedTaskParksIt(t *testing.T) {
	t.Parallel()
	w, e := delegating(t, map[string][]modeltest.Reply{
		"Look.":    {modeltest.ToolCall("delegate", `{"task":"Drop it."}`), modeltest.Text("Gone.")},
		"Drop it.": {modeltest.ToolCall("drop", `{}`), modeltest.Text("dropped")},
	})
	var dropped int
	w.builtins["drop"] = func(context.Context, skills.Call) (any, error) { dropped++; return "ok", nil }
	w.put(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove})
	w.turn.Approvals = reason.Park
	id := begin(t, w, e)
	child := w.child(t, id)
	asked := enginetest.Await(t, w.pool, child.ID, executions.Waiting)
	enginetest.Await(t, w.pool, id, executions.Waiting)
	require.Truef(t, asked.WaitingFor != nil && *asked.WaitingFor == "approval" && dropped == 0,
		"the child waits for %v, %d drops", asked.WaitingFor, dropped)
	_, err := approvals.Decide(t.Context(), w.pool, *asked.WaitingKey, true, "admin", "")
	require.NoError(t, err)
	got := outcome(t, enginetest.Await(t, w.pool, id, executions.Completed))
	assert.Truef(t, got.Text == "Gone." && dropped == 1, "outcome is %+v after %d drops", got, dropped)
}

func TestCrashWhileDelegatingStartsOneChild(t *testing.T) {
	t.Parallel()
	for at := 1; ; at++ {
		c, parked := newCrash(), false
		t.Run(fmt.Sprintf("before new step %d", at), func(t *testing.T) {
			w := newWorld(t)
			w.plan(modeltest.ToolCall("delegate", `{"task":"Part."}`), modeltest.Text("ok"))
			w.crashBefore(at, c)
			w.loop.Budget = reason.Budget{Iterations: 3}
			w.delegates(t)
			x := w.survive(t, c)
			if parked = c.done.CompareAndSwap(false, true); parked { // the first process has parked
				w.engine(t, true)
			}
			x = enginetest.Await(t, w.pool, x.ID, executions.Completed)
			assert.Equal(t, 1, pgtest.Value[int](t, w.pool, `select count(*) from agent_executions where parent_id = $1`, x.ID))
			got := w.book(t)
			assert.Truef(t, got.Aside == 0 && got.Unknown == 0, "the day has %+v", got)
		})
		if parked || t.Failed() {
			assert.Truef(t, at >= 5, "the turn had %d steps only", at-1)
			return
		}
	}
}

func TestManyDelegateAtOnce(t *testing.T) {
	t.Parallel()
	w, e := delegating(t, map[string][]modeltest.Reply{
		"Look.": {
			modeltest.ToolCall("delegate", `{"task":"Part."}`).AndCall("delegate", `{"task":"Part two."}`),
			modeltest.Text("ok"),
		},
		"Part.":     {modeltest.Text("one")},
		"Part two.": {modeltest.Text("two")},
	})
	var parents []string
	for range 8 {
		parents = append(parents, begin(t, w, e))
	}
	for _, id := range parents {
		enginetest.Await(t, w.pool, id, executions.Completed)
	}
	assert.Equal(t, 16, pgtest.Value[int](t, w.pool, `select count(*) from agent_executions where flow = 'delegate'
		and status = 'completed'`))
}
