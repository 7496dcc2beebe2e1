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
	channel    = "agent_lanes"          // a release notifies it when somebody waits, with the lane, or with whom it was handed to
	queuePlace = 5 * time.Second        // how long the queue keeps a place between two looks
	pollEvery  = time.Second            // when nothing wakes us
	pollSoon   = 150 * time.Millisecond // when the lane is free, but promised to who came before us
	pollAgain  = 30 * time.Millisecond  // when the row was being changed, and once after the first look
)

// AcquireWait takes lane when its turn comes, as an owner of its own. Waiters are served in the
// order in which they came. It gives up with a *BusyError after its patience (see WithPatience),
// with ctx's cause when ctx ends, and leaves the queue either way.
func (k *Keeper) AcquireWait(ctx context.Context, lane string, opts ...Option) (*Lease, error) {
	return k.AwaitAs(ctx, runOwner(ctx, settingsFor(lane, opts).process), lane, opts...)
}

// AwaitAs is AcquireWait for the claim of an execution.
func (k *Keeper) AwaitAs(ctx context.Context, owner Owner, lane string, opts ...Option) (_ *Lease, err error) {
	s := settingsFor(lane, opts)
	w := waiter{keeper: k, owner: owner, lane: lane, ttl: s.ttl}
	began := time.Now()
	defer func() { k.observer.LaneWaited(lane, time.Since(began), err == nil) }()
	if k.listener != nil && k.enabled {
		freed, cancel := k.listener.SubscribeTo(channel, w.concerned)
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
	freed  <-chan string // what is notified of lanes; nil without a listener
	before time.Time     // the last look that was answered was asked after this
	now    time.Time     // what the database's clock said then
}

func (w *waiter) wait(ctx context.Context, patience time.Duration) (*Lease, error) {
	enough := time.NewTimer(patience)
	defer enough.Stop()
	for looks := 1; ; looks++ {
		lease, busy, err := w.keeper.look(ctx, w.owner, w.lane, w.ttl, w.ask)
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
		got, goOn := w.pause(ctx, w.nextLook(busy, looks), enough.C)
		if got != nil && w.keeper.renewing() && time.Now().Before(w.end(*got)) {
			return w.accept(ctx, *got), nil
		}
		if !goOn {
			w.leave(ctx)
			if ctx.Err() != nil {
				return nil, fmt.Errorf("await %s: %w", w.lane, context.Cause(ctx))
			}
			return nil, busy.err(w.lane)
		}
	}
}

// concerned reports whether a notification is about the lane, and not of a hand-over to another: who looks at each
// change of each lane writes as often, and has no time to read.
func (w *waiter) concerned(payload string) bool {
	return payload == w.lane || strings.HasPrefix(payload, w.lane+"\t"+w.owner.name+"\t")
}

// pause returns the lane when it is handed over, and true when it is time to look again.
func (w *waiter) pause(ctx context.Context, d time.Duration, enough <-chan time.Time) (got *handed, goOn bool) {
	poll := time.NewTimer(d)
	defer poll.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, false
		case <-enough:
			return nil, false
		case <-poll.C:
			return nil, true
		case payload := <-w.freed:
			if payload == w.lane || payload == "" {
				return nil, true
			}
			if h, ok := readHanded(payload); ok && h.lane == w.lane && h.owner == w.owner.name {
				return &h, true
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

// leave gives the place in the queue up, and the lane if it was handed over just then, also when ctx has ended. A place
// that could not be given up is void after queuePlace.
func (w *waiter) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseLimit)
	defer cancel()
	if err := quitQueue(ctx, w.keeper.db, w.lane, w.owner); err != nil {
		w.keeper.log.WarnContext(ctx, "place in the queue not given up, it ends by itself", "lane", w.lane, "error", err)
	}
}

// quitQueue leaves the queue of a lane, after a hand-over that is under way, and then releases what was handed over.
// The claim of an execution is handed nothing, and may hold the lane: it only leaves.
func quitQueue(ctx context.Context, db postgres.DB, lane string, owner Owner) error {
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

// ask asks for the lane and keeps a place in its queue when it is busy. Who listens may be handed the lane, but for the
// claims of executions, which may be over by then.
func (w *waiter) ask(ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration) (answer, error) {
	before := time.Now()
	rows, err := db.Query(ctx, `
		select acquired, coalesce(fencing_token, 0) as fencing_token, coalesce(expires_at, 'epoch') as expires_at, coalesce(locked_by, '') as holder,
		       coalesce(was_holder, '') as was_holder, coalesce(was_until, 'epoch') as was_until, clock_timestamp() as now
		  from lanekeeper.acquire_or_enqueue_agent_lock(@lane, @owner, @ttl, @place, @handed)`,
		postgres.Strict{
			"lane": lane, "owner": owner.name, "ttl": seconds(ttl), "place": seconds(queuePlace), "handed": w.freed != nil && !owner.claim,
		})
	if err != nil {
		return answer{}, err
	}
	t, err := pgx.CollectExactlyOneRow(rows, readTold)
	if err == nil {
		w.before, w.now = before, t.Now
	}
	return t.answer(), err
}

// handed is what a release notifies that has given the lane to who waited.
type handed struct {
	lane, owner string
	token       int64
	until       time.Time // by the database's clock
}

// readHanded reads a notification; false for one of another kind.
func readHanded(payload string) (h handed, ok bool) {
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
	return handed{parts[0], parts[1], token, time.UnixMicro(until).UTC()}, true
}

// HandedOver reports whether a notification on agent_lanes says that a lane has gone from its holder to who waited
// for it, so that it was never free.
func HandedOver(payload string) bool {
	_, ok := readHanded(payload)
	return ok
}

// end is when a lease that was handed over ends at the latest, by the local clock: it counts from before the last
// look, which told what the database's clock said later.
func (w *waiter) end(got handed) time.Time { return w.before.Add(got.until.Sub(w.now)) }

// accept makes a lease of a lane that was handed over. It is a short one, which Run renews to its length at once;
// without Run the next look does that. Lanes that Run does not renew, those of threads, are not handed over.
func (w *waiter) accept(ctx context.Context, got handed) *Lease {
	lease := w.keeper.enter(ctx, w.owner, grant{
		lane: w.lane, token: got.token, ttl: w.ttl, before: w.before, expires: got.until, brief: w.end(got),
	})
	w.keeper.logGrant(ctx, lease, answer{FencingToken: got.token}, false)
	return lease
}
