package runner_test

import (
	"context"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/runner"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// serve runs the loop of a server until the caller calls the returned function, or the test ends.
func (w *testRunner) serve(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		assert.NoError(t, w.runner.Serve(ctx))
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// A server plays background runs. It leaves a run that another server has claimed, and takes the run over after that
// claim expires. A server that stops releases its runs.
func TestServersPlayAndTakeOverRuns(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	blocked, reached := make(chan struct{}), make(chan struct{}, 100)
	w.script(func(_ string, results []string) modeltest.Reply {
		reached <- struct{}{}
		<-blocked
		if len(results) == 0 {
			return modeltest.ToolCall("check_order", `{"order":7}`)
		}
		return modeltest.Text("It is not due.")
	})
	d := ordersSuite()
	d.Cases = d.Cases[:1]
	stopped := w.start(t, d, runner.Options{Background: true})
	foreground := w.start(t, d, runner.Options{})
	stop := w.serve(t)
	<-reached
	stop()
	close(blocked)
	pgtest.Equal(t, w.pool, true, `select served_until < clock_timestamp() from agent_eval_runs where id = $1`, stopped.ID)
	pgtest.Exec(t, w.pool, `delete from agent_eval_runs where id = $1`, stopped.ID)
	own := w.start(t, d, runner.Options{Background: true})
	claimed := w.start(t, d, runner.Options{Background: true})
	pgtest.Exec(t, w.pool, `update agent_eval_runs set served_until = clock_timestamp() + interval '1 hour' where id = $1`,
		claimed.ID)
	w.serve(t)
	status := func(run evals.Run) string {
		return pgtest.Value[string](t, w.pool, `select status from agent_eval_runs where id = $1`, run.ID)
	}
	pgtest.EventuallyWithin(t, 30*time.Second, func() bool { return status(own) == evals.Passed }, "the run ends")
	assert.True(t, status(claimed) == evals.Running && status(foreground) == evals.Running,
		"a server played another server's run")
	pgtest.Exec(t, w.pool, `update agent_eval_runs set served_until = clock_timestamp() where id = $1`, claimed.ID)
	pgtest.EventuallyWithin(t, 30*time.Second, func() bool { return status(claimed) == evals.Passed },
		"another server resumes the run of a dead one")
	pgtest.Equal(t, w.pool, 0, `select count(*)::int from agent_eval_trials where run_id = $1 and verdict is not null`,
		foreground.ID)
}

func (w *testRunner) shadow(t *testing.T) evals.Run {
	t.Helper()
	run, err := w.runner.StartShadow(t.Context(), runner.Counterfactual{Model: "gpt-4.1", Margin: 0.05}, 1, time.Hour)
	require.NoError(t, err)
	return run
}

func (w *testRunner) awaitStatus(t *testing.T, id, want string) {
	t.Helper()
	pgtest.Until(t, w.pool, want, `select status from agent_eval_runs where id = $1`, id)
}

// A run with a permanent error ends undecided, and so does its control.
func TestShadowOfRemovedAgentEndsUndecided(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	run := w.shadow(t)
	_, err := agents.Remove(t.Context(), w.pool, nil)
	require.NoError(t, err)
	w.serve(t)
	w.awaitStatus(t, run.ID, evals.Undecided)
	w.awaitStatus(t, run.ControlID, evals.Undecided)
}

// A run with another error ends undecided after its deadline.
func TestFailingRunEndsAfterDeadline(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	run := w.start(t, ordersSuite(), runner.Options{Background: true})
	pgtest.Exec(t, w.pool, `update agent_eval_runs set subject = '[]' where id = $1`, run.ID)
	w.serve(t)
	pgtest.Until(t, w.pool, true, `select served_until > clock_timestamp() from agent_eval_runs where id = $1`, run.ID)
	pgtest.Equal(t, w.pool, evals.Running, `select status from agent_eval_runs where id = $1`, run.ID)
	pgtest.Exec(t, w.pool, `
		update agent_eval_runs set created_at = created_at - interval '2 days', served_until = created_at where id = $1`, run.ID)
	w.awaitStatus(t, run.ID, evals.Undecided)
}

// Retention keeps an unfinished run with the texts of its turns. A server ends an interrupted run, and plays no trial.
func TestServerEndsInterruptedRuns(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.script(func(string, []string) modeltest.Reply { return modeltest.Text("It is not due.") })
	w.record(t, "order 7?")
	p, err := w.runner.Plan(t.Context(), runner.Counterfactual{
		Agent: "sales", Model: "gpt-4.1", Since: time.Hour, Sample: 1, Trials: 1, Timeout: time.Hour,
	})
	require.NoError(t, err)
	run, err := w.runner.Store(t.Context(), p)
	require.NoError(t, err)
	suite, calls := w.start(t, ordersSuite(), runner.Options{}), len(w.model.Requests())
	pgtest.Exec(t, w.pool, `update agent_eval_runs set created_at = created_at - interval '100 days'`)
	young := w.start(t, ordersSuite(), runner.Options{})
	w.serve(t)
	for _, id := range []string{run.ID, run.ControlID, suite.ID} {
		w.awaitStatus(t, id, evals.Undecided)
	}
	assert.Equal(t, calls, len(w.model.Requests()))
	pgtest.Equal(t, w.pool, evals.Running, `select status from agent_eval_runs where id = $1`, young.ID)
}

// A process with an expired claim neither renews nor releases the claim of another process.
func TestServerKeepsForeignClaim(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	blocked, reached := make(chan struct{}), make(chan struct{}, 100)
	w.script(func(string, []string) modeltest.Reply {
		reached <- struct{}{}
		<-blocked
		return modeltest.Text("It is not due.")
	})
	defer close(blocked)
	run := w.start(t, ordersSuite(), runner.Options{Background: true})
	stop := w.serve(t)
	<-reached
	pgtest.Exec(t, w.pool, `update agent_eval_runs set served_until = clock_timestamp() + interval '1 hour' where id = $1`,
		run.ID)
	stop()
	pgtest.Equal(t, w.pool, true, `
		select served_until > clock_timestamp() + interval '50 minutes' from agent_eval_runs where id = $1`, run.ID)
}

// Shadows never use all slots, because they last long.
func TestShadowsLeaveSlotsForOtherRuns(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.script(func(_ string, results []string) modeltest.Reply {
		if len(results) == 0 {
			return modeltest.ToolCall("check_order", `{"order":7}`)
		}
		return modeltest.Text("It is not due.")
	})
	for range 4 {
		w.shadow(t)
	}
	d := ordersSuite()
	d.Cases = d.Cases[:1]
	run := w.start(t, d, runner.Options{Background: true})
	w.serve(t)
	w.awaitStatus(t, run.ID, evals.Passed)
	pgtest.Equal(t, w.pool, 2, `
		select count(*)::int from agent_eval_runs where kind = 'shadow' and served_until > clock_timestamp()`)
}

// A shadow that waits for a slot says so. If it is stopped, a server ends it all the same.
func TestStoppedShadowNeedsNoSlot(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	first, second, third := w.shadow(t), w.shadow(t), w.shadow(t)
	w.serve(t)
	status := func(run evals.Run) (status string) {
		list, err := evals.Shadows(t.Context(), w.pool, 3)
		require.NoError(t, err)
		for _, s := range list {
			if s.RunID == run.ID {
				status = s.Status
			}
		}
		return status
	}
	pgtest.Eventually(t, func() bool { return status(first) == evals.Running && status(second) == evals.Running },
		"a server plays two shadows")
	assert.Equal(t, "waiting for a server", status(third))
	require.NoError(t, evals.StopShadow(t.Context(), w.pool, third.ID))
	w.awaitStatus(t, third.ID, evals.Passed)
}

// After a poll without a new turn, a shadow waits 30 s, so an idle shadow costs little.
func TestPauseAfter(t *testing.T) {
	t.Parallel()
	now := time.Now()
	polled := evals.Shadow{SeenAt: now.Add(-time.Minute), VisibleUntil: now}
	for found, want := range map[int]time.Duration{0: 30 * time.Second, 1: 0} {
		got := runner.PauseAfter(found, polled)
		assert.Truef(t, got == want, "after %d turns it waits %s, want %s", found, got, want)
	}
	got := runner.PauseAfter(0, evals.Shadow{SeenAt: now, VisibleUntil: now})
	assert.Equal(t, 0, got, "the pause without a completed poll")
}

// The timeout of a run starts with its first trial, and again if a person resumes the run. A run played by servers has
// one deadline.
func TestRunTimeStartsWithFirstTrial(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.script(replyAsAgent)
	for name, test := range map[string]struct {
		change     string
		background bool
		want       string
	}{
		"waited":    {`created_at = now() - interval '1 day'`, false, evals.Passed},
		"continued": {`began_at = now() - interval '1 day'`, false, evals.Passed},
		"served":    {`began_at = now() - interval '1 day'`, true, evals.Undecided},
	} {
		d := evals.Definition{Name: name, Agent: "sales", Trials: 1, Cases: ordersSuite().Cases[:1]}
		run := w.start(t, d, runner.Options{Background: test.background})
		pgtest.Exec(t, w.pool, `update agent_eval_runs set `+test.change+` where id = $1`, run.ID)
		require.NoError(t, w.runner.Work(t.Context(), run, 1, func(evals.Trial) {}))
		assert.Equal(t, test.want, w.report(t, run).Status, name, "the run")
	}
}
