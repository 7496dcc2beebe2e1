package lanes

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Lease is a hold of a lane. Its methods may be called from any goroutine.
type Lease struct {
	hold *hold
	ctx  context.Context
	end  context.CancelCauseFunc
	off  bool // lanes are switched off

	mu      sync.Mutex
	settled bool // Release has its answer
	answer  error
}

func newLease(ctx context.Context, h *hold) *Lease {
	l := &Lease{hold: h}
	l.ctx, l.end = leaseContext(ctx, h.lane)
	return l
}

// localLease is what everybody gets while lanes are off.
func localLease(ctx context.Context, k *Keeper, owner Owner, lane string) *Lease {
	l := newLease(ctx, &hold{keeper: k, owner: owner, lane: lane, lost: make(chan struct{})})
	l.off = true
	return l
}

// Lane is the name of the lane.
func (l *Lease) Lane() string { return l.hold.lane }

// Owner is who holds it.
func (l *Lease) Owner() Owner { return l.hold.owner }

// Lender is the execution that the lane was borrowed from, empty for a lane that was free.
func (l *Lease) Lender() string { return l.hold.lender }

// Token is the fencing token: larger than that of every earlier grant of this lane. 0 while lanes are off.
func (l *Lease) Token() int64 { return l.hold.token }

// ExpiresAt is the end of the lease by the database's clock, as of the last renewal. Zero while
// lanes are off.
func (l *Lease) ExpiresAt() time.Time {
	k := l.hold.keeper
	k.mu.Lock()
	defer k.mu.Unlock()
	return l.hold.expires
}

// Context is the acquirer's context, cancelled when the lease is released and, with a cause that is
// ErrLost, when the lane is lost. The loss of a thread's lane cancels nothing.
func (l *Lease) Context() context.Context { return l.ctx }

// Lost is closed when the lane is lost, also a thread's.
func (l *Lease) Lost() <-chan struct{} { return l.hold.lost }

// Fence guards the writes of tx: it returns ErrStale, and has aborted tx, when the lane is no longer held
// under this lease's token. Otherwise nobody can take the lane over before tx ends; renewals pass.
// Call it before the writes.
func (l *Lease) Fence(ctx context.Context, tx postgres.DB) error {
	if l.off {
		return nil
	}
	_, err := tx.Exec(ctx, `select fence_agent_lock(@lane, @token)`,
		postgres.Strict{"lane": l.hold.lane, "token": l.hold.token})
	if postgres.IsCode(err, codeStale) {
		return fmt.Errorf("fence %s: %w: %w", l.hold.lane, ErrStale, err)
	}
	if err != nil {
		return fmt.Errorf("fence %s: %w", l.hold.lane, err)
	}
	return nil
}

// Renew prolongs the lease by its TTL from now. Only lanes that Run does not renew, those of threads, need
// it. ErrLost once the lane is lost or given back; nil also when the row was being changed and the lease goes on as
// it was.
func (l *Lease) Renew(ctx context.Context) error {
	if l.off {
		return nil
	}
	if l.over() {
		return fmt.Errorf("renew %s: %w: it was given back", l.hold.lane, ErrLost)
	}
	if err := l.hold.keeper.renew(ctx, []*hold{l.hold}); err != nil {
		return fmt.Errorf("renew %s: %w", l.hold.lane, err)
	}
	select {
	case <-l.hold.lost:
		return fmt.Errorf("renew %s: %w", l.hold.lane, ErrLost)
	default:
		return nil
	}
}

// over reports that the lease was given back, or forgotten with its owner.
func (l *Lease) over() bool {
	k := l.hold.keeper
	k.mu.Lock()
	defer k.mu.Unlock()
	_, counts := l.hold.leases[l]
	return l.hold.state == gone || l.hold.state != lost && !counts
}

// Release cancels Context and gives the lane back. An inner hold only ends itself. It works with a ctx
// that has ended. When a connection breaks, the database is away or a fenced write is still open it tries again, for
// at most 5 seconds; then it returns the error, and the keeper goes on trying until the lease would have ended
// anyway. It may be called again, and answers the same. ErrLost says that the lane had been lost before, so that the
// work may not have been alone.
func (l *Lease) Release(ctx context.Context) error { return l.ReleaseWithin(ctx, releaseLimit) }

