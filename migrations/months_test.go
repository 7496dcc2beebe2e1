package migrations_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// bare is a transaction, never committed, of a session in a time zone, in which the activity log has no partitions.
func bare(t *testing.T, zone string) pgx.Tx {
	t.Helper()
	tx, err := pgtest.DB(t).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	exec(t, tx, `select set_config('TimeZone', $1, true)`, zone)
	exec(t, tx, `do $$ declare p text; begin
		for p in select partition from agent_activity_partitions loop execute 'drop table ' || p; end loop; end $$`)
	return tx
}

const (
	// unaligned are partitions that do not hold the month of UTC that their name says.
	unaligned = `
		select count(*) from agent_activity_partitions p, lateral (select to_date(right(p.partition, 7), 'YYYY_MM')::timestamp) t (m)
		 where (p.lower_id, p.upper_id) is distinct from (agent_uuid7_floor(m at time zone 'UTC'), agent_uuid7_floor((m + interval '1 month') at time zone 'UTC'))`
	// reach is how far the log takes rows without a gap, from a time on.
	reach = `
		with recursive r as (
		  select agent_uuid7_floor($1::timestamptz) as id
		  union all
		  select p.upper_id from r join agent_activity_partitions p on p.lower_id <= r.id and r.id < p.upper_id)
		select id::text from r order by id desc limit 1`
)

// The months of the log are those of UTC, whatever zone a server was set up in.
func TestMonthsAreThoseOfUTC(t *testing.T) {
	t.Parallel()
	for _, zone := range []string{"America/New_York", "Europe/Berlin", "Pacific/Auckland"} {
		tx := bare(t, zone)
		for month := range 14 {
			exec(t, tx, `select cover_agent_activity($1, 3)`, time.Date(2027, time.Month(1+month), 1, 0, 30, 0, 0, time.UTC))
		}
		if got := get[int](t, tx, `select count(*) from agent_activity_partitions`); got != 18 {
			t.Errorf("%s: %d months, want 18", zone, got)
		}
		if got := get[int](t, tx, unaligned); got != 0 {
			t.Errorf("%s: %d partitions do not hold the month of their name", zone, got)
		}
	}
}

// Before, months were reckoned in the zone of the session: they came to overlap, none could be added, and no row was taken after the last.
func TestMonthsThatWereMadeInAnotherZoneAreGoneOnFrom(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("sql/0003_activity.sql")
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(string(text), "function ensure_agent_activity_partitions(p_months int default 3)")
	body, _, _ = strings.Cut(body, "end $$;")
	before := "create function before(p_at timestamptz)" + strings.NewReplacer("clock_timestamp()", "p_at", "p_months", "3").Replace(body) + "end $$"
	for zone, first := range map[string]time.Time{
		"America/New_York": time.Date(2027, 3, 1, 12, 0, 0, 0, time.UTC),
		"Europe/Berlin":    time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC),
	} {
		tx := bare(t, zone)
		exec(t, tx, before)
		at := first
		for ; ; at = at.AddDate(0, 1, 0) {
			err := pgx.BeginFunc(t.Context(), tx, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), `select before($1)`, at)
				return err
			})
			if err != nil {
				break
			}
			if at.Year() > 2030 {
				t.Fatalf("%s: it worked", zone)
			}
		}
		for range 14 {
			exec(t, tx, `select cover_agent_activity($1, 3)`, at)
			last := time.Date(at.Year(), at.Month()-1, 1, 0, 0, 0, 0, time.UTC)
			if !get[bool](t, tx, `select (`+reach+`)::uuid >= agent_uuid7_floor($2)`, last, last.AddDate(0, 5, 0)) {
				t.Fatalf("%s: in %s the log is not there from %s on for five months", zone, at, last)
			}
			at = at.AddDate(0, 1, 0)
		}
	}
}
