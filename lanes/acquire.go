package lanes

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Acquire makes one attempt to acquire lane for a new owner. It does not wait for a holder. If another owner holds the
// lane, it returns a *BusyError, which matches ErrBusy. For an invalid lane or TTL it returns ErrInvalid. Run renews
// the lease until Release. The context of the lease derives from ctx. If ctx ends during the statement, Acquire may
// return a lease with an ended Context, which the caller must release too.
func (k *Keeper) Acquire(ctx context.Context, lane string, opts ...Option) (*Lease, error) {
	return k.AcquireAs(ctx, runOwner(ctx, settingsFor(lane, opts).process), lane, opts...)
}

// AcquireAs is Acquire for the claim of an execution. The owner may acquire a lane repeatedly; the last release frees
// it. If a waiting parent holds the lane and the execution may borrow it, AcquireAs borrows the lane. Lender then names
// the parent, and a release returns the lane.
func (k *Keeper) AcquireAs(ctx context.Context, owner Owner, lane string, opts ...Option) (*Lease, error) {
	try := k.tryBatched
	if owner.claim {
		try = tryExecutionLane
	}
	lease, busy, err := k.attempt(ctx, owner, lane, settingsFor(lane, opts).ttl, try)
	if err != nil {
		return nil, err
	}
	if busy != nil {
		k.log.WarnContext(ctx, "lane busy", "lane", lane, "owner", owner.name, "holder", busy.Holder)
		return nil, busy.busyError(lane)
	}
	return lease, nil
}

// acquireResult is the database's response to an acquire, with the former state of the lane.
type acquireResult struct {
	Acquired      bool
	FencingToken  int64
	ExpiresAt     time.Time
	Holder        string
	Remaining     float64 // seconds until ExpiresAt by the database's clock
	ExpiredHolder string  // holder of the expired lease that was replaced
	ExpiredFor    float64 // seconds since that lease expired
	Lender        string  // execution that lent the lane
	WillLend      bool    // the holder lends the lane when it waits
}

func (r *acquireResult) busyError(lane string) *BusyError {
	e := &BusyError{Lane: lane, Holder: r.Holder, ExpiresAt: r.ExpiresAt, WillLend: r.WillLend}
	if r.Holder == "" || r.Remaining > parkedAfter.Seconds() {
		e.ExpiresAt = time.Time{}
	}
	return e
}

// parkedAfter is longer than any lease. A lane with a longer remaining time is parked.
const parkedAfter = 10 * 365 * 24 * time.Hour

// remaining returns the remaining time of the current lease, at most parkedAfter.
func (r *acquireResult) remaining() time.Duration {
	return time.Duration(math.Min(r.Remaining, parkedAfter.Seconds()) * float64(time.Second))
}

// acquireFunc runs one statement that acquires a lane: tryLane, tryExecutionLane or waiter.tryOrEnqueue.
type acquireFunc func(ctx context.Context, db postgres.DB, lane string, owner Owner,
	ttl time.Duration) (acquireResult, error)

// attempt runs one acquireFunc. It returns a lease, the current holder or an error.
func (k *Keeper) attempt(
	ctx context.Context, owner Owner, lane string, ttl time.Duration, acquire acquireFunc,
) (*Lease, *acquireResult, error) {
	if owner.name == "" {
		return nil, nil, fmt.Errorf("acquire %s: %w: the owner is not a claim of an execution", lane, ErrInvalid)
	}
	if !k.enabled {
		return disabledLease(ctx, k, owner, lane), nil, nil
	}
	id := key{lane, owner.name}
	unlock, err := k.keyed.Lock(ctx, id)
	if err != nil {
		return nil, nil, fmt.Errorf("acquire %s: %w", lane, err)
	}
	defer unlock()
	ttl, nested := k.nestedTTL(id, ttl)
	sentAt := time.Now()
	result, err := k.query(ctx, acquire, lane, owner, ttl)
	switch {
	case isInvalid(err):
		return nil, nil, invalidError("acquire", lane, err)
	case err != nil:
		if !nested {
			k.undoAcquire(ctx, owner, lane, ttl, err)
		}
		return nil, nil, fmt.Errorf("acquire %s: %w", lane, err)
	case !result.Acquired:
		return nil, &result, nil
	}
	lease := k.addGrant(ctx, owner, grant{
		lane: lane, token: result.FencingToken, ttl: ttl, sentAt: sentAt, expires: result.ExpiresAt, lender: result.Lender,
	})
	k.logGrant(ctx, lease, result, nested)
	return lease, nil, nil
}

