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

// months returns a log with ten counted rows in each of the last eight months, and a policy of 90 days.
func months(t *testing.T) (*pgxpool.Pool, string) {
	t.Helper()
	url := pgtest.URL(t)
	pool := pgtest.Pool(t, url, postgres.Options{ApplicationName: passing})
	partitions(t, pool)
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

// attached lists the partitions of the log older than a number of days.
func attached(t *testing.T, db postgres.DB, days int) []string {
	t.Helper()
	return pgtest.Value[[]string](t, db, `
		select coalesce(array_agg(partition order by lower_id), '{}') from agent_activity_partitions
		 where upper_id < lanekeeper.agent_uuid7_floor(now() - make_interval(days => $1))`, days)
}

func pass(t *testing.T, pool *pgxpool.Pool, lockTimeout time.Duration) retention.Done {
	t.Helper()
	done, err := retention.Run(t.Context(), pool,
		retention.Options{Kinds: []string{"activity"}, Restart: true, DetachTimeout: lockTimeout})
	require.Truef(t, err == nil && len(done) == 1, "%+v, %v", done, err)
	return done[0]
}

func TestOldMonthsAreDroppedWhole(t *testing.T) {
	t.Parallel()
	pool, _ := months(t)
	old := attached(t, pool, 123)
	require.Truef(t, len(old) >= 3, "old months: %v", old)
	archived := old[0] // an admin archived it
	pgtest.Exec(t, pool, `alter table agent_activity detach partition `+archived)
	done := pass(t, pool, 0)
	assert.Truef(t, slices.Equal(intersect(done.Partitions, old), old[1:]) && done.Removed == 0 && done.Later == "",
		"%+v, want %v dropped", done, old[1:])
	left := attached(t, pool, 123)
	assert.Truef(t, len(left) == 0, "left: %v", left)
	assert.Equal(t, 10, pgtest.Value[int](t, pool, `select count(*) from `+archived))
	again := pass(t, pool, 0)
	assert.Truef(t, len(again.Partitions) == 0 && again.Removed == 0, "again: %+v", again)
}

func intersect(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(s string) bool { return !slices.Contains(b, s) })
}

// TestAMonthIsDetachedBesideAReader prunes during a long transaction of a reader. The pass does not wait for long, and
// no session waits for the pass. A later pass finishes the detachment after the reader has ended.
func TestAMonthIsDetachedBesideAReader(t *testing.T) {
	t.Parallel()
	if pgtest.Pooled() {
		t.Skip("the time that a session waits for a lock is set when it begins")
	}
	pool, url := months(t)
	others := hasty(t, url, pool)
	reader := pgtest.Begin(t, pool)
	pgtest.Exec(t, reader, `select count(*) from agent_activity`)
	worked := make(chan error, 1)
	stop := make(chan struct{})
	go func() { worked <- useTheLog(t, others, stop) }()
	old := attached(t, pool, 123)
	rows := pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 's'`)
	for range 3 {
		done := pass(t, pool, 300*time.Millisecond)
		assert.Truef(t, len(done.Partitions) == 0 && done.Later != "" && done.Removed == 0, "beside a reader: %+v", done)
	}
	left := pgtest.Value[int](t, pool, `select count(*) from agent_activity_partitions where leaving`)
	n := pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 's'`)
	assert.Truef(t, left != 0 && n < rows, "%d months are leaving, and %d of %d rows are read", left, n, rows)
	require.NoError(t, reader.Rollback(t.Context()))
	pgtest.Eventually(t, func() bool {
		pass(t, pool, time.Second)
		return len(attached(t, pool, 123)) == 0
	}, "the old months are gone when the reader is")
	close(stop)
	assert.NoError(t, <-worked)
	for _, name := range old {
		assert.Truef(t, pgtest.Value[*string](t, pool, `select to_regclass($1)::text`, name) == nil,
			"%s is detached and was not dropped", name)
	}
}

// useTheLog writes and reads until the test stops it.
func useTheLog(t *testing.T, db *pgxpool.Pool, stop chan struct{}) error {
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

// markOnly marks a month as retired, and no more.
func markOnly(t *testing.T, db postgres.Beginner, partition string) {
	t.Helper()
	noted, err := retention.Mark(t.Context(), db, partition)
	require.Truef(t, noted && err == nil, "note %s: %v, %v", partition, noted, err)
}

// TestAPassGoesOnWhereAnotherWasKilled kills a pass at each step of retiring a month.
func TestAPassGoesOnWhereAnotherWasKilled(t *testing.T) {
	t.Parallel()
	pool, _ := months(t)
	old := attached(t, pool, 123)
	markOnly(t, pool, old[0])
	markOnly(t, pool, old[1])
	pgtest.Exec(t, pool, strings.Join([]string{`alter table agent_activity detach partition`, old[1], `concurrently`},
		" "))
	done := pass(t, pool, 0)
	assert.NoDiff(t, old, intersect(done.Partitions, old))
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_activity_retired`))
}

// TestAMonthThatIsNeededAfterAllIsAttachedAgain: a later execution needs the month again.
func TestAMonthThatIsNeededAfterAllIsAttachedAgain(t *testing.T) {
	t.Parallel()
	pool, _ := months(t)
	old := attached(t, pool, 123)
	rows := pgtest.Value[int](t, pool, `select count(*) from agent_activity`)
	for _, name := range old[:2] {
		markOnly(t, pool, name)
		pgtest.Exec(t, pool, `insert into agent_executions (trace_id, surface, flow) values ('hb_' || $1, 'flow', 'f')`, name)
	}
	pgtest.Exec(t, pool, strings.Join([]string{`alter table agent_activity detach partition`, old[1], `concurrently`},
		" "))
	done := pass(t, pool, 0)
	assert.Truef(t, !slices.Contains(done.Partitions, old[0]) && !slices.Contains(done.Partitions, old[1]),
		"dropped: %v", done.Partitions)
	got := attached(t, pool, 123)
	assert.Truef(t, slices.Equal(got, old[:2]), "attached: %v, want %v", got, old[:2])
	assert.Equal(t, rows-10*len(done.Partitions),
		pgtest.Value[int](t, pool, `select count(*) from agent_activity`), rows, done.Partitions)
	// After that execution has ended, the next pass drops the month.
	pgtest.Exec(t, pool, `update agent_executions set status = 'cancelled'`)
	done = pass(t, pool, 0)
	assert.Truef(t, slices.Equal(done.Partitions, old[:2]), "after the end: %+v", done)
}
