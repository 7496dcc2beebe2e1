package runner_test

import (
	"context"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/runner"
	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// record registers a flow like the chat, and records a turn for each prompt.
func (w *testRunner) record(t *testing.T, prompts ...string) {
	t.Helper()
	loop := &reason.Loop{
		Pool: w.pool, Model: w.runner.Model, Skills: w.runner.Skills, Agents: w.runner.Agents, Budget: w.runner.Budget,
		Logger: w.runner.Logger,
	}
	require.NoError(t, w.runner.Engine.Register("chat",
		func(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
			var prompt string
			if err := json.Unmarshal(raw, &prompt); err != nil {
				return executions.Result{}, err
			}
			outcome, err := loop.Run(ctx, reason.Turn{
				Purpose: "chat", System: "Be brief.", Context: "Ana is a good customer.", Prompt: prompt,
				History: []models.Message{
					{Role: models.RoleUser, Content: "Hello."}, {Role: models.RoleAssistant, Content: "Hello, I am Nora."},
				},
				Scopes: []string{skills.ScopeExternal},
			})
			return executions.Result{Value: outcome}, err
		}))
	w.play(t, prompts...)
}

// play runs the registered flow with each prompt.
func (w *testRunner) play(t *testing.T, prompts ...string) {
	t.Helper()
	for _, prompt := range prompts {
		x, _, err := w.runner.Engine.Start(t.Context(), w.pool, executions.Spec{
			Flow: "chat", Surface: trace.Chat, Agent: "sales", Input: prompt,
		})
		require.NoError(t, err)
		require.NoError(t, w.runner.Engine.ClaimAndRun(t.Context(), x.ID))
		enginetest.Await(t, w.pool, x.ID, executions.Completed)
	}
}

// counterfactual runs a counterfactual to its end.
func (w *testRunner) counterfactual(t *testing.T, c runner.Counterfactual) evals.Report {
	t.Helper()
	c.Since, c.Sample, c.Trials, c.Margin, c.Timeout = time.Hour, 50, 1, 0.05, time.Hour
	p, err := w.runner.Plan(t.Context(), c)
	require.NoError(t, err)
	run, err := w.runner.Store(t.Context(), p)
	require.NoError(t, err)
	require.NoError(t, w.runner.Work(t.Context(), run, 1, func(evals.Trial) {}))
	return w.report(t, run)
}

// callID matches the id of a call by the scripted model.
var callID = regexp.MustCompile(`call_\d+_`)

// conversations returns the messages and tools of requests, in a stable order.
func conversations(requests []modeltest.Request) []string {
	list := make([]string, len(requests))
	for i, r := range requests {
		for _, m := range r.Messages {
			text, _ := json.Marshal(m)
			list[i] += callID.ReplaceAllString(string(text), "") + "\n"
		}
		tools, _ := json.Marshal(r.Tools)
		list[i] += string(tools)
	}
	slices.Sort(list)
	return list
}

// The control sends the recorded requests again, byte for byte: history, context, time, pinned memory, results, errors
// and denials.
func TestControlRepeatsRecordedRequests(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	pgtest.Exec(t, w.pool, `
		insert into agent_memory (category, key, value) values ('policy', 'returns', '{"days": 14, "note": "a: b"}')`)
	w.script(func(prompt string, results []string) modeltest.Reply {
		switch {
		case len(results) == 0:
			return modeltest.ToolCall("check_order", `{"order":7}`)
		case len(results) == 1 && strings.Contains(prompt, "search"):
			return modeltest.ToolCall("no_such_skill", `{}`)
		case len(results) == 1 && strings.Contains(prompt, "wrong"):
			return modeltest.ToolCall("check_order", `{"order":"seven"}`)
		case len(results) == 1 && strings.Contains(prompt, "refund"):
			return modeltest.ToolCall("refund", `{"order":7}`)
		}
		return modeltest.Text("It is not due.")
	})
	w.record(t, "order 7?", "search 7", "wrong 7", "refund 7")
	recorded := w.model.Requests()
	calls := w.realCalls.Load()
	report := w.counterfactual(t, runner.Counterfactual{Agent: "sales", Model: "gpt-4.1"})
	got := w.model.Requests()[len(recorded):]
	control := slices.DeleteFunc(slices.Clone(got), func(r modeltest.Request) bool { return r.Model == "gpt-4.1" })
	want, have := conversations(recorded), conversations(control)
	assert.Truef(t, slices.Equal(want, have),
		"the control sent\n%s\n\nwant\n%s", strings.Join(have, "\n\n"), strings.Join(want, "\n\n"))
	if c := report.ControlRun.Coverage; c.Sampled != 4 || c.Followed != 4 || report.Coverage.Followed != 4 {
		t.Errorf("the coverage is %+v and %+v", c, report.Coverage)
	}
	assert.Equal(t, calls, w.realCalls.Load(), "a call reached a real skill")
	pgtest.Equal(t, w.pool, 0, `select count(*)::int from agent_approvals where trace_id like 'ev\_%'`)
}

// If the control does not follow its own turns, the runner cannot compare, and plays no candidate.
func TestCandidateNeedsFollowingControl(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.script(replyAsAgent)
	w.record(t, "order 7?", "order 8?")
	before := len(w.model.Requests())
	w.script(func(_ string, results []string) modeltest.Reply {
		return modeltest.ToolCall("check_order", `{"order":9}`)
	})
	report := w.counterfactual(t, runner.Counterfactual{Model: "gpt-4.1"})
	assert.Truef(t, report.Comparison.Answer == stats.Undecided && report.Coverage.Played == 0 &&
		report.ControlRun.Coverage.Diverged["check_order"] == 2, "the answer is %s: %+v, control %+v",
		report.Comparison.Answer, report.Coverage, report.ControlRun.Coverage)
	// The first call that is not recorded ended each trial of the control.
	requests := len(w.model.Requests()) - before
	assert.Equal(t, 2, requests, "model calls")
}

// Both runs reserve from one budget.
func TestControlAndCandidateShareBudget(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		most := max(req.MaxTokens, req.MaxCompletionTokens) //nolint:staticcheck // the field of most servers
		return modeltest.Text("Hello.").WithUsage(2000, min(1000, most), 0)
	})
	w.record(t, "a", "b", "c", "d")
	report := w.counterfactual(t, runner.Counterfactual{Model: "gpt-4o-mini", BudgetUSD: 0.006})
	assert.Truef(t, report.ControlRun.Coverage.Followed == 4 && report.Status == evals.Undecided &&
		report.CostUSD+report.ControlRun.CostUSD <= 0.006, "the candidate is %s, for $%.4f + $%.4f: control %+v",
		report.Status, report.ControlRun.CostUSD, report.CostUSD, report.ControlRun.Coverage)
}

