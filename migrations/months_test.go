package migrations_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// bare is a transaction, never committed, of a session in a time zone, in which the activity log has no partitions.
func bare(t *testing.T, zone string) pgx.Tx {
	t.Helper()
	tx := pgtest.Begin(t, pgtest.DB(t))
	pgtest.Exec(t, tx, `select set_config('TimeZone', $1, true)`, zone)
	pgtest.Exec(t, tx, `do $$ declare p text; begin
		for p in select partition from agent_activity_partitions loop execute 'drop table ' || p; end loop; end $$`)
	return tx
}

const (
	// unaligned are partitions that do not hold the month of UTC that their name says.
	unaligned = `
		select count(*) from agent_activity_partitions p,
		  lateral (select to_date(right(p.partition, 7), 'YYYY_MM')::timestamp) t (m)
		 where (p.lower_id, p.upper_id) is distinct
		   from (lanekeeper.agent_uuid7_floor(m at time zone 'UTC'),
		     lanekeeper.agent_uuid7_floor((m + interval '1 month') at time zone 'UTC'))`
)

// The months of the log are those of UTC, whatever zone a server was set up in.
func TestMonthsAreThoseOfUTC(t *testing.T) {
	t.Parallel()
	for _, zone := range []string{"America/New_York", "Europe/Berlin", "Pacific/Auckland"} {
		tx := bare(t, zone)
		for month := range 14 {
			at := time.Date(2027, time.Month(1+month), 1, 0, 30, 0, 0, time.UTC)
			_, err := migrations.EnsureMonths(t.Context(), tx, &at, 3)
			require.NoError(t, err)
		}
		assert.Equal(t, 18, pgtest.Value[int](t, tx, `select count(*) from agent_activity_partitions`), zone)
		assert.Equal(t, 0, pgtest.Value[int](t, tx, unaligned), zone)
	}
}
