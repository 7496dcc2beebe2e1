package flows_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

const collectorFlow = `
name: collector
variables: {color: child, input2: 1}
actions:
  - {actionType: send_message, parameters: {message: "Necesito tu {{input.what}}"}}
  - {actionType: wait_for_response}
  - {actionType: send_message, parameters: {message: Documento recibido}}
  - {actionType: end, parameters: {summary: collected, result: {n: 1}}}
`

// A child sends messages in its parent's thread while the parent waits, and returns its variables to the parent.
func TestChildVariablesReachParent(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, collectorFlow, `
name: coordinator
variables: {color: parent}
actions:
  - {actionType: send_message, parameters: {message: Iniciamos tu proceso}}
  - {id: collect, actionType: trigger_agent, saveAs: child, parameters: {flow: collector, input: {what: "{{input.what}}"}, waitForCompletion: true}}
  - {actionType: send_message, parameters: {message: "Siguiente paso, {{lastResponse}}"}}
`)
	id := w.startInThread(t, "coordinator", map[string]any{"what": "INE"})
	child := *awaitWaiting(t, w.pool, id, 1).WaitingKey
	awaitWaiting(t, w.pool, child, 1)
	receiveMessage(t, w, "aqui esta")
	x := enginetest.Await(t, w.pool, id, executions.Completed)
	assert.Equal(t, "Iniciamos tu proceso | Necesito tu INE | Documento recibido | Siguiente paso, "+
		"aqui esta", replies(t, w.pool))
	want := map[string]any{
		"color": "child", "input2": 1.0, "lastResponse": "aqui esta", "triggeredExecutionId": child,
		"childExecutionStatus":  "completed",
		"childExecutionSuccess": true, "timedOut": false, "child": map[string]any{
			"executionId": child, "status": "completed", "success": true, "summary": "collected", "error": "",
			"result": map[string]any{"n": 1.0},
		},
	}
	assert.NoDiff(t, want, variables(t, x))
	var all map[string]any
	err := json.Unmarshal(x.Variables, &all)
	assert.Truef(t, err == nil && all["executionId"] == id, "the parent's executionId is %v", all["executionId"])
}

// A cancel reaches the awaited children of an execution, at any depth, with the given reason.
func TestCancelReachesGrandchildren(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("top", "  - {actionType: trigger_agent, parameters: {flow: middle}}"),
		flowYAML("middle", "  - {actionType: trigger_agent, parameters: {flow: bottom}}"),
		flowYAML("bottom", "  - {actionType: wait_for_event, parameters: {key: never}}"))
	top := w.startInThread(t, "top", nil)
	middle := *awaitWaiting(t, w.pool, top, 1).WaitingKey
	bottom := *awaitWaiting(t, w.pool, middle, 1).WaitingKey
	awaitWaiting(t, w.pool, bottom, 1)
	_, err := w.Cancel(t.Context(), top, "admin", "Usuario solicito cancelacion")
	require.NoError(t, err)
	for _, id := range []string{middle, bottom} {
		if x := enginetest.Await(t, w.pool, id, executions.Cancelled); postgres.Deref(
			x.CancelReason) != "its parent was cancelled: Usuario solicito cancelacion" {
			t.Errorf("the cancel reason is %q", postgres.Deref(x.CancelReason))
		}
	}
}

