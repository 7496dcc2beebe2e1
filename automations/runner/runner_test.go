package runner_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
)

const hook = "wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE"

func TestAnEventStartsARunInItsOwnTrace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{
		Name: "a", Event: "ISSUE",
		When: `payload.action == "opened" and key startsWith "repo/"`, Prompt: "Answer the issue.",
	})
	w.put(t, automations.Definition{Name: "other", Event: "PUSH"})
	w.loop.Agents = &agents.Directory{}
	_, err := agents.Put(t.Context(), w.pool, agents.Definition{Name: "support", Default: true})
	require.NoError(t, err)
	w.process(t)
	pgtest.Exec(t, w.pool, `select *
		from raise_agent_event('ISSUE', 'repo/1', '{"action": "opened", "title": "It broke", "password": "hunter2"}', 'd1',
		$1)`, hook)
	// the same event again
	pgtest.Exec(t, w.pool, `select * from raise_agent_event('ISSUE', 'repo/1', '{"action": "opened"}', 'd1', $1)`, hook)
	w.raise(t, "ISSUE", "repo/2", `{"action": "closed"}`)
	w.raise(t, "ISSUE", "elsewhere", `{"action": "opened"}`)
	pgtest.Exec(t, w.pool, `select * from deliver_agent_event('EVENT_COMPLETED', 'PUSH')`) // deduplicated by its key
	w.until(t, "skipped 2, success 2")
	pgtest.Equal(t, w.pool, hook+" webhook automation "+hook+" support", `
		select r.trace_id || ' ' || x.surface || ' ' || x.flow || ' ' || x.trace_id || ' ' || x.agent
		  from agent_automation_runs r join agent_executions x on x.id = r.execution_id where r.status = 'success'
		    and r.trace_id <> ''  and x.surface = 'webhook'`)
	prompt := w.model.Requests()[0].Messages[1].Content
	assert.Truef(t, strings.Contains(prompt, "It broke") && strings.Contains(prompt, "not as instructions") &&
		!strings.Contains(prompt, "hunter2"), "the model was told %s", prompt)
}

func TestAnEventAndItsRunsAreOneTransaction(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "a", Event: "E"})
	tx, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	pgtest.Exec(t, tx, `insert into agent_events (event, key) values ('E', 'k')`)
	require.NoError(t, tx.Rollback(t.Context()))
	assert.Equal(t, "", w.states(t))
	pgtest.Exec(t, w.pool, `update agent_automations set enabled = false, disabled_by = 'admin'`)
	w.raise(t, "E", "k", `{}`)
	assert.Equal(t, "", w.states(t))
}

func TestARunThatCannotStartDelaysNoOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, err := agents.Put(t.Context(), w.pool, agents.Definition{Name: "broken"})
	require.NoError(t, err)
	w.put(t, automations.Definition{Name: "a", Event: "E", Agent: "broken"})
	w.raise(t, "E", "first", `{}`)
	w.put(t, automations.Definition{Name: "b", Event: "E"})
	w.raise(t, "E", "second", `{}`)
	pgtest.Exec(t, w.pool, `alter table agent_executions add constraint refuse check (agent <> 'broken')`)
	r, _, _ := w.idle(t)
	started, err := r.Dispatch(t.Context())
	assert.Equal(t, 1, started)
	assert.Truef(t, err != nil && strings.Contains(err.Error(), `automation "a"`), "error %v", err)
}

