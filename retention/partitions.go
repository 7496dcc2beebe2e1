package retention

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// A whole month goes in three steps, each committed: a row of agent_activity_retired says that it is on its way out; it is detached;
// it is looked at once more, now that nobody can write to it, and dropped, or attached again. Whoever comes after a kill goes on from
// the step that was reached.
//
// `detach partition … concurrently` marks the partition, commits, and then waits, without a lock, for everybody who was reading. That wait
// is ended after Options.Patience: the partition is then not read any more, and drop_agent_activity_partition finishes what was begun
// in a later pass, when no old snapshot is left.

const (
	// patientDays is after how long a month that cannot be detached goes row by row.
	patientDays = 2
	// dropTries is how often a detached month is tried in one pass; it does no harm until the next.
	dropTries = 5
)

// retirable is a partition that is to go.
type retirable struct {
	Partition string // quoted, with its schema
	Began     bool
	Attached  bool
}

// retire sees the old months out. It reports whether rows may go one by one now: not as long as a month that is to go whole could not,
// because that would be the same work, much dearer.
func (o Options) retire(ctx context.Context, pool *pgxpool.Pool, d *Done) (whole bool, err error) {
	if d.Keep == Forever {
		return false, nil
	}
	rows, err := pool.Query(ctx, `select partition, began, attached from agent_activity_retirable()`)
	if err != nil {
		return false, err
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[retirable])
	if err != nil {
		return false, err
	}
	for _, r := range list {
		said, err := o.see(ctx, pool, r)
		if err != nil {
			return false, fmt.Errorf("partition %s: %w", r.Partition, err)
		}
		if said == "dropped" {
			d.Partitions = append(d.Partitions, r.Partition)
		} else {
			d.Later = r.Partition + ": " + said
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
func (o Options) see(ctx context.Context, pool *pgxpool.Pool, r retirable) (string, error) {
	if !r.Began {
		var noted bool
		err := pool.QueryRow(ctx, `select retire_agent_activity_partition(@partition)`, postgres.Strict{"partition": r.Partition}).Scan(&noted)
		if err != nil || !noted {
			return "it is needed after all", err
		}
	}
	if r.Began {
		if said, err := drop(ctx, pool, r.Partition); !r.Attached || said != notDetached || err != nil {
			return said, err
		}
	}
	if said, err := o.detach(ctx, pool, r.Partition); said != "" || err != nil {
		return said, err
	}
	return drop(ctx, pool, r.Partition)
}

// notDetached is what drop says of a partition that it cannot drop yet.
const notDetached = "it is not detached yet"

// drop does the last step, or finds that the partition is needed after all, and says which.
func drop(ctx context.Context, db postgres.DB, partition string) (string, error) {
	for try := 1; ; try++ {
		var said string
		err := db.QueryRow(ctx, `select drop_agent_activity_partition(@partition)`, postgres.Strict{"partition": partition}).Scan(&said)
		switch {
		case !postgres.IsCode(err, "55P03", "40P01", "42P01"): // the last: who had begun to detach it has done so in this very moment
			return said, err
		case try < dropTries:
		case postgres.IsCode(err, "42P01"):
			return "", err
		default:
			return "others have it locked", nil
		}
		if err := rest(ctx, time.Duration(try)*50*time.Millisecond); err != nil {
			return "", err
		}
	}
}

// detach takes a partition out of the log. It says why when that has to wait.
func (o Options) detach(ctx context.Context, pool *pgxpool.Pool, partition string) (later string, err error) {
	// A connection of its own, whose statement is cancelled on the server when time is up; the others would be closed and leave it at work.
	config := pool.Config().ConnConfig.Copy()
	config.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: c, DeadlineDelay: 5 * time.Second}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return "", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	inTime, cancel := context.WithTimeout(ctx, o.Patience)
	defer cancel()
	// The name is from the catalogue, quoted there.
	_, err = conn.Exec(inTime, strings.Join([]string{`alter table agent_activity detach partition`, partition, `concurrently`}, " "), pgx.QueryExecModeSimpleProtocol)
	switch {
	case err == nil, postgres.IsCode(err, "55000", "42P01", "42P16"): // somebody else is at it, or was
		return "", nil
	case ctx.Err() != nil:
		return "", ctx.Err()
	case inTime.Err() != nil:
		return "others have read the log for longer than " + o.Patience.String(), nil
	case postgres.IsCode(err, "55P03", "40P01"):
		return "others have the log locked", nil
	}
	return "", err
}
