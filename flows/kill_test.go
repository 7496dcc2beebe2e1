package flows_test

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

var errKilled = errors.New("killed by the test")

// reaper takes an execution's claim away the first time that it comes to each step: right before the step, as a process
// that dies there would lose it.
type reaper struct {
	pool *pgxpool.Pool

	mu   sync.Mutex
	seen map[string]bool
}

func (r *reaper) wrap(find func(ctx context.Context, name string) (executions.Func, error)) func(context.Context, string) (executions.Func, error) {
	return func(ctx context.Context, name string) (executions.Func, error) {
		fn, err := find(ctx, name)
		if fn == nil || err != nil {
			return nil, err
		}
		return func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
			return fn(executions.Gate(ctx, r.pass), input)
		}, nil
	}
}

func (r *reaper) pass(ctx context.Context) error {
	x, _ := executions.Current(ctx)
	key := x.ID + executions.StepKey(ctx)
	r.mu.Lock()
	again := r.seen[key]
	r.seen[key] = true
	r.mu.Unlock()
	if again {
		return nil
	}
	_, err := r.pool.Exec(ctx, `select lanekeeper.release_agent_claim(@id, @claim)`, postgres.Strict{"id": x.ID, "claim": x.Claim})
	return errors.Join(errKilled, err)
}

func (r *reaper) kills() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.seen)
}

// A flow whose process dies before every single step ends as if nothing had happened: nothing is done twice, and nothing is
// left out.
func TestAFlowSurvivesADeathBeforeEveryStep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	put(t, pool, `
name: child
variables: {from: child}
actions:
  - {actionType: send_message, parameters: {message: "child of {{input.n}}"}}
`)
	put(t, pool, `
name: all
variables: {seen: ""}
actions:
  - {actionType: send_message, parameters: {message: hello}}
  - {actionType: wait_for_response, onTimeout: retry, timeoutActions: [{actionType: send_message, parameters: {message: again}}]}
  - actionType: for_each
    parameters:
      items: [a, b, c]
      actions:
        - {actionType: set, parameters: {expressions: {seen: seen + item}}}
        - {actionType: if, parameters: {condition: item == "b", then: [{actionType: send_message, parameters: {message: "at {{item}}"}}]}}
  - {actionType: trigger_agent, parameters: {flow: child, input: {n: 1}}}
  - {actionType: request_document, parameters: {documents: INE}}
  - {actionType: assign_test, parameters: {test: sql, wait: false}}
  - {actionType: delay, parameters: {until: "2020-01-01T00:00:00Z"}}
  - {actionType: send_message, when: childExecutionSuccess, parameters: {message: "bye {{lastResponse}} {{seen}} {{documentUrls}}"}}
`)
	r := &reaper{pool: pool, seen: map[string]bool{}}
	w := process(t, pool, nil, func(e *executions.Engine) error {
		e.Fallback(r.wrap((&flows.Interpreter{Pool: pool, Engine: e}).Find))
		return nil
	})
	id := w.begin(t, "all", nil)
	late(t, w, id, 1)
	waits(t, pool, id, 2)
	answer(t, w, "yes")
	var key string
	pgtest.Eventually(t, patience, func() bool {
		x, err := executions.Get(t.Context(), pool, id)
		if err == nil && x.Status == executions.Waiting && *x.WaitingFor == "document" {
			key = *x.WaitingKey
		}
		return key != ""
	}, "it waits for a document")
	deliver(t, w, "DOCUMENT_UPLOADED", key, `{"document": "INE", "url": "u"}`)
	x := until(t, pool, id, executions.Completed)
	if got := said(t, pool); got != "hello | again | at b | child of 1 | Please send us: INE. | A test is waiting for you: sql | bye yes abc u" {
		t.Errorf("said %s", got)
	}
	got := variables(t, x)
	delete(got, "triggeredExecutionId")
	delete(got, "requestId")
	want := map[string]any{
		"seen": "abc", "from": "child", "lastResponse": "yes", "timedOut": false, "childExecutionStatus": "completed",
		"childExecutionSuccess": true, "documentUrls": []any{"u"}, "documents": []any{map[string]any{"document": "INE", "url": "u"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if n := value[int](t, pool, `select count(*) from agent_executions`); n != 2 {
		t.Errorf("%d executions", n)
	}
	if n := value[int](t, pool, `select count(*) from agent_requests`); n != 2 {
		t.Errorf("%d requests", n)
	}
	if n := r.kills(); n < 30 {
		t.Errorf("it was killed %d times only", n)
	}
}
