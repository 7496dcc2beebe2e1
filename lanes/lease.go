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
	hold     *hold
	ctx      context.Context
	cancel   context.CancelCauseFunc
	disabled bool // lanes are off

	mu         sync.Mutex
	released   bool // Release has its result
	releaseErr error
}

func newLease(ctx context.Context, h *hold) *Lease {
	l := &Lease{hold: h}
	l.ctx, l.cancel = context.WithCancelCause(trace.WithLane(ctx, h.lane))
	return l
}

// disabledLease returns a lease while lanes are off.
func disabledLease(ctx context.Context, k *Keeper, owner Owner, lane string) *Lease {
	l := newLease(ctx, &hold{keeper: k, owner: owner, lane: lane, lost: make(chan struct{})})
	l.disabled = true
	return l
}

// Lane returns the name of the lane.
func (l *Lease) Lane() string { return l.hold.lane }

// Owner returns the holder.
func (l *Lease) Owner() Owner { return l.hold.owner }

// Lender returns the execution that lent the lane; empty if the lane is not borrowed.
func (l *Lease) Lender() string { return l.hold.lender }

// Token returns the fencing token. It is larger than the tokens of all earlier grants of this lane; 0 while lanes are
// off.
func (l *Lease) Token() int64 { return l.hold.token }

// ExpiresAt returns the expiry by the database's clock as of the last renewal; zero while lanes are off.
func (l *Lease) ExpiresAt() time.Time {
	k := l.hold.keeper
	k.mu.Lock()
	defer k.mu.Unlock()
	return l.hold.expires
}

// Context returns a context that derives from the acquirer's. The release of the lease cancels it. The loss of the lane
// cancels it with cause ErrLost, except for the lane of a thread.
func (l *Lease) Context() context.Context { return l.ctx }

// Lost returns a channel that is closed when the lane is lost, also for the lane of a thread.
func (l *Lease) Lost() <-chan struct{} { return l.hold.lost }

