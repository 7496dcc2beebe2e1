package flows_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// testProcess is a database with a process that runs flows.
type testProcess struct {
	*executions.Engine
	pool *pgxpool.Pool
	in   *flows.Interpreter
	stop func()
}

// newTestProcess stores the flows of YAML documents and starts a process.
func newTestProcess(t *testing.T, documents ...string) *testProcess {
	t.Helper()
	pool := pgtest.DB(t)
	for _, text := range documents {
		putFlow(t, pool, text)
	}
	return startProcess(t, pool, nil)
}

// startProcess runs an engine until the test ends or the caller calls stop.
func startProcess(
	t *testing.T, pool *pgxpool.Pool, loop *reason.Loop, register ...func(*executions.Engine) error,
) *testProcess {
	t.Helper()
	e := enginetest.New(t, pool)
	w := &testProcess{Engine: e, pool: pool, in: &flows.Interpreter{
		Pool: pool, Engine: e, Loop: loop,
		Logger: slog.New(slog.DiscardHandler),
	}}
	e.Fallback(w.in.Find)
	for _, more := range register {
		require.NoError(t, more(e))
	}
	w.stop = enginetest.Run(t, e.Run)
	return w
}

// parseYAML parses a flow in the format of a workspace file.
func parseYAML(t *testing.T, text string) flows.Definition {
	t.Helper()
	var tree map[string]any
	require.NoError(t, yaml.Unmarshal([]byte(text), &tree))
	raw, err := json.Marshal(tree)
	require.NoError(t, err)
	d, err := parseDefinition(string(raw))
	require.NoError(t, err)
	return d
}

func putFlow(t *testing.T, pool *pgxpool.Pool, text string) {
	t.Helper()
	_, err := flows.Put(t.Context(), pool, parseYAML(t, text))
	require.NoError(t, err)
}

// createThread creates a thread and returns its id.
func createThread(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	const id = "maria"
	pgtest.Exec(t, pool, `insert into agent_threads (id, channel, agent, owner, participant)
		values (@id, 'chat', 'agent', 'test', 'Maria') on conflict do nothing`,
		postgres.Strict{"id": id})
	return id
}

// startInThread starts a flow in the thread.
func (w *testProcess) startInThread(t *testing.T, flow string, input any) string {
	t.Helper()
	x, _, err := w.Start(t.Context(), w.pool, executions.Spec{
		Flow: flow, Surface: trace.Flow, Input: input,
		ThreadID: createThread(t, w.pool),
	})
	require.NoError(t, err)
	return x.ID
}

// awaitWaiting waits until an execution waits for the nth time.
func awaitWaiting(t *testing.T, db postgres.DB, id string, n int) executions.Execution {
	t.Helper()
	var got executions.Execution
	pgtest.Eventually(t, func() bool {
		var err error
		got, err = executions.Get(t.Context(), db, id)
		return err == nil && got.Status == executions.Waiting && got.WaitNumber >= n
	}, "the execution waits")
	return got
}

// variables returns the final variables, except those that the runtime sets.
func variables(t *testing.T, x executions.Execution) map[string]any {
	t.Helper()
	var all map[string]any
	require.NoError(t, json.Unmarshal(x.Variables, &all), "variables", x.Variables)
	for _, name := range []string{"input", "executionId", "traceId", "threadId"} {
		_, known := all[name]
		assert.Truef(t, known, "variable %s is missing", name)
		delete(all, name)
	}
	return all
}

// replies returns the sent messages in order.
func replies(t *testing.T, db postgres.DB) string {
	t.Helper()
	return pgtest.Value[string](t, db, `select coalesce(string_agg(content, ' | ' order by seq), '') from agent_messages
		where role = 'assistant' and seq is not null`)
}

// receiveMessage receives a message of the visitor.
func receiveMessage(t *testing.T, w *testProcess, text string) {
	t.Helper()
	pgtest.Exec(t, w.pool, `select * from lanekeeper.receive_agent_message('maria', @text)`, postgres.Strict{"text": text})
}

func deliverEvent(t *testing.T, w *testProcess, event, key, data string) {
	t.Helper()
	_, err := w.Deliver(t.Context(), w.pool, event, key, json.RawMessage(data), "")
	require.NoError(t, err)
}

// phaseStatuses lists the action types of an execution, each with its status unless it succeeded.
func phaseStatuses(t *testing.T, db postgres.DB, id string) string {
	t.Helper()
	return pgtest.Value[string](t, db, `
		select coalesce(string_agg(skill_name || case status when 'success' then '' else ' ' || status end, ', '
		  order by created_at, id), '')
		  from agent_activity where execution_id = @id and kind = 'phase'`, postgres.Strict{"id": id})
}

// expireWait lets the nth wait of an execution time out.
func expireWait(t *testing.T, w *testProcess, id string, n int) {
	t.Helper()
	awaitWaiting(t, w.pool, id, n)
	pgtest.Exec(t, w.pool, `update agent_executions set waiting_until = clock_timestamp() - interval '1 second'
		where id = @id and status = 'waiting'`,
		postgres.Strict{"id": id})
}

// flowYAML returns the document of a flow with these actions.
func flowYAML(name, actions string) string {
	return "name: " + name + "\nactions:\n" + strings.ReplaceAll(strings.TrimLeft(actions, "\n"), "\t", "  ")
}

