package retention_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/retention"
)

// effects selects the rows whose causes why() reads.
const effects = `
	select 'execution ' || id as effect from agent_executions
	union all select 'event ' || id from agent_events
	union all select 'run ' || id from agent_automation_runs
	union all select 'outgoing ' || id from agent_webhook_outbox`

// seedCauses records a cause for every row that can have one, and a lane and a lost claim for every execution.
func seedCauses(t *testing.T, db postgres.DB) {
	t.Helper()
	pgtest.Exec(t, db, `delete from agent_links`)
	pgtest.Exec(t, db, `insert into agent_links (cause, kind, effect) select 'trace of a test', 'raised', e.effect from (`+
		effects+`) e`)
	pgtest.Exec(t, db, `
		insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended)
		select 'lane ' || id, id, 1, created_at, created_at, 'released' from agent_executions`)
	pgtest.Exec(t, db, `insert into agent_claims_lost (execution_id, claim, how) select id, 1, 'lost'
		from agent_executions`)
}

// checkCauses checks that causes, lane holds and lost claims exist for exactly the remaining rows.
func checkCauses(t *testing.T, db postgres.DB) {
	t.Helper()
	for what, sql := range map[string][2]string{
		"causes": {effects + ` order by 1`, `select effect from agent_links where cause = 'trace of a test' order by 1`},
		"lanes held": {
			`select id::text from agent_executions order by 1`,
			`select execution_id::text from agent_lane_holds where ended = 'released' order by 1`,
		},
		"claims lost": {
			`select id::text from agent_executions order by 1`,
			`select execution_id::text from agent_claims_lost order by 1`,
		},
	} {
		assert.Equal(t, "", cmp.Diff(pgtest.Column[string](t, db, sql[0]), pgtest.Column[string](t, db, sql[1])), what)
	}
}

// An old run is deleted with its trials and its sample. Open, recent and declared rows stay. A control stays as long as
// the run compared with it.
func TestEvalRunsAreDeletedWithTheirSamples(t *testing.T) {
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
	assert.Truef(t, len(done) == 1 && done[0].Removed == 2, "the pass returned %+v, want 2 runs removed", done)
	pgtest.Equal(t, pool, "counterfactual-new declared", `select string_agg(name, ' ' order by name) from agent_evals`)
	pgtest.Equal(t, pool, 4, `select count(*)::int from agent_eval_trials`)
	pgtest.Equal(t, pool, "counterfactual-new counterfactual-new declared declared",
		`select string_agg(suite, ' ' order by suite) from agent_eval_runs`)
}

// By default the policy of labels keeps them forever.
func TestEvalLabelsHaveTheirOwnPolicy(t *testing.T) {
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
		_, err := retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"eval_labels"}, Restart: true})
		require.NoError(t, err)
		pgtest.Equal(t, pool, map[string]int{"": 3, "60d": 2}[keep], `select count(*)::int from agent_eval_labels`)
	}
}