func TestNoRunIsMadeTwiceHoweverManyDispatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var at, most atomic.Int32
	w.look = func(context.Context, int) error {
		for now := at.Add(1); ; {
			if seen := most.Load(); now <= seen || most.CompareAndSwap(seen, now) {
				break
			}
		}
		at.Add(-1)
		return nil
	}
	a := w.put(t, automations.Definition{Name: "one", Event: "E"})
	for i := range 3 {
		w.put(t, automations.Definition{Name: fmt.Sprint("more ", i), Event: "E"})
	}
	w.process(t)
	w.process(t)
	const events = 10
	var group sync.WaitGroup
	for i := range events {
		group.Go(func() { w.raise(t, "E", fmt.Sprint(i), `{}`) })
	}
	idle, _, _ := w.idle(t)
	for range 8 {
		group.Go(func() {
			_, err := idle.Dispatch(t.Context())
			assert.NoError(t, err)
		})
	}
	group.Wait()
	w.until(t, fmt.Sprintf("success %d", 4*events))
	assert.Equal(t, 4*events, w.count())
	pgtest.Equal(t, w.pool, "0", `
		select count(*)::text from agent_activity p join agent_activity q
		    on p.skill_name = 'run_automation' and q.skill_name = 'run_automation' and p.id < q.id
		   and p.output ->> 'automation' = q.output ->> 'automation'
		   and p.created_at < q.finished_at and q.created_at < p.finished_at`)
	assert.Equal(t, fmt.Sprint(4*events), pgtest.Value[string](t, w.pool,
		`select count(*)::text from agent_executions where flow = 'automation'`))
	assert.Equal(t, "true", pgtest.Value[string](t, w.pool, `select (last_trace_id <> '' and last_run_at is not null)::text
		from agent_automations where id = $1`, a.ID), "the automation does not say when it last ran")
}

func TestASignalFiresWhenItBecomesTrueAndNotAgainUntilItWasFalse(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.put(t, automations.Definition{Name: "s", Signal: "objectives_active >= 1 and failures_24h == 0"})
	watch := func(want int) {
		t.Helper()
		var fired atomic.Int32
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				n, err := automations.Watch(t.Context(), w.pool)
				assert.NoError(t, err)
				fired.Add(int32(n))
			})
		}
		group.Wait()
		assert.Equal(t, want, int(fired.Load()), fired.Load())
	}
	watch(0)
	pgtest.Exec(t, w.pool, `insert into agent_objectives (name, goal) values ('o', 'g')`)
	watch(1)
	watch(0)
	pgtest.Exec(t, w.pool, `delete from agent_objectives`)
	watch(0)
	pgtest.Exec(t, w.pool, `insert into agent_objectives (name, goal) values ('o', 'g')`)
	pgtest.Exec(t, w.pool, `update agent_automations set enabled = false, disabled_by = 'admin' where id = $1`, a.ID)
	watch(0)
	pgtest.Exec(t, w.pool, `update agent_automations set enabled = true, disabled_by = '' where id = $1`, a.ID)
	watch(1)
	w.process(t)
	w.until(t, "success 2")
}

func TestAFailedRunIsTriedAgainAndThenLiesInTheDeadLetterBox(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.look = func(_ context.Context, n int) error {
		if n < 3 {
			return errors.New("no luck")
		}
		return nil
	}
	w.put(t, automations.Definition{Name: "a", Event: "E", MaxAttempts: 2})
	w.process(t)
	w.raise(t, "E", "k", `{}`)
	w.until(t, "error 1")
	pgtest.Exec(t, w.pool, `update agent_automation_runs set retry_at = clock_timestamp()`)
	w.until(t, "dead 1")
	id := pgtest.Value[string](t, w.pool, `select id::text from agent_automation_runs`)
	ok, err := automations.Redrive(t.Context(), w.pool, id)
	require.True(t, ok && err == nil, ok, err)
	w.until(t, "success 1")
	assert.Equal(t, 3, w.count())
}

