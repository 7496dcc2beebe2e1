package lanes

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/puddle/v2"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	retryFirst = 20 * time.Millisecond // before a release is tried again; doubles
	retryMost  = time.Second
)

// leave ends one lease of a hold, and with the last one the hold. err means that the lane is not released yet: the
// keeper goes on.
func (k *Keeper) leave(ctx context.Context, l *Lease) (answer, err error) {
	h := l.hold
	end, err := k.turns.Lock(ctx, h.key())
	if err != nil {
		return nil, err
	}
	defer end()
	last, answer := k.depart(l)
	if !last {
		return answer, nil
	}
	r := releasing{keeper: k, hold: h}
	released, err := r.try(ctx)
	if err != nil {
		r.continueInBackground(ctx)
		return nil, err
	}
	return k.departed(ctx, h, released), nil
}

// departed ends a hold whose release the database has answered.
func (k *Keeper) departed(ctx context.Context, h *hold, released release) (answer error) {
	k.mu.Lock()
	if released.done {
		k.forget(h)
		k.mu.Unlock()
		k.logReleased(ctx, held{h.lane, h.owner, h.token}, cmp.Or(released.to, h.lender))
		return nil
	}
	if h.state == closing {
		h.state = live
	}
	after := k.loseLocked(h, "it was held no longer when it was released")
	k.mu.Unlock()
	after()
	return h.lossAnswer()
}

// logReleased says that a lane was given back, and whom it went to: who waited for it, or the execution that had lent
// it.
func (k *Keeper) logReleased(ctx context.Context, h held, to string) {
	about := []any{"lane", h.lane, "owner", h.owner.name, "fencing_token", h.token}
	if to != "" {
		about = append(about, "to", to)
	}
	k.log.InfoContext(ctx, "lane released", about...)
}

// releasing is the release of a hold, which may take several tries.
type releasing struct {
	keeper  *Keeper
	hold    *hold
	unheard bool // the answer to a try was lost: it may have released the lane
	warned  bool
}

// try releases until the database answers, until ctx ends or trying again is no use. The caller has the turn.
func (r *releasing) try(ctx context.Context) (released release, err error) {
	h := r.hold
	for pause := retryFirst; ; pause = min(2*pause, retryMost) {
		released, err = r.keeper.freeTogether(ctx, held{h.lane, h.owner, h.token})
		switch {
		case err == nil:
			released.done = released.done || r.unheard
			return released, nil // the lease was alive before, so what is gone now was released by that try
		case !worthRetrying(err):
			return released, err
		}
		r.unheard = r.unheard || !postgres.Unchanged(err)
		if !r.warned {
			r.warned = true
			r.keeper.log.WarnContext(ctx, "lane not released yet, trying again", "lane", h.lane, "owner", h.owner.name, "error", err)
		}
		if !sleep(ctx, pause) {
			return released, err
		}
	}
}

// continueInBackground goes on until the lane is released, its lease has ended, its owner takes it again or the
// process shuts down.
func (r *releasing) continueInBackground(ctx context.Context) {
	k, h := r.keeper, r.hold
	k.mu.Lock()
	begun := h.background
	h.background = true
	k.mu.Unlock()
	if begun { // by another Release of the same lease
		return
	}
	k.inBackground(ctx, h.ttl, r.once)
}

// once is one try in the background; true when there is nothing left to do.
func (r *releasing) once(ctx context.Context) (over bool) {
	k, h := r.keeper, r.hold
	end, err := k.turns.Lock(ctx, h.key())
	if err != nil {
		return false
	}
	defer end()
	k.mu.Lock()
	over = h.state != closing
	h.background = !over
	k.mu.Unlock()
	if over {
		return true
	}
	released, err := k.freeTogether(ctx, held{h.lane, h.owner, h.token})
	if err != nil {
		r.unheard = r.unheard || !postgres.Unchanged(err)
		return poolClosed(err)
	}
	released.done = released.done || r.unheard
	_ = k.departed(ctx, h, released) // nobody waits for the answer
	return true
}

// inBackground tries about once a second, for as long as a lease may last, until try has nothing left to do or the
// process shuts down.
func (k *Keeper) inBackground(ctx context.Context, lease time.Duration, try func(ctx context.Context) (over bool)) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), lease)
	go func() {
		defer stop()
		defer context.AfterFunc(k.closed, stop)()
		for sleep(ctx, retryMost) {
			limited, cancel := context.WithTimeout(ctx, releaseLimit)
			over := try(limited)
			cancel()
			if over {
				return
			}
		}
	}()
}

// worthRetrying reports an error that another try may not meet. A statement that the database cannot run is not of
// that kind.
func worthRetrying(err error) bool {
	if said, ok := errors.AsType[*pgconn.PgError](err); ok {
		return said.Code[:2] != "42" && !refused(err)
	}
	return !poolClosed(err)
}

// poolClosed reports the error of a pool that was closed, as at the end of the process.
func poolClosed(err error) bool { return errors.Is(err, puddle.ErrClosedPool) }

// sleep returns false when ctx has ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// depart takes l out of its hold. last means that the hold is now to be released.
func (k *Keeper) depart(l *Lease) (last bool, answer error) {
	h := l.hold
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(h.leases, l)
	switch {
	case h.state == lost:
		return false, h.lossAnswer()
	case h.state == gone, len(h.leases) > 0:
		return false, nil
	}
	h.state = closing
	return true, nil
}

func (h *hold) lossAnswer() error {
	if !h.policy.cancels {
		return nil
	}
	return ErrLost
}
