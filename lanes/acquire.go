package lanes

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Acquire makes one attempt to acquire lane for a new owner. It never waits. A held lane is a *BusyError, which
// matches ErrBusy; an invalid lane or TTL is ErrInvalid. Run renews the lease until Release. The context of the lease
// derives from ctx. If ctx ends during the statement, Acquire may still return a lease with an ended Context: release
// it like any other.
func (k *Keeper) Acquire(ctx context.Context, lane string, opts ...Option) (*Lease, error) {
	return k.AcquireAs(ctx, runOwner(ctx, settingsFor(lane, opts).process), lane, opts...)
}

// AcquireAs is Acquire for the claim of an execution. A lane that the owner already holds is granted again: holds are
// counted, and the last release frees the lane. A lane of a waiting parent is borrowed if the execution may borrow
// it. Lender then names the parent, and a release returns the lane.
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

// acquireResult is the database's answer to an acquire, with the lane's former state.
type acquireResult struct {
	Acquired     bool
	FencingToken int64
	ExpiresAt    time.Time
	Holder       string
	Remaining    float64 // seconds until ExpiresAt by the database's clock
	WasHolder    string  // holder of the expired lease that was replaced
	StaleFor     float64 // seconds since that lease expired
	Lender       string  // execution that lent the lane
	WillLend     bool    // the holder lends it when it waits
}

func (a *acquireResult) busyError(lane string) *BusyError {
	e := &BusyError{Lane: lane, Holder: a.Holder, ExpiresAt: a.ExpiresAt, WillLend: a.WillLend}
	if a.Holder == "" || a.Remaining > parkedAfter.Seconds() {
		e.ExpiresAt = time.Time{}
	}
	return e
}

// parkedAfter is longer than any lease: a longer remaining time means parked.
const parkedAfter = 10 * 365 * 24 * time.Hour

// remaining is the time left of the present lease, at most parkedAfter.
func (a *acquireResult) remaining() time.Duration {
	return time.Duration(math.Min(a.Remaining, parkedAfter.Seconds()) * float64(time.Second))
}

// acquireFunc is one statement that acquires a lane: tryLane, tryExecutionLane or waiter.tryOrEnqueue.
type acquireFunc func(ctx context.Context, db postgres.DB, lane string, owner Owner,
	ttl time.Duration) (acquireResult, error)

// attempt runs one statement. It returns a lease, or the holder, or an error.
func (k *Keeper) attempt(
	ctx context.Context, owner Owner, lane string, ttl time.Duration, acquire acquireFunc,
) (*Lease, *acquireResult, error) {
	if owner.name == "" {
		return nil, nil, fmt.Errorf("acquire %s: %w: the owner is not a claim of an execution", lane, ErrInvalid)
	}
	if !k.enabled {
		return unlockedLease(ctx, k, owner, lane), nil, nil
	}
	id := key{lane, owner.name}
	unlock, err := k.keyed.Lock(ctx, id)
	if err != nil {
		return nil, nil, fmt.Errorf("acquire %s: %w", lane, err)
	}
	defer unlock()
	ttl, nested := k.nestedTTL(id, ttl)
	sentAt := time.Now()
	a, err := k.query(ctx, acquire, lane, owner, ttl)
	switch {
	case isInvalid(err):
		return nil, nil, invalidError("acquire", lane, err)
	case err != nil:
		if !nested {
			k.undoAcquire(ctx, owner, lane, ttl, err)
		}
		return nil, nil, fmt.Errorf("acquire %s: %w", lane, err)
	case !a.Acquired:
		return nil, &a, nil
	}
	lease := k.addGrant(ctx, owner, grant{
		lane: lane, token: a.FencingToken, ttl: ttl, sentAt: sentAt, expires: a.ExpiresAt, lender: a.Lender,
	})
	k.logGrant(ctx, lease, a, nested)
	return lease, nil, nil
}

// query runs a statement and waits for its answer a while after ctx has ended. Otherwise a lane granted at that
// moment would stay held until its lease expires.
func (k *Keeper) query(
	ctx context.Context, acquire acquireFunc, lane string, owner Owner, ttl time.Duration,
) (acquireResult, error) {
	if ctx.Err() != nil {
		return acquireResult{}, context.Cause(ctx)
	}
	queryCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(answerTimeout, func() { cancel(context.Cause(ctx)) })
		context.AfterFunc(queryCtx, func() { timer.Stop() })
	})
	defer stop()
	return acquire(queryCtx, k.db, lane, owner, ttl)
}