// ReleaseWithin is Release that tries for as long as limit, for a process that ends afterwards.
func (l *Lease) ReleaseWithin(ctx context.Context, limit time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end(context.Canceled)
	if l.settled {
		return l.answer
	}
	if l.off {
		l.settled = true
		l.hold.keeper.log.InfoContext(ctx, "lane released", "lane", l.hold.lane, "owner", l.hold.owner.name)
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	answer, err := l.hold.keeper.leave(ctx, l)
	if err != nil {
		return fmt.Errorf("release %s: %w", l.hold.lane, err)
	}
	l.settled = true
	if answer != nil {
		l.answer = fmt.Errorf("release %s: %w", l.hold.lane, answer)
	}
	return l.answer
}

// key is what a process may hold once: a lane, by an owner.
type key struct{ lane, owner string }

// grant is what the database gave, and when we began to ask.
type grant struct {
	lane    string
	token   int64
	ttl     time.Duration
	before  time.Time // local, read before the statement was sent
	expires time.Time // by the database's clock
	lender  string    // of a lane that was borrowed
	brief   time.Time // local end of a lane that was handed over, which is sooner than its ttl; zero otherwise
}

type state int

const (
	live    state = iota
	closing       // being released: neither renewed nor lost
	lost
	gone // released or forgotten
)

// hold is one lease of the database as this process sees it, shared by the nested Leases of its
// owner. The fields below the line are guarded by Keeper.mu.
type hold struct {
	keeper *Keeper
	owner  Owner
	lane   string
	token  int64
	lender string
	policy policy
	log    context.Context // for log lines: the values of the first acquirer's context
	lost   chan struct{}

	// guarded by Keeper.mu
	state    state
	ttl      time.Duration
	expires  time.Time
	deadline time.Time // local and monotonic
	renewAt  time.Time
	timer    *time.Timer // fires at deadline
	leases   map[*Lease]struct{}

	background bool // its release goes on in the background
}

func (h *hold) key() key { return key{h.lane, h.owner.name} }

// enter turns a grant into a Lease: the first of a new hold, or one more of the hold that it refreshed.
func (k *Keeper) enter(ctx context.Context, owner Owner, g grant) *Lease {
	id := key{g.lane, owner.name}
	k.mu.Lock()
	h := k.held[id]
	after := func() {}
	if h != nil && h.token != g.token {
		after = k.loseLocked(h, "it was granted anew")
		h = nil
	}
	if h == nil {
		h = k.newHold(ctx, owner, g)
		k.held[id] = h
		if k.lanes[g.lane] == nil {
			k.lanes[g.lane] = make(map[*hold]struct{}, 1)
		}
		k.lanes[g.lane][h] = struct{}{}
	}
	h.state = live
	h.ttl = g.ttl
	if g.brief.IsZero() {
		h.extend(g.before, g.ttl, g.expires)
	} else {
		h.expires, h.renewAt = g.expires, time.Now()
	}
	l := newLease(ctx, h)
	h.leases[l] = struct{}{}
	sooner := h.policy.renewed && h.renewAt.Before(k.planned)
	k.mu.Unlock()
	after()
	if sooner {
		k.wakeRun()
	}
	return l
}

func (k *Keeper) newHold(ctx context.Context, owner Owner, g grant) *hold {
	h := &hold{
		keeper: k, owner: owner, lane: g.lane, token: g.token, lender: g.lender, policy: policyOf(g.lane),
		log: context.WithoutCancel(ctx), lost: make(chan struct{}), leases: make(map[*Lease]struct{}),
		deadline: g.before.Add(g.ttl),
	}
	if !g.brief.IsZero() {
		h.deadline = g.brief
	}
	h.timer = time.AfterFunc(time.Until(h.deadline), func() { k.expire(h) })
	return h
}

// extend moves the end of the lease to ttl after before. A moment that lies before the present end is
// of a statement that another has overtaken. Caller holds Keeper.mu.
func (h *hold) extend(before time.Time, ttl time.Duration, expires time.Time) {
	if end := before.Add(ttl); end.After(h.deadline) {
		h.deadline = end
		h.timer.Reset(time.Until(end))
	}
	h.expires = expires
	h.renewAt = before.Add(h.interval())
}

// shorten is for a renewal that was sent with a smaller TTL than the lease has got since.
func (h *hold) shorten(before time.Time, ttl time.Duration) {
	h.deadline = before.Add(ttl)
	h.timer.Reset(time.Until(h.deadline))
	h.renewAt = time.Now()
}

func (h *hold) interval() time.Duration { return min(h.ttl/3, renewEvery) }

// expire runs at the local end of a lease.
func (k *Keeper) expire(h *hold) {
	k.mu.Lock()
	if left := time.Until(h.deadline); left > 0 && h.state == live {
		h.timer.Reset(left)
		k.mu.Unlock()
		return
	}
	after := func() {}
	if h.state == closing { // its release has failed, and now the database has freed it
		k.forget(h)
	} else {
		after = k.loseLocked(h, fmt.Sprintf("it was not renewed within %s", h.ttl))
	}
	k.mu.Unlock()
	after()
}

// loseLocked marks a live hold as lost. The caller holds mu and calls after when it has let go.
func (k *Keeper) loseLocked(h *hold, why string) (after func()) {
	if h.state != live {
		return func() {}
	}
	leases := k.forget(h)
	h.state = lost
	return func() {
		close(h.lost)
		k.observer.LaneLost(h.lane)
		if !h.policy.cancels {
			k.log.InfoContext(h.log, "lane lost", "lane", h.lane, "owner", h.owner.name, "fencing_token", h.token, "reason", why)
			return
		}
		endAll(leases, fmt.Errorf("%w: %s: %s", ErrLost, h.lane, why))
		k.log.ErrorContext(h.log, "lane lost", "lane", h.lane, "owner", h.owner.name, "fencing_token", h.token, "reason", why)
	}
}

// forget takes a hold out of the keeper and returns its leases. The caller holds mu.
func (k *Keeper) forget(h *hold) []*Lease {
	h.state = gone
	h.timer.Stop()
	if k.held[h.key()] == h {
		delete(k.held, h.key())
	}
	delete(k.lanes[h.lane], h)
	if len(k.lanes[h.lane]) == 0 {
		delete(k.lanes, h.lane)
	}
	leases := make([]*Lease, 0, len(h.leases))
	for l := range h.leases {
		leases = append(leases, l)
	}
	return leases
}

func endAll(leases []*Lease, cause error) {
	for _, l := range leases {
		l.end(cause)
	}
}

// leaseContext is where the work of a lease runs.
func leaseContext(ctx context.Context, lane string) (context.Context, context.CancelCauseFunc) {
	return context.WithCancelCause(trace.WithLane(ctx, lane))
}