func TestParentHandlesChildFailure(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("broken", `
  - {id: stop, actionType: fail, parameters: {message: no}}`), flowYAML("picky", `
  - {actionType: end}`)+"\ninput: {type: object, required: [x]}\n", `
name: handles
actions:
  - {actionType: trigger_agent, parameters: {agent: broken}}
  - {actionType: if, parameters: {condition: not childExecutionSuccess, then: [{actionType: end, parameters: {summary: "child {{childExecutionStatus}}"}}]}}
  - {actionType: fail, parameters: {message: never}}
`, flowYAML("strict", `
  - {id: go, actionType: trigger_agent, parameters: {flow: broken, onFailure: fail}}`), flowYAML("wrong", `
  - {id: go, actionType: trigger_agent, parameters: {flow: picky}}`), flowYAML("loose", `
  - {actionType: trigger_agent, saveAs: it, parameters: {flow: broken, waitForCompletion: false}}`))
	assert.Equal(t, "child failed", enginetest.Await(t, w.pool, w.startInThread(t, "handles", nil),
		executions.Completed).ResultSummary)
	for name, want := range map[string]string{
		"strict": "action go (trigger_agent): flow broken ended as failed: action stop (fail): no",
		"wrong":  "action go (trigger_agent): flow picky does not take this input: missing property 'x'",
	} {
		if x := enginetest.Await(t, w.pool, w.startInThread(t, name, nil), executions.Failed); postgres.Deref(
			x.ErrorMessage) != want || postgres.Deref(x.FailedStep) != "go" {
			t.Errorf("%s: %q at %q", name, postgres.Deref(x.ErrorMessage), postgres.Deref(x.FailedStep))
		}
	}
	got := variables(t, enginetest.Await(t, w.pool, w.startInThread(t, "loose", nil), executions.Completed))
	id, _ := got["triggeredExecutionId"].(string)
	assert.Truef(t, id != "" && cmp.Diff(got["it"], map[string]any{"executionId": id}) == "", "variables %v", got)
}

// A child may be a flow of Go code.
func TestGoFlowAsChild(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	putFlow(t, pool, flowYAML("a", `
  - {actionType: trigger_agent, saveAs: sum, parameters: {flow: add, input: {a: 1, b: 2}}}`))
	w := startProcess(t, pool, nil, func(e *executions.Engine) error {
		return e.Register("add", func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
			var in struct{ A, B int }
			if err := json.Unmarshal(input, &in); err != nil {
				return executions.Result{}, err
			}
			return executions.Result{Summary: "added", Value: in.A + in.B},
				executions.SetVariables(ctx, map[string]int{"total": in.A + in.B})
		})
	})
	got := variables(t, enginetest.Await(t, pool, w.startInThread(t, "a", nil), executions.Completed))
	sum, _ := got["sum"].(map[string]any)
	assert.Truef(t, got["total"] == 3.0 && sum["result"] == 3.0, "variables %v", got)
}

// The outcome has the reason of a cancelled child, also after a retry of the wait.
func TestParentReadsCancelReasonAfterRetry(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, sleepingFlow, flowYAML("a", `
  - {actionType: trigger_agent, saveAs: got, timeout: 1h, onTimeout: retry, parameters: {flow: sleeper}}`))
	id := w.startInThread(t, "a", nil)
	child := *awaitWaiting(t, w.pool, id, 1).WaitingKey
	expireWait(t, w, id, 1)
	awaitWaiting(t, w.pool, id, 2)
	_, err := w.Cancel(t.Context(), child, "ana", "no stock")
	require.NoError(t, err)
	got := variables(t, enginetest.Await(t, w.pool, id, executions.Completed))
	assert.Contains(t, got["got"].(map[string]any)["error"].(string), "no stock")
}

// A program that restarts has no live worker for a moment. The child of its flow waits for the program.
func TestChildWaitsForItsProgram(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("a", `
  - {actionType: trigger_agent, saveAs: shipped, parameters: {flow: ship}}`))
	id := w.startInThread(t, "a", nil)
	awaitWaiting(t, w.pool, id, 1)
	startProcess(t, w.pool, nil, func(e *executions.Engine) error {
		return e.Register("ship", func(context.Context, json.RawMessage) (executions.Result, error) {
			return executions.Result{Value: "shipped"}, nil
		})
	})
	got := variables(t, enginetest.Await(t, w.pool, id, executions.Completed))
	assert.Equal(t, "shipped", got["shipped"].(map[string]any)["result"])
}

// A flow that starts itself fails at the nesting limit.
func TestRecursiveFlowsReachNestingLimit(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: again
actions:
  - {id: next, actionType: trigger_agent, parameters: {flow: again, waitForCompletion: false}}
`)
	root := w.startInThread(t, "again", nil)
	enginetest.Await(t, w.pool, root, executions.Completed)
	pgtest.Until(t, w.pool, true, `select exists (select from agent_executions where status = 'failed')`)
	pgtest.Equal(t, w.pool, "32 1", `select count(*) || ' ' || count(*) filter (where status = 'failed'
		and failed_step = 'next' and error_message like '%nested 32 deep%') from agent_executions`)
}
