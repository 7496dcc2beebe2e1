package evals_test

import (
	"fmt"
	"testing"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A run with the status running and without a live process counts as interrupted.
func TestRunWithoutProcessIsInterrupted(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	insert := func(background bool) string {
		return pgtest.Value[string](t, pool, `
			with run as (insert into agent_eval_runs (suite, version, agent, agent_version, model, trials, created_at, served_until)
			  values ('returns', 1, 'sales', 1, 'm', 1, now() - interval '1 hour', case when `+fmt.Sprint(background)+` then now() end)
			  returning id),
			trials as (insert into agent_eval_trials (run_id, case_name, trial, position) select id, 'late', 1, 1 from run)
			select id::text from run`)
	}
	abandoned, served := insert(false), insert(true)
	expectStatus := func(id, want string) {
		t.Helper()
		run, err := evals.GetRun(t.Context(), pool, id)
		require.NoError(t, err)
		assert.Equal(t, want, run.Status)
		assert.Equal(t, want, evals.ReportOf(run, nil).State())
	}
	expectStatus(abandoned, evals.Interrupted)
	expectStatus(served, evals.Running)
	pgtest.Exec(t, pool, `
		with w as (insert into agent_workers (id, name, kind, expires_at)
		  values ('018f0000-0000-7000-8000-000000000001', 'w', 'process', now() + interval '1 minute') returning id)
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim, input)
		select 'ev_00000000000000000000000001', 'eval', 'eval', 'running', id, 1, jsonb_build_object('run', '`+abandoned+`') from w`)
	expectStatus(abandoned, evals.Running)
	pgtest.Exec(t, pool, `update agent_workers set expires_at = now() - interval '1 second'`)
	expectStatus(abandoned, evals.Interrupted)
	pgtest.Exec(t, pool, `update agent_eval_trials set verdict = 'pass', finished_at = now() where run_id::text = '`+abandoned+`'`)
	expectStatus(abandoned, evals.Running) // between two trials
	pgtest.Exec(t, pool, `update agent_eval_trials set finished_at = now() - interval '1 hour'`)
	expectStatus(abandoned, evals.Interrupted)
	pgtest.Exec(t, pool, `update agent_eval_runs set kind = 'shadow'`) // another run is its control
	expectStatus(abandoned, evals.Running)
}

// A list and a report of a run of recorded turns agree.
func TestRecordedRunStateIsItsComparison(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_evals (name, version, digest, definition)
		values ('shadow-1', 1, 'x', '{"name": "shadow-1", "sample": {"size": 1, "turns": {"a": {}}}, "gate": {"margin": 0.05}}');
		with control as (insert into agent_eval_runs (kind, suite, version, agent, agent_version, model, trials, status, finished_at)
		  values ('shadow', 'shadow-1', 1, 'sales', 1, 'recorded', 1, 'failed', now()) returning id),
		run as (insert into agent_eval_runs (kind, control_id, suite, version, agent, agent_version, model, trials, status, finished_at)
		  select 'shadow', id, 'shadow-1', 1, 'sales', 1, 'm', 1, 'passed', now() from control returning id),
		trials as (insert into agent_eval_trials (run_id, case_name, trial, position, verdict)
		  select id, 'a', 1, 1, 'diverged' from control union all select id, 'a', 1, 1, 'pass' from run)
		insert into agent_eval_shadows (run_id, share, until) select id, 0.1, now() from run`)
	shadows, err := evals.Shadows(t.Context(), pool, 10)
	require.NoError(t, err)
	run, err := evals.GetRun(t.Context(), pool, shadows[0].RunID)
	require.NoError(t, err)
	report, err := evals.NewReport(t.Context(), pool, run)
	require.NoError(t, err)
	assert.Equal(t, "passed", run.Status)
	assert.Equal(t, string(stats.Undecided), report.State())
	assert.Equal(t, report.State(), shadows[0].Status)
}
