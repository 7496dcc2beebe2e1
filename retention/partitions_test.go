package retention_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/retention"
)

// seedMonths returns a database whose log has ten counted rows in each of the last eight months, with a policy of 90
// days.
func seedMonths(t *testing.T) (*pgxpool.Pool, string) {
	t.Helper()
	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, postgres.Options{ApplicationName: passAppName})
	createPartitions(t, pool)
	pgtest.Exec(t, pool, `
		insert into agent_activity (id, trace_id, skill_name, created_at)
		select lanekeeper.agent_uuid7(lower + n * interval '1 hour'), 'hb_' || partition, 's', lower + n * interval '1 hour'
		  from (select p.partition, to_timestamp(('x' || substr(replace(p.lower_id::text, '-', ''), 1,
		    12))::bit(48)::bigint / 1000.0) as lower
		          from agent_activity_partitions p
		            where p.lower_id < lanekeeper.agent_uuid7_floor(now() - interval '40 days')) m, generate_series(1, 10) n`)
	pgtest.Exec(t, pool, `delete from agent_activity_uncounted; `)
	pgtest.Exec(t, pool,
		`update agent_activity_counted set counted_upto = lanekeeper.agent_uuid7_floor(clock_timestamp())`)
	pgtest.Exec(t, pool, `update agent_retention set keep = '90 days' where kind = 'activity'`)
	return pool, url
}

// attachedPartitions lists the partitions of the log older than a number of days.
func attachedPartitions(t *testing.T, db postgres.DB, days int) []string {
	t.Helper()
	return pgtest.Value[[]string](t, db, `
		select coalesce(array_agg(partition order by lower_id), '{}') from agent_activity_partitions
		 where upper_id < lanekeeper.agent_uuid7_floor(now() - make_interval(days => $1))`, days)
}

func runPass(t *testing.T, pool *pgxpool.Pool, lockTimeout time.Duration) retention.Result {
	t.Helper()
	done, err := retention.Run(t.Context(), pool,
		retention.Options{Kinds: []string{"activity"}, Restart: true, DetachTimeout: lockTimeout})
	require.Truef(t, err == nil && len(done) == 1, "%+v, %v", done, err)
	return done[0]
}

func TestPassDropsOldMonths(t *testing.T) {
	t.Parallel()
	pool, _ := seedMonths(t)
	old := attachedPartitions(t, pool, 123)
	require.Truef(t, len(old) >= 3, "old months: %v", old)
	archived := old[0] // an admin has detached this partition
	pgtest.Exec(t, pool, `alter table agent_activity detach partition `+archived)
	done := runPass(t, pool, 0)
	assert.Truef(t, slices.Equal(intersect(done.Partitions, old), old[1:]) && done.Removed == 0 && done.Later == "",
		"%+v, want %v dropped", done, old[1:])
	left := attachedPartitions(t, pool, 123)
	assert.Truef(t, len(left) == 0, "left: %v", left)
	assert.Equal(t, 10, pgtest.Value[int](t, pool, `select count(*) from `+archived))
	again := runPass(t, pool, 0)
	assert.Truef(t, len(again.Partitions) == 0 && again.Removed == 0, "again: %+v", again)
}

func intersect(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(s string) bool { return !slices.Contains(b, s) })
}

// TestDetachDuringLongRead prunes during a long transaction of a reader. The pass does not wait for long, and
// no session waits for the pass. A later pass finishes the detachment after the reader has ended.
func TestDetachDuringLongRead(t *testing.T) {
	t.Parallel()
	if pgtest.Pooled() {
		t.Skip("the time that a session waits for a lock is set when it begins")
	}
	pool, url := seedMonths(t)
	others := impatientPool(t, url, pool)
	reader := pgtest.Begin(t, pool)
	pgtest.Exec(t, reader, `select count(*) from agent_activity`)
	workerDone := make(chan error, 1)
	stop := make(chan struct{})
	go func() { workerDone <- useLog(t, others, stop) }()
	old := attachedPartitions(t, pool, 123)
	rows := pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 's'`)
	for range 3 {
		done := runPass(t, pool, 300*time.Millisecond)
		assert.Truef(t, len(done.Partitions) == 0 && done.Later != "" && done.Removed == 0, "during the read: %+v", done)
	}
	left := pgtest.Value[int](t, pool, `select count(*) from agent_activity_partitions where leaving`)
	n := pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 's'`)
	assert.Truef(t, left != 0 && n < rows, "%d months are detaching, and queries read %d of %d rows", left, n, rows)
	require.NoError(t, reader.Rollback(t.Context()))
	pgtest.Eventually(t, func() bool {
		runPass(t, pool, time.Second)
		return len(attachedPartitions(t, pool, 123)) == 0
	}, "passes drop the old months after the end of the reader")
	close(stop)
	assert.NoError(t, <-workerDone)
	for _, name := range old {
		assert.Truef(t, pgtest.Value[*string](t, pool, `select to_regclass($1)::text`, name) == nil,
			"%s is detached but not dropped", name)
	}
}

