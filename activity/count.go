package activity

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// countLimit bounds the rows of one pass, which takes a fraction of a second.
	countLimit = 20_000
	// countLag is how far a pass stays behind the clock. It must exceed the 5 seconds of the trigger
	// agent_activity_written, which lists rows with older ids.
	countLag = 20 * time.Second
	// noID sorts before every id.
	noID = "00000000-0000-0000-0000-000000000000"
)

// Count counts ended rows of the log and reports whether more can be counted now. One call reads at most about 20,000
// new rows and 20,000 that were open or late before. It writes nothing when there is nothing to count or another
// process counts. A pass is one transaction, and blocks no writer of the log.
func Count(ctx context.Context, db postgres.Beginner) (more bool, err error) {
	_, more, err = CountPass(ctx, db, countLimit, countLag)
	return more, err
}

// CountPass is Count with its own limit and lag; the limit applies to scanned and to listed rows. It also returns the
// number of counted rows.
//
// Rows of open transactions are invisible, and may have lower ids than visible rows. So a pass stores an id, the
// candidate, and its own transaction id. Rows below the candidate are counted once no earlier transaction is in
// progress.
func CountPass(
	ctx context.Context, db postgres.Beginner, limit int, lag time.Duration,
) (counted int, more bool, err error) {
	idle, err := isIdle(ctx, db, lag)
	if err != nil || idle {
		return 0, false, wrapCount(err)
	}
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		counted, more, err = countInTx(ctx, tx, limit, lag)
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

// isIdle reports whether there is nothing to count. Most passes end here, without a lock or a write. The order by makes
// the planner use the index of ids.
func isIdle(ctx context.Context, db postgres.DB, lag time.Duration) (idle bool, err error) {
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

// countInTx is a pass in its transaction.
func countInTx(ctx context.Context, tx pgx.Tx, limit int, lag time.Duration) (counted int, more bool, err error) {
	if acquired, err := lockProgress(ctx, tx); err != nil || !acquired {
		return 0, false, err
	}
	p, err := readProgress(ctx, tx, limit)
	if err != nil {
		return 0, false, err
	}
	var listed int
	err = tx.QueryRow(ctx, countSQL, customPlan, postgres.Strict{
		"counted_upto": p.countedUpTo, "bound": p.bound, "listed_upto": p.checkedUpTo, "most": limit,
	}).Scan(&counted, &listed, &p.checkedUpTo)
	if err != nil {
		return 0, false, err
	}
	if listed < limit {
		p.checkedUpTo = noID // this was the end of the list, so the next pass starts over
	}
	more = p.candidate != nil && p.countedUpTo < p.bound && p.bound < *p.candidate || listed == limit
	return counted, more, p.save(ctx, tx, lag)
}

// lockProgress locks the progress, and sets the planner for the transaction. It returns false while another process
// counts.
func lockProgress(ctx context.Context, tx pgx.Tx) (acquired bool, err error) {
	err = tx.QueryRow(ctx, `
		select set_config('enable_seqscan', 'off', true) = set_config('jit', 'off', true)
		  from agent_activity_counted c for update skip locked`).Scan(&acquired)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

// progress is the row of agent_activity_counted, with the bound of a pass.
type progress struct {
	countedUpTo string  // the first uncounted id, apart from listed rows
	checkedUpTo string  // the last examined row of agent_activity_uncounted
	candidate   *string // see CountPass; nil for none
	bound       string  // the pass counts the rows below
}

// readProgress reads the progress, and sets bound: the candidate, or a lower id after limit rows. Without a safe
// candidate, the pass counts only listed rows. A candidate of a future transaction is from another server: the database
// was restored from a dump. readProgress ignores it.
func readProgress(ctx context.Context, tx pgx.Tx, limit int) (p progress, err error) {
	err = tx.QueryRow(ctx, `
		with counted as (
		  select c.counted_upto, c.checked_upto, c.candidate_xid,
		         case when c.candidate_xid < pg_snapshot_xmax(pg_current_snapshot()) then c.candidate end as candidate
		    from agent_activity_counted c)
		select c.counted_upto::text, c.checked_upto::text, c.candidate::text,
		       case when c.candidate is null or c.candidate_xid > pg_snapshot_xmin(pg_current_snapshot())
		            then c.counted_upto
		            else coalesce((select a.id from agent_activity a where a.id >= c.counted_upto and a.id < c.candidate
		                            order by a.id offset @limit::int limit 1), c.candidate) end::text
		  from counted c`,
		customPlan, postgres.Strict{"limit": limit}).Scan(&p.countedUpTo, &p.checkedUpTo, &p.candidate, &p.bound)
	return p, err
}

// save stores the progress after a pass. If the pass has reached the candidate, save chooses the next candidate: the id
// of the time lag ago, which precedes now(). now() precedes this transaction's id.
func (p progress) save(ctx context.Context, tx pgx.Tx, lag time.Duration) error {
	candidate := p.candidate
	if candidate != nil && p.bound == *candidate {
		candidate = nil
	}
	_, err := tx.Exec(ctx, `
		update agent_activity_counted c
		   set counted_upto = @bound::uuid, checked_upto = @checked_upto::uuid, candidate = n.candidate,
		       candidate_xid = case when @candidate::uuid is not null then c.candidate_xid
		                            when n.candidate is not null then pg_current_xact_id() end
		  from (select coalesce(@candidate::uuid, (
		                 select h.id from lanekeeper.agent_uuid7_floor(now() - @lag::interval) h (id)
		                  where exists (select from agent_activity a where a.id >= @bound::uuid and a.id < h.id)))
		                    as candidate) n`,
		customPlan,
		postgres.Strict{"bound": p.bound, "checked_upto": p.checkedUpTo, "candidate": candidate, "lag": lag})
	return err
}