func TestPromptPartIsDeletedWithLastPrompt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_prompt_parts (digest, body, used_on)
		select sha256(p.body::bytea), p.body, (now() at time zone 'UTC')::date - p.days
		  from (values ('shared', 10), ('old', 40), ('unused', 20), ('new', 0)) p (body, days)`)
	pgtest.Exec(t, pool, `
		insert into agent_prompts (activity_id, messages, created_at)
		select lanekeeper.agent_uuid7(now() - make_interval(days => p.days)),
		  array(select sha256(b::bytea) from unnest(p.parts) b), now() - make_interval(days => p.days)
		  from (values (40, '{shared,old}'::text[]), (10, '{shared}'), (0, '{new}')) p (days, parts)`)
	done, err := retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"prompts"}})
	assert.Truef(t, err == nil && len(done) == 1 && done[0].Removed == 3,
		"the pass returned %+v, %v; want 1 prompt and 2 parts", done, err)
	left := pgtest.Value[[]string](t, pool, `select array_agg(body order by body) from agent_prompt_parts`)
	assert.NoDiff(t, []string{"new", "shared"}, left)
	assert.Equal(t, 2, pgtest.Value[int](t, pool, `select count(*) from agent_prompts`))
	_, err = retention.Set(t.Context(), pool, map[string]string{"activity": "7d"}, "admin", "")
	require.NoError(t, err)
	_, err = retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"prompts"}, Restart: true})
	require.NoError(t, err)
	left = pgtest.Value[[]string](t, pool, `select array_agg(body) from agent_prompt_parts`)
	assert.Truef(t, slices.Equal(left, []string{"new"}),
		"parts %v are left, but prompts are kept no longer than their model calls", left)
}

func TestPromptsKeptForeverGoWithActivity(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := retention.Set(t.Context(), pool, map[string]string{"prompts": "forever", "activity": "30d"}, "admin", "")
	require.NoError(t, err)
	pgtest.Exec(t, pool, `
		insert into agent_prompts (activity_id, messages, created_at)
		select lanekeeper.agent_uuid7(now() - make_interval(days => days)), '{}', now() - make_interval(days => days)
		  from unnest(array[40, 20]) days`)
	_, err = retention.Run(t.Context(), pool, retention.Options{})
	require.NoError(t, err)
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_prompts`))
	_, err = pool.Exec(t.Context(), `select set_agent_retention('{"activity": null}', 'admin')`)
	assert.Truef(t, postgres.IsCode(err, "22023"), "a missing value: %v", err)
	_, err = retention.Set(t.Context(), pool, map[string]string{"activity": "forever"}, "admin", "")
	require.NoError(t, err)
	_, err = retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"prompts"}, Restart: true})
	require.NoError(t, err)
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_prompts`))
}

type spend struct {
	Skill         string
	Calls, Tokens int64
	CostUSD       float64
}

// TestSpendOutlivesActivity checks that the spend outlives the activity log. Some rows have a usage or a cost that is
// not a number.
func TestSpendOutlivesActivity(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	createPartitions(t, pool)
	pgtest.Exec(t, pool, `
		insert into agent_activity (id, trace_id, kind, skill_name, token_usage, cost_usd, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_x', 'model', 'model', usage::jsonb, cost, at
		  from (select clock_timestamp() - interval '150 days' as at) x,
		       (values ('{"total_tokens": 7}', 0.5), ('{"total_tokens": "many"}', 'NaN'), ('{"total_tokens": {}}', 0.25),
		         ('[]', 0)) u (usage, cost)`)
	want := []spend{{"", 4, 7, 0.75}} // not charged to a skill
	sums := `select skill, sum(calls)::bigint, sum(tokens)::bigint, sum(cost_usd)::float8 from agent_spend group by 1`
	for _, when := range []string{"before the count", "after the count", "after the pass"} {
		assert.Equal(t, "", cmp.Diff(want, pgtest.Rows[spend](t, pool, sums)), when)
		switch when {
		case "before the count":
			pgtest.Exec(t, pool, `update agent_activity_counted
				set counted_upto = lanekeeper.agent_uuid7_floor(clock_timestamp())`)
			_, err := activity.Count(t.Context(), pool)
			require.NoError(t, err)
		case "after the count":
			pgtest.Exec(t, pool, `update agent_retention set keep = '90 days' where kind = 'activity'`)
			done := runPass(t, pool, time.Minute)
			assert.Truef(t, len(done.Partitions) > 0, "%+v", done)
		}
	}
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_activity`))
}

func TestMain(m *testing.M) { pgtest.Main(leaks.Tests{M: m}) }

// A pass reports expired activity that it kept because nothing has counted it.
func TestUncountedActivityIsReported(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := retention.Set(t.Context(), pool, map[string]string{"activity": "7d"}, "admin", "")
	require.NoError(t, err)
	pgtest.Exec(t, pool, `
		insert into agent_activity (id, trace_id, skill_name, created_at)
		select lanekeeper.agent_uuid7(at), 'tr', 's', at from (select clock_timestamp() - interval '20 days' as at) a`)
	later := func() string {
		done, err := retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"activity"}, Restart: true})
		require.NoError(t, err)
		require.Equal(t, 1, len(done), done)
		return done[0].Later
	}
	for _, counted := range []string{
		`update agent_activity_counted set counted_upto = lanekeeper.agent_uuid7_floor(clock_timestamp())`,
		`delete from agent_activity_uncounted`,
	} {
		assert.Contains(t, later(), "not counted yet")
		pgtest.Exec(t, pool, counted)
	}
	assert.Equal(t, "", later())
	pgtest.Equal(t, pool, 0, `select count(*) from agent_activity where trace_id = 'tr'`)
}