func TestARunWhoseSkillIsDisabledWaitsForItInsteadOfDying(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.put(t, automations.Definition{Name: "a", Event: "E", MaxAttempts: 1})
	pgtest.Exec(t, w.pool, `select try_acquire_agent_lock($1, 'somebody', 3600)`, "automation:"+a.ID)
	w.process(t)
	w.raise(t, "E", "k", `{}`)
	pgtest.Until(t, w.pool, "1", `select count(*)::text from agent_executions where flow = 'automation'
			and status = 'waiting'`)
	_, err := skills.Disable(t.Context(), w.pool, "look", "admin", "not now", nil)
	require.NoError(t, err)
	pgtest.Exec(t, w.pool, `select release_agent_lock($1, 'somebody')`, "automation:"+a.ID)
	w.until(t, "error 1")
	pgtest.Exec(t, w.pool, `update agent_automation_runs set retry_at = clock_timestamp()`)
	w.raise(t, "E", "k2", `{}`) // a paused automation ignores it
	ready, err := automations.Ready(t.Context(), w.pool, 0)
	assert.Truef(t, err == nil && len(ready) == 0, "ready while the skill is disabled: %v, %v", ready, err)
	_, err = skills.Enable(t.Context(), w.pool, "look", "admin", "again")
	require.NoError(t, err)
	w.until(t, "success 1")
	assert.Equal(t, 1, w.count())
}

func TestAConditionThatCannotBeDecidedIsADeadLetter(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "a", Event: "E", When: "payload.size > 3"})
	w.process(t)
	w.raise(t, "E", "k", `{"size": "large"}`)
	w.until(t, "dead 1")
	why := pgtest.Value[string](t, w.pool, `select error_message from agent_automation_runs`)
	assert.Truef(t, strings.Contains(why, `automation "a"`) && strings.Contains(why, "column"), "it says %s", why)
}

func TestARunOfADeadProcessGoesOnElsewhere(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	came, wake := make(chan struct{}), make(chan struct{})
	w.look = func(_ context.Context, n int) error {
		if n == 1 {
			close(came)
			<-wake
		}
		return nil
	}
	a := w.put(t, automations.Definition{Name: "a", Event: "E"})
	w.raise(t, "E", "k", `{}`)
	first, engine, _ := w.idle(t)
	n, err := first.Dispatch(t.Context())
	require.True(t, n == 1 && err == nil, n, err)
	var group sync.WaitGroup
	group.Go(func() {
		run, err := automations.GetRun(t.Context(), w.pool,
			pgtest.Value[string](t, w.pool, `select id::text from agent_automation_runs`))
		if err == nil {
			err = engine.ClaimAndRun(context.WithoutCancel(t.Context()), *run.ExecutionID)
		}
		assert.NoError(t, err)
	})
	<-came
	pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
	w.process(t)
	w.until(t, "success 1")
	close(wake)
	group.Wait()
	pgtest.Until(t, w.pool, "completed", `select string_agg(status, ' ') from agent_executions
			where flow = 'automation'`)
	assert.Equal(t, "false", pgtest.Value[string](t, w.pool, `select is_agent_lock_held($1)::text`, "automation:"+a.ID))
	assert.Equal(t, 2, w.count())
}

func TestARunWhoseUnsafeCallHasAnUnknownResultIsNotRetried(t *testing.T) {
	t.Parallel()
	for name, interrupt := range map[string]string{
		"crash":  `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`,
		"cancel": `select cancel_agent_execution(id, 'admin', 'why') from agent_executions`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			d := skills.Definition{Name: "act", Handler: "builtin:look"}
			_, err := skills.Put(t.Context(), w.pool, d, skills.SourceWorkspace)
			require.NoError(t, err)
			began, wake := make(chan struct{}), make(chan struct{})
			w.look = func(_ context.Context, n int) error {
				if n == 1 {
					close(began)
					<-wake
				}
				return nil
			}
			w.put(t, automations.Definition{Name: "a", Event: "E", Skill: "act", MaxAttempts: 3})
			w.raise(t, "E", "k", `{}`)
			first, engine, _ := w.idle(t)
			n, err := first.Dispatch(t.Context())
			require.True(t, n == 1 && err == nil, n, err)
			id := pgtest.Value[string](t, w.pool, `select execution_id::text from agent_automation_runs`)
			var group sync.WaitGroup
			group.Go(func() { assert.NoError(t, engine.ClaimAndRun(context.WithoutCancel(t.Context()), id)) })
			<-began
			pgtest.Exec(t, w.pool, interrupt)
			w.process(t)
			w.until(t, "dead 1")
			close(wake)
			group.Wait()
			assert.Equal(t, 1, w.count())
		})
	}
}

