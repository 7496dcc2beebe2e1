package flows_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Fork rejects input that contradicts the record of a kept action. The error names the action.
func TestForkRejectsInputThatContradictsRecords(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("greets", `
  - {id: greet, actionType: send_message, parameters: {message: "Hola {{input.name}}"}}
  - {id: more, when: input.more, actionType: send_message, parameters: {message: "Algo mas"}}
  - {id: each, actionType: for_each, parameters: {items: "{{input.items}}", actions: [{id: item, actionType: send_message, parameters: {message: "{{item}}"}}]}}
  - {id: decide, actionType: if, parameters: {condition: input.vip, then: [{id: vip, actionType: send_message, parameters: {message: "Bienvenida"}}]}}
  - {id: compose, actionType: set, parameters: {expressions: {greeting: "input.name2 + '!'"}}}
  - {id: choose, actionType: switch, parameters: {cases: [{condition: input.amount > 100, actions: [{id: big, actionType: send_message, parameters: {message: "Gracias"}}]}]}}
  - {id: note, when: input.noted, actionType: set, parameters: {expressions: {noted: "1"}}}
  - {id: pass, when: input.passed, actionType: set, parameters: {expressions: {passed: "1"}}}
  - {id: bye, actionType: send_message, parameters: {message: "Adios {{input.farewell}}"}}`))
	createThread(t, w.pool)
	original := map[string]any{
		"name": "Ana", "more": true, "items": []string{"a", "b"}, "vip": true,
		"name2": "Ana", "amount": 200, "noted": true, "passed": false, "farewell": "",
	}
	id := w.startInThread(t, "greets", original)
	enginetest.Await(t, w.pool, id, executions.Completed)
	w.stop()
	restarted := startProcess(t, w.pool, nil)
	for name, c := range map[string]struct {
		change any
		step   string
	}{
		"name":     {"Eva", "greet"},
		"more":     {false, "more"},
		"items":    {[]string{"a"}, "each"},
		"vip":      {false, "decide"},
		"name2":    {"Bea", "compose"},
		"amount":   {5, "choose"},
		"noted":    {false, "note"},
		"passed":   {true, "pass"},
		"farewell": {"!", ""},
	} {
		input := maps.Clone(original)
		input[name] = c.change
		text, err := json.Marshal(input)
		require.NoError(t, err)
		x, err := restarted.Fork(t.Context(), w.pool, executions.ForkSpec{ID: id, From: "bye", Input: text})
		_, latestErr := restarted.Fork(t.Context(), w.pool, executions.ForkSpec{
			ID: id, From: "bye", Input: text,
			Latest: true,
		})
		assert.Equal(t, fmt.Sprint(err), fmt.Sprint(latestErr), name, latestErr, err)
		switch {
		case c.step == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.step == "":
			enginetest.Await(t, w.pool, x.ID, executions.Completed)
		case !errors.Is(err, executions.ErrChanged) || !strings.Contains(err.Error(), c.step):
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The kept actions of a retry have the ids of the original in their input.
func TestRetryKeepsIDs(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("a", `
  - {actionType: send_message, parameters: {message: "{{executionId}} {{traceId}}"}}
  - {actionType: wait_for_event, timeout: 10ms, parameters: {key: never}}`))
	createThread(t, w.pool)
	id := w.startInThread(t, "a", nil)
	enginetest.Await(t, w.pool, id, executions.Timeout)
	for _, of := range []string{"the original", "the fork"} {
		fork, _, err := w.Retry(t.Context(), w.pool, id)
		require.NoError(t, err, of)
		id = enginetest.Await(t, w.pool, fork.ID, executions.Timeout).ID
	}
}

// Fork rejects input that violates the flow's schema, even if the fork keeps the step that validated the first input.
func TestForkRejectsInvalidInput(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: greets
input: {type: object, required: [name], properties: {name: {type: string}}}
actions:
  - {id: greet, actionType: set, parameters: {variables: {hello: "Hola {{input.name}}"}}}`)
	id := w.startInThread(t, "greets", map[string]any{"name": "Ana"})
	enginetest.Await(t, w.pool, id, executions.Completed)
	for input, want := range map[string]string{`{}`: "name", `[1]`: "object", `{"name": "Eva"}`: ""} {
		_, err := w.Fork(t.Context(), w.pool, executions.ForkSpec{ID: id, From: "greet", Input: json.RawMessage(input)})
		assert.Truef(t, (want != "" || err == nil) &&
			(want == "" || errors.Is(err, executions.ErrNoFork) && strings.Contains(err.Error(), want)), "%s: %v", input, err)
	}
	assert.Equal(t, 2, pgtest.Value[int](t, w.pool, `select count(*)::int from agent_executions`))
}

// Large integers of a definition, and of a loop that resumes from its snapshot, stay unchanged.
func TestLargeIntegerSurvivesDefinitionAndLoop(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, `
name: numbers
input: {type: object, properties: {id: {type: integer, default: 123456789012345671, maximum: 123456789012345671}}}
variables: {first: 123456789012345672}
actions:
  - {actionType: set, parameters: {variables: {second: 123456789012345673}}}
  - actionType: while
    parameters:
      condition: index < 17
      actions:
        - {actionType: set, when: index == 0, parameters: {variables: {third: 123456789012345674}}}
        - {actionType: delay, when: index == 16, parameters: {duration: 10ms}}
  - {actionType: end, parameters: {result: {all: ["{{input.id}}", "{{first}}", "{{second}}", "{{third}}"]}}}`)
	assert.NoError(t, flows.CheckStart(t.Context(), w.pool, "numbers", json.RawMessage(`{"id": 123456789012345671}`)))
	assert.Error(t, flows.CheckStart(t.Context(), w.pool, "numbers", json.RawMessage(`{"id": 123456789012345672}`)))
	x := enginetest.Await(t, w.pool, w.startInThread(t, "numbers", nil), executions.Completed)
	assert.Equal(t, `{"all": [123456789012345671, 123456789012345672, 123456789012345673, 123456789012345674]}`,
		string(x.Result))
	replayed, err := w.Replay(t.Context(), x.ID)
	assert.Truef(t, err == nil && replayed.Equal, "replay %+v, %v", replayed, err)
}

// A set keeps its result across a wait, whatever JSON makes of the values.
func TestSetIsUnchangedAfterWait(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("sets", `
  - {id: none, actionType: set, parameters: {variables: {}}}
  - {id: zero, actionType: set, parameters: {expressions: {zero: "input.change * 0"}}}
  - {id: half, actionType: set, parameters: {expressions: {half: "input.name[0:1]"}}}
  - {id: wait, actionType: delay, parameters: {duration: 10ms}}`))
	id := w.startInThread(t, "sets", json.RawMessage(`{"change": -0.5, "name": "Álvaro"}`))
	enginetest.Await(t, w.pool, id, executions.Completed)
}

// A large integer survives a wait unchanged.
func TestLargeIntegerSurvivesWait(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("numbers", `
  - {id: take, actionType: set, parameters: {expressions: {id: "input.id"}}}
  - {id: wait, actionType: wait_for_event, parameters: {key: go}}
  - {id: say, actionType: send_message, parameters: {message: "{{id}}"}}`))
	id := w.startInThread(t, "numbers", json.RawMessage(`{"id": 123456789012345678}`))
	enginetest.Await(t, w.pool, id, executions.Waiting)
	_, err := w.Deliver(t.Context(), w.pool, "EVENT_COMPLETED", "go", nil, "")
	require.NoError(t, err)
	enginetest.Await(t, w.pool, id, executions.Completed)
	assert.Equal(t, "123456789012345678", pgtest.Value[string](t, w.pool,
		`select content from agent_messages order by id desc limit 1`))
}

// An execution finishes on the version with which it started, even if the flow changed or was removed during a wait.
func TestExecutionKeepsItsVersion(t *testing.T) {
	t.Parallel()
	version := func(n string) string {
		return "name: a\nactions:\n  - {id: before, actionType: send_message, parameters: {message: before " + n + "}}\n" +
			"  - {actionType: wait_for_event, parameters: {key: '{{input.key}}'}}\n" +
			"  - {actionType: send_message, parameters: {message: after " + n + "}}\n"
	}
	w := newTestProcess(t, version("1"))
	first := w.startInThread(t, "a", map[string]any{"key": "k1"})
	awaitWaiting(t, w.pool, first, 1)
	putFlow(t, w.pool, version("2"))
	second, _, err := w.Start(t.Context(), w.pool, executions.Spec{
		Flow: "a", Surface: "flow", ThreadID: "maria",
		Input: map[string]any{"key": "k2"},
	})
	require.NoError(t, err)
	awaitWaiting(t, w.pool, second.ID, 1)
	pgtest.Exec(t, w.pool, `update agent_flows set current = false`)
	w.stop()
	w = startProcess(t, w.pool, nil) // its cache has neither version
	deliverEvent(t, w, "EVENT_COMPLETED", "k1", `{}`)
	enginetest.Await(t, w.pool, first, executions.Completed)
	deliverEvent(t, w, "EVENT_COMPLETED", "k2", `{}`)
	enginetest.Await(t, w.pool, second.ID, executions.Completed)
	// A fork has its version before it starts, here without a thread.
	var third string
	err = postgres.InTx(t.Context(), w.pool, func(tx pgx.Tx) error {
		fork, err := w.Fork(t.Context(), tx, executions.ForkSpec{ID: first, From: "flow version"})
		if err != nil {
			return err
		}
		third = fork.ID
		pgtest.Exec(t, tx, `update agent_executions set thread_id = null, input = '{"key": "k4"}' where id = @id`,
			postgres.Strict{"id": third})
		return nil
	})
	require.NoError(t, err)
	x := enginetest.Await(t, w.pool, third, executions.Failed)
	if v := x.FlowVersion; v == nil || *v != 1 || !strings.Contains(postgres.Deref(x.ErrorMessage), "no thread") {
		t.Errorf("the fork runs version %v: %s", v, postgres.Deref(x.ErrorMessage))
	}
	pgtest.Equal(t, w.pool, "1 before 1, 1 after 1, 2 before 2, 2 after 2", `
		select string_agg(flow_version || ' ' || content, ', ' order by m.execution_id, m.id)
		  from agent_messages m join agent_executions x on x.id = m.execution_id
		    where x.flow = @flow`, postgres.Strict{"flow": "a"})
	x = enginetest.Await(t, w.pool, w.startInThread(t, "a", map[string]any{"key": "k3"}), executions.Failed)
	assert.Equal(t, "flow a: the flow was removed", postgres.Deref(x.ErrorMessage))
}

var errClaimRevoked = errors.New("killed by the test")

// claimRevoker simulates a crash before each step: when an execution first reaches the step, its claim is released.
type claimRevoker struct {
	pool *pgxpool.Pool

	mu   sync.Mutex
	seen map[string]bool
}

func (r *claimRevoker) wrapFind(
	find func(ctx context.Context, name string) (executions.Func, error),
) func(context.Context, string) (executions.Func, error) {
	return func(ctx context.Context, name string) (executions.Func, error) {
		fn, err := find(ctx, name)
		if fn == nil || err != nil {
			return nil, err
		}
		return func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
			return fn(executions.Gate(ctx, r.revokeOnce), input)
		}, nil
	}
}

func (r *claimRevoker) revokeOnce(ctx context.Context) error {
	x, _ := executions.Current(ctx)
	key := x.ID + executions.StepKey(ctx)
	r.mu.Lock()
	revoked := r.seen[key]
	r.seen[key] = true
	r.mu.Unlock()
	if revoked {
		return nil
	}
	_, err := r.pool.Exec(ctx, `select lanekeeper.release_agent_claim(@id, @claim)`,
		postgres.Strict{"id": x.ID, "claim": x.Claim})
	return errors.Join(errClaimRevoked, err)
}

func (r *claimRevoker) revocations() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.seen)
}

// The claim is lost before every step. The flow still ends like an undisturbed one: no step is repeated or missing.
func TestFlowSurvivesCrashBeforeEveryStep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	putFlow(t, pool, `
name: child
variables: {from: child}
actions:
  - {actionType: send_message, parameters: {message: "child of {{input.n}}"}}
`)
	putFlow(t, pool, `
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
	r := &claimRevoker{pool: pool, seen: map[string]bool{}}
	w := startProcess(t, pool, nil, func(e *executions.Engine) error {
		e.Fallback(r.wrapFind((&flows.Interpreter{Pool: pool, Engine: e}).Find))
		return nil
	})
	id := w.startInThread(t, "all", nil)
	expireWait(t, w, id, 1)
	awaitWaiting(t, pool, id, 2)
	receiveMessage(t, w, "yes")
	var key string
	pgtest.Eventually(t, func() bool {
		x, err := executions.Get(t.Context(), pool, id)
		if err == nil && x.Status == executions.Waiting && *x.WaitingFor == "document" {
			key = *x.WaitingKey
		}
		return key != ""
	}, "it waits for a document")
	deliverEvent(t, w, "DOCUMENT_UPLOADED", key, `{"document": "INE", "url": "u"}`)
	x := enginetest.Await(t, pool, id, executions.Completed)
	assert.Equal(t, "hello | again | at b | child of 1 | Please send us: INE. | A test is waiting for "+
		"you: sql | bye yes abc u", replies(t, pool))
	got := variables(t, x)
	delete(got, "triggeredExecutionId")
	delete(got, "requestId")
	want := map[string]any{
		"seen": "abc", "from": "child", "lastResponse": "yes", "timedOut": false, "childExecutionStatus": "completed",
		"childExecutionSuccess": true, "documentUrls": []any{"u"},
		"documents": []any{map[string]any{"document": "INE", "url": "u"}},
	}
	assert.NoDiff(t, want, got)
	assert.Equal(t, 2, pgtest.Value[int](t, pool, `select count(*) from agent_executions`))
	assert.Equal(t, 2, pgtest.Value[int](t, pool, `select count(*) from agent_requests`))
	n := r.revocations()
	assert.Truef(t, n >= 30, "the claim was revoked only %d times", n)
}
