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

// Acquire tries once to take lane, as an owner of its own. It never waits: a lane that another owner holds
// is a *BusyError, which matches ErrBusy; a bad lane or TTL is ErrInvalid. The lease runs until
// Release, for as long as Run renews it. Context of the lease derives from ctx. A ctx that ends while the
// database answers may still get the lease, whose Context is over then: release it like any other.
func (k *Keeper) Acquire(ctx context.Context, lane string, opts ...Option) (*Lease, error) {
	return k.AcquireAs(ctx, runOwner(ctx, settingsFor(lane, opts).process), lane, opts...)
}

// AcquireAs is Acquire for the claim of an execution. What the owner holds already is
// granted again: the holds are counted, and the lane is free when the last is released. A lane that a parent of
// the execution holds, which waits for it, is borrowed if the execution may; Lender says so, and a release gives it
// back.
func (k *Keeper) AcquireAs(ctx context.Context, owner Owner, lane string, opts ...Option) (*Lease, error) {
	try := k.tryTogether
	if owner.claim {
		try = takeLane
	}
	lease, busy, err := k.look(ctx, owner, lane, settingsFor(lane, opts).ttl, try)
	if err != nil {
		return nil, err
	}
	if busy != nil {
		k.log.WarnContext(ctx, "lane busy", "lane", lane, "owner", owner.name, "holder", busy.Holder)
		return nil, busy.err(lane)
	}
	return lease, nil
}

// answer is what the database says to who asks for a lane, with what the lane was before.
type answer struct {
	Acquired     bool
	FencingToken int64
	ExpiresAt    time.Time
	Holder       string
	Remaining    float64 // seconds until ExpiresAt by the database's clock
	WasHolder    string  // whose expired lease was taken over
	StaleFor     float64 // seconds since that expired
	Lender       string  // whose lane was borrowed
	Soon         bool    // it will be lent when its holder waits
}

func (a *answer) err(lane string) *BusyError {
	e := &BusyError{Lane: lane, Holder: a.Holder, ExpiresAt: a.ExpiresAt, Soon: a.Soon}
	if a.Holder == "" || a.Remaining > parkedFrom.Seconds() {
		e.ExpiresAt = time.Time{}
	}
	return e
}

// parkedFrom is longer than any lease: what lasts that long is parked.
const parkedFrom = 10 * 365 * 24 * time.Hour

// remaining is how long the present lease lasts, at most parkedFrom.
func (a *answer) remaining() time.Duration {
	return time.Duration(math.Min(a.Remaining, parkedFrom.Seconds()) * float64(time.Second))
}

// ask is one statement about a lane: tryLane, takeLane or waiter.ask.
type ask func(ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration) (answer, error)

// look asks once. It returns a lease, or who is in the way, or an error.
func (k *Keeper) look(ctx context.Context, owner Owner, lane string, ttl time.Duration, ask ask) (*Lease, *answer, error) {
	if owner.name == "" {
		return nil, nil, fmt.Errorf("acquire %s: %w: the owner is not a claim of an execution", lane, ErrInvalid)
	}
	if !k.enabled {
		return localLease(ctx, k, owner, lane), nil, nil
	}
	id := key{lane, owner.name}
	end, err := k.turns.Lock(ctx, id)
	if err != nil {
		return nil, nil, fmt.Errorf("acquire %s: %w", lane, err)
	}
	defer end()
	ttl, nested := k.longest(id, ttl)
	before := time.Now()
	a, err := k.answer(ctx, ask, lane, owner, ttl)
	switch {
	case refused(err):
		return nil, nil, invalid("acquire", lane, err)
	case err != nil:
		if !nested {
			k.undo(ctx, owner, lane, ttl, err)
		}
		return nil, nil, fmt.Errorf("acquire %s: %w", lane, err)
	case !a.Acquired:
		return nil, &a, nil
	}
	lease := k.enter(ctx, owner, grant{
		lane: lane, token: a.FencingToken, ttl: ttl, before: before, expires: a.ExpiresAt, lender: a.Lender,
	})
	k.logGrant(ctx, lease, a, nested)
	return lease, nil, nil
}

// answer sends a statement and stays for its answer a while after ctx has ended: a lane that is granted
// to a caller who went away in that moment would be held by nobody until its lease ends.
func (k *Keeper) answer(ctx context.Context, ask ask, lane string, owner Owner, ttl time.Duration) (answer, error) {
	if ctx.Err() != nil {
		return answer{}, context.Cause(ctx)
	}
	patient, leave := context.WithCancelCause(context.WithoutCancel(ctx))
	defer leave(nil)
	stop := context.AfterFunc(ctx, func() {
		enough := time.AfterFunc(answerLimit, func() { leave(context.Cause(ctx)) })
		context.AfterFunc(patient, func() { enough.Stop() })
	})
	defer stop()
	return ask(patient, k.db, lane, owner, ttl)
}

// longest keeps a nested hold from shortening the lease of the outer one.
func (k *Keeper) longest(id key, ttl time.Duration) (_ time.Duration, nested bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if h := k.held[id]; h != nil && ttl > 0 {
		return max(ttl, h.ttl), true
	}
	return ttl, false
}

