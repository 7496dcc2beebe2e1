package activity

import (
	"context"
	_ "embed" // for the query
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// countMost is how many rows one pass counts. It takes a fraction of a second.
	countMost = 20_000
	// countLag is how far a pass stays behind the clock. The trigger agent_activity_late lists rows whose id is older
	// than 5 seconds, so the lag must be longer than that.
	countLag = 20 * time.Second
	// noID is below every id.
	noID = "00000000-0000-0000-0000-000000000000"
)

// Count counts rows of the log that have ended, at most 20,000 or so, and reports whether there are others
// that can be counted at once. It writes nothing where there is nothing to count, or where another process
// is at it. A pass is one transaction, and blocks nobody who writes to the log.
func Count(ctx context.Context, db postgres.Beginner) (more bool, err error) {
	_, more, err = CountPass(ctx, db, countMost, countLag)
	return more, err
}

// CountPass is Count for at most so many rows, and as many that are listed one by one, with a lag of its own. It also
// returns how many rows it counted.
//
// A row of an open transaction is not seen, and may have an id below those that are. So a pass notes an id, the
// candidate, and its own transaction id. Rows below the candidate are counted once no transaction before that one
// is under way.
func CountPass(ctx context.Context, db postgres.Beginner, most int, lag time.Duration) (counted int, more bool, err error) {
	idle, err := nothingToCount(ctx, db, lag)
	if err != nil || idle {
		return 0, false, wrapCount(err)
	}
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		counted, more, err = countIn(ctx, tx, most, lag)
		return err
	})
	return counted, more, wrapCount(err)
}

func wrapCount(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("count activities: %w", err)
}

// nothingToCount is the common case, and costs no write. The order by keeps the planner to the index of ids.
func nothingToCount(ctx context.Context, db postgres.DB, lag time.Duration) (idle bool, err error) {
	err = db.QueryRow(ctx, `
		select c.candidate is null
		       and ((select a.id from agent_activity a where a.id >= c.counted_upto order by a.id limit 1)
		            < lanekeeper.agent_uuid7_floor(now() - @lag::interval)) is not true
		       and not exists (select from agent_activity_uncounted u
		                        where u.activity_id < c.counted_upto
		                          and not exists (select from agent_activity_open o where o.activity_id = u.activity_id))
		  from agent_activity_counted c`, postgres.Strict{"lag": lag}).Scan(&idle)
	return idle, err
}

//go:embed count.sql
var countSQL string

// countIn is a pass, in its transaction.
func countIn(ctx context.Context, tx pgx.Tx, most int, lag time.Duration) (counted int, more bool, err error) {
	var locked bool
	err = tx.QueryRow(ctx, `
		select set_config('enable_seqscan', 'off', true) = set_config('jit', 'off', true)
		  from agent_activity_counted c for update skip locked`).Scan(&locked)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil // another process is at it
	} else if err != nil {
		return 0, false, err
	}
	var upto, listedUpto, bound string
	var candidate *string
	// A candidate of a later transaction than any here is of another server: the database was restored from a dump.
	err = tx.QueryRow(ctx, `
		with counted as (
		  select c.counted_upto, c.looked, c.candidate_xid,
		         case when c.candidate_xid < pg_snapshot_xmax(pg_current_snapshot()) then c.candidate end as candidate
		    from agent_activity_counted c)
		select c.counted_upto::text, c.looked::text, c.candidate::text,
		       case when c.candidate is null or c.candidate_xid > pg_snapshot_xmin(pg_current_snapshot()) then c.counted_upto
		            else coalesce((select a.id from agent_activity a where a.id >= c.counted_upto and a.id < c.candidate
		                            order by a.id offset @most::int limit 1), c.candidate) end::text
		  from counted c`, perQuery, postgres.Strict{"most": most}).Scan(&upto, &listedUpto, &candidate, &bound)
	if err != nil {
		return 0, false, err
	}
	var listed int
	err = tx.QueryRow(ctx, countSQL, perQuery, postgres.Strict{
		"counted_upto": upto, "bound": bound, "listed_upto": listedUpto, "most": most,
	}).Scan(&counted, &listed, &listedUpto)
	if err != nil {
		return 0, false, err
	}
	if listed < most {
		listedUpto = noID // the end of the list: begin anew
	}
	more = candidate != nil && upto < bound && bound < *candidate || listed == most
	if candidate != nil && bound == *candidate {
		candidate = nil
	}
	// now() is before the transaction has an id.
	_, err = tx.Exec(ctx, `
		update agent_activity_counted c
		   set counted_upto = @bound::uuid, looked = @listed_upto::uuid, candidate = n.candidate,
		       candidate_xid = case when @candidate::uuid is not null then c.candidate_xid when n.candidate is not null then pg_current_xact_id() end
		  from (select coalesce(@candidate::uuid, (
		                 select h.id from lanekeeper.agent_uuid7_floor(now() - @lag::interval) h (id)
		                  where exists (select from agent_activity a where a.id >= @bound::uuid and a.id < h.id))) as candidate) n`,
		perQuery, postgres.Strict{"bound": bound, "listed_upto": listedUpto, "candidate": candidate, "lag": lag})
	return counted, more, err
}
