package lanes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Expire clears lanes whose lease expired at least ten seconds ago, and logs them. One call reads up to 1,000 held
// lanes in the order of their names, starting after a name. It returns the name for the next call: empty to begin
// again. It skips lanes of threads, which the delivery of messages clears, and lent lanes, which [Prune] returns. It
// also deletes places in queues that expired more than a minute ago. It does nothing while lanes are off.
func (k *Keeper) Expire(ctx context.Context, after string) (next string, err error) {
	if !k.enabled {
		return "", nil
	}
	next, err = k.clearExpired(ctx, after)
	if err != nil {
		return "", fmt.Errorf("clear expired lanes: %w", err)
	}
	return next, nil
}

const (
	// expireBatch bounds the held lanes that one Expire reads.
	expireBatch = 1000
	// expireAfter is the time from the end of a lease until Expire clears its lane.
	expireAfter = 10 * time.Second
)

// clearExpired deletes waiters that expired a minute ago, and releases lanes that expired expireAfter ago. It skips the
// lanes of threads, parked lanes and those with loans. It reads at most expireBatch held lanes after the name after;
// next is where the following call continues, "" for the beginning.
func (k *Keeper) clearExpired(ctx context.Context, after string) (next string, err error) {
	_, err = k.db.Exec(ctx, `
		delete from agent_lock_waiters w
		 where w.ctid = any (array(
		   select x.ctid from agent_lock_waiters x
		    where x.expires_at < statement_timestamp() - interval '1 minute' for update skip locked))`)
	if err != nil {
		return "", err
	}
	// The scan is by name, because every renewal would have to write an index of the expiry.
	rows, err := k.db.Query(ctx, `
		select l.lane from agent_locks l
		 where l.locked_by <> '' and l.lane > @after
		 order by l.lane limit @max_lanes`,
		postgres.Strict{"after": after, "max_lanes": expireBatch})
	held, err := postgres.Collect(rows, err, "list held lanes", pgx.RowTo[string])
	if err != nil || len(held) == 0 {
		return "", err
	}
	rows, err = k.db.Query(ctx, `
		with expired as materialized (
		  select l.lane, l.locked_by, l.execution_id, l.expires_at from agent_locks l
		   where l.lane = any (@held::text[]) and l.locked_by <> ''
		     and l.expires_at <= clock_timestamp() - make_interval(secs => @min_age)
		     and not l.parked and l.lane not like 'thread:%'
		     and not exists (select from agent_lock_loans n where n.lane = l.lane)
		   order by l.lane for update of l skip locked)
		select e.lane, e.locked_by as holder, coalesce(e.execution_id::text, '') as execution_id,
		       extract(epoch from clock_timestamp() - e.expires_at)::float8 as expired_for
		  from expired e
		 cross join lateral lanekeeper.return_agent_lock(e.lane, null, 'expired')`,
		postgres.Strict{"held": held, "min_age": expireAfter.Seconds()})
	if err != nil {
		return "", err
	}
	type expiredLane struct {
		Lane, Holder, ExecutionID string
		ExpiredFor                float64
	}
	cleared, err := pgx.CollectRows(rows, pgx.RowToStructByName[expiredLane])
	if err != nil {
		return "", err
	}
	for _, lane := range cleared {
		k.log.WarnContext(ctx, "lane stale, clearing", "lane", lane.Lane, "holder", lane.Holder,
			"execution_id", lane.ExecutionID, "age", age(lane.ExpiredFor))
	}
	if len(held) < expireBatch {
		return "", nil
	}
	return held[expireBatch-1], nil
}

// pruneBatch bounds the lanes of one statement of Prune.
const pruneBatch = 1000

// Prune returns up to 1,000 borrowed lanes whose lease has expired, and deletes lanes that were free for a time. Later
// tokens of a deleted lane are still larger, because tokens derive from the clock.
func Prune(ctx context.Context, db postgres.DB, free time.Duration) error {
	if free < 0 {
		return fmt.Errorf("prune lanes that were free for %s: %w: give 0 or more", free, ErrInvalid)
	}
	_, returnErr := db.Exec(ctx, `
		select count(lanekeeper.return_agent_lock(l.lane))
		  from (select l.lane from agent_locks l
		         where l.expires_at <= statement_timestamp()
		           and exists (select from agent_lock_loans n where n.lane = l.lane)
		         order by l.lane limit @limit for update skip locked) l`,
		postgres.Strict{"limit": pruneBatch})
	var deleteErr error
	last := ""
	for deleted := pruneBatch; deleted == pruneBatch && deleteErr == nil; {
		deleteErr = db.QueryRow(ctx, `
			with old as (
			  select l.lane, l.execution_id, l.fencing_token, l.locked_at, l.expires_at from agent_locks l
			   where l.lane > @last and l.expires_at < statement_timestamp() - make_interval(secs => @free)
			     and not exists (select from agent_lock_loans n where n.lane = l.lane)
			   order by l.lane limit @limit for update skip locked),
			held as (
			  insert into agent_lane_holds (lane, execution_id, fencing_token, held_from, held_until, ended)
			  select o.lane, o.execution_id, o.fencing_token, o.locked_at, o.expires_at, 'expired' from old o
			   where o.execution_id is not null
			  on conflict do nothing),
			gone as (delete from agent_locks l using old where l.lane = old.lane returning l.lane)
			select count(*), coalesce(max(lane), '') from gone`,
			postgres.Strict{"last": last, "free": free.Seconds(), "limit": pruneBatch}).Scan(&deleted, &last)
	}
	if err := errors.Join(returnErr, deleteErr); err != nil {
		return fmt.Errorf("prune lanes: %w", err)
	}
	return nil
}

// age formats seconds for a log line.
func age(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Round(time.Millisecond).String()
}