// Fork rejects input that contradicts the record of a kept action. The error names the action.
func TestForkRejectsInputThatContradictsRecords(t *testing.T) {
	t.Parallel()
	w := newTestProcess(t, flowYAML("greets", `
  - {id: greet, actionType: send_message, parameters: {message: "Hola {{input.name}}"}}
  - {id: more, when: input.more, actionType: send_message, parameters: {message: "Algo mas"}}
  - {id: each, actionType: for_each, parameters: {items: "{{input.items}}", actions: [{id: item, actionType: send_message, parameters: {message: "{{item}}"}}]}}
  - {id: decide, actionType: if, parameters: {condition: input.vip, then: [{id: vip, actionType: send_message, parameters: {message: "Bienvenida"}}]}}
  - {id: compose, actionType: set, parameters: {expressions: {greeting: "input.name2 + '!'"}}}
  - {id: bye, actionType: send_message, parameters: {message: "Adios {{input.farewell}}"}}`))
	createThread(t, w.pool)
	original := map[string]any{
		"name": "Ana", "more": true, "items": []string{"a", "b"}, "vip": true,
		"name2": "Ana", "farewell": "",
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

// newMemoryProcess starts a process with the builtins. The memory has the value "first" for the key contact.
func newMemoryProcess(t *testing.T, documents ...string) *testProcess {
	t.Helper()
	pool := pgtest.DB(t)
	for _, text := range documents {
		putFlow(t, pool, text)
	}
	_, err := builtins.Put(t.Context(), pool)
	require.NoError(t, err)
	registry, err := skills.New(skills.Options{Builtins: builtins.New(pool, nil, nil), Pool: pool})
	require.NoError(t, err)
	saveContact(t, pool, "first")
	return startProcess(t, pool, &reason.Loop{Pool: pool, Skills: registry, Logger: slog.New(slog.DiscardHandler)})
}

// saveContact writes the key contact, as another writer.
func saveContact(t *testing.T, pool *pgxpool.Pool, value string) {
	t.Helper()
	_, err := memory.Save(t.Context(), pool, memory.Note{Key: "contact", Value: value, TraceID: "op_1"})
	require.NoError(t, err)
}

const (
	recallAction = "  - {actionType: skill, saveAs: known, parameters: {name: recall, arguments: {query: contact}}}\n"
	waitAction   = "  - {actionType: wait_for_event, parameters: {key: go}}\n"
	writeAction  = "  - {id: write, actionType: skill, saveAs: kept, parameters: {name: memory_write, arguments: {key: " +
		"contact, value: mine}}}\n"
	forgetAction = "  - {id: forget, actionType: skill, parameters: {name: memory_forget, arguments: {key: contact}}}\n"
)

func TestMemoryWriteRequiresRead(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		actions      string
		overwritten  bool   // another writer writes the key during the wait
		want         string // the final value and its revision
		failedAction string // the action that fails; empty for none
	}{
		"read": {recallAction + waitAction + writeAction, false, `"mine" at 2`, ""},
		"read, own, and again": {
			recallAction + waitAction + writeAction + strings.ReplaceAll(writeAction, "mine", "mine again"), false,
			`"mine again" at 3`, "",
		},
		"read and overwritten":       {recallAction + waitAction + writeAction, true, `"theirs" at 2`, "write"},
		"never read":                 {waitAction + writeAction, false, `"first" at 1`, "write"},
		"read and forgotten":         {recallAction + waitAction + forgetAction, false, "nothing", ""},
		"overwritten, not forgotten": {recallAction + waitAction + forgetAction, true, `"theirs" at 2`, "forget"},
		"read after overwrite":       {waitAction + recallAction + writeAction, true, `"mine" at 3`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newMemoryProcess(t, flowYAML("keeps", strings.ReplaceAll(test.actions,
				"id: write, actionType: skill, saveAs: kept, "+
					"parameters: {name: memory_write, arguments: {key: contact, value: mine again}",
				"id: again, actionType: skill, parameters: {name: memory_write, arguments: {key: contact, value: mine again}")))
			id := w.startInThread(t, "keeps", nil)
			awaitWaiting(t, w.pool, id, 1)
			if test.overwritten {
				saveContact(t, w.pool, "theirs")
			}
			deliverEvent(t, w, "EVENT_COMPLETED", "go", `{}`)
			if test.failedAction == "" {
				enginetest.Await(t, w.pool, id, executions.Completed)
			} else {
				x := enginetest.Await(t, w.pool, id, executions.Failed)
				stored, _, _ := strings.Cut(test.want, " ")
				message := postgres.Deref(x.ErrorMessage)
				assert.Truef(t, strings.Contains(message, test.failedAction) && strings.Contains(message, "nothing was changed") &&
					strings.Contains(message, stored), "the error is %q", message)
				pgtest.Equal(t, w.pool, "skipped", `select status from agent_activity
					where skill_name in ('memory_write', 'memory_forget') and kind = 'call'`)
			}
			pgtest.Equal(t, w.pool, test.want, `select coalesce((select value::text || ' at ' || revision from agent_memory),
				'nothing')`)
		})
	}
}

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
  - {id: go, actionType: trigger_agent, parameters: {flow: broken, onFailure: fail}}`), flowYAML("lost", `
  - {id: go, actionType: trigger_agent, parameters: {flow: nobody}}`), flowYAML("wrong", `
  - {id: go, actionType: trigger_agent, parameters: {flow: picky}}`), flowYAML("loose", `
  - {actionType: trigger_agent, saveAs: it, parameters: {flow: broken, waitForCompletion: false}}`))
	assert.Equal(t, "child failed", enginetest.Await(t, w.pool, w.startInThread(t, "handles", nil),
		executions.Completed).ResultSummary)
	for name, want := range map[string]string{
		"strict": "action go (trigger_agent): flow broken ended as failed: action stop (fail): no",
		"lost":   "action go (trigger_agent): there is no flow nobody",
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
