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

// A pass retires a month in three committed steps. It marks the month by a row of agent_activity_retired. It detaches
// the month, and then no transaction can write to it. It checks the month again and drops or reattaches it. After a
// kill, the next pass continues with the following step.
//
// `detach partition … concurrently` marks the partition, commits, and then waits without a lock for all present
// readers. Options.DetachTimeout bounds the wait. New queries no longer read the partition, and a later pass finalizes
// the detachment when no old snapshot is left.

const (
	// maxRetirementDays is the time for the retirement of a month. After it, passes delete the rows of an attached month
	// one by one.
	maxRetirementDays = 2
	// dropTries bounds the tries of one pass to drop a detached month. The next pass tries again.
	dropTries = 5
)

// month is a partition of the log to retire.
type month struct {
	Partition    string // quoted, with its schema
	Lower, Upper string // bounds of its ids
	Marked       bool   // agent_activity_retired has the partition
	Attached     bool
	Expired      bool // the present policy allows its retirement
}

// retireMonths retires the old months. It reports whether the pass may prune single rows now. For maxRetirementDays it
// returns false while a month waits for its retirement, because to prune its rows would cost much more.
func (o Options) retireMonths(ctx context.Context, pool *pgxpool.Pool, d *Result) (done bool, err error) {
	list, err := retirable(ctx, pool, "")
	if err != nil {
		return false, err
	}
	for _, m := range list {
		result, err := o.retireMonth(ctx, pool, m)
		if err != nil {
			return false, fmt.Errorf("partition %s: %w", m.Partition, err)
		}
		switch result {
		case "dropped":
			d.Partitions = append(d.Partitions, m.Partition)
		case keptByPolicy:
		default:
			d.Later = m.Partition + ": " + result
		}
	}
	var waiting int
	err = pool.QueryRow(ctx, `
		select count(*) from agent_activity_retired r
		 where r.decided_at > clock_timestamp() - make_interval(days => @days)
		   and exists (select from agent_activity_partitions p where p.partition = r.partition and not p.leaving)`,
		postgres.Strict{"days": maxRetirementDays}).Scan(&waiting)
	return waiting == 0, err
}

// retireMonth runs the remaining steps of a partition. It returns "dropped", or the reason why it did not drop the
// partition.
func (o Options) retireMonth(ctx context.Context, pool *pgxpool.Pool, m month) (string, error) {
	if !m.Marked {
		if marked, err := mark(ctx, pool, m.Partition); err != nil || !marked {
			return "work needs it again", err
		}
	} else if result, err := drop(ctx, pool, m.Partition); !m.Attached || result != notDetached || err != nil {
		return result, err
	}
	if reason, err := o.detach(ctx, pool, m.Partition); reason != "" || err != nil {
		return reason, err
	}
	return drop(ctx, pool, m.Partition)
}

