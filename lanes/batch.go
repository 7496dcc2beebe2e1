package lanes

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/batch"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// acquireRequest is one acquire of a batch.
type acquireRequest struct {
	lane  string
	owner Owner
	ttl   time.Duration
}

// releaseRequest is one release of a batch.
type releaseRequest struct {
	lane  string
	owner Owner
	token int64
}

// tryBatched is tryLane in a batch of concurrent acquires. Claims of executions use tryExecutionLane instead.
func (k *Keeper) tryBatched(
	ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration,
) (acquireResult, error) {
	return k.acquires.Do(ctx, acquireRequest{lane, owner, ttl},
		func() (acquireResult, error) { return tryLane(ctx, db, lane, owner, ttl) })
}

// numberedRow is the response to one acquire of a batch. n counts from 1.
type numberedRow struct {
	n int64
	acquireRow
}

func scanNumberedRow(row pgx.CollectableRow) (scanned numberedRow, err error) {
	err = row.Scan(&scanned.n, &scanned.Acquired, &scanned.FencingToken, &scanned.ExpiresAt, &scanned.Holder,
		&scanned.ExpiredHolder, &scanned.ExpiredAt, &scanned.Now)
	return scanned, err
}

// tryBatch acquires several lanes, of different owners, in one commit.
func tryBatch(ctx context.Context, db postgres.DB, requests []acquireRequest) ([]batch.Result[acquireResult], error) {
	var lanes, owners []string
	var ttls []int32
	for _, r := range requests {
		lanes, owners, ttls = append(lanes, r.lane), append(owners, r.owner.name), append(ttls, seconds(r.ttl))
	}
	rows, err := db.Query(ctx, `
		select a.n, a.acquired, coalesce(a.fencing_token, 0) as fencing_token, coalesce(a.expires_at, 'epoch') as expires_at,
		       coalesce(a.locked_by, '') as holder, coalesce(a.was_holder, '') as was_holder,
		       coalesce(a.was_until, 'epoch') as was_until, clock_timestamp() as now
		  from lanekeeper.acquire_agent_locks(@lanes::text[], @owners::text[], @ttls::int[]) a`,
		postgres.Strict{"lanes": lanes, "owners": owners, "ttls": ttls})
	if err != nil {
		return nil, err
	}
	numbered, err := pgx.CollectRows(rows, scanNumberedRow)
	if err != nil {
		return nil, err
	}
	results := batch.AllSkipped[acquireResult](len(requests))
	for _, row := range numbered {
		results[row.n-1] = batch.Result[acquireResult]{Value: row.result()}
	}
	return results, nil
}

// releaseLate releases a lane that was granted after its caller had left.
func (k *Keeper) releaseLate(r acquireRequest, result acquireResult) {
	k.mu.Lock()
	nested := k.held[key{r.lane, r.owner.name}] != nil
	k.mu.Unlock()
	if !result.Acquired || nested {
		return
	}
	k.releaseOrphan(context.Background(), r.lane, r.owner, r.ttl, func(ctx context.Context) error {
		_, err := releaseLane(ctx, k.db, releaseRequest{r.lane, r.owner, result.FencingToken})
		return err
	})
}

// releaseResult is the response to a release.
type releaseResult struct {
	released  bool
	successor string // the waiter that got the lane
}

// releaseBatched is releaseLane in a batch of concurrent releases.
func (k *Keeper) releaseBatched(ctx context.Context, r releaseRequest) (releaseResult, error) {
	single := func() (releaseResult, error) { return releaseLane(ctx, k.db, r) }
	if r.owner.claim {
		return single()
	}
	return k.releases.Do(ctx, r, single)
}

// releaseLane releases one lane. It waits about a second for a fenced write under its token, and then returns
// ErrBlocked. A release without a handover does not wait for the disk. So a server crash within a second may restore
// the hold of the former owner until the lease expires, which is safe. The statement is the whole transaction. A grant
// is always durable, with everything that was committed before it.
func releaseLane(ctx context.Context, db postgres.DB, r releaseRequest) (releaseResult, error) {
	var payload *string
	err := db.QueryRow(ctx, `
		select r.handover,
		       set_config('synchronous_commit',
		         case r.handover when '' then 'off' else current_setting('synchronous_commit') end, true)
		  from lanekeeper.release_agent_lock(@lane, @owner, @token, true) r (handover)`,
		postgres.Strict{"lane": r.lane, "owner": r.owner.name, "token": r.token}).Scan(&payload, nil)
	if payload == nil || err != nil {
		return releaseResult{}, asBlocked(err)
	}
	return parseRelease(*payload), nil
}

// parseRelease parses the handover of a release.
func parseRelease(payload string) releaseResult {
	h, _ := parseHandover(payload)
	return releaseResult{released: true, successor: h.owner}
}

// releaseRow is a row of releaseBatch.
type releaseRow struct {
	N        int64
	Handover string // the waiter that got the lane
	Mode     string // of the commit
}

// releaseBatch is releaseLane for several lanes. It never waits, and skips blocked lanes.
func releaseBatch(
	ctx context.Context, db postgres.DB, requests []releaseRequest,
) ([]batch.Result[releaseResult], error) {
	var lanes, owners []string
	var tokens []int64
	for _, r := range requests {
		lanes, owners, tokens = append(lanes, r.lane), append(owners, r.owner.name), append(tokens, r.token)
	}
	rows, err := db.Query(ctx, `
		with released as materialized (
		  select w.n, r.handover
		    from unnest(@lanes::text[], @owners::text[], @tokens::bigint[]) with ordinality w (lane, owner, token, n)
		   cross join lateral lanekeeper.release_agent_lock(w.lane, w.owner, w.token, true, false) r (handover)
		   where r.handover is not null)
		select r.n, r.handover,
		       set_config('synchronous_commit',
		         case when h.any_handover then current_setting('synchronous_commit') else 'off' end, true)
		  from released r
		 cross join (select bool_or(o.handover <> '') as any_handover from released o) h`,
		postgres.Strict{"lanes": lanes, "owners": owners, "tokens": tokens})
	if err != nil {
		return nil, err
	}
	released, err := pgx.CollectRows(rows, pgx.RowToStructByPos[releaseRow])
	if err != nil {
		return nil, err
	}
	results := batch.AllSkipped[releaseResult](len(requests))
	for _, row := range released {
		results[row.N-1] = batch.Result[releaseResult]{Value: parseRelease(row.Handover)}
	}
	return results, nil
}
