package lanes

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	channel    = "agent_lanes"          // a release notifies it, with the lane, when somebody waits
	queuePlace = 5 * time.Second        // how long the queue keeps a place between two looks
	pollEvery  = time.Second            // when nothing wakes us
	pollSoon   = 150 * time.Millisecond // when the lane is free, but promised to who came before us
	pollAgain  = 30 * time.Millisecond  // when the row was being changed, and once after the first look
)

// AcquireWait takes lane when its turn comes, as an owner of its own. Waiters are served in the
// order in which they came. It gives up with a *BusyError after its patience (see WithPatience),
// with ctx's cause when ctx ends, and leaves the queue either way.
func (k *Keeper) AcquireWait(ctx context.Context, lane string, opts ...Option) (*Lease, error) {
	return k.AwaitAs(ctx, runOwner(ctx), lane, opts...)
}

// AwaitAs is AcquireWait for the claim of an execution.
func (k *Keeper) AwaitAs(ctx context.Context, owner Owner, lane string, opts ...Option) (_ *Lease, err error) {
	s := settingsFor(lane, opts)
	w := waiter{keeper: k, owner: owner, lane: lane, ttl: s.ttl}
	began := time.Now()
	defer func() { k.observer.LaneWaited(lane, time.Since(began), err == nil) }()
	if k.listener != nil && k.enabled {
		freed, cancel := k.listener.Subscribe(channel)
		defer cancel()
		w.freed = freed
	}
	return w.wait(ctx, s.patience)
}

type waiter struct {
	keeper *Keeper
	owner  Owner
	lane   string
	ttl    time.Duration
	freed  <-chan string // lanes that were released; nil without a listener
}

func (w *waiter) wait(ctx context.Context, patience time.Duration) (*Lease, error) {
	enough := time.NewTimer(patience)
	defer enough.Stop()
	for looks := 1; ; looks++ {
		lease, busy, err := w.keeper.look(ctx, w.owner, w.lane, w.ttl, awaitLane)
		if err != nil {
			if looks > 1 {
				w.leave(ctx)
			}
			return nil, err
		}
		if lease != nil {
			return lease, nil
		}
		if looks == 1 {
			w.keeper.log.WarnContext(ctx, "lane busy", "lane", w.lane, "owner", w.owner.name, "holder", busy.Holder, "waiting", true)
		}
		if !w.pause(ctx, w.nextLook(busy, looks), enough.C) {
			w.leave(ctx)
			if ctx.Err() != nil {
				return nil, fmt.Errorf("await %s: %w", w.lane, context.Cause(ctx))
			}
			return nil, busy.err(w.lane)
		}
	}
}

// pause returns true when it is time to look again.
func (w *waiter) pause(ctx context.Context, d time.Duration, enough <-chan time.Time) bool {
	poll := time.NewTimer(d)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-enough:
			return false
		case <-poll.C:
			return true
		case lane := <-w.freed:
			if lane == w.lane || lane == "" {
				return true
			}
		}
	}
}

// nextLook is when to look without being woken. The quick second look is for a release that was under way
// during the first, too early to see our mark and too late for us to see it.
func (w *waiter) nextLook(busy *answer, looks int) time.Duration {
	switch left := busy.remaining(); {
	case busy.Holder == "", looks == 1:
		return pollAgain/2 + rand.N(pollAgain)
	case left <= 0:
		return pollSoon/2 + rand.N(pollSoon)
	default:
		return min(left+rand.N(pollAgain), pollEvery*3/4+rand.N(pollEvery/2))
	}
}

// leave gives the place in the queue up, also when ctx has ended. A place that could not be
// given up is void after queuePlace.
func (w *waiter) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseLimit)
	defer cancel()
	_, err := w.keeper.db.Exec(ctx, `select leave_agent_lock_queue(@lane, @owner)`,
		postgres.Strict{"lane": w.lane, "owner": w.owner.name})
	if err != nil {
		w.keeper.log.WarnContext(ctx, "place in the queue not given up, it ends by itself", "lane", w.lane, "error", err)
	}
}

// awaitLane asks for a lane and keeps a place in its queue when it is busy.
func awaitLane(ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration) (answer, error) {
	rows, err := db.Query(ctx, `
		select a.acquired, coalesce(a.fencing_token, 0) as fencing_token, coalesce(a.expires_at, 'epoch') as expires_at,
		       coalesce(a.locked_by, '') as holder,
		       coalesce(extract(epoch from a.expires_at - clock_timestamp()), 0)::float8 as remaining,
		       coalesce(was.locked_by, '') as was_holder,
		       coalesce(extract(epoch from clock_timestamp() - was.expires_at), 0)::float8 as stale_for,
		       '' as lender, false as soon
		  from await_agent_lock(@lane, @owner, @ttl, @place) a
		  left join agent_locks was on a.acquired and was.lane = @lane and was.locked_by <> ''
		        and was.fencing_token < a.fencing_token`,
		postgres.Strict{"lane": lane, "owner": owner.name, "ttl": seconds(ttl), "place": seconds(queuePlace)})
	if err != nil {
		return answer{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[answer])
}
