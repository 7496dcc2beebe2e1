package executions_test

import (
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Every execution counts once, by the hour of its end, also if it ended after that hour was counted.
func TestCountCountsEachExecutionOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pass := func(limit int, lag time.Duration) {
		t.Helper()
		for range 20 {
			_, more, err := executions.CountPass(t.Context(), pool, limit, lag)
			require.NoError(t, err)
			if !more {
				return
			}
		}
		t.Fatal("the count does not end")
	}
	pgtest.Exec(t, pool, `
		set session_replication_role = replica;
		insert into agent_executions (id, trace_id, surface, agent, flow, status, wait_number, created_at, started_at, completed_at)
		select lanekeeper.agent_uuid7(at), 'fl_' || n, 'flow', 'sales', 'import',
		       case when n % 5 = 0 then 'failed' when n % 5 = 1 then 'waiting' else 'completed' end, (n % 5 = 2)::int, at,
		       at + interval '100 ms', case when n % 5 <> 1 then at + interval '2 seconds' end
		  from (select n, date_trunc('day', now()) - interval '40 hours' + n * interval '1 second' as at
		          from generate_series(1, 50) n) x; -- in the morning, so no day ends meanwhile
		insert into agent_checkpoints (execution_id, step, claim, waited_for, waited_since, created_at)
		select id, 'lane', 1, 'lane', created_at, created_at + interval '1 second' from agent_executions where wait_number = 1;
		set session_replication_role = origin`)
	pass(7, time.Millisecond)
	pass(7, time.Millisecond)
	const sums = `select concat_ws(' ', sum(completed), sum(failed), sum(cancelled), count(*)) from agent_execution_counts where span = $1`
	for _, span := range []string{"hour", "day"} {
		pgtest.Equal(t, pool, "30 10 0 1", sums, span)
	}
	pgtest.Equal(t, pool, 10, `select count(*) from agent_executions_uncounted`)
	pgtest.Exec(t, pool, `
		set session_replication_role = replica;
		update agent_executions set status = 'cancelled', completed_at = created_at + interval '2 hours' where status = 'waiting';
		set session_replication_role = origin`)
	pass(7, time.Millisecond)
	pass(7, time.Millisecond)
	pgtest.Equal(t, pool, "30 10 10 1", sums, "day")
	pgtest.Equal(t, pool, 0, `select count(*) from agent_executions_uncounted`)
	const measured = `select coalesce(string_agg(concat_ws(' ', measure, bucket, executions), ', ' order by measure, bucket), '')
		from agent_execution_durations where span = 'day' and flow = $1`
	want := "lane 141 10, queue 94 50, run 154 40" // 1 s, 100 ms and 1.9 s
	pgtest.Equal(t, pool, want, measured, "import")
	pgtest.Equal(t, pool, want, measured, "") // all together
	pgtest.Exec(t, pool, `update agent_retention set keep = '35 days' where kind = 'hour_counts'`)
	pgtest.Exec(t, pool, `update agent_execution_counts set start = start - interval '99 days' where span = 'hour'`)
	pgtest.Exec(t, pool, `insert into agent_executions (trace_id, surface, flow) values ('fl_1', 'flow', 'x')`)
	time.Sleep(5 * time.Millisecond) // longer than the lag
	pass(7, -time.Minute)
	pgtest.Equal(t, pool, 0, `select count(*) from agent_execution_counts where span = 'hour'`)
}
