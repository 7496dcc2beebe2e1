package flows_test

import (
	"encoding/json"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// testProcess is a database with a process that runs flows.
type testProcess struct {
	*executions.Engine
	pool *pgxpool.Pool
	in   *flows.Interpreter
	stop func()
	log  *testkit.Log // of the interpreter
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
	log := &testkit.Log{}
	w := &testProcess{Engine: e, pool: pool, log: log, in: &flows.Interpreter{
		Pool: pool, Engine: e, Loop: loop,
		Logger: slog.New(slog.NewTextHandler(log, nil)),
	}}
	e.Fallback(w.in.Find)
	for _, more := range register {
		require.NoError(t, more(e))
	}
	w.stop = testkit.Run(t, e.Run)
	return w
}

// parseYAML parses a flow in the format of a workspace file.
func parseYAML(t *testing.T, text string) flows.Definition {
	t.Helper()
	decoder := yaml.NewDecoder(strings.NewReader(text))
	decoder.KnownFields(true)
	var d flows.Definition
	require.NoError(t, decoder.Decode(&d))
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
