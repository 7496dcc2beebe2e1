package retention

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// A whole month goes in three steps, each committed. A row of agent_activity_retired says that it is on its way
// out. The month is detached. Now that nobody can write to it, the pass looks at it once more, and drops it or
// attaches it again. The pass after a kill goes on from the step that was reached.
//
// `detach partition … concurrently` marks the partition, commits, and then waits for all readers of that moment,
// without a lock. Options.DetachTimeout bounds that wait. After it nobody reads the partition any more, and a later
// pass finishes the detachment when no old snapshot is left.

const (
	// patientDays is after how long a month that cannot be detached goes row by row.
	patientDays = 2
	// dropTries is how often a detached month is tried in one pass; it does no harm until the next.
	dropTries = 5
)

// month is a partition of the log that is to go.
type month struct {
	Partition    string // quoted, with its schema
	Lower, Upper string // its ids
	Began        bool   // it is on its way out
	Attached     bool
}

// retire sees the old months out. It reports whether rows may go one by one now: not as long as a month that is to go
// whole could not, because that would be the same work, much dearer.
func (o Options) retire(ctx context.Context, pool *pgxpool.Pool, d *Done) (whole bool, err error) {
	if d.Keep == Forever {
		return false, nil
	}
	list, err := retirable(ctx, pool, "")
	if err != nil {
		return false, err
	}
	for _, m := range list {
		said, err := o.see(ctx, pool, m)
		if err != nil {
			return false, fmt.Errorf("partition %s: %w", m.Partition, err)
		}
		if said == "dropped" {
			d.Partitions = append(d.Partitions, m.Partition)
		} else {
			d.Later = m.Partition + ": " + said
		}
	}
	var stuck int
	err = pool.QueryRow(ctx, `
		select count(*) from agent_activity_retired r
		 where r.decided_at > clock_timestamp() - make_interval(days => @days)
		   and exists (select from agent_activity_partitions p where p.partition = r.partition and not p.leaving)`,
		postgres.Strict{"days": patientDays}).Scan(&stuck)
	return stuck == 0, err
}

// see sees one partition out, and says how far it came.
func (o Options) see(ctx context.Context, pool *pgxpool.Pool, m month) (string, error) {
	if !m.Began {
		if noted, err := note(ctx, pool, m.Partition); err != nil || !noted {
			return "it is needed after all", err
		}
	}
	if m.Began {
		if said, err := drop(ctx, pool, m.Partition); !m.Attached || said != notDetached || err != nil {
			return said, err
		}
	}
	if said, err := o.detach(ctx, pool, m.Partition); said != "" || err != nil {
		return said, err
	}
	return drop(ctx, pool, m.Partition)
}

