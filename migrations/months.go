package migrations

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// EnsureMonths creates the missing monthly partitions of the activity log, from the month before a moment to some
// months after it, and returns their number. Without a moment it uses the database's clock. Months begin and end in
// UTC. It finds gaps by the ranges of the partitions, not by their names. Concurrent calls are safe.
func EnsureMonths(ctx context.Context, db postgres.Beginner, at *time.Time, ahead int) (made int, err error) {
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('activity partitions', 0))`); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
			select to_char(m.month, '"agent_activity_"YYYY_MM') as name, s.id::text as lower, least(m.upper_id, (
			         select p.lower_id from agent_activity_partitions p where p.lower_id > s.id
			           order by p.lower_id limit 1))::text as upper
			  from (select t.month, lanekeeper.agent_uuid7_floor(t.month at time zone 'UTC') as lower_id,
			               lanekeeper.agent_uuid7_floor((t.month + interval '1 month') at time zone 'UTC') as upper_id
			          from date_trunc('month', coalesce(@at::timestamptz, clock_timestamp()) at time zone 'UTC') this,
			               generate_series(this - interval '1 month', this + make_interval(months => @ahead),
			                 interval '1 month') t (month)) m
			 cross join lateral (
			   select m.lower_id
			   union
			   select p.upper_id from agent_activity_partitions p where p.upper_id > m.lower_id
			     and p.upper_id < m.upper_id) s (id)
			 where not exists (select from agent_activity_partitions p where p.lower_id <= s.id and s.id < p.upper_id)
			 order by s.id`, postgres.Strict{"at": at, "ahead": ahead})
		if err != nil {
			return err
		}
		missing, err := pgx.CollectRows(rows, pgx.RowToStructByName[month])
		for _, m := range missing {
			if err := m.attach(ctx, tx); err != nil {
				return err
			}
		}
		made = len(missing)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("make partitions of the activity log: %w", err)
	}
	return made, nil
}

// MonthsAhead is the number of monthly partitions of the activity log that exist ahead of time.
const MonthsAhead = 3

// month is a partition to create, with its range of ids.
type month struct{ Name, Lower, Upper string }

// attach creates the table under the first free name, then attaches it. The clause `partition of` would wait for every
// reader of the log and block every writer.
func (m month) attach(ctx context.Context, tx pgx.Tx) error {
	var name string
	err := tx.QueryRow(ctx, `
		select n.name from generate_series(1, 1000) i, lateral (select @name || case when i > 1 then '_' || i
		  else '' end as name) n
		 where to_regclass(n.name) is null order by i limit 1`, postgres.Strict{"name": m.Name}).Scan(&name)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, fmt.Sprintf(`
		create table %[1]s (like agent_activity including all) with (fillfactor = 80);
		alter table agent_activity attach partition %[1]s for values from ('%[2]s') to ('%[3]s')`, name, m.Lower, m.Upper))
	return err
}
