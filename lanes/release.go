package lanes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/puddle/v2"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

const (
	minRetryPause = 20 * time.Millisecond // before a release is retried; doubles
	maxRetryPause = time.Second
)

// releaseLease ends one lease of a hold. After the last lease, it releases the lane. lossErr means that the lane was
// lost before. err means that the lane is not released yet. The keeper then continues in the background if a retry may
// succeed.
func (k *Keeper) releaseLease(ctx context.Context, l *Lease) (lossErr, err error) {
	h := l.hold
	unlock, err := k.keyed.Lock(ctx, h.key())
	if err != nil { // another call of this owner holds the key
		last, lossErr := k.detach(l)
		if !last {
			return lossErr, nil
		}
		k.continueInBackground(ctx, h)
		return nil, err
	}
	defer unlock()
	last, lossErr := k.detach(l)
	if !last {
		return lossErr, nil
	}
	result, err := k.tryRelease(ctx, h)
	if err != nil {
		if retryable(err) {
			k.continueInBackground(ctx, h)
		}
		return nil, err
	}
	return k.finishRelease(h, result), nil
}

// finishRelease ends a hold after the response to its release.
func (k *Keeper) finishRelease(h *hold, result releaseResult) (lossErr error) {
	k.mu.Lock()
	if result.released {
		k.remove(h)
		k.mu.Unlock()
		k.logReleased(h.logCtx, releaseRequest{h.lane, h.owner, h.token}, cmp.Or(result.successor, h.lender))
		return nil
	}
	if h.state == releasing {
		h.state = live
	}
	notify := k.loseLocked(h, "it was no longer held at its release")
	k.mu.Unlock()
	notify()
	return h.lossError()
}

// logReleased logs a release with the successor: a waiter, or the execution that had lent the lane.
func (k *Keeper) logReleased(ctx context.Context, r releaseRequest, successor string) {
	attrs := []any{"lane", r.lane, "owner", r.owner.name, "fencing_token", r.token}
	if successor != "" {
		attrs = append(attrs, "to", successor)
	}
	k.log.InfoContext(ctx, "lane released", attrs...)
}

// tryRelease retries the release until the database responds, ctx ends or a retry is useless. The caller holds the
// key's lock.
func (k *Keeper) tryRelease(ctx context.Context, h *hold) (releaseResult, error) {
	for pause := minRetryPause; ; pause = min(2*pause, maxRetryPause) {
		result, err := k.releaseOnce(ctx, h)
		if err == nil || !retryable(err) {
			return result, err
		}
		if pause == minRetryPause {
			k.log.WarnContext(h.logCtx, "lane not released yet, trying again", "lane", h.lane, "owner", h.owner.name,
				"error", err)
		}
		if !sleep.For(ctx, pause) {
			return result, err
		}
	}
}

// releaseOnce makes one attempt. The caller holds the key's lock.
func (k *Keeper) releaseOnce(ctx context.Context, h *hold) (releaseResult, error) {
	result, err := k.releaseBatched(ctx, releaseRequest{h.lane, h.owner, h.token})
	k.mu.Lock()
	defer k.mu.Unlock()
	if err != nil {
		h.uncertain = h.uncertain || !postgres.Unchanged(err)
		return result, err
	}
	result.released = result.released || h.uncertain // assumes that the lane was not lost before
	return result, nil
}

// continueInBackground retries until the lane is released, its lease has expired, its owner acquires it again, or a
// retry is useless. After a useless retry, another Release may continue it.
func (k *Keeper) continueInBackground(ctx context.Context, h *hold) {
	k.mu.Lock()
	started, ttl := h.background, h.ttl
	h.background = true
	k.mu.Unlock()
	if started { // by an earlier Release of this hold
		return
	}
	k.retryInBackground(ctx, ttl, func(ctx context.Context) (done bool) { return k.releaseInBackground(ctx, h) })
}

// releaseInBackground makes one attempt. It returns true if nothing is left to do.
func (k *Keeper) releaseInBackground(ctx context.Context, h *hold) (done bool) {
	unlock, err := k.keyed.Lock(ctx, h.key())
	if err != nil {
		return false
	}
	defer unlock()
	k.mu.Lock()
	done = h.state != releasing
	h.background = !done
	k.mu.Unlock()
	if done {
		return true
	}
	result, err := k.releaseOnce(ctx, h)
	if err != nil && retryable(err) {
		return false
	}
	if err != nil {
		k.mu.Lock()
		h.background = false // so a repeated Release may start it again
		k.mu.Unlock()
		return true
	}
	_ = k.finishRelease(h, result) // no caller waits for the result
	return true
}

// retryInBackground calls try about once a second until it is done or the lease has expired.
func (k *Keeper) retryInBackground(
	ctx context.Context, lease time.Duration, try func(ctx context.Context) (done bool),
) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), lease)
	go func() {
		defer stop()
		for sleep.For(ctx, maxRetryPause) {
			limited, cancel := context.WithTimeout(ctx, releaseTimeout)
			done := try(limited)
			cancel()
			if done {
				return
			}
		}
	}()
}

// retryable reports whether a retry may succeed. An error in the statement itself is permanent.
func retryable(err error) bool {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return !strings.HasPrefix(pgErr.Code, "42") && !isInvalid(err)
	}
	return !errors.Is(err, puddle.ErrClosedPool) // as at the end of the process
}

// detach removes l from its hold. last means that the caller must release the hold now.
func (k *Keeper) detach(l *Lease) (last bool, lossErr error) {
	h := l.hold
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(h.leases, l)
	switch {
	case h.state == lost:
		return false, h.lossError()
	case h.state == released, len(h.leases) > 0:
		return false, nil
	}
	h.state = releasing
	return true, nil
}

func (h *hold) lossError() error {
	if !h.policy.cancels {
		return nil
	}
	return ErrLost
}

// Break releases a lane without its holder, and makes the holder's token invalid. It records an activity with the
// reason, in the holder's trace if it has one, and notifies the holder (see [Keeper.Run]). Break waits about a second
// for a fenced write. Then it returns a *BlockedError and changes nothing. It returns false for a free lane, and
// ErrInvalid for an empty reason.
func Break(ctx context.Context, db postgres.DB, lane, reason string) (bool, error) {
	var broken bool
	err := db.QueryRow(ctx, `select break_agent_lock(@lane, @reason)`,
		postgres.Strict{"lane": lane, "reason": reason}).Scan(&broken)
	if isInvalid(err) {
		return false, invalidError("break", lane, err)
	}
	if err != nil {
		return false, fmt.Errorf("break %s: %w", lane, asBlocked(err))
	}
	return broken, nil
}