// retirable lists the months that go, the oldest first: those that are on their way out, and by the policy those in
// which nothing is needed. Last month stays: it would be made again. With a name in only, it is about that partition
// alone.
func retirable(ctx context.Context, db postgres.Beginner, only string) (list []month, err error) {
	err = byIndex(ctx, db, "0", func(tx pgx.Tx) error {
		s, err := readState(ctx, tx, "activity", false)
		if err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
			select r.partition, r.lower_id::text as lower, r.upper_id::text as upper, true as began,
			       exists (select from agent_activity_partitions p where p.partition = r.partition and not p.leaving) as attached
			  from agent_activity_retired r
			 where r.partition = @only or @only = ''
			union all
			select p.partition, p.lower_id::text, p.upper_id::text, false, true from agent_activity_partitions p
			 where p.upper_id <= case when @before::timestamptz is not null then lanekeeper.agent_uuid7_floor(
			         least(@before, (date_trunc('month', now() at time zone 'UTC') - interval '1 month') at time zone 'UTC')) end
			   and not p.leaving and not exists (select from agent_activity_retired r where r.partition = p.partition)
			   and (p.partition = @only or @only = '')
			 order by began desc, lower`, postgres.Strict{"only": only, "before": s.Before})
		if err != nil {
			return err
		}
		all, err := pgx.CollectRows(rows, pgx.RowToStructByName[month])
		for _, m := range all {
			reason := ""
			if !m.Began {
				if reason, err = needed(ctx, tx, m); err != nil {
					return err
				}
			}
			if reason == "" {
				list = append(list, m)
			}
		}
		return err
	})
	return list, err
}

// needed says why a partition cannot go; nothing when it can. It may be detached.
func needed(ctx context.Context, tx pgx.Tx, m month) (reason string, err error) {
	const query = `
		select case
		  when (select c.counted_upto from agent_activity_counted c) < @upper::uuid
		       or exists (select from agent_activity_uncounted u
		                   where u.activity_id >= @lower::uuid and u.activity_id < @upper::uuid)
		    then 'it has rows that are not counted yet'
		  when exists (select from agent_activity_open o where o.activity_id >= @lower::uuid and o.activity_id < @upper::uuid)
		    then 'calls in it are under way'
		  when exists (select from agent_executions e
		                where e.status in ('pending', 'running', 'waiting')
		                  and (exists (select from agent_activity a where a.trace_id = e.trace_id)
		                       or exists (select from agent_activity a where a.execution_id = e.id)))
		    then 'executions that have not ended have rows in it'
		  when exists (select from agent_approvals p
		                where p.status in ('pending', 'approved') and p.expires_at > clock_timestamp()
		                  and exists (select from agent_activity a where a.trace_id = p.trace_id))
		    then 'approvals for it are not decided, or not used'
		  else '' end`
	err = tx.QueryRow(ctx, strings.ReplaceAll(query, "from agent_activity a", "from "+m.Partition+" a"),
		postgres.Strict{"lower": m.Lower, "upper": m.Upper}).Scan(&reason)
	return reason, err
}

// note writes down that a partition is on its way out. It returns false when that is not to go.
func note(ctx context.Context, db postgres.Beginner, partition string) (bool, error) {
	list, err := retirable(ctx, db, partition)
	if err != nil || len(list) == 0 {
		return false, err
	}
	_, err = db.Exec(ctx, `
		insert into agent_activity_retired (partition, lower_id, upper_id)
		select p.partition, p.lower_id, p.upper_id from agent_activity_partitions p where p.partition = @partition
		on conflict do nothing`,
		postgres.Strict{"partition": partition})
	return err == nil, err
}

// notDetached is what drop says of a partition that it cannot drop yet.
const notDetached = "it is not detached yet"

// drop does the last step, or finds that the partition is needed after all, and says which.
func drop(ctx context.Context, db postgres.Beginner, partition string) (said string, err error) {
	for try := 1; ; try++ {
		err := byIndex(ctx, db, "50ms", func(tx pgx.Tx) (err error) {
			said, err = dropOrAttach(ctx, tx, partition)
			return err
		})
		switch {
		case !postgres.IsCode(err, "55P03", "40P01", "42P01"): // the last: another pass has detached it in this very moment
			return said, err
		case try < dropTries:
		case postgres.IsCode(err, "42P01"):
			return "", err
		default:
			return "others have it locked", nil
		}
		if !sleep.For(ctx, time.Duration(try)*50*time.Millisecond) {
			return "", ctx.Err()
		}
	}
}

// dropOrAttach drops a partition that was detached on its way out, or attaches it again when something in it is needed
// after all. It says `dropped`, or why not.
func dropOrAttach(ctx context.Context, tx pgx.Tx, partition string) (string, error) {
	rows, err := tx.Query(ctx, `
		select r.partition, r.lower_id::text as lower, r.upper_id::text as upper,
		       exists (select from agent_activity_partitions p where p.partition = r.partition and not p.leaving) as attached
		  from agent_activity_retired r where r.partition = @partition for update of r skip locked`,
		postgres.Strict{"partition": partition})
	if err != nil {
		return "", err
	}
	m, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByNameLax[month])
	if errors.Is(err, pgx.ErrNoRows) {
		return "it is not on its way out, or somebody is at it", nil
	}
	if err != nil {
		return "", err
	}
	if !m.Attached {
		if said, err := finalize(ctx, tx, partition); said != "" || err != nil {
			return said, err
		}
	}
	// Nobody can write to a detached one any more: this looks again, for what came while it was detached.
	reason, err := needed(ctx, tx, m)
	switch {
	case err != nil:
		return "", err
	case m.Attached && reason == "":
		return notDetached, nil
	case m.Attached:
	case reason == "":
		err = define(ctx, tx, "drop table", partition)
	default:
		bounds := "for values from ('" + m.Lower + "') to ('" + m.Upper + "')"
		err = define(ctx, tx, "alter table agent_activity attach partition", partition, bounds)
	}
	if err != nil {
		return "", err
	}
	return cmp.Or(reason, "dropped"), forget(ctx, tx, partition)
}

// finalize finishes a detachment whose session was stopped while it waited for readers. Nobody new reads the partition;
// old snapshots may. It says what is left to say; nothing when the partition is detached.
func finalize(ctx context.Context, tx pgx.Tx, partition string) (string, error) {
	var gone, leaving, read bool
	err := tx.QueryRow(ctx, `
		select to_regclass(@partition) is null,
		       exists (select from agent_activity_partitions p where p.partition = @partition and p.leaving),
		       exists (select from pg_stat_activity s
		                where s.datid = (select d.oid from pg_database d where d.datname = current_database())
		                  and s.pid <> pg_backend_pid()
		                  and s.backend_xmin is not null and s.xact_start < clock_timestamp() - interval '50 milliseconds')`,
		postgres.Strict{"partition": partition}).Scan(&gone, &leaving, &read)
	switch {
	case err != nil:
		return "", err
	case gone:
		return "dropped", forget(ctx, tx, partition)
	case leaving && read:
		return "others read what was before", nil
	case leaving:
		return "", define(ctx, tx, "alter table agent_activity detach partition", partition, "finalize")
	}
	return "", nil
}

// define changes the schema. Names are from the catalogue, quoted there.
func define(ctx context.Context, db postgres.DB, words ...string) error {
	_, err := db.Exec(ctx, strings.Join(words, " "), pgx.QueryExecModeSimpleProtocol)
	return err
}

// forget ends what note began.
func forget(ctx context.Context, tx pgx.Tx, partition string) error {
	_, err := tx.Exec(ctx, `delete from agent_activity_retired r where r.partition = @partition`,
		postgres.Strict{"partition": partition})
	return err
}

// detach takes a partition out of the log. It says why when that has to wait.
func (o Options) detach(ctx context.Context, pool *pgxpool.Pool, partition string) (later string, err error) {
	// A connection of its own, whose statement is cancelled on the server when time is up; the others would be closed
	// and leave it at work.
	config := pool.Config().ConnConfig.Copy()
	config.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: c, DeadlineDelay: 5 * time.Second}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return "", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	inTime, cancel := context.WithTimeout(ctx, o.DetachTimeout)
	defer cancel()
	err = define(inTime, conn, "alter table agent_activity detach partition", partition, "concurrently")
	switch {
	case err == nil, postgres.IsCode(err, "55000", "42P01", "42P16"): // somebody else is at it, or was
		return "", nil
	case ctx.Err() != nil:
		return "", ctx.Err()
	case inTime.Err() != nil:
		return "others have read the log for longer than " + o.DetachTimeout.String(), nil
	case postgres.IsCode(err, "55P03", "40P01"):
		return "others have the log locked", nil
	}
	return "", err
}