// nestedTTL keeps a nested hold from shortening the outer lease.
func (k *Keeper) nestedTTL(id key, ttl time.Duration) (_ time.Duration, nested bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if h := k.held[id]; h != nil && ttl > 0 {
		return max(ttl, h.ttl), true
	}
	return ttl, false
}

func (k *Keeper) logGrant(ctx context.Context, l *Lease, a acquireResult, nested bool) {
	if nested {
		return
	}
	if a.Lender != "" {
		k.log.InfoContext(ctx, "lane inherited", "lane", l.Lane(), "from", a.Lender, "to", l.Owner().name,
			"fencing_token", a.FencingToken)
		return
	}
	if a.WasHolder != "" {
		k.log.WarnContext(ctx, "lane stale, clearing", "lane", l.Lane(), "holder", a.WasHolder, "age", age(a.StaleFor))
	}
	k.log.InfoContext(ctx, "lane acquired", "lane", l.Lane(), "owner", l.Owner().name, "fencing_token", a.FencingToken)
}

// undoAcquire releases what a statement without an answer may have acquired, and leaves the queue. A failure
// continues in the background. Lanes of an execution stay: they end with it.
func (k *Keeper) undoAcquire(ctx context.Context, owner Owner, lane string, ttl time.Duration, cause error) {
	var connectErr *pgconn.ConnectError
	if owner.claim || errors.As(cause, &connectErr) || postgres.Unchanged(cause) {
		return
	}
	k.releaseOrphan(ctx, lane, owner, ttl, func(ctx context.Context) error { return leaveQueue(ctx, k.db, lane, owner) })
}

// releaseOrphan releases a lane without a caller, in the background after a failure.
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
	Acquired     bool
	FencingToken int64
	ExpiresAt    time.Time
	Holder       string
	WasHolder    string
	WasUntil     time.Time
	Now          time.Time
}

// result computes the durations here, which is cheaper than in SQL.
func (t *acquireRow) result() acquireResult {
	a := acquireResult{
		Acquired: t.Acquired, FencingToken: t.FencingToken, ExpiresAt: t.ExpiresAt, Holder: t.Holder,
		WasHolder: t.WasHolder,
	}
	if t.Holder != "" {
		a.Remaining = t.ExpiresAt.Sub(t.Now).Seconds()
	}
	if t.WasHolder != "" {
		a.StaleFor = t.Now.Sub(t.WasUntil).Seconds()
	}
	return a
}

// scanAcquireRow scans by position, which is several times cheaper than by name.
func scanAcquireRow(row pgx.CollectableRow) (t acquireRow, err error) {
	err = row.Scan(&t.Acquired, &t.FencingToken, &t.ExpiresAt, &t.Holder, &t.WasHolder, &t.WasUntil, &t.Now)
	return t, err
}

// tryLane acquires a lane without waiting.
func tryLane(ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration) (acquireResult, error) {
	rows, err := db.Query(ctx, `
		select acquired, coalesce(fencing_token, 0) as fencing_token, coalesce(expires_at, 'epoch') as expires_at,
		  coalesce(locked_by, '') as holder,
		       coalesce(was_holder, '') as was_holder, coalesce(was_until, 'epoch') as was_until, clock_timestamp() as now
		  from lanekeeper.acquire_agent_lock(@lane, @owner, @ttl)`,
		postgres.Strict{"lane": lane, "owner": owner.name, "ttl": seconds(ttl)})
	if err != nil {
		return acquireResult{}, err
	}
	t, err := pgx.CollectExactlyOneRow(rows, scanAcquireRow)
	return t.result(), err
}