// query runs a statement. After the end of ctx, it waits up to responseTimeout for the response. Otherwise a lane that
// is granted at that moment would stay held until its lease expires.
func (k *Keeper) query(
	ctx context.Context, acquire acquireFunc, lane string, owner Owner, ttl time.Duration,
) (acquireResult, error) {
	if ctx.Err() != nil {
		return acquireResult{}, context.Cause(ctx)
	}
	queryCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(responseTimeout, func() { cancel(context.Cause(ctx)) })
		context.AfterFunc(queryCtx, func() { timer.Stop() })
	})
	defer stop()
	return acquire(queryCtx, k.db, lane, owner, ttl)
}

// nestedTTL returns the TTL of a hold. A nested hold must not shorten the outer lease.
func (k *Keeper) nestedTTL(id key, ttl time.Duration) (_ time.Duration, nested bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if h := k.held[id]; h != nil && ttl > 0 {
		return max(ttl, h.ttl), true
	}
	return ttl, false
}

func (k *Keeper) logGrant(ctx context.Context, l *Lease, result acquireResult, nested bool) {
	if nested {
		return
	}
	if result.Lender != "" {
		k.log.InfoContext(ctx, "lane inherited", "lane", l.Lane(), "from", result.Lender, "to", l.Owner().name,
			"fencing_token", result.FencingToken)
		return
	}
	if result.ExpiredHolder != "" {
		k.log.WarnContext(ctx, "lane stale, clearing", "lane", l.Lane(), "holder", result.ExpiredHolder,
			"age", age(result.ExpiredFor))
	}
	k.log.InfoContext(ctx, "lane acquired", "lane", l.Lane(), "owner", l.Owner().name,
		"fencing_token", result.FencingToken)
}

// undoAcquire releases the lane that a statement without a response may have acquired, and leaves the queue. After a
// failure it retries in the background. It does nothing for an execution, because the end of the execution releases its
// lanes.
func (k *Keeper) undoAcquire(ctx context.Context, owner Owner, lane string, ttl time.Duration, cause error) {
	var connectErr *pgconn.ConnectError
	if owner.claim || errors.As(cause, &connectErr) || postgres.Unchanged(cause) {
		return
	}
	k.releaseOrphan(ctx, lane, owner, ttl, func(ctx context.Context) error { return leaveQueue(ctx, k.db, lane, owner) })
}

// releaseOrphan releases a lane that has no caller. After a failure it retries in the background.
func (k *Keeper) releaseOrphan(
	ctx context.Context, lane string, owner Owner, ttl time.Duration, release func(ctx context.Context) error,
) {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	err := release(limited)
	if err == nil {
		return
	}
	k.log.WarnContext(ctx, "lane may be held, retrying its release until the lease expires", "lane", lane, "owner",
		owner.name, "error", err)
	if retryable(err) {
		k.retryInBackground(ctx, ttl, func(ctx context.Context) bool {
			err := release(ctx)
			return err == nil || !retryable(err)
		})
	}
}

// acquireRow is a row of acquire_agent_lock or acquire_or_enqueue_agent_lock, with the database's time.
type acquireRow struct {
	Acquired      bool
	FencingToken  int64
	ExpiresAt     time.Time
	Holder        string
	ExpiredHolder string
	ExpiredAt     time.Time
	Now           time.Time
}

