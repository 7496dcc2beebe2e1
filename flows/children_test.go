package flows_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const collector = `
name: collector
variables: {color: child, input2: 1}
actions:
  - {actionType: send_message, parameters: {message: "Necesito tu {{input.what}}"}}
  - {actionType: wait_for_response}
  - {actionType: send_message, parameters: {message: Documento recibido}}
  - {actionType: end, parameters: {summary: collected, result: {n: 1}}}
`

// A child speaks in its parent's thread while the parent waits, and leaves its variables to it.
func TestAParentGoesOnWithWhatItsChildKnows(t *testing.T) {
	t.Parallel()
	w := newWorld(t, collector, `
name: coordinator
variables: {color: parent}
actions:
  - {actionType: send_message, parameters: {message: Iniciamos tu proceso}}
  - {id: collect, actionType: trigger_agent, saveAs: child, parameters: {flow: collector, input: {what: "{{input.what}}"}, waitForCompletion: true}}
  - {actionType: send_message, parameters: {message: "Siguiente paso, {{lastResponse}}"}}
`)
	id := w.begin(t, "coordinator", map[string]any{"what": "INE"})
	child := *waits(t, w.pool, id, 1).WaitingKey
	waits(t, w.pool, child, 1)
	answer(t, w, "aqui esta")
	x := until(t, w.pool, id, executions.Completed)
	if got := said(t, w.pool); got != "Iniciamos tu proceso | Necesito tu INE | Documento recibido | Siguiente paso, aqui esta" {
		t.Errorf("said %s", got)
	}
	want := map[string]any{
		"color": "child", "input2": 1.0, "lastResponse": "aqui esta", "triggeredExecutionId": child, "childExecutionStatus": "completed",
		"childExecutionSuccess": true, "timedOut": false, "child": map[string]any{
			"executionId": child, "status": "completed", "success": true, "summary": "collected", "error": "", "result": map[string]any{"n": 1.0},
		},
	}
	if diff := cmp.Diff(want, variables(t, x)); diff != "" {
		t.Error(diff)
	}
	var all map[string]any
	if err := json.Unmarshal(x.Variables, &all); err != nil || all["executionId"] != id {
		t.Errorf("the parent takes itself for %v", all["executionId"])
	}
}

// Whom a cancelled execution waits for is cancelled with it, however deep, and for the reason that was given.
func TestCancellingReachesGrandchildren(t *testing.T) {
	t.Parallel()
	w := newWorld(t, flow("top", "  - {actionType: trigger_agent, parameters: {flow: middle}}"),
		flow("middle", "  - {actionType: trigger_agent, parameters: {flow: bottom}}"),
		flow("bottom", "  - {actionType: wait_for_event, parameters: {key: never}}"))
	top := w.begin(t, "top", nil)
	middle := *waits(t, w.pool, top, 1).WaitingKey
	bottom := *waits(t, w.pool, middle, 1).WaitingKey
	waits(t, w.pool, bottom, 1)
	if _, err := w.Cancel(t.Context(), top, "admin", "Usuario solicito cancelacion"); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{middle, bottom} {
		if x := until(t, w.pool, id, executions.Cancelled); deref(x.CancelReason) != "its parent was cancelled: Usuario solicito cancelacion" {
			t.Errorf("cancelled because of %q", deref(x.CancelReason))
		}
	}
}

func TestAChildsFailureIsTheParentsToHandle(t *testing.T) {
	t.Parallel()
	w := newWorld(t, flow("broken", `
  - {id: stop, actionType: fail, parameters: {message: no}}`), flow("picky", `
  - {actionType: end}`)+"\ninput: {type: object, required: [x]}\n", `
name: handles
actions:
  - {actionType: trigger_agent, parameters: {agent: broken}}
  - {actionType: if, parameters: {condition: not childExecutionSuccess, then: [{actionType: end, parameters: {summary: "child {{childExecutionStatus}}"}}]}}
  - {actionType: fail, parameters: {message: never}}
`, flow("strict", `
  - {id: go, actionType: trigger_agent, parameters: {flow: broken, onFailure: fail}}`), flow("lost", `
  - {id: go, actionType: trigger_agent, parameters: {flow: nobody}}`), flow("wrong", `
  - {id: go, actionType: trigger_agent, parameters: {flow: picky}}`), flow("loose", `
  - {actionType: trigger_agent, saveAs: it, parameters: {flow: broken, waitForCompletion: false}}`))
	if x := until(t, w.pool, w.begin(t, "handles", nil), executions.Completed); x.ResultSummary != "child failed" {
		t.Errorf("%q", x.ResultSummary)
	}
	for name, want := range map[string]string{
		"strict": "action go (trigger_agent): flow broken ended as failed: action stop (fail): no",
		"lost":   "action go (trigger_agent): there is no flow nobody",
		"wrong":  "action go (trigger_agent): flow picky does not take this input: at '': missing property 'x'",
	} {
		if x := until(t, w.pool, w.begin(t, name, nil), executions.Failed); deref(x.ErrorMessage) != want || deref(x.FailedStep) != "go" {
			t.Errorf("%s: %q at %q", name, deref(x.ErrorMessage), deref(x.FailedStep))
		}
	}
	got := variables(t, until(t, w.pool, w.begin(t, "loose", nil), executions.Completed))
	if id, _ := got["triggeredExecutionId"].(string); id == "" || cmp.Diff(got["it"], map[string]any{"executionId": id}) != "" {
		t.Errorf("variables %v", got)
	}
}

