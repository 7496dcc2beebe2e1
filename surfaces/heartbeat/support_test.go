package heartbeat_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/looptest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
)

type request = openai.ChatCompletionRequest

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// testHeartbeat is a database with a heartbeat and a scripted model.
type testHeartbeat struct {
	pool     *pgxpool.Pool
	model    *modeltest.Server
	surface  *heartbeat.Heartbeat
	builtins map[string]skills.Builtin
	calls    testkit.Counter // of skills
}

// newTestHeartbeat returns a heartbeat with the idempotent skill look, which succeeds.
func newTestHeartbeat(t *testing.T) *testHeartbeat {
	t.Helper()
	w := &testHeartbeat{pool: pgtest.DB(t), model: modeltest.New(t), builtins: map[string]skills.Builtin{}}
	w.builtins["look"] = func(context.Context, skills.Call) (any, error) {
		w.calls.Add("look")
		return map[string]int{"rows": 42}, nil
	}
	w.addSkill(t, skills.Definition{Name: "look", Idempotent: true})
	loop := looptest.New(t, w.pool, w.model, skills.Options{Builtins: w.builtins})
	loop.AdmitTrial = func(ctx context.Context, skill, owner string) (bool, error) {
		return selfheal.Admit(ctx, w.pool, skill, owner)
	}
	loop.AfterCall = selfheal.After(w.pool)
	w.surface = &heartbeat.Heartbeat{
		Pool: w.pool, Heal: selfheal.Default(), Logger: slog.New(slog.DiscardHandler), Loop: loop,
	}
	return w
}

// replyNothing makes the model give the same answer to every request.
func (w *testHeartbeat) replyNothing() {
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Nothing to report.") })
}

// setReplies scripts the model by task and number of replies in this turn. A word of the prompt identifies the task.
func (w *testHeartbeat) setReplies(script map[string][]modeltest.Reply) {
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply { return replyForTask(script, req) })
}

// addSkill declares a skill whose builtin has the same name.
func (w *testHeartbeat) addSkill(t *testing.T, d skills.Definition) {
	t.Helper()
	d.Handler, d.Description = "builtin:"+d.Name, "does "+d.Name
	_, err := skills.Put(t.Context(), w.pool, d, skills.SourceWorkspace)
	require.NoError(t, err)
}

// addFailingSkill declares a skill whose last three calls have failed.
func (w *testHeartbeat) addFailingSkill(t *testing.T, name string) {
	t.Helper()
	w.builtins[name] = func(context.Context, skills.Call) (any, error) {
		w.calls.Add(name)
		return "well again", nil
	}
	w.addSkill(t, skills.Definition{Name: name, Idempotent: true})
	for range 3 {
		pgtest.Exec(t, w.pool, `
			insert into agent_activity (trace_id, skill_name, kind, status, error_class, error_message, finished_at, duration_ms)
			values ('op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', $1, 'call', 'error', 'http_status', 'the service answered 503',
			  clock_timestamp(), 12)`, name)
	}
}

// addAutomation declares a due automation.
func (w *testHeartbeat) addAutomation(t *testing.T, d automations.Definition) {
	t.Helper()
	d.Cron = "0 0 1 1 *"
	_, err := automations.Put(t.Context(), w.pool, d)
	require.NoError(t, err)
	w.makeDue(t, d.Name)
}

// makeDue sets an automation's next time back to the last full hour.
func (w *testHeartbeat) makeDue(t *testing.T, name string) {
	t.Helper()
	pgtest.Exec(t, w.pool, `update agent_automations set next_run_at = date_trunc('hour', clock_timestamp())
		where name = $1`, name)
}

// addObjective declares an objective and returns the ids of its steps.
func (w *testHeartbeat) addObjective(t *testing.T, d objectives.Definition) (o objectives.Objective, steps []string) {
	t.Helper()
	if _, err := objectives.Put(t.Context(), w.pool, d, objectives.SourceWorkspace); err != nil {
		t.Fatal(err)
	}
	o, err := objectives.Get(t.Context(), w.pool, d.Name)
	require.NoError(t, err)
	all, err := objectives.Steps(t.Context(), w.pool, o.ID)
	require.NoError(t, err)
	for _, s := range all {
		steps = append(steps, s.ID)
	}
	return o, steps
}

// engine returns a process's engine. With running, the engine claims work until the test ends.
func (w *testHeartbeat) engine(t *testing.T, running bool) *executions.Engine {
	t.Helper()
	keeper := lanes.NewKeeper(w.pool, lanes.Options{})
	e := enginetest.New(t, w.pool, func(o *executions.Options) { o.Keeper = keeper })
	beat := *w.surface
	require.NoError(t, beat.Register(e))
	if !running {
		return e
	}
	testkit.Run(t, e.Run, keeper.Run)
	return e
}

// run runs one heartbeat now.
func (w *testHeartbeat) run(t *testing.T) (executions.Execution, heartbeat.Summary) {
	t.Helper()
	x, err := w.engine(t, false).RunSync(context.WithoutCancel(t.Context()), heartbeat.Spec("agent"))
	require.NoError(t, err)
	return x, summary(t, x)
}

// runCompleted expects a completed heartbeat.
func (w *testHeartbeat) runCompleted(t *testing.T) (executions.Execution, heartbeat.Summary) {
	t.Helper()
	x, got := w.run(t)
	require.Equal(t, executions.Completed, x.Status, postgres.Deref(x.ErrorMessage))
	return x, got
}

func summary(t *testing.T, x executions.Execution) (s heartbeat.Summary) {
	t.Helper()
	if len(x.Result) > 0 {
		require.NoError(t, json.Unmarshal(x.Result, &s))
	}
	return s
}

// traceLines returns skill and status of a trace, in order.
func (w *testHeartbeat) traceLines(t *testing.T, traceID string) (lines []string) {
	t.Helper()
	rows, err := w.pool.Query(t.Context(), `
		SELECT skill_name, status, duration_ms, token_usage, created_at
		FROM agent_activity
		WHERE conversation_id = @trace_id
		ORDER BY created_at`, postgres.Strict{"trace_id": traceID})
	require.NoError(t, err)
	type line struct {
		SkillName, Status string
		DurationMS        *int64
		TokenUsage        json.RawMessage
		CreatedAt         time.Time
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[line])
	require.NoError(t, err)
	for _, l := range got {
		assert.Truef(t, l.Status == "running" || l.DurationMS != nil, "%s has no duration", l.SkillName)
		lines = append(lines, l.SkillName+" "+l.Status)
	}
	return lines
}

// phases returns the lines of the six phases.
func phases(lines []string) (list []string) {
	for _, l := range lines {
		name, _, _ := strings.Cut(l, " ")
		switch name {
		case "self_heal", "follow_through", "advance_plan", "run_automations", "reflect", "save_memories":
			list = append(list, l)
		}
	}
	return list
}

// prompts returns the first two messages of each request, joined.
func (w *testHeartbeat) prompts() (list []string) {
	for _, r := range w.model.Requests() {
		list = append(list, r.Messages[0].Content+"\n"+r.Messages[1].Content)
	}
	return list
}

// completeStep returns a call of complete_step.
func completeStep(id string) modeltest.Reply {
	return modeltest.ToolCall("complete_step", fmt.Sprintf(`{"step_id":%q,"result":"found 42 rows"}`, id))
}
