package runner_test

import (
	"context"
	"testing"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// RunOutageCases runs the cases in which the skill fails: only those, once each, without a call of the skill.
func TestRunOutageCases(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.script(func(_ string, results []string) modeltest.Reply {
		if len(results) == 0 {
			return modeltest.ToolCall("check_order", `{"order": 7}`)
		}
		return modeltest.Text("The shop does not answer.")
	})
	id := trace.New(trace.Heartbeat)
	ctx := trace.With(t.Context(), trace.Span{TraceID: id, Surface: trace.Heartbeat})
	require.NoError(t, w.runner.RunOutageCases(ctx, "check_order")) // no suite exists

	outageCase := func(name, skill string) evals.Case {
		return evals.Case{
			Name: name, Messages: userMessage("Where is order 7?"),
			Expect: []evals.Expectation{{Answer: &evals.Answer{Contains: "not answer"}}},
			Skills: map[string][]evals.Stub{skill: {{Error: "down", Class: "timeout"}}},
		}
	}
	_, err := evals.Put(t.Context(), w.pool, evals.Definition{
		Name: evals.OutageSuite, Agent: "sales", Trials: 5,
		Cases: []evals.Case{outageCase("orders", "check_order"), outageCase("refunds", "refund")},
	})
	require.NoError(t, err)
	require.NoError(t, w.runner.RunOutageCases(ctx, "other"))
	pgtest.Equal(t, w.pool, 0, `select count(*)::int from agent_eval_runs`)
	withoutModel := *w.runner // as in the command agent skills call
	withoutModel.Model = nil
	require.NoError(t, withoutModel.RunOutageCases(ctx, "check_order"))

	serving, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.runner.Serve(serving) }()
	pgtest.Until(t, w.pool, 1, `select count(*)::int from agent_eval_runs where status <> 'running'`)
	stop()
	require.NoError(t, <-done)
	pgtest.Equal(t, w.pool, "sales gpt-4o-mini", `select agent || ' ' || model from agent_eval_runs`)
	pgtest.Equal(t, w.pool, "orders pass", `select string_agg(case_name || ' ' || verdict, ',') from agent_eval_trials`)
	pgtest.Equal(t, w.pool, "run_eval,eval_ended passed", `
		select string_agg(skill_name || coalesce(' ' || (output ->> 'status'), ''), ',' order by id) from agent_activity
		 where trace_id = $1 and agent <> 'admin' and input ->> 'returned' = 'check_order'`, string(id))
	assert.Equal(t, 0, w.realCalls.Load(), "the skill was called", "times")
}