// Fence protects the writes of tx; call it before them. If the lane is no longer held under this token, Fence returns
// ErrStale and tx is aborted. Otherwise no other owner can acquire the lane before tx ends, but renewals succeed.
func (l *Lease) Fence(ctx context.Context, tx postgres.DB) error {
	if l.disabled {
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

// Renew extends the lease to its TTL from now. Only lanes of threads need it, because Run does not renew them. It
// returns ErrLost for a lost or released lane. If the row is locked, it returns nil without a change of the lease.
func (l *Lease) Renew(ctx context.Context) error {
	if l.disabled {
		return nil
	}
	if l.hasEnded() {
		return fmt.Errorf("renew %s: %w: it was released", l.hold.lane, ErrLost)
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

// hasEnded reports whether the lease was released, or dropped with its owner.
func (l *Lease) hasEnded() bool {
	k := l.hold.keeper
	k.mu.Lock()
	defer k.mu.Unlock()
	_, attached := l.hold.leases[l]
	return l.hold.state == released || l.hold.state != lost && !attached
}

// Release cancels Context and releases the lane. For a nested hold, the lane remains held. Release works with an ended
// ctx. It retries for at most 5 seconds after a broken connection, while the database is unavailable, and during fenced
// writes. Then it returns the error, and the keeper retries until the lease would have expired. It does not retry after
// a permanent error, such as one in the statement. After a success or ErrLost, a repeated call returns the same result.
// ErrLost means that the lane was lost before, so the work may have overlapped with that of another owner.
func (l *Lease) Release(ctx context.Context) error { return l.ReleaseWithin(ctx, releaseTimeout) }

// ReleaseWithin is Release with a limit for the retries. Use it if the process ends afterwards.
func (l *Lease) ReleaseWithin(ctx context.Context, limit time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cancel(context.Canceled)
	if l.released {
		return l.releaseErr
	}
	if l.disabled {
		l.released = true
		l.hold.keeper.log.InfoContext(ctx, "lane released", "lane", l.hold.lane, "owner", l.hold.owner.name)
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	lossErr, err := l.hold.keeper.releaseLease(ctx, l)
	if err != nil {
		return fmt.Errorf("release %s: %w", l.hold.lane, err)
	}
	l.released = true
	if lossErr != nil {
		l.releaseErr = fmt.Errorf("release %s: %w", l.hold.lane, lossErr)
	}
	return l.releaseErr
}

// key identifies a hold of this process: a lane and its owner.
type key struct{ lane, owner string }

// grant is a granted lane, with the local time before the statement.
type grant struct {
	lane     string
	token    int64
	ttl      time.Duration
	sentAt   time.Time // local, before the statement was sent
	expires  time.Time // by the database's clock
	lender   string    // of a borrowed lane
	localEnd time.Time // local end of a handed-over lease, sooner than its ttl; zero otherwise
}

type state int

const (
	live      state = iota
	releasing       // cannot be renewed or lost
	lost
	released // or dropped
)

// hold is one database lease in this process, shared by the nested Leases of its owner.
type hold struct {
	keeper *Keeper
	owner  Owner
	lane   string
	token  int64
	lender string
	policy policy
	logCtx context.Context // values of the first acquirer's context, for log lines
	lost   chan struct{}

	// guarded by Keeper.mu
	state    state
	ttl      time.Duration
	expires  time.Time
	deadline time.Time // local and monotonic
	renewAt  time.Time
	timer    *time.Timer // fires at deadline
	leases   map[*Lease]struct{}

	background bool // its release continues in the background
	uncertain  bool // an attempt without a response may have released the lane
}

func (h *hold) key() key { return key{h.lane, h.owner.name} }

// addGrant returns a Lease for a grant. If the owner holds the lane already, the grant extends that hold.
func (k *Keeper) addGrant(ctx context.Context, owner Owner, g grant) *Lease {
	id := key{g.lane, owner.name}
	k.mu.Lock()
	h := k.held[id]
	notify := func() {}
	if h != nil && h.token != g.token {
		notify = k.loseLocked(h, "it was granted again")
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
	h.state, h.uncertain = live, false
	h.ttl = g.ttl
	if g.localEnd.IsZero() {
		h.extend(g.sentAt, g.ttl, g.expires)
	} else {
		h.expires, h.renewAt = g.expires, time.Now()
	}
	l := newLease(ctx, h)
	h.leases[l] = struct{}{}
	sooner := h.policy.renewed && h.renewAt.Before(k.nextRenewal)
	k.mu.Unlock()
	notify()
	if sooner {
		k.wakeRenewal()
	}
	return l
}

func (k *Keeper) newHold(ctx context.Context, owner Owner, g grant) *hold {
	h := &hold{
		keeper: k, owner: owner, lane: g.lane, token: g.token, lender: g.lender, policy: policyOf(g.lane),
		logCtx: context.WithoutCancel(ctx), lost: make(chan struct{}), leases: make(map[*Lease]struct{}),
		deadline: g.sentAt.Add(g.ttl),
	}
	if !g.localEnd.IsZero() {
		h.deadline = g.localEnd
	}
	h.timer = time.AfterFunc(time.Until(h.deadline), func() { k.expire(h) })
	return h
}

// extend sets the end of the lease to ttl after sentAt. It ignores an earlier end, because responses may arrive out of
// order. The caller holds Keeper.mu.
func (h *hold) extend(sentAt time.Time, ttl time.Duration, expires time.Time) {
	if end := sentAt.Add(ttl); end.After(h.deadline) {
		h.deadline = end
		h.timer.Reset(time.Until(end))
	}
	h.expires = expires
	h.renewAt = sentAt.Add(h.interval())
}

// shorten handles a renewal with a smaller TTL than the lease has now.
func (h *hold) shorten(sentAt time.Time, ttl time.Duration) {
	h.deadline = sentAt.Add(ttl)
	h.timer.Reset(time.Until(h.deadline))
	h.renewAt = time.Now()
}

func (h *hold) interval() time.Duration { return min(h.ttl/3, maxRenewInterval) }

// expire runs at the local end of a lease.
func (k *Keeper) expire(h *hold) {
	k.mu.Lock()
	if remaining := time.Until(h.deadline); remaining > 0 && h.state == live {
		h.timer.Reset(remaining)
		k.mu.Unlock()
		return
	}
	notify := func() {}
	if h.state == releasing { // its release failed, and the database lease has expired
		k.remove(h)
	} else {
		notify = k.loseLocked(h, fmt.Sprintf("it was not renewed within %s", h.ttl))
	}
	k.mu.Unlock()
	notify()
}

// loseLocked marks a live hold as lost. The caller holds mu, and calls notify after it has unlocked mu.
func (k *Keeper) loseLocked(h *hold, reason string) (notify func()) {
	if h.state != live {
		return func() {}
	}
	leases := k.remove(h)
	h.state = lost
	return func() {
		defer close(h.lost) // its readers find the cause of the contexts
		if !h.policy.cancels {
			k.log.InfoContext(h.logCtx, "lane lost", "lane", h.lane, "owner", h.owner.name, "fencing_token",
				h.token, "reason", reason)
			return
		}
		k.observer.LaneLost(h.lane)
		cancelAll(leases, fmt.Errorf("%w: %s: %s", ErrLost, h.lane, reason))
		k.log.ErrorContext(h.logCtx, "lane lost", "lane", h.lane, "owner", h.owner.name, "fencing_token",
			h.token, "reason", reason)
	}
}

// remove removes a hold from the keeper and returns its leases. The caller holds mu.
func (k *Keeper) remove(h *hold) []*Lease {
	h.state = released
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

func cancelAll(leases []*Lease, cause error) {
	for _, l := range leases {
		l.cancel(cause)
	}
}