func (k *Keeper) logGrant(ctx context.Context, l *Lease, a answer, nested bool) {
	if nested {
		return
	}
	if a.Lender != "" {
		k.log.InfoContext(ctx, "lane inherited", "lane", l.Lane(), "from", a.Lender, "to", l.Owner().name, "fencing_token", a.FencingToken)
		return
	}
	if a.WasHolder != "" {
		k.log.WarnContext(ctx, "lane stale, clearing", "lane", l.Lane(), "holder", a.WasHolder, "age", age(a.StaleFor))
	}
	k.log.InfoContext(ctx, "lane acquired", "lane", l.Lane(), "owner", l.Owner().name, "fencing_token", a.FencingToken)
}

// undo frees what a statement may have taken whose answer did not arrive, and leaves the queue; what fails goes on in
// the background. The lanes of an execution are left: they end with it.
func (k *Keeper) undo(ctx context.Context, owner Owner, lane string, ttl time.Duration, cause error) {
	var never *pgconn.ConnectError
	if owner.claim || errors.As(cause, &never) || postgres.Unchanged(cause) {
		return
	}
	k.giveUp(ctx, lane, owner, ttl, func(ctx context.Context) error { return quitQueue(ctx, k.db, lane, owner) })
}

// giveUp frees a lane of which no caller knows, and goes on in the background when that fails.
func (k *Keeper) giveUp(ctx context.Context, lane string, owner Owner, ttl time.Duration, free func(ctx context.Context) error) {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseLimit)
	defer cancel()
	err := free(limited)
	if err == nil {
		return
	}
	k.log.WarnContext(ctx, "lane may be held, trying to free it until its lease ends", "lane", lane, "owner", owner.name, "error", err)
	if worthRetrying(err) {
		k.inBackground(ctx, ttl, func(ctx context.Context) bool {
			err := free(ctx)
			return err == nil || !worthRetrying(err)
		})
	}
}

// told is a row of acquire_agent_lock or acquire_or_enqueue_agent_lock, and what the database's clock said then.
type told struct {
	Acquired     bool
	FencingToken int64
	ExpiresAt    time.Time
	Holder       string
	WasHolder    string
	WasUntil     time.Time
	Now          time.Time
}

// answer reckons with the times here, which costs less than in the statement.
func (t *told) answer() answer {
	a := answer{Acquired: t.Acquired, FencingToken: t.FencingToken, ExpiresAt: t.ExpiresAt, Holder: t.Holder, WasHolder: t.WasHolder}
	if t.Holder != "" {
		a.Remaining = t.ExpiresAt.Sub(t.Now).Seconds()
	}
	if t.WasHolder != "" {
		a.StaleFor = t.Now.Sub(t.WasUntil).Seconds()
	}
	return a
}

// readTold reads by place: finding the columns by name costs several times as much.
func readTold(row pgx.CollectableRow) (t told, err error) {
	err = row.Scan(&t.Acquired, &t.FencingToken, &t.ExpiresAt, &t.Holder, &t.WasHolder, &t.WasUntil, &t.Now)
	return t, err
}

// tryLane asks for a lane without waiting.
func tryLane(ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration) (answer, error) {
	rows, err := db.Query(ctx, `
		select acquired, coalesce(fencing_token, 0) as fencing_token, coalesce(expires_at, 'epoch') as expires_at, coalesce(locked_by, '') as holder,
		       coalesce(was_holder, '') as was_holder, coalesce(was_until, 'epoch') as was_until, clock_timestamp() as now
		  from lanekeeper.acquire_agent_lock(@lane, @owner, @ttl)`,
		postgres.Strict{"lane": lane, "owner": owner.name, "ttl": seconds(ttl)})
	if err != nil {
		return answer{}, err
	}
	t, err := pgx.CollectExactlyOneRow(rows, readTold)
	return t.answer(), err
}

// takeLane is tryLane for the claim of an execution, which may borrow. The join reads the row as it was before the
// function ran.
func takeLane(ctx context.Context, db postgres.DB, lane string, owner Owner, ttl time.Duration) (answer, error) {
	rows, err := db.Query(ctx, `
		select a.acquired, coalesce(a.fencing_token, 0) as fencing_token, coalesce(a.expires_at, 'epoch') as expires_at,
		       coalesce(a.locked_by, '') as holder,
		       coalesce(extract(epoch from a.expires_at - clock_timestamp()), 0)::float8 as remaining,
		       coalesce(was.locked_by, '') as was_holder,
		       coalesce(extract(epoch from clock_timestamp() - was.expires_at), 0)::float8 as stale_for,
		       coalesce(a.lender::text, '') as lender, a.soon
		  from lanekeeper.acquire_agent_execution_lock(@lane, @owner, @ttl) a
		  left join agent_locks was on a.acquired and was.lane = @lane and was.locked_by <> ''
		        and was.fencing_token < a.fencing_token`,
		postgres.Strict{"lane": lane, "owner": owner.name, "ttl": seconds(ttl)})
	if err != nil {
		return answer{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[answer])
}

// refused reports that the database refuses what it was given.
func refused(err error) bool { return postgres.IsCode(err, codeInvalid, codeNoText) }

// invalid makes ErrInvalid of an error that is refused, with the database's words.
func invalid(verb, lane string, err error) error {
	text := err.Error()
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		text = pgErr.Message
	}
	return fmt.Errorf("%s %.40q: %w: %s", verb, lane, ErrInvalid, text)
}

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