// A shadow plays the turns that complete during its time, each once, and so does its control.
func TestShadowPlaysCompletedTurns(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.script(replyAsAgent)
	w.record(t, "order 7?") // from before the shadow
	run, err := w.runner.StartShadow(t.Context(), runner.Counterfactual{Model: "gpt-4.1", Margin: 0.05}, 1, time.Hour)
	require.NoError(t, err)
	w.play(t, "order 7?", "order 8?")
	before := len(w.model.Requests())
	time.Sleep(2100 * time.Millisecond) // until a completion is certainly visible
	require.NoError(t, evals.StopShadow(t.Context(), w.pool, run.ID))
	require.NoError(t, w.runner.Work(t.Context(), run, 1, func(evals.Trial) {}))
	report := w.report(t, run)
	c := report.Coverage
	assert.Truef(t, c.Sampled == 2 && c.Followed == 2 && report.ControlRun.Coverage.Followed == 2 &&
		report.Status == evals.Passed, "the shadow is %s: %+v, control %+v", report.Status, c, report.ControlRun.Coverage)
	requests := len(w.model.Requests()) - before
	assert.Equal(t, 8, requests, "model calls")
	pgtest.Equal(t, w.pool, 1, `select count(*)::int from agent_audit where act = 'stop_shadow'`)
	assert.Error(t, evals.StopShadow(t.Context(), w.pool, run.ID), "a shadow was stopped twice")
	// A server finds the run by its claim, like any other run.
	pgtest.Equal(t, w.pool, true, `select served_until is not null from agent_eval_runs where id = $1`, run.ID)
	pgtest.Equal(t, w.pool, true, `select served_until is null from agent_eval_runs where id = $1`, run.ControlID)
}

// Two processes may draw the same turns. Each turn counts once.
func TestShadowCountsTurnsOnce(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	run := w.shadow(t)
	seen, err := evals.GetShadow(t.Context(), w.pool, run.ID)
	require.NoError(t, err)
	seen.VisibleUntil = seen.SeenAt.Add(time.Second)
	more := evals.Sample{Size: 1, Skipped: map[string]int{}, Turns: map[string]evals.Recorded{"ch_1": {}}}
	for range 2 {
		require.NoError(t, evals.Extend(t.Context(), w.pool, run, more, seen))
	}
	assert.Equal(t, 1, w.report(t, run).Coverage.Sampled, "turns of the sample")
}
