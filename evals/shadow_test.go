package evals_test

import (
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// A poll of a shadow reads the executions of its time by an index, however many others exist.
func TestShadowPollUsesIndex(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, created_at)
		select lanekeeper.agent_uuid7(at), 'ch_' || lpad(n::text, 26, '0'), 'chat', 'chat', at
		  from generate_series(1, 5000) n, lateral (select now() - interval '3 days' - n * interval '1 minute' as at) x`)
	pgtest.Exec(t, pool, `analyze agent_executions`)
	now := time.Now()
	before := now.Add(-time.Minute)
	tx := pgtest.Begin(t, pool)
	_, sample, err := evals.DrawSample(t.Context(), tx, evals.SampleFilter{
		Agent: "sales", All: true, Since: 24 * time.Hour, Size: 500, Share: 0.5, After: &before, Until: &now,
	})
	require.NoError(t, err)
	read := pgtest.Value[int](t, tx, `
		select (seq_tup_read + coalesce(idx_tup_fetch, 0))::int from pg_stat_xact_user_tables
		 where relname = 'agent_executions'`)
	assert.Truef(t, sample.Size == 0 && read <= 100,
		"the poll read %d of 5000 older executions, and found %d", read, sample.Size)
}