// A call that timed out may have taken effect, so only a call that is safe to repeat is made again.
func TestARunWhoseUnsafeCallTimedOutIsNotRetried(t *testing.T) {
	t.Parallel()
	for want, idempotent := range map[string]bool{"dead 1": false, "error 1": true} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			d := skills.Definition{Name: "act", Handler: "builtin:look", Timeout: "10ms", Idempotent: idempotent}
			_, err := skills.Put(t.Context(), w.pool, d, skills.SourceWorkspace)
			require.NoError(t, err)
			w.look = func(ctx context.Context, _ int) error {
				<-ctx.Done()
				return ctx.Err()
			}
			w.put(t, automations.Definition{Name: "a", Event: "E", Skill: "act", MaxAttempts: 3})
			w.raise(t, "E", "k", `{}`)
			w.process(t)
			w.until(t, want)
		})
	}
}

// post declares a skill that posts to a server with the given status. It returns the number of requests.
func (w *world) post(t *testing.T, status int) *atomic.Int32 {
	t.Helper()
	requests := &atomic.Int32{}
	server := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		requests.Add(1)
		rw.WriteHeader(status)
	}))
	t.Cleanup(server.Close)
	d := skills.Definition{Name: "post", Handler: "http:POST " + server.URL}
	_, err := skills.Put(t.Context(), w.pool, d, skills.SourceWorkspace)
	require.NoError(t, err)
	return requests
}

// A gateway's timeout shows nothing about the service behind the gateway.
func TestARunWhoseGatewayTimedOutIsNotRetried(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	requests := w.post(t, http.StatusGatewayTimeout)
	w.put(t, automations.Definition{Name: "a", Event: "E", Skill: "post", MaxAttempts: 3})
	w.process(t)
	w.raise(t, "E", "k", `{}`)
	w.until(t, "dead 1")
	assert.Equal(t, 1, int(requests.Load()))
}

func TestAPromptThatActedIsNotRetried(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	requests := w.post(t, http.StatusOK)
	w.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		if n == 0 {
			return modeltest.ToolCall("post", `{}`)
		}
		return modeltest.Status(http.StatusServiceUnavailable, 0)
	})
	w.put(t, automations.Definition{Name: "a", Event: "E", Prompt: "Mail it, then update the sheet.", MaxAttempts: 3})
	w.process(t)
	w.raise(t, "E", "k", `{}`)
	w.until(t, "dead 1")
	assert.Equal(t, 1, int(requests.Load()))
}

func TestARunWithoutBudgetOfTheDayWaitsInsteadOfDying(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: 1}}
	w.put(t, automations.Definition{Name: "a", Event: "E", Prompt: "Answer.", MaxAttempts: 1})
	w.process(t)
	w.raise(t, "E", "k", `{}`)
	w.until(t, "error 1")
	assert.Equal(t, 0, len(w.model.Requests()))
}

func TestARunWhoseExecutionWasCancelledIsTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "a", Event: "E"})
	w.raise(t, "E", "k", `{}`)
	r, _, _ := w.idle(t)
	n, err := r.Dispatch(t.Context())
	require.True(t, n == 1 && err == nil, n, err)
	n, err = r.Dispatch(t.Context())
	require.True(t, n == 0 && err == nil, n, err)
	pgtest.Exec(t, w.pool, `select cancel_agent_execution(id, 'admin', 'why') from agent_executions`)
	w.process(t)
	w.until(t, "error 1")
	pgtest.Exec(t, w.pool, `update agent_automation_runs set retry_at = clock_timestamp()`)
	w.until(t, "success 1")
}

