package lanes

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
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
