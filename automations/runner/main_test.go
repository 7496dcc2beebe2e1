package runner_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
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
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// world is a database, a model, and the skill look, which calls a function of the test.
type world struct {
	pool  *pgxpool.Pool
	model *modeltest.Server
	loop  *reason.Loop

	mu    sync.Mutex
	calls int
	look  func(ctx context.Context, n int) error
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{pool: pgtest.DB(t), model: modeltest.New(t)}
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("Done.") })
	d := skills.Definition{Name: "look", Handler: "builtin:look", Idempotent: true}
	_, err := skills.Put(t.Context(), w.pool, d, skills.SourceWorkspace)
	require.NoError(t, err)
	w.loop = looptest.New(t, w.pool, w.model, skills.Options{
		Builtins: map[string]skills.Builtin{"look": w.called}, AllowPrivate: []string{"127.0.0.1"},
	})
	return w
}

func (w *world) called(ctx context.Context, _ skills.Call) (any, error) {
	w.mu.Lock()
	w.calls++
	n, look := w.calls, w.look
	w.mu.Unlock()
	if look != nil {
		return map[string]int{"call": n}, look(ctx, n)
	}
	return map[string]int{"call": n}, nil
}

func (w *world) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.calls
}

// process dispatches and executes runs until the test ends.
func (w *world) process(t *testing.T) (*runner.Runner, *executions.Engine) {
	t.Helper()
	r, e, keeper := w.idle(t)
	listener := postgres.NewListener(postgres.Dialer(w.pool), r.Logger)
	r.Listener = listener
	testkit.Run(t, e.Run, r.Run, keeper.Run, listener.Run)
	return r, e
}

// idle returns a process that does nothing on its own.
func (w *world) idle(t *testing.T) (*runner.Runner, *executions.Engine, *lanes.Keeper) {
	t.Helper()
	keeper := lanes.NewKeeper(w.pool, lanes.Options{})
	e := enginetest.New(t, w.pool, func(o *executions.Options) { o.Keeper = keeper })
	r := &runner.Runner{
		Pool: w.pool, Loop: w.loop, Engine: e, Logger: slog.New(slog.DiscardHandler), Agent: "agent",
		PollEvery: 200 * time.Millisecond, SignalsEvery: 200 * time.Millisecond,
	}
	require.NoError(t, r.Register())
	return r, e, keeper
}

func (w *world) put(t *testing.T, d automations.Definition) automations.Automation {
	t.Helper()
	if d.Skill == "" && d.Prompt == "" && d.Flow == "" {
		d.Skill = "look"
	}
	_, err := automations.Put(t.Context(), w.pool, d)
	require.NoError(t, err)
	a, err := automations.Get(t.Context(), w.pool, d.Name)
	require.NoError(t, err)
	return a
}

func (w *world) raise(t *testing.T, event, key, data string) {
	t.Helper()
	pgtest.Exec(t, w.pool, `select * from raise_agent_event($1, $2, $3, null, '')`, event, key, data)
}

// states returns the states of the runs with their numbers.
func (w *world) states(t *testing.T) string {
	t.Helper()
	return pgtest.Value[string](t, w.pool, `
		select coalesce(string_agg(status || ' ' || n, ', ' order by status), '')
		  from (select status, count(*) n from agent_automation_runs group by status) r`)
}

func (w *world) until(t *testing.T, want string) {
	t.Helper()
	got := ""
	defer func() {
		if t.Failed() {
			t.Logf("runs are %s", got)
		}
	}()
	pgtest.Eventually(t, func() bool { got = w.states(t); return got == want },
		fmt.Sprintf("runs become %s", want))
}

func TestAnAutomationStartsAFlow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.put(t, automations.Definition{
		Name: "hire", Event: "hired", Flow: "onboarding",
		Arguments: map[string]any{"tone": "warm"},
	})
	assert.Equal(t, "onboarding", a.Flow, a)
	assert.Equal(t, "", a.SkillName, a)
	// The end of the started flow is also an event. It must not start another run.
	w.put(t, automations.Definition{Name: "again", Event: "AGENT_COMPLETED", Flow: "onboarding"})
	_, e := w.process(t)
	require.NoError(t, e.Register("onboarding", func(_ context.Context, in json.RawMessage) (executions.Result, error) {
		return executions.Result{Summary: string(in)}, nil
	}))
	w.raise(t, "hired", "c1", `{"name": "Ana"}`)
	w.until(t, "success 1")
	pgtest.Until(t, w.pool, "1", `select count(*)::text from agent_executions where flow = 'onboarding'
			and status = 'completed'`)
	assert.Equal(t, `{"key": "c1", "data": {"name": "Ana"}, "tone": "warm", "event": "hired"}`,
		pgtest.Value[string](t, w.pool, `select input::text from agent_executions where flow = 'onboarding'`))
	got := pgtest.Value[string](t, w.pool, `
		select (x.parent_id = r.execution_id and x.trace_id = r.trace_id and r.output ->> 'execution_id' = x.id::text)::text
		  from agent_executions x, agent_automation_runs r where x.flow = 'onboarding'`)
	assert.Equal(t, "true", got, "the run and the flow do not name each other")
	assert.Equal(t, "success 1", w.states(t))
	run := pgtest.Value[string](t, w.pool, `select execution_id::text from agent_automation_runs`)
	_, err := e.Fork(t.Context(), w.pool, executions.ForkSpec{ID: run})
	assert.ErrorIs(t, err, executions.ErrNoFork, "fork of a run")
	pgtest.Until(t, w.pool, "true", `select (status = 'completed')::text from agent_executions
			where id = (select execution_id from agent_automation_runs)`)
	again, err := e.Replay(t.Context(), run)
	assert.Truef(t, err == nil && again.Equal, "the run is not replayed: %+v, %v", again.Divergence, err)
}