// result converts the row. It computes the durations here, because that is cheaper than in SQL.
func (row *acquireRow) result() acquireResult {
	r := acquireResult{
		Acquired: row.Acquired, FencingToken: row.FencingToken, ExpiresAt: row.ExpiresAt, Holder: row.Holder,
		ExpiredHolder: row.ExpiredHolder,
	}
	if row.Holder != "" {
		r.Remaining = row.ExpiresAt.Sub(row.Now).Seconds()
	}
	if row.ExpiredHolder != "" {
		r.ExpiredFor = row.Now.Sub(row.ExpiredAt).Seconds()
	}
	return r
}

// acquireRowColumns are the columns of an acquireRow, in order. test/linearizability reads them by name.
const acquireRowColumns = `acquired, coalesce(fencing_token, 0) as fencing_token,
	coalesce(expires_at, 'epoch') as expires_at, coalesce(locked_by, '') as holder, coalesce(was_holder, '') as was_holder,
	coalesce(was_until, 'epoch') as was_until, clock_timestamp() as now`

// scanAcquireRow scans by position, which is several times cheaper than by name.
func scanAcquireRow(row pgx.CollectableRow) (scanned acquireRow, err error) {
	err = row.Scan(&scanned.Acquired, &scanned.FencingToken, &scanned.ExpiresAt, &scanned.Holder,
		&scanned.ExpiredHolder, &scanned.ExpiredAt, &scanned.Now)
	return scanned, err
}

// tryLane acquires a lane without waiting.
func tryLane(ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration) (acquireResult, error) {
	rows, err := db.Query(ctx, `
		select `+acquireRowColumns+` from lanekeeper.acquire_agent_lock(@lane, @owner, @ttl)`,
		postgres.Strict{"lane": lane, "owner": owner.name, "ttl": seconds(ttl)})
	if err != nil {
		return acquireResult{}, err
	}
	row, err := pgx.CollectExactlyOneRow(rows, scanAcquireRow)
	return row.result(), err
}

// tryExecutionLane is tryLane for the claim of an execution, which may borrow lanes. A claim that is not live is error
// LK001. Executions are locked before lanes, so the owner depends on the fence. The join reads the row as it was before
// the function ran.
func tryExecutionLane(
	ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration,
) (acquireResult, error) {
	rows, err := db.Query(ctx, `
		select a.acquired, coalesce(a.fencing_token, 0) as fencing_token, coalesce(a.expires_at, 'epoch') as expires_at,
		       coalesce(a.locked_by, '') as holder,
		       coalesce(extract(epoch from a.expires_at - clock_timestamp()), 0)::float8 as remaining,
		       coalesce(was.locked_by, '') as expired_holder,
		       coalesce(extract(epoch from clock_timestamp() - was.expires_at), 0)::float8 as expired_for,
		       coalesce(a.lender::text, '') as lender, a.soon as will_lend
		  from (select fence_agent_execution(split_part(@owner, '#', 1)::uuid,
		          split_part(@owner, '#', 2)::bigint) as fenced offset 0) f
		 cross join lateral lanekeeper.acquire_agent_execution_lock(@lane, case when f.fenced then @owner end, @ttl) a
		  left join agent_locks was on a.acquired and was.lane = @lane and was.locked_by <> ''
		        and was.fencing_token < a.fencing_token`,
		postgres.Strict{"lane": lane, "owner": owner.name, "ttl": seconds(ttl)})
	if err != nil {
		return acquireResult{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[acquireResult])
}

// isInvalid reports whether the database rejected an argument.
func isInvalid(err error) bool { return postgres.IsCode(err, codeInvalid, codeBadEncoding) }

// invalidError wraps a rejected argument in ErrInvalid, with the database's message.
func invalidError(verb, lane string, err error) error {
	text := err.Error()
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		text = pgErr.Message
	}
	return fmt.Errorf("%s %.40q: %w: %s", verb, lane, ErrInvalid, text)
}