// A child may be a flow of Go code.
func TestAChildOfGoCode(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	put(t, pool, flow("a", `
  - {actionType: trigger_agent, saveAs: sum, parameters: {flow: add, input: {a: 1, b: 2}}}`))
	w := process(t, pool, nil, func(e *executions.Engine) error {
		return e.Register("add", func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
			var in struct{ A, B int }
			if err := json.Unmarshal(input, &in); err != nil {
				return executions.Result{}, err
			}
			return executions.Result{Summary: "added", Value: in.A + in.B}, executions.SetVariables(ctx, map[string]int{"total": in.A + in.B})
		})
	})
	got := variables(t, until(t, pool, w.begin(t, "a", nil), executions.Completed))
	sum, _ := got["sum"].(map[string]any)
	if got["total"] != 3.0 || sum["result"] != 3.0 {
		t.Errorf("variables %v", got)
	}
}

// An execution finishes on the version it began with, also when the flow was changed and removed while it waited.
func TestARunningExecutionKeepsItsVersion(t *testing.T) {
	t.Parallel()
	version := func(n string) string {
		return "name: a\nactions:\n  - {id: before, actionType: send_message, parameters: {message: before " + n + "}}\n" +
			"  - {actionType: wait_for_event, parameters: {key: '{{input.key}}'}}\n" +
			"  - {actionType: send_message, parameters: {message: after " + n + "}}\n"
	}
	w := newWorld(t, version("1"))
	first := w.begin(t, "a", map[string]any{"key": "k1"})
	waits(t, w.pool, first, 1)
	put(t, w.pool, version("2"))
	second, _, err := w.Start(t.Context(), w.pool, executions.Spec{Flow: "a", Surface: "flow", ThreadID: "maria", Input: map[string]any{"key": "k2"}})
	if err != nil {
		t.Fatal(err)
	}
	waits(t, w.pool, second.ID, 1)
	if _, err := w.pool.Exec(t.Context(), `update agent_flows set current = false`); err != nil {
		t.Fatal(err)
	}
	w.stop()
	w = process(t, w.pool, nil) // which has compiled neither
	deliver(t, w, "EVENT_COMPLETED", "k1", `{}`)
	until(t, w.pool, first, executions.Completed)
	deliver(t, w, "EVENT_COMPLETED", "k2", `{}`)
	until(t, w.pool, second.ID, executions.Completed)
	// A fork is given its version before it begins. It begins when it has lost its thread.
	var third string
	err = postgres.InTx(t.Context(), w.pool, func(tx pgx.Tx) error {
		fork, err := w.Fork(t.Context(), tx, executions.ForkSpec{ID: first, From: "flow version"})
		if err != nil {
			return err
		}
		third = fork.ID
		exec(t, tx, `update agent_executions set thread_id = null, input = '{"key": "k4"}' where id = @id`, postgres.Strict{"id": third})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	x := until(t, w.pool, third, executions.Failed)
	if v := x.FlowVersion; v == nil || *v != 1 || !strings.Contains(deref(x.ErrorMessage), "no thread") {
		t.Errorf("the fork runs version %v: %s", v, deref(x.ErrorMessage))
	}
	got := value[string](t, w.pool, `
		select string_agg(flow_version || ' ' || content, ', ' order by m.execution_id, m.id)
		  from agent_messages m join agent_executions x on x.id = m.execution_id where x.flow = @flow`, postgres.Strict{"flow": "a"})
	if got != "1 before 1, 1 after 1, 2 before 2, 2 after 2" {
		t.Errorf("said %s", got)
	}
	x = until(t, w.pool, w.begin(t, "a", map[string]any{"key": "k3"}), executions.Failed)
	if deref(x.ErrorMessage) != "flow a: the flow was removed" {
		t.Errorf("%q", deref(x.ErrorMessage))
	}
}

// Flows that start one another are stopped: the deepest fails, and the trace has no more executions than may be nested.
func TestFlowsThatStartOneAnotherAreStopped(t *testing.T) {
	t.Parallel()
	w := newWorld(t, `
name: again
actions:
  - {id: next, actionType: trigger_agent, parameters: {flow: again, waitForCompletion: false}}
`)
	first := w.begin(t, "again", nil)
	until(t, w.pool, first, executions.Completed)
	pgtest.Eventually(t, patience, func() bool {
		return value[bool](t, w.pool, `select exists (select from agent_executions where status = 'failed')`)
	}, "one of them fails")
	got := value[string](t, w.pool, `select count(*) || ' ' || count(*) filter (where status = 'failed' and failed_step = 'next' and error_message like '%nested 32 deep%') from agent_executions`)
	if got != "32 1" {
		t.Errorf("executions, and those that were refused a child: %s", got)
	}
}
