package runner_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

const patience = 90 * time.Second

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// world is a database, a model, and the skill look, which runs a function of the test.
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
	quiet := slog.New(slog.DiscardHandler)
	client, err := models.New(models.Config{
		BaseURL: w.model.URL(), Model: "gpt-4o-mini", Logger: quiet,
		Retry: models.Retry{Attempts: 2, Base: time.Millisecond, MaxWait: time.Second},
	})
	require.NoError(t, err)
	registry, err := skills.New(skills.Options{Builtins: map[string]skills.Builtin{"look": w.called}, Pool: w.pool})
	require.NoError(t, err)
	w.loop = &reason.Loop{Pool: w.pool, Model: client, Skills: registry, Logger: quiet}
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

// process dispatches and executes until the test ends.
func (w *world) process(t *testing.T) (*runner.Runner, *executions.Engine) {
	t.Helper()
	r, e, keeper := w.idle(t)
	listener := postgres.NewListener(postgres.Dialer(w.pool), r.Logger)
	r.Listener = listener
	enginetest.Run(t, e.Run, r.Run, keeper.Run, listener.Run)
	return r, e
}

// idle is a process that does nothing by itself.
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
	_, err := automations.Put(t.Context(), w.pool, d, automations.SourceWorkspace)
	require.NoError(t, err)
	a, err := automations.Get(t.Context(), w.pool, d.Name)
	require.NoError(t, err)
	return a
}

func (w *world) raise(t *testing.T, event, key, data string) {
	t.Helper()
	pgtest.Exec(t, w.pool, `select * from raise_agent_event($1, $2, $3, null, '')`, event, key, data)
}

// states is the runs' states with their numbers.
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
	pgtest.Eventually(t, patience, func() bool { got = w.states(t); return got == want },
		fmt.Sprintf("runs become %s", want))
}