func TestARunThatIsTriedAgainStartsItsFlowOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "hire", Event: "hired", Flow: "external:hire"})
	// The end of the first attempt cannot be recorded.
	pgtest.Exec(t, w.pool, `create function refuse() returns trigger language plpgsql as $$ begin
		if new.status = 'success' and old.attempt = 1 then raise exception 'not now'; end if; return new; end $$`)
	pgtest.Exec(t, w.pool, `create trigger refuse before update
		on agent_automation_runs for each row execute function refuse()`)
	w.process(t)
	w.raise(t, "hired", "c1", `{}`)
	pgtest.Eventually(t, func() bool {
		pgtest.Exec(t, w.pool, `update agent_automation_runs set retry_at = clock_timestamp() where status = 'error'`)
		return w.states(t) == "success 1"
	}, "the second attempt succeeds")
	assert.Equal(t, "1", pgtest.Value[string](t, w.pool,
		`select count(*)::text from agent_executions where flow = 'external:hire'`))
	assert.True(t, pgtest.Value[string](t, w.pool,
		`select count(*)::text from agent_executions where flow = 'automation'`) != "1", "there was one attempt")
}

func TestWhilePausedTimesAreSkippedAndEventsAreKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 51 { // more than one pass reads
		w.put(t, automations.Definition{Name: fmt.Sprintf("before%d", i), Cron: "*/5 * * * *"})
	}
	w.put(t, automations.Definition{Name: "during", Cron: "0 0 1 1 *"})
	w.put(t, automations.Definition{Name: "event", Event: "E"})
	w.loop.Agents = &agents.Directory{}
	_, err := agents.Put(t.Context(), w.pool, agents.Definition{Name: "support", Default: true})
	require.NoError(t, err)
	pgtest.Exec(t, w.pool, `update agent_automations set next_run_at = clock_timestamp() - interval '1 hour'
		where name like 'before%'`)
	_, err = executions.PauseAll(t.Context(), w.pool, "ana", "prices look wrong")
	require.NoError(t, err)
	pgtest.Exec(t, w.pool, `update agent_automations set next_run_at = clock_timestamp() where name = 'during'`)
	const turn = "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE"
	pgtest.Exec(t, w.pool, `select * from raise_agent_event('E', 'k', '{}', 'e1', $1)`, turn)
	r, _ := w.process(t)
	w.until(t, "due 1, skipped 1")
	for range 3 {
		n, err := r.Dispatch(t.Context())
		require.Truef(t, n == 0 && err == nil, "started %d, %v", n, err)
	}
	if got := w.states(t); got != "due 1, skipped 1" || w.count() != 0 {
		t.Errorf("%s, %d calls", got, w.count())
	}
	text := pgtest.Value[string](t, w.pool, `
		select count(*) || ' ' || min(a.agent) || ' ' || min(a.input ->> 'automation') || ' ' || min(a.output #>> '{}') from agent_activity a
		  join agent_automation_runs r on r.trace_id = a.trace_id where a.skill_name = 'run_automation'
		    and a.status = 'skipped'`)
	assert.Truef(t, strings.HasPrefix(text, "1 support during autonomous work is paused since ") &&
		strings.HasSuffix(text, "by ana: prices look wrong"), "recorded: %s", text)
	pgtest.Equal(t, w.pool, "before0 false, during true", `select string_agg(name || ' ' || (next_run_at > clock_timestamp())::text, ', '
		order by name) from agent_automations where name in ('before0', 'during')`)
	_, err = executions.ResumeAll(t.Context(), w.pool, "ana", "")
	require.NoError(t, err)
	w.until(t, "skipped 1, success 1")
	// No execution waits for the runs caused by an admin's turn, so the next pause holds them back too.
	assert.Equal(t, "flow "+turn, pgtest.Value[string](t, w.pool, `select surface || ' ' || trace_id from agent_executions
		where flow = 'automation'`), "it ran as")
}