// tryExecutionLane is tryLane for the claim of an execution, which may borrow and must be live (LK001). Executions are
// locked before lanes, so the owner depends on the fence. The join reads the row as it was before the function ran.
func tryExecutionLane(
	ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration,
) (acquireResult, error) {
	rows, err := db.Query(ctx, `
		select a.acquired, coalesce(a.fencing_token, 0) as fencing_token, coalesce(a.expires_at, 'epoch') as expires_at,
		       coalesce(a.locked_by, '') as holder,
		       coalesce(extract(epoch from a.expires_at - clock_timestamp()), 0)::float8 as remaining,
		       coalesce(was.locked_by, '') as was_holder,
		       coalesce(extract(epoch from clock_timestamp() - was.expires_at), 0)::float8 as stale_for,
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

// isInvalid reports an argument that the database rejects.
func isInvalid(err error) bool { return postgres.IsCode(err, codeInvalid, codeNoText) }

// invalidError wraps a rejected argument in ErrInvalid, with the database's message.
func invalidError(verb, lane string, err error) error {
	text := err.Error()
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		text = pgErr.Message
	}
	return fmt.Errorf("%s %.40q: %w: %s", verb, lane, ErrInvalid, text)
}

const (
	channel       = "agent_lanes"          // releases notify it when a waiter queues: with the lane, or with the handover
	queuePlaceTTL = 5 * time.Second        // lifetime of a place in the queue between two attempts
	pollInterval  = time.Second            // without a notification
	pollPromised  = 150 * time.Millisecond // when the lane is free but promised to an earlier waiter
	pollLocked    = 30 * time.Millisecond  // when the row was locked, and once after the first attempt
)

// AcquireWait queues for lane as a new owner. Waiters are served in order of arrival. It returns a *BusyError after
// its timeout (see WithTimeout), or the cause of ctx when that ends, and leaves the queue either way.
func (k *Keeper) AcquireWait(ctx context.Context, lane string, opts ...Option) (*Lease, error) {
	return k.AcquireWaitAs(ctx, runOwner(ctx, settingsFor(lane, opts).process), lane, opts...)
}

// AcquireWaitAs is AcquireWait for the claim of an execution.
func (k *Keeper) AcquireWaitAs(ctx context.Context, owner Owner, lane string, opts ...Option) (_ *Lease, err error) {
	s := settingsFor(lane, opts)
	w := waiter{keeper: k, owner: owner, lane: lane, ttl: s.ttl}
	start := time.Now()
	defer func() { k.observer.LaneWaited(lane, time.Since(start), err == nil) }()
	if k.listener != nil && k.enabled {
		freed, cancel := k.listener.SubscribeTo(channel, w.concerns)
		defer cancel()
		w.notifications = freed
	}
	return w.wait(ctx, s.timeout)
}

type waiter struct {
	keeper        *Keeper
	owner         Owner
	lane          string
	ttl           time.Duration
	notifications <-chan string // of lanes; nil without a listener
	sentAt        time.Time     // before the last answered attempt was sent
	dbTime        time.Time     // the database's clock in that answer
}

func (w *waiter) wait(ctx context.Context, timeout time.Duration) (*Lease, error) {
	deadline := time.NewTimer(timeout)
	defer deadline.Stop()
	for attempts := 1; ; attempts++ {
		lease, busy, err := w.keeper.attempt(ctx, w.owner, w.lane, w.ttl, w.tryOrEnqueue)
		if err != nil {
			if attempts > 1 {
				w.leaveQueue(ctx)
			}
			return nil, err
		}
		if lease != nil {
			return lease, nil
		}
		if attempts == 1 {
			w.keeper.log.WarnContext(ctx, "lane busy", "lane", w.lane, "owner", w.owner.name, "holder",
				busy.Holder, "waiting", true)
		}
		handedOver, retry := w.pause(ctx, w.nextAttempt(busy, attempts), deadline.C)
		if handedOver != nil && w.keeper.renewing() && time.Now().Before(w.localEnd(*handedOver)) {
			return w.accept(ctx, *handedOver), nil
		}
		if !retry {
			w.leaveQueue(ctx)
			if ctx.Err() != nil {
				return nil, fmt.Errorf("await %s: %w", w.lane, context.Cause(ctx))
			}
			return nil, busy.busyError(w.lane)
		}
	}
}

// concerns reports whether a notification is about this lane and not a handover to another owner. The filter here
// saves one query per unrelated notification.
func (w *waiter) concerns(payload string) bool {
	return payload == w.lane || strings.HasPrefix(payload, w.lane+"\t"+w.owner.name+"\t")
}

// pause returns the lane when it is handed over, and true when it is time for another attempt.
func (w *waiter) pause(ctx context.Context, d time.Duration, deadline <-chan time.Time) (got *handover, retry bool) {
	poll := time.NewTimer(d)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, false
		case <-deadline:
			return nil, false
		case <-poll.C:
			return nil, true
		case payload := <-w.notifications:
			if payload == w.lane || payload == "" {
				return nil, true
			}
			if h, ok := parseHandover(payload); ok && h.lane == w.lane && h.owner == w.owner.name {
				return &h, true
			}
		}
	}
}

// nextAttempt is the pause without a notification. The second attempt is quick: a release during the first one may
// have missed our place in the queue.
func (w *waiter) nextAttempt(busy *acquireResult, attempts int) time.Duration {
	switch remaining := busy.remaining(); {
	case busy.Holder == "", attempts == 1:
		return pollLocked/2 + rand.N(pollLocked)
	case remaining <= 0:
		return pollPromised/2 + rand.N(pollPromised)
	default:
		return min(remaining+rand.N(pollLocked), pollInterval*3/4+rand.N(pollInterval/2))
	}
}

// leaveQueue gives up the place in the queue, and a lane that was just handed over, also when ctx has ended.
// Otherwise the place expires after queuePlaceTTL.
func (w *waiter) leaveQueue(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	if err := leaveQueue(ctx, w.keeper.db, w.lane, w.owner); err != nil {
		w.keeper.log.WarnContext(ctx, "place in the queue not removed, it expires", "lane", w.lane, "error", err)
	}
}

// leaveQueue leaves the queue of a lane, and then releases a lane that was handed over meanwhile. The claim of an
// execution gets no handover and may hold the lane: it only leaves.
func leaveQueue(ctx context.Context, db postgres.DB, lane string, owner Owner) error {
	args := postgres.Strict{"lane": lane, "owner": owner.name}
	if owner.claim {
		_, err := db.Exec(ctx, `select leave_agent_lock_queue(@lane, @owner)`, args)
		return err
	}
	var released *string
	return db.QueryRow(ctx, `
		select lanekeeper.release_agent_lock(@lane, @owner, null, true) from leave_agent_lock_queue(@lane, @owner)`,
		args).Scan(&released)
}

// tryOrEnqueue acquires the lane, or queues for it when it is busy. A listening waiter may get a handover. The claim of
// an execution must be live (LK001), and gets no handover, because it may have ended by then.
func (w *waiter) tryOrEnqueue(
	ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration,
) (acquireResult, error) {
	sentAt := time.Now()
	rows, err := db.Query(ctx, `
		select acquired, coalesce(fencing_token, 0) as fencing_token, coalesce(expires_at, 'epoch') as expires_at,
		  coalesce(locked_by, '') as holder,
		       coalesce(was_holder, '') as was_holder, coalesce(was_until, 'epoch') as was_until, clock_timestamp() as now
		  from (select case when @claim then fence_agent_execution(split_part(@owner, '#', 1)::uuid,
		          split_part(@owner, '#', 2)::bigint) end as fenced offset 0) f
		 cross join lateral lanekeeper.acquire_or_enqueue_agent_lock(@lane, case when f.fenced is not false then @owner end,
		         @ttl, @place, @handed)`,
		postgres.Strict{
			"claim": owner.claim,
			"lane":  lane, "owner": owner.name, "ttl": seconds(ttl), "place": seconds(queuePlaceTTL),
			"handed": w.notifications != nil && !owner.claim,
		})
	if err != nil {
		return acquireResult{}, err
	}
	t, err := pgx.CollectExactlyOneRow(rows, scanAcquireRow)
	if err == nil {
		w.sentAt, w.dbTime = sentAt, t.Now
	}
	return t.result(), err
}

// handover is the notification of a release that handed the lane to a waiter.
type handover struct {
	lane, owner string
	token       int64
	until       time.Time // by the database's clock
}

// parseHandover parses a notification; false for another kind.
func parseHandover(payload string) (h handover, ok bool) {
	parts := strings.Split(payload, "\t")
	if len(parts) != 4 {
		return h, false
	}
	token, err := strconv.ParseInt(parts[2], 10, 64)
	if err != nil {
		return h, false
	}
	until, err := strconv.ParseInt(parts[3], 10, 64)
	if err != nil {
		return h, false
	}
	return handover{parts[0], parts[1], token, time.UnixMicro(until).UTC()}, true
}

// IsHandover reports a notification on agent_lanes that a lane went from its holder to a waiter, so it was never
// free.
func IsHandover(payload string) bool {
	_, ok := parseHandover(payload)
	return ok
}

// localEnd bounds the end of a handed-over lease by the local clock: it counts from before the last attempt, whose
// answer had the database's time.
func (w *waiter) localEnd(h handover) time.Time { return w.sentAt.Add(h.until.Sub(w.dbTime)) }

// accept makes a lease of a handed-over lane. The lease is short until Run renews it at once; without Run the next
// attempt does. Lanes that Run does not renew, those of threads, are never handed over.
func (w *waiter) accept(ctx context.Context, h handover) *Lease {
	lease := w.keeper.addGrant(ctx, w.owner, grant{
		lane: w.lane, token: h.token, ttl: w.ttl, sentAt: w.sentAt, expires: h.until, localEnd: w.localEnd(h),
	})
	w.keeper.logGrant(ctx, lease, acquireResult{FencingToken: h.token}, false)
	return lease
}
