package lanes

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	channel              = "agent_lanes"          // channel for releases; the payload is a lane or a handover
	queuePlaceTTL        = 5 * time.Second        // maximum pause between two attempts of a waiter in the queue
	pollInterval         = time.Second            // pause without a notification
	promisedPollInterval = 150 * time.Millisecond // pause while a free lane is reserved for an earlier waiter
	lockedPollInterval   = 30 * time.Millisecond  // pause after a locked row, and after the first attempt
	maxHandover          = 15 * time.Second       // time from the last attempt to the end of a handover, at most
)

// AcquireWait waits for lane as a new owner. Waiters acquire a lane in order of arrival. AcquireWait returns a
// *BusyError after its timeout (see WithTimeout), or the cause when ctx ends. In both cases it leaves the queue.
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
		freed, cancel := k.listener.SubscribeTo(channel, w.isRelevant)
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
	sentAt        time.Time     // local time before the last attempt with a response
	dbTime        time.Time     // the database's clock in that response
}

// wait tries to acquire the lane until timeout or the end of ctx. The first try enqueues the waiter; later tries follow
// a notification, an expiry or a hand-over. The error of a timeout is a [BusyError] with the holder.
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
		if handedOver != nil && w.keeper.runCount.Load() > 0 && w.isLive(*handedOver) {
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

// isRelevant reports whether a notification is about this lane and not a handover to another owner. This saves one
// query per irrelevant notification.
func (w *waiter) isRelevant(payload string) bool {
	return payload == w.lane || strings.HasPrefix(payload, w.lane+"\t"+w.owner.name+"\t")
}

// pause waits for the next attempt. It returns early with the handover if the lane is handed over to this waiter. retry
// is false after the deadline or the end of ctx.
func (w *waiter) pause(
	ctx context.Context, d time.Duration, deadline <-chan time.Time,
) (received *handover, retry bool) {
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

// nextAttempt returns the pause before the next attempt without a notification. The pause before the second attempt is
// short, because a release during the first attempt may not have seen this waiter in the queue.
func (w *waiter) nextAttempt(busy *acquireResult, attempts int) time.Duration {
	switch remaining := busy.remaining(); {
	case busy.Holder == "", attempts == 1:
		return lockedPollInterval/2 + rand.N(lockedPollInterval)
	case remaining <= 0:
		return promisedPollInterval/2 + rand.N(promisedPollInterval)
	default:
		return min(remaining+rand.N(lockedPollInterval), pollInterval*3/4+rand.N(pollInterval/2))
	}
}

// leaveQueue leaves the queue, and releases a lane that was just handed over. It works with an ended ctx. After a
// failure, the place in the queue expires after queuePlaceTTL.
func (w *waiter) leaveQueue(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	if err := leaveQueue(ctx, w.keeper.db, w.lane, w.owner); err != nil {
		w.keeper.log.WarnContext(ctx, "place in the queue not removed, it expires", "lane", w.lane, "error", err)
	}
}

// leaveQueue leaves the queue of a lane, and then releases a lane that was handed over meanwhile. For the claim of an
// execution it releases nothing, because the claim gets no handover and may hold the lane already.
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

// tryOrEnqueue acquires the lane, or queues for it if it is busy. A listening waiter may get a handover. The claim of
// an execution must be live (LK001), and gets no handover, because it may have ended by then.
func (w *waiter) tryOrEnqueue(
	ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration,
) (acquireResult, error) {
	sentAt := time.Now()
	rows, err := db.Query(ctx, `
		select `+acquireRowColumns+`
		  from (select case when @claim then fence_agent_execution(split_part(@owner, '#', 1)::uuid,
		          split_part(@owner, '#', 2)::bigint) end as fenced offset 0) f
		 cross join lateral lanekeeper.acquire_or_enqueue_agent_lock(
		   @lane, case when f.fenced is not false then @owner end, @ttl, @place_ttl, @accepts_handover)`,
		postgres.Strict{
			"claim": owner.claim, "lane": lane, "owner": owner.name, "ttl": seconds(ttl),
			"place_ttl": seconds(queuePlaceTTL), "accepts_handover": w.notifications != nil && !owner.claim,
		})
	if err != nil {
		return acquireResult{}, err
	}
	row, err := pgx.CollectExactlyOneRow(rows, scanAcquireRow)
	if err == nil {
		w.sentAt, w.dbTime = sentAt, row.Now
	}
	return row.result(), err
}

// handover is the notification of a release that handed the lane to a waiter.
type handover struct {
	lane, owner string
	token       int64
	until       time.Time // by the database's clock
}

// parseHandover parses the notification of a handover. ok is false for other notifications.
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

// IsHandover reports whether a notification on agent_lanes is a handover to a waiter, so the lane was never free.
func IsHandover(payload string) bool {
	_, ok := parseHandover(payload)
	return ok
}

// localEnd returns the earliest possible end of a handed-over lease by the local clock. It counts from before the last
// attempt, whose response had the database's time.
func (w *waiter) localEnd(h handover) time.Time { return w.sentAt.Add(h.until.Sub(w.dbTime)) }

// isLive reports whether a handed-over lease has not ended. Any login of the database can send a notification, so a
// handover for longer than maxHandover counts as forged.
func (w *waiter) isLive(h handover) bool {
	return h.until.Sub(w.dbTime) <= maxHandover && time.Now().Before(w.localEnd(h))
}

// accept returns a lease for a handed-over lane. The lease is short, and Run renews it at once. Lanes of threads, which
// Run does not renew, are never handed over.
func (w *waiter) accept(ctx context.Context, h handover) *Lease {
	lease := w.keeper.addGrant(ctx, w.owner, grant{
		lane: w.lane, token: h.token, ttl: w.ttl, sentAt: w.sentAt, expires: h.until, localEnd: w.localEnd(h),
	})
	w.keeper.logGrant(ctx, lease, acquireResult{FencingToken: h.token}, false)
	return lease
}
