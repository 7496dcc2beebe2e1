package runner_test

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestAnAutomationStartsAFlow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.put(t, automations.Definition{
		Name: "hire", Event: "hired", Flow: "onboarding",
		Arguments: map[string]any{"tone": "warm"},
	})
	assert.Equal(t, "onboarding", a.Flow, a)
	assert.Equal(t, "", a.SkillName, a)
	// The end of the started flow is an event, too, and must not start another run.
	w.put(t, automations.Definition{Name: "again", Event: "AGENT_COMPLETED", Flow: "onboarding"})
	_, e := w.process(t)
	require.NoError(t, e.Register("onboarding", func(_ context.Context, in json.RawMessage) (executions.Result, error) {
		return executions.Result{Summary: string(in)}, nil
	}))
	w.raise(t, "hired", "c1", `{"name": "Ana"}`)
	w.until(t, "success 1")
	pgtest.Eventually(t, patience, func() bool {
		return pgtest.Value[string](t, w.pool, `select count(*)::text from agent_executions where flow = 'onboarding'
			and status = 'completed'`) == "1"
	}, "the flow ends")
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
	pgtest.Eventually(t, patience, func() bool {
		return pgtest.Value[string](t, w.pool, `select (status = 'completed')::text from agent_executions
			where id = (select execution_id from agent_automation_runs)`) == "true"
	}, "the run's execution ends")
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
	pgtest.Eventually(t, patience, func() bool {
		pgtest.Exec(t, w.pool, `update agent_automation_runs set retry_at = clock_timestamp() where status = 'error'`)
		return w.states(t) == "success 1"
	}, "the second attempt succeeds")
	assert.Equal(t, "1", pgtest.Value[string](t, w.pool,
		`select count(*)::text from agent_executions where flow = 'external:hire'`))
	assert.True(t, pgtest.Value[string](t, w.pool,
		`select count(*)::text from agent_executions where flow = 'automation'`) != "1", "there was one attempt")
}
