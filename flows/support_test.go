package flows_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.yaml.in/yaml/v3"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/trace"
)

// patience is how long a test waits for what must happen; it is long because machines are slow.
const patience = 60 * time.Second

// world is a database and a process that runs flows.
type world struct {
	*executions.Engine
	pool *pgxpool.Pool
	in   *flows.Interpreter
	stop func()
}

// newWorld has the flows of a few YAML documents.
func newWorld(t *testing.T, documents ...string) *world {
	t.Helper()
	pool := pgtest.DB(t)
	for _, text := range documents {
		put(t, pool, text)
	}
	return process(t, pool, nil)
}

// process runs an engine until the test ends, or stop is called.
func process(t *testing.T, pool *pgxpool.Pool, loop *reason.Loop, register ...func(*executions.Engine) error) *world {
	t.Helper()
	e, err := executions.New(pool, executions.Options{
		Keeper: lanes.NewKeeper(pool, lanes.Options{}), SweepEvery: 100 * time.Millisecond, LeaseTTL: 20 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{Engine: e, pool: pool, in: &flows.Interpreter{Pool: pool, Engine: e, Loop: loop, Logger: slog.New(slog.DiscardHandler)}}
	e.Fallback(w.in.Find)
	for _, more := range register {
		if err := more(e); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	group, running := errgroup.WithContext(ctx)
	group.Go(func() error { return e.Run(running) })
	stopped := false
	w.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("engine: %v", err)
		}
	}
	t.Cleanup(w.stop)
	return w
}

// read reads a flow the way a file has it.
func read(t *testing.T, text string) flows.Definition {
	t.Helper()
	var tree map[string]any
	if err := yaml.Unmarshal([]byte(text), &tree); err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(tree)
	if err != nil {
		t.Fatal(err)
	}
	d, err := define(string(raw))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func put(t *testing.T, pool *pgxpool.Pool, text string) {
	t.Helper()
	if _, err := flows.Put(t.Context(), pool, read(t, text), "workspace"); err != nil {
		t.Fatal(err)
	}
}

// thread makes one and returns its id.
func thread(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	const id = "maria"
	exec(t, pool, `insert into agent_threads (id, channel, agent, owner, participant) values (@id, 'chat', 'agent', 'test', 'Maria') on conflict do nothing`,
		postgres.Strict{"id": id})
	return id
}

// begin starts a flow in the thread.
func (w *world) begin(t *testing.T, flow string, input any) string {
	t.Helper()
	x, _, err := w.Start(t.Context(), w.pool, executions.Spec{Flow: flow, Surface: trace.Flow, Input: input, ThreadID: thread(t, w.pool)})
	if err != nil {
		t.Fatal(err)
	}
	return x.ID
}

// until waits for an execution to reach a status.
func until(t *testing.T, db postgres.DB, id string, want executions.Status) executions.Execution {
	t.Helper()
	var got executions.Execution
	var err error
	defer func() {
		if t.Failed() {
			t.Logf("execution is %s (%v %v)", got.Status, deref(got.FailedStep), deref(got.ErrorMessage))
		}
	}()
	pgtest.Eventually(t, patience, func() bool {
		got, err = executions.Get(t.Context(), db, id)
		return err == nil && (got.Status == want || got.Status.Ended())
	}, "execution becomes "+string(want))
	if got.Status != want {
		t.Fatalf("execution is %s, not %s: %s: %s", got.Status, want, deref(got.FailedStep), deref(got.ErrorMessage))
	}
	return got
}

// waits waits until an execution waits for the nth time.
func waits(t *testing.T, db postgres.DB, id string, n int) executions.Execution {
	t.Helper()
	var got executions.Execution
	pgtest.Eventually(t, patience, func() bool {
		var err error
		got, err = executions.Get(t.Context(), db, id)
		return err == nil && got.Status == executions.Waiting && got.WaitNumber >= n
	}, "execution waits")
	return got
}

// variables are the final ones, without those of the runtime.
func variables(t *testing.T, x executions.Execution) map[string]any {
	t.Helper()
	var all map[string]any
	if err := json.Unmarshal(x.Variables, &all); err != nil {
		t.Fatalf("variables %s: %v", x.Variables, err)
	}
	for _, name := range []string{"input", "executionId", "traceId", "threadId"} {
		if _, known := all[name]; !known {
			t.Errorf("variable %s is missing", name)
		}
		delete(all, name)
	}
	return all
}

// said is what went out in the thread, in its order.
func said(t *testing.T, db postgres.DB) string {
	t.Helper()
	return value[string](t, db, `select coalesce(string_agg(content, ' | ' order by seq), '') from agent_messages where role = 'assistant' and seq is not null`)
}

// answer is what the other side says.
func answer(t *testing.T, w *world, text string) {
	t.Helper()
	exec(t, w.pool, `select * from lanekeeper.receive_agent_message('maria', @text)`, postgres.Strict{"text": text})
}

// deliver sends an event.
func deliver(t *testing.T, w *world, event, key, data string) {
	t.Helper()
	if _, err := w.Deliver(t.Context(), w.pool, event, key, json.RawMessage(data), ""); err != nil {
		t.Fatal(err)
	}
}

// story is the activity of an execution: type, status.
func story(t *testing.T, db postgres.DB, id string) string {
	t.Helper()
	return value[string](t, db, `
		select coalesce(string_agg(skill_name || case status when 'success' then '' else ' ' || status end, ', ' order by created_at, id), '')
		  from agent_activity where execution_id = @id and kind = 'phase'`, postgres.Strict{"id": id})
}

// late lets the wait of an execution time out now.
func late(t *testing.T, w *world, id string, n int) {
	t.Helper()
	waits(t, w.pool, id, n)
	exec(t, w.pool, `update agent_executions set waiting_until = clock_timestamp() - interval '1 second' where id = @id and status = 'waiting'`,
		postgres.Strict{"id": id})
}

func exec(t *testing.T, db postgres.DB, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func value[T any](t *testing.T, db postgres.DB, sql string, args ...any) (v T) {
	t.Helper()
	if err := db.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// flow is a document with these actions.
func flow(name, actions string) string {
	return "name: " + name + "\nactions:\n" + strings.ReplaceAll(strings.TrimLeft(actions, "\n"), "\t", "  ")
}