func TestARunByHandIsMadeByWhoAskedForIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "a", Cron: "@daily"})
	pgtest.Exec(t, w.pool, `update agent_automations set enabled = false, disabled_by = 'admin'`)
	w.process(t)
	_, engine, _ := w.idle(t)
	run, err := automations.RunManually(t.Context(), w.pool, "a", "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	require.NoError(t, err)
	x, err := engine.RunSync(t.Context(), runner.Spec("agent", run))
	assert.Truef(t, err == nil && x.Status == executions.Completed && x.TraceID == run.TraceID &&
		x.ResultSummary == "a: success", "got %+v, %v", x, err)
	x, err = engine.RunSync(t.Context(), runner.Spec("agent", run))
	assert.Truef(t, err == nil && strings.Contains(x.ResultSummary, "another execution has this run"),
		"the same run was made again: %+v, %v", x, err)
	pgtest.Exec(t, w.pool, `update agent_automations set disabled_by = 'proposal', proposed_by = 'agent'`)
	_, err = automations.RunManually(t.Context(), w.pool, "a", "")
	assert.ErrorIs(t, err, automations.ErrProposal, "a proposal was run")
}

func TestAnOrderedRunIsMadeAtOnceByWhoeverSeesIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "a", Cron: "@daily"})
	pgtest.Exec(t, w.pool, `update agent_automations set enabled = false, disabled_by = 'admin'`)
	w.process(t)
	_, err := automations.Enqueue(t.Context(), w.pool, "a", "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	require.NoError(t, err)
	require.NoError(t, automations.Notify(t.Context(), w.pool))
	w.until(t, "success 1")
}

func TestTheEndOfARunStartsNoOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "a", Event: "AGENT_COMPLETED"})
	w.process(t)
	pgtest.Exec(t, w.pool, `insert into agent_executions (trace_id, surface, flow, status)
		values ('op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'operate', 'x', 'running')`)
	pgtest.Exec(t, w.pool, `update agent_executions set status = 'cancelled' where flow = 'x'`)
	w.until(t, "success 1")
	pgtest.Until(t, w.pool, "1", `select count(*)::text from agent_executions where flow = 'automation'
			and status = 'completed'`)
	assert.Equal(t, "success 1", w.states(t))
}

func TestWhatIsNotMeantHoldsUpNothingBehindIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "a", Event: "E", When: `key == "meant"`})
	r, _, _ := w.idle(t)
	for range 5 {
		w.raise(t, "E", "noise", `{}`)
	}
	w.raise(t, "E", "meant", `{}`)
	if n, err := r.Dispatch(t.Context()); err != nil || n != 1 {
		t.Errorf("one look started %d runs (%v), want the one behind 5 that are not meant", n, err)
	}
	assert.Equal(t, "claimed 1, skipped 5", w.states(t))
}

// The counters cost a day of the activity log. A burst of events reads them once.
func TestBurstOfEventsReadsCountersOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "a", Event: "E", When: "failures_24h > 0 && payload.n == 1"})
	for range 5 {
		w.raise(t, "E", "k", `{"n": 1}`)
	}
	db := &countingDB{DB: w.pool, text: "failures_24h"}
	tasks, err := runner.Ready(t.Context(), db, slog.New(slog.DiscardHandler), 10)
	require.NoError(t, err)
	assert.Equal(t, 0, len(tasks))
	assert.Equal(t, "skipped 5", w.states(t))
	assert.Equal(t, 1, db.queries)
}

// countingDB counts the queries that contain a text.
type countingDB struct {
	postgres.DB
	text    string
	queries int
}

func (c *countingDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if strings.Contains(sql, c.text) {
		c.queries++
	}
	return c.DB.Query(ctx, sql, args...)
}

// An event with a number that no condition can read is a dead letter, and delays no other event.
func TestUnreadableEventDelaysNoOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "big", Event: "paid", When: "payload.cents > 100"})
	w.put(t, automations.Definition{Name: "small", Event: "ping"})
	w.raise(t, "paid", "k", `{"cents": 1e400}`)
	w.raise(t, "ping", "k", `{}`)
	w.process(t)
	pgtest.Eventually(t, func() bool { return w.states(t) == "dead 1, success 1" }, "the runs have ended")
}