// retirable lists the months to retire, the oldest first. It lists marked months, and expired months that no work
// needs. Last month stays, because housekeeping would create its partition again. If only is set, the list has at most
// that partition.
func retirable(ctx context.Context, db postgres.Beginner, only string) (list []month, err error) {
	err = inIndexTx(ctx, db, "0", func(tx pgx.Tx) error {
		s, err := readState(ctx, tx, "activity", false)
		if err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
			select r.partition, r.lower_id::text as lower, r.upper_id::text as upper, true as marked,
			       exists (select from agent_activity_partitions p where p.partition = r.partition and not p.leaving) as attached,
			       `+expired+` as expired
			  from agent_activity_retired r
			 where r.partition = @only or @only = ''
			union all
			select p.partition, p.lower_id::text, p.upper_id::text, false, true, true from agent_activity_partitions p
			 where p.upper_id <= case when @before::timestamptz is not null then lanekeeper.agent_uuid7_floor(
			         least(@before, (date_trunc('month', now() at time zone 'UTC') - interval '1 month') at time zone 'UTC')) end
			   and not p.leaving and not exists (select from agent_activity_retired r where r.partition = p.partition)
			   and (p.partition = @only or @only = '')
			 order by marked desc, lower`, postgres.Strict{"only": only, "before": s.Before})
		if err != nil {
			return err
		}
		all, err := pgx.CollectRows(rows, pgx.RowToStructByName[month])
		for _, m := range all {
			reason := ""
			if !m.Marked {
				if reason, err = keepReason(ctx, tx, m); err != nil {
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

// expired is the condition that the policy no longer keeps a marked month r; false for a policy of forever.
const expired = `coalesce(r.upper_id <= lanekeeper.agent_uuid7_floor(@before), false)`

// keepReason returns the reason why a partition must stay; empty if a pass may drop it.
func keepReason(ctx context.Context, tx pgx.Tx, m month) (reason string, err error) {
	const query = `
		select case
		  when (select c.counted_upto from agent_activity_counted c) < @upper::uuid
		       or exists (select from agent_activity_uncounted u
		                   where u.activity_id >= @lower::uuid and u.activity_id < @upper::uuid)
		    then 'it has rows that are not counted yet'
		  when exists (select from agent_activity_open o where o.activity_id >= @lower::uuid and o.activity_id < @upper::uuid)
		    then 'calls in it are still running'
		  when exists (select from agent_executions e
		                where e.status in ('pending', 'running', 'waiting')
		                  and (exists (select from agent_activity a where a.trace_id = e.trace_id)
		                       or exists (select from agent_activity a where a.execution_id = e.id)))
		    then 'unfinished executions have rows in it'
		  when exists (select from agent_approvals p
		                where p.status in ('pending', 'approved') and p.expires_at > clock_timestamp()
		                  and exists (select from agent_activity a where a.trace_id = p.trace_id))
		    then 'it has undecided or unused approvals'
		  else '' end`
	err = tx.QueryRow(ctx, strings.ReplaceAll(query, "from agent_activity a", "from "+m.Partition+" a"),
		postgres.Strict{"lower": m.Lower, "upper": m.Upper}).Scan(&reason)
	return reason, err
}

// mark marks a partition as retired. It returns false if the partition must stay.
func mark(ctx context.Context, db postgres.Beginner, partition string) (bool, error) {
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

// notDetached is the reason of drop for an attached partition.
const notDetached = "it is not detached yet"

// keptByPolicy is the reason of drop for a month that a longer policy keeps again.
const keptByPolicy = "the policy keeps it"

// drop runs dropOrAttach, and retries it while locks block it.
func drop(ctx context.Context, db postgres.Beginner, partition string) (result string, err error) {
	for try := 1; ; try++ {
		err := inIndexTx(ctx, db, "50ms", func(tx pgx.Tx) (err error) {
			result, err = dropOrAttach(ctx, tx, partition)
			return err
		})
		switch {
		case !postgres.IsCode(err, "55P03", "40P01", "42P01"): // 42P01: another pass is detaching the partition
			return result, err
		case try < dropTries:
		case postgres.IsCode(err, "42P01"):
			return "", err
		default:
			return "another session holds a lock on it", nil
		}
		if !sleep.For(ctx, time.Duration(try)*50*time.Millisecond) {
			return "", ctx.Err()
		}
	}
}

// dropOrAttach drops a detached partition, or reattaches a partition that the policy keeps or work needs after all. It
// returns "dropped", or the reason why it did not drop the partition.
func dropOrAttach(ctx context.Context, tx pgx.Tx, partition string) (string, error) {
	s, err := readState(ctx, tx, "activity", false)
	if err != nil {
		return "", err
	}
	rows, err := tx.Query(ctx, `
		select r.partition, r.lower_id::text as lower, r.upper_id::text as upper,
		       exists (select from agent_activity_partitions p where p.partition = r.partition and not p.leaving) as attached,
		       `+expired+` as expired
		  from agent_activity_retired r where r.partition = @partition for update of r skip locked`,
		postgres.Strict{"partition": partition, "before": s.Before})
	if err != nil {
		return "", err
	}
	m, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByNameLax[month])
	if errors.Is(err, pgx.ErrNoRows) {
		return "another pass retires it, or has attached it again", nil
	}
	if err != nil {
		return "", err
	}
	if !m.Attached {
		if result, err := finalize(ctx, tx, partition); result != "" || err != nil {
			return result, err
		}
	}
	reason := keptByPolicy
	if m.Expired {
		// No transaction can write to a detached partition. Check again, for rows written before the detachment.
		reason, err = keepReason(ctx, tx, m)
	}
	switch {
	case err != nil:
		return "", err
	case m.Attached && reason == "":
		return notDetached, nil
	case m.Attached:
	case reason == "":
		err = execDDL(ctx, tx, "drop table", partition)
	default:
		bounds := "for values from ('" + m.Lower + "') to ('" + m.Upper + "')"
		err = execDDL(ctx, tx, "alter table agent_activity attach partition", partition, bounds)
	}
	if err != nil {
		return "", err
	}
	return cmp.Or(reason, "dropped"), deleteMark(ctx, tx, partition)
}

// finalize finishes an interrupted detachment. Old snapshots may still read the partition. It returns "dropped", the
// reason to wait, or "" for a detached partition.
func finalize(ctx context.Context, tx pgx.Tx, partition string) (string, error) {
	var missing, detaching, inUse bool
	err := tx.QueryRow(ctx, `
		select to_regclass(@partition) is null,
		       exists (select from agent_activity_partitions p where p.partition = @partition and p.leaving),
		       exists (select from pg_stat_activity s
		                where s.datid = (select d.oid from pg_database d where d.datname = current_database())
		                  and s.pid <> pg_backend_pid()
		                  and s.backend_xmin is not null and s.xact_start < clock_timestamp() - interval '50 milliseconds')`,
		postgres.Strict{"partition": partition}).Scan(&missing, &detaching, &inUse)
	switch {
	case err != nil:
		return "", err
	case missing:
		return "dropped", deleteMark(ctx, tx, partition)
	case detaching && inUse:
		return "an older transaction may still read it", nil
	case detaching:
		return "", execDDL(ctx, tx, "alter table agent_activity detach partition", partition, "finalize")
	}
	return "", nil
}

// execDDL runs a schema change. All names in it come quoted from the catalog.
func execDDL(ctx context.Context, db postgres.DB, parts ...string) error {
	_, err := db.Exec(ctx, strings.Join(parts, " "), pgx.QueryExecModeSimpleProtocol)
	return err
}

// deleteMark deletes the mark of a partition.
func deleteMark(ctx context.Context, tx pgx.Tx, partition string) error {
	_, err := tx.Exec(ctx, `delete from agent_activity_retired r where r.partition = @partition`,
		postgres.Strict{"partition": partition})
	return err
}

// detach detaches a partition. If the detachment has to wait, it returns the reason.
func (o Options) detach(ctx context.Context, pool *pgxpool.Pool, partition string) (reason string, err error) {
	// On a timeout, this connection cancels the statement on the server. A pool's connection would close while the server
	// continues.
	config := pool.Config().ConnConfig.Copy()
	config.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: c, DeadlineDelay: 5 * time.Second}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return "", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	detachCtx, cancel := context.WithTimeout(ctx, o.DetachTimeout)
	defer cancel()
	err = execDDL(detachCtx, conn, "alter table agent_activity detach partition", partition, "concurrently")
	switch {
	case err == nil, postgres.IsCode(err, "55000", "42P01", "42P16"): // another pass detaches or detached it
		return "", nil
	case ctx.Err() != nil:
		return "", ctx.Err()
	case detachCtx.Err() != nil:
		return "another session has read the log for longer than " + o.DetachTimeout.String(), nil
	case postgres.IsCode(err, "55P03", "40P01"):
		return "another session holds a lock on the log", nil
	}
	return "", err
}
