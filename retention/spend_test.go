package retention_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

type spend struct {
	Skill         string
	Calls, Tokens int64
	CostUSD       float64
}

// TestSpendStaysWhenTheLogGoes, and is not broken by a usage or a cost that is no number.
func TestSpendStaysWhenTheLogGoes(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	partitions(t, pool)
	pgtest.Exec(t, pool, `
		insert into agent_activity (id, trace_id, kind, skill_name, token_usage, cost_usd, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_x', 'model', 'model', usage::jsonb, cost, at
		  from (select clock_timestamp() - interval '150 days' as at) x,
		       (values ('{"total_tokens": 7}', 0.5), ('{"total_tokens": "many"}', 'NaN'), ('{"total_tokens": {}}', 0.25),
		         ('[]', 0)) u (usage, cost)`)
	want := []spend{{"", 4, 7, 0.75}} // charged to no skill
	sums := `select skill, sum(calls)::bigint, sum(tokens)::bigint, sum(cost_usd)::float8 from agent_spend group by 1`
	for _, when := range []string{"before they are counted", "after", "after the log has gone"} {
		assert.Equal(t, "", cmp.Diff(want, pgtest.Rows[spend](t, pool, sums)), when)
		switch when {
		case "before they are counted":
			pgtest.Exec(t, pool, `update agent_activity_counted
				set counted_upto = lanekeeper.agent_uuid7_floor(clock_timestamp())`)
			_, err := activity.Count(t.Context(), pool)
			require.NoError(t, err)
		case "after":
			pgtest.Exec(t, pool, `update agent_retention set keep = '90 days' where kind = 'activity'`)
			done := pass(t, pool, time.Minute)
			assert.Truef(t, len(done.Partitions) > 0, "%+v", done)
		}
	}
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_activity`))
}
