package executions

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
	// countLimit bounds the executions of one pass of Count.
	countLimit = 20_000
	// countLag is the minimum age of the executions that Count reads. Count misses an execution whose inserting
	// transaction stays open for longer.
	countLag = time.Minute
	// noExecution is less than every id.
	noExecution = "00000000-0000-0000-0000-000000000000"
)

//go:embed count.sql
var countSQL string

// Count adds ended executions to agent_execution_counts and agent_execution_durations. One call reads at most about
// 20,000 new executions and 20,000 that were open before. It reports whether more can be counted now. It writes nothing
// if there is nothing to count or another process counts. A pass is one transaction and blocks no writer. Count finds
// executions by id, so the completion of an execution needs no extra write. A pass that counts also deletes up to 5,000
// hourly rows of each table that are older than the hour_counts period of agent_retention. Daily rows stay.
func Count(ctx context.Context, db postgres.Beginner) (more bool, err error) {
	_, more, err = CountPass(ctx, db, countLimit, countLag)
	return more, err
}

// CountPass is Count with its own limit and lag. It also returns the number of counted executions.
func CountPass(
	ctx context.Context, db postgres.Beginner, limit int, lag time.Duration,
) (counted int, more bool, err error) {
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		counted, more, err = countInTx(ctx, tx, limit, lag)
		return err
	})
	if err != nil {
		err = fmt.Errorf("count executions: %w", err)
	}
	return counted, more, err
}

// countInTx is CountPass in a transaction.
func countInTx(ctx context.Context, tx pgx.Tx, limit int, lag time.Duration) (counted int, more bool, err error) {
	var countedUpTo, checkedUpTo string
	err = tx.QueryRow(ctx, `
		select c.counted_upto::text, c.checked_upto::text
		  from agent_executions_counted c for update skip locked`).Scan(&countedUpTo, &checkedUpTo)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil // another process counts
	} else if err != nil {
		return 0, false, err
	}
	var bound, end string
	var idle bool
	err = tx.QueryRow(ctx, `
		select coalesce((select e.id from agent_executions e where e.id >= @counted_upto::uuid and e.id < f.id
		                  order by e.id offset @limit::int limit 1), greatest(f.id, @counted_upto::uuid))::text,
		       f.id::text,
		       not exists (select from agent_executions e where e.id >= @counted_upto::uuid and e.id < f.id)
		         and not exists (select from agent_executions_uncounted)
		  from lanekeeper.agent_uuid7_floor(now() - @lag::interval) f (id)`, pgx.QueryExecModeCacheDescribe,
		postgres.Strict{"counted_upto": countedUpTo, "limit": limit, "lag": lag}).Scan(&bound, &end, &idle)
	if err != nil || idle {
		return 0, false, err
	}
	var listed int
	var lastChecked string
	err = tx.QueryRow(ctx, countSQL, pgx.QueryExecModeCacheDescribe, postgres.Strict{
		"counted_upto": countedUpTo, "bound": bound, "checked_upto": checkedUpTo, "limit": limit,
	}).Scan(&counted, &listed, &lastChecked)
	if err != nil {
		return 0, false, err
	}
	if listed < limit {
		lastChecked = noExecution // this was the end of the list, so the next pass starts over
	}
	_, err = tx.Exec(ctx, `
		update agent_executions_counted set counted_upto = @bound::uuid, checked_upto = @checked_upto::uuid`,
		postgres.Strict{"bound": bound, "checked_upto": lastChecked})
	if err != nil {
		return 0, false, err
	}
	_, err = tx.Exec(ctx, `
		with durations as (
		  delete from agent_execution_durations d
		   where d.ctid = any (array(
		           select o.ctid from agent_execution_durations o, agent_retention r
		            where r.kind = 'hour_counts' and o.span = 'hour' and o.start < date_trunc('hour', now() - r.keep)
		            limit 5000)))
		delete from agent_execution_counts c
		 where c.ctid = any (array(
		         select o.ctid from agent_execution_counts o, agent_retention r
		          where r.kind = 'hour_counts' and o.span = 'hour' and o.start < date_trunc('hour', now() - r.keep)
		          limit 5000))`)
	if err != nil {
		return 0, false, err
	}
	return counted, bound < end, nil
}
