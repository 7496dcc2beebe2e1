package retention_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/retention"
)

// An old run goes with its trials and its sample. What is open, recent or declared stays, and a control as long as the
// run that is compared with it.
func TestOldRunsOfEvalsGoWithTheirSamples(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_evals (name, version, digest, definition, source, current) values
		  ('declared', 1, 'd', '{}', 'workspace', true), ('counterfactual-old', 1, 'd', '{}', 'counterfactual', false),
		  ('counterfactual-new', 1, 'd', '{}', 'counterfactual', false);
		insert into agent_eval_runs (id, suite, version, agent, agent_version, model, trials, status, finished_at, control_id)
		select lanekeeper.agent_uuid7(now() - interval '100 days' + n * interval '1 ms'), suite, 1, 'a', 1, 'm', 1, status, finished_at, null
		  from (values (1, 'declared', 'passed', now() - interval '99 days'), (2, 'declared', 'running', null),
		               (3, 'declared', 'passed', now() - interval '1 day'), (4, 'counterfactual-old', 'failed', now() - interval '99 days'),
		               (5, 'counterfactual-new', 'passed', now() - interval '99 days'),
		               (6, 'counterfactual-new', 'passed', now() - interval '1 day')) r (n, suite, status, finished_at);
		update agent_eval_runs r set control_id = c.id from agent_eval_runs c
		 where r.suite = 'counterfactual-new' and c.suite = r.suite and c.id < r.id;
		insert into agent_eval_trials (run_id, case_name, trial, position) select id, 'c', 1, 1 from agent_eval_runs`)
	done, err := retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"evals"}})
	require.NoError(t, err)
	assert.Truef(t, len(done) == 1 && done[0].Removed == 2, "the pass did %+v, want 2 runs removed", done)
	pgtest.Equal(t, pool, "counterfactual-new declared", `select string_agg(name, ' ' order by name) from agent_evals`)
	pgtest.Equal(t, pool, 4, `select count(*)::int from agent_eval_trials`)
	pgtest.Equal(t, pool, "counterfactual-new counterfactual-new declared declared",
		`select string_agg(suite, ' ' order by suite) from agent_eval_runs`)
}

// Labels go by their own policy, which keeps them for ever at first.
func TestOldLabelsGoByTheirPolicy(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_eval_labels (run_id, case_name, trial, principal, suite, answer, answer_digest, good, note, created_at)
		select gen_random_uuid(), 'c', 1, 'ana', 's', 'a', 'd', true, '', now() - n * interval '40 days'
		  from generate_series(0, 2) n`)
	for _, keep := range []string{"", "60d"} {
		if keep != "" {
			_, err := retention.Set(t.Context(), pool, map[string]string{"eval_labels": keep}, "admin", "")
			require.NoError(t, err)
		}
		_, err := retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"eval_labels"}, Anew: true})
		require.NoError(t, err)
		pgtest.Equal(t, pool, map[string]int{"": 3, "60d": 2}[keep], `select count(*)::int from agent_eval_labels`)
	}
}
