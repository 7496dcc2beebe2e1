package reason_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// world is a database and a scripted model, with a loop between them.
type world struct {
	pool     *pgxpool.Pool
	model    *modeltest.Server
	loop     *reason.Loop
	log      *testkit.Log
	builtins map[string]skills.Builtin
	turn     reason.Turn
	// prepare, if set, gets every engine before it runs.
	prepare func(e *executions.Engine)
	// wrap, if set, changes the context of the turn.
	wrap func(ctx context.Context) context.Context
	// instead, if set, replaces the turn.
	instead func(ctx context.Context) (executions.Result, error)
	// took has the results of the flow's runs, in the order of their ends.
	mu   sync.Mutex
	took []reason.Outcome
}

// newWorld has two skills: sizes, which takes a limit, and probe, which takes nothing.
func newWorld(t *testing.T, replies ...modeltest.Reply) *world {
	t.Helper()
	w := &world{
		pool: pgtest.DB(t), model: modeltest.New(t, replies...), log: &testkit.Log{},
		builtins: map[string]skills.Builtin{},
	}
	w.builtins["sizes"] = func(_ context.Context, c skills.Call) (any, error) {
		return map[string]any{"largest": "orders"}, nil
	}
	w.builtins["probe"] = func(context.Context, skills.Call) (any, error) { return "alive", nil }
	w.put(t, skills.Definition{Name: "sizes", Idempotent: true, Parameters: map[string]any{
		"type": "object", "required": []any{"limit"},
		"properties": map[string]any{"limit": map[string]any{"type": "integer", "minimum": 1}},
	}})
	w.put(t, skills.Definition{Name: "probe"})
	w.turn = reason.Turn{
		Purpose: "test", System: "You are tested.", Prompt: "Look.",
		Scopes: []string{skills.ScopeInternal},
	}
	client, err := models.New(models.Config{
		BaseURL: w.model.URL(), Model: "gpt-4o-mini", Logger: slog.New(slog.DiscardHandler),
		Retry: models.Retry{Attempts: 3, Base: time.Millisecond, MaxWait: 3 * time.Second},
	})
	require.NoError(t, err)
	registry, err := skills.New(skills.Options{Builtins: w.builtins, Pool: w.pool})
	require.NoError(t, err)
	w.loop = &reason.Loop{
		Pool: w.pool, Model: client, Skills: registry, Logger: slog.New(slog.NewJSONHandler(w.log, nil)),
		AdmitTrial: func(ctx context.Context, skill, owner string) (bool, error) {
			return selfheal.Admit(ctx, w.pool, skill, owner)
		},
		AfterCall: selfheal.After(w.pool),
	}
	return w
}

// put declares a skill whose builtin has the same name.
func (w *world) put(t *testing.T, d skills.Definition) {
	t.Helper()
	d.Handler, d.Description = "builtin:"+d.Name, "does "+d.Name
	_, err := skills.Put(t.Context(), w.pool, d, skills.SourceWorkspace)
	require.NoError(t, err)
}

// engine returns an engine that knows the world's turn. With run, it also claims work.
func (w *world) engine(t *testing.T, run bool) *executions.Engine {
	t.Helper()
	e := enginetest.New(t, w.pool)
	enginetest.Register(t, e, "turn", w.flow)
	if w.prepare != nil {
		w.prepare(e)
	}
	if run {
		testkit.Run(t, e.Run)
	}
	return e
}

func (w *world) flow(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
	if w.wrap != nil {
		ctx = w.wrap(ctx)
	}
	if w.instead != nil {
		return w.instead(ctx)
	}
	got, err := w.loop.Run(ctx, w.turn)
	if err != nil {
		return executions.Result{}, err
	}
	w.mu.Lock()
	w.took = append(w.took, got)
	w.mu.Unlock()
	return executions.Result{Summary: got.Text, Value: got}, nil
}

// run runs one turn to its end.
func (w *world) run(t *testing.T) (executions.Execution, reason.Outcome) {
	t.Helper()
	x, err := w.engine(t, false).RunSync(t.Context(), executions.Spec{Flow: "turn", Surface: trace.Flow})
	require.NoError(t, err)
	return x, outcome(t, x)
}

// completed is run for a turn that must succeed.
func (w *world) completed(t *testing.T) (executions.Execution, reason.Outcome) {
	t.Helper()
	x, got := w.run(t)
	require.Equal(t, executions.Completed, x.Status, postgres.Deref(x.ErrorMessage))
	return x, got
}

func outcome(t *testing.T, x executions.Execution) (got reason.Outcome) {
	t.Helper()
	if x.Status == executions.Completed {
		require.NoError(t, json.Unmarshal(x.Result, &got))
	}
	return got
}

// row has the compared columns of the activity log.
type row struct {
	Skill, Kind, Status, Class, Message string
	Input, Output                       json.RawMessage
}

// rows returns the rows of an execution in order.
func (w *world) rows(t *testing.T, x executions.Execution) []row {
	t.Helper()
	got, err := w.pool.Query(t.Context(), `
		select skill_name, kind, status, error_class, coalesce(error_message, ''), input, coalesce(output, 'null')
		  from agent_activity where execution_id = @id order by created_at, id`, postgres.Strict{"id": x.ID})
	require.NoError(t, err)
	list, err := pgx.CollectRows(got, pgx.RowToStructByPos[row])
	require.NoError(t, err)
	return list
}

func named(rows []row, skill string) (list []row) {
	for _, r := range rows {
		if r.Skill == skill {
			list = append(list, r)
		}
	}
	return list
}

// since returns the messages that request n added to those of the request before.
func (w *world) since(t *testing.T, n int) []openai.ChatCompletionMessage {
	t.Helper()
	requests := w.model.Requests()
	require.Truef(t, n < len(requests), "there were %d requests, not %d", len(requests), n+1)
	if n == 0 {
		return requests[0].Messages
	}
	return requests[n].Messages[len(requests[n-1].Messages):]
}

// delegates lets the world's turn delegate.
func (w *world) delegates(t *testing.T) {
	t.Helper()
	w.prepare = func(e *executions.Engine) {
		assert.NoError(t, w.loop.RegisterDelegate(e))
		w.turn.Tools = []reason.Tool{w.loop.DelegateTool(e, []string{skills.ScopeInternal})}
	}
}

// begin starts the turn. A process that runs the engine claims it, also after waits.
func begin(t *testing.T, w *world, e *executions.Engine) string {
	t.Helper()
	x, _, err := e.Start(t.Context(), w.pool, executions.Spec{Flow: "turn", Surface: trace.Flow})
	require.NoError(t, err)
	return x.ID
}

// child returns the execution that another started.
func (w *world) child(t *testing.T, parent string) (x executions.Execution) {
	t.Helper()
	pgtest.Eventually(t, func() bool {
		var id string
		if err := w.pool.QueryRow(t.Context(), `select id::text from agent_executions where parent_id = @id`,
			postgres.Strict{"id": parent}).Scan(&id); err != nil {
			return false
		}
		var err error
		x, err = executions.Get(t.Context(), w.pool, id)
		return err == nil
	}, parent+" has a child")
	return x
}

func toolNames(r modeltest.Request) (names []string) {
	for _, t := range r.Tools {
		names = append(names, t.Function.Name)
	}
	return names
}

var errBroken = errors.New("it broke")