// useLog writes to the log and reads it until stop is closed.
func useLog(t *testing.T, db *pgxpool.Pool, stop chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		if _, err := db.Exec(t.Context(),
			`insert into agent_activity (trace_id, skill_name) values ('hb_new', 'new')`); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		for _, sql := range []string{
			`select count(*) from agent_activity where trace_id = 'hb_new'`,
			`select count(*) from (select id from agent_activity where skill_name = 's' order by id limit 100) x`,
			`update agent_activity set output = '1'
				where id = (select max(id::text)::uuid from agent_activity where trace_id = 'hb_new')`,
		} {
			if _, err := db.Exec(t.Context(), sql); err != nil {
				return fmt.Errorf("%s: %w", sql, err)
			}
		}
	}
}

// markRetired marks a month as retired, without detaching or dropping it.
func markRetired(t *testing.T, db postgres.Beginner, partition string) {
	t.Helper()
	marked, err := retention.Mark(t.Context(), db, partition)
	require.Truef(t, marked && err == nil, "mark %s: %v, %v", partition, marked, err)
}

// TestPassResumesRetirement leaves two months after the first and the second step of their retirement, as a
// killed pass would.
func TestPassResumesRetirement(t *testing.T) {
	t.Parallel()
	pool, _ := seedMonths(t)
	old := attachedPartitions(t, pool, 123)
	markRetired(t, pool, old[0])
	markRetired(t, pool, old[1])
	pgtest.Exec(t, pool, strings.Join([]string{`alter table agent_activity detach partition`, old[1], `concurrently`},
		" "))
	done := runPass(t, pool, 0)
	assert.NoDiff(t, old, intersect(done.Partitions, old))
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_activity_retired`))
}

// TestLongerPolicyKeepsMarkedMonths changes the policy after the first and the second step of a retirement. The present
// policy decides, and both months return to the log.
func TestLongerPolicyKeepsMarkedMonths(t *testing.T) {
	t.Parallel()
	for _, keep := range []string{"100 years", retention.Forever} {
		t.Run(keep, func(t *testing.T) {
			t.Parallel()
			pool, _ := seedMonths(t)
			old := attachedPartitions(t, pool, 123)
			rows := pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 's'`)
			markRetired(t, pool, old[0])
			markRetired(t, pool, old[1])
			pgtest.Exec(t, pool, strings.Join([]string{`alter table agent_activity detach partition`, old[1], `concurrently`},
				" "))
			pgtest.Exec(t, pool, `select set_agent_retention(jsonb_build_object('activity', $1::text))`, keep)
			dry, err := retention.Run(t.Context(), pool, retention.Options{Kinds: []string{"activity"}, DryRun: true})
			assert.Truef(t, err == nil && len(dry) == 1 && len(dry[0].Partitions) == 0, "dry run: %+v, %v", dry, err)
			done, err := retention.Run(t.Context(), pool, retention.Options{})
			require.NoError(t, err)
			for _, d := range done {
				assert.Truef(t, len(d.Partitions) == 0 && d.Later == "", "%+v", d)
			}
			assert.NoDiff(t, old, attachedPartitions(t, pool, 123))
			assert.Equal(t, rows, pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 's'`))
			assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_activity_retired`))
		})
	}
}

// TestNeededMonthIsReattached starts an execution that needs a month whose retirement has begun.
func TestNeededMonthIsReattached(t *testing.T) {
	t.Parallel()
	pool, _ := seedMonths(t)
	old := attachedPartitions(t, pool, 123)
	rows := pgtest.Value[int](t, pool, `select count(*) from agent_activity`)
	for _, name := range old[:2] {
		markRetired(t, pool, name)
		pgtest.Exec(t, pool, `insert into agent_executions (trace_id, surface, flow) values ('hb_' || $1, 'flow', 'f')`, name)
	}
	pgtest.Exec(t, pool, strings.Join([]string{`alter table agent_activity detach partition`, old[1], `concurrently`},
		" "))
	done := runPass(t, pool, 0)
	assert.Truef(t, !slices.Contains(done.Partitions, old[0]) && !slices.Contains(done.Partitions, old[1]),
		"dropped: %v", done.Partitions)
	got := attachedPartitions(t, pool, 123)
	assert.Truef(t, slices.Equal(got, old[:2]), "attached: %v, want %v", got, old[:2])
	assert.Equal(t, rows-10*len(done.Partitions),
		pgtest.Value[int](t, pool, `select count(*) from agent_activity`), rows, done.Partitions)
	// After that execution has ended, the next pass drops the month.
	pgtest.Exec(t, pool, `update agent_executions set status = 'cancelled'`)
	done = runPass(t, pool, 0)
	assert.Truef(t, slices.Equal(done.Partitions, old[:2]), "after the end: %+v", done)
}
