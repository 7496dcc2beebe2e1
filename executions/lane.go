package executions

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Hold is a lane that an execution holds. It belongs to the execution, not to the process: a new claim takes it over
// with a new token, and the end of the execution releases it. A wait keeps the lane of a thread, an automation or an
// objective; any other lane expires after its TTL. When a run is released (shutdown, pause), the execution keeps only
// the lane of a thread. Any other lane is free until the execution acquires it again.
type Hold struct {
	run   *run
	lease *lanes.Lease
	ctx   context.Context
}

// Lane acquires a lane for the execution of ctx, or returns the execution's present hold. It returns lanes.ErrBusy if
// another owner holds the lane.
//
// Lane is not a step, so a resumed run also acquires and releases the lanes around its recorded steps. If a flow
// acquires one lane twice, a resumed run loses the lane at the first Release. If a flow acquires several lanes in turn,
// a resumed run may hold a later lane while it waits for an earlier one. So acquire each lane once, and hold it until
// all protected work is done.
//
// An awaited child (Trigger with Wait) borrows a lane of its parent, or of a waiting ancestor. The lane returns when
// the child releases it or ends. If a child calls Lane before its parent waits, Lane blocks for about a minute at most.
func Lane(ctx context.Context, name string, opts ...lanes.Option) (*Hold, error) {
	deadline := time.Now().Add(lendTimeout)
	return acquireLane(ctx, name, func(r *run, detached context.Context) (*lanes.Lease, error) {
		return r.tryLane(ctx, detached, name, deadline, opts)
	})
}

// tryLane acquires or borrows a lane. Until the deadline it waits for a lender that does not wait yet.
func (r *run) tryLane(
	ctx, detached context.Context, name string, deadline time.Time, opts []lanes.Option,
) (*lanes.Lease, error) {
	for pause := minLendPause; ; pause = min(2*pause, maxLendPause) {
		lease, err := r.e.keeper.AcquireAs(detached, lanes.ClaimOwner(r.exec.ID, r.exec.Claim), name, opts...)
		busy, ok := errors.AsType[*lanes.BusyError](err)
		if !ok || !busy.WillLend || time.Now().After(deadline) || !sleep.For(ctx, pause) {
			return lease, err
		}
	}
}

const (
	lendTimeout  = time.Minute // enough for another process to resume a parent whose process died
	minLendPause = 2 * time.Millisecond
	maxLendPause = time.Second
)

// LaneWait is Lane that queues for a busy lane, which no ancestor lends. After the timeout it returns lanes.ErrBusy. It
// blocks the goroutine, so use it only in flows for which a person waits. Other flows wait durably with LaneFree.
func LaneWait(ctx context.Context, name string, timeout time.Duration, opts ...lanes.Option) (*Hold, error) {
	deadline := time.Now().Add(timeout)
	return acquireLane(ctx, name, func(r *run, detached context.Context) (*lanes.Lease, error) {
		if r.exec.Inherits { // no place in the queue can borrow
			lease, err := r.tryLane(ctx, detached, name, deadline, opts)
			if !errors.Is(err, lanes.ErrBusy) {
				return lease, err
			}
		}
		// The lease's context derives from waitCtx, so waitCtx must not end with the timeout.
		waitCtx, cancel := context.WithCancelCause(detached)
		defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
		remaining := max(time.Until(deadline), time.Millisecond)
		return r.e.keeper.AcquireWaitAs(waitCtx, lanes.ClaimOwner(r.exec.ID, r.exec.Claim), name,
			append(opts, lanes.WithTimeout(remaining))...)
	})
}

// acquireLane acquires a lane for the running execution and watches the lease. A lane that is acquired after ctx has
// ended stays with the execution, whose end releases it. [ErrStale]: the execution has another claim by now.
func acquireLane(
	ctx context.Context, name string, acquire func(r *run, ctx context.Context) (*lanes.Lease, error),
) (*Hold, error) {
	r, err := runFrom(ctx)
	if err != nil {
		return nil, err
	}
	if cause := r.stopCause(); cause != nil {
		return nil, cause
	}
	if r.exec.Surface == string(trace.Eval) {
		return nil, fmt.Errorf("acquire lane %s: a trial of an eval cannot hold a lane", name)
	}
	if r.replay != nil {
		return r.replay.answerLane(ctx, r, name)
	}
	detached := withGrace(ctx, 5*time.Second)
	lease, err := RetryTransient(ctx, func(context.Context) (*lanes.Lease, error) {
		lease, err := acquire(r, detached)
		if postgres.IsCode(err, "LK001") {
			r.stop(ErrStale)
			err = ErrStale
		}
		return lease, err
	})
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx) // an acquired lane belongs to the execution, whose end releases it
	case err != nil:
		return nil, fmt.Errorf("acquire lane: %w", err)
	}
	r.mu.Lock()
	if r.leases == nil {
		r.leases = make(map[*lanes.Lease]struct{}, 1)
	}
	maps.DeleteFunc(r.leases, func(l *lanes.Lease, _ struct{}) bool { return l.Lane() == name && leaseLost(l) })
	r.leases[lease] = struct{}{}
	r.mu.Unlock()
	holdCtx, cancel := context.WithCancelCause(lease.Context())
	context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	return &Hold{run: r, lease: lease, ctx: trace.WithLane(holdCtx, name)}, nil
}

// withGrace returns a context that ends some time after ctx. So a stopped run still receives the response to its
// statement. Without the response, an acquired lane would remain held.
func withGrace(ctx context.Context, grace time.Duration) context.Context {
	graceCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() { time.AfterFunc(grace, func() { cancel(context.Cause(ctx)) }) })
	return graceCtx
}

// LaneHolder returns the holder of a lane; nil for a free lane and while lanes are disabled. LaneHolder is not a step.
func LaneHolder(ctx context.Context, name string) (*lanes.BusyError, error) {
	r, err := runFrom(ctx)
	if err != nil {
		return nil, err
	}
	return r.e.keeper.Holder(ctx, name)
}

// Context returns the context for work that the lane protects. It ends with cause lanes.ErrLost when the lane is lost.
// After a loss the run starts no step, under any context, until it releases the hold or acquires the lane again.
func (h *Hold) Context() context.Context { return h.ctx }

// Token returns the fencing token. It is 0 in a replay, which holds no lanes.
func (h *Hold) Token() int64 {
	if h.lease == nil {
		return 0
	}
	return h.lease.Token()
}

// Fence guards the writes of tx, as [lanes.Lease.Fence] does. In the transaction of a [StepTx], a lost lane ends the
// run with ErrStale, and another process continues the execution.
func (h *Hold) Fence(ctx context.Context, tx postgres.DB) error {
	if h.lease == nil {
		return nil
	}
	return h.lease.Fence(ctx, tx)
}

// leaseLost reports whether a lease was lost.
func leaseLost(l *lanes.Lease) bool { return errors.Is(context.Cause(l.Context()), lanes.ErrLost) }

// Release releases the lane before the execution ends. After a wait or a stop it does nothing, because the lane belongs
// to the execution and a deferred Release must not release it. Release retries transient errors like [RetryTransient].
func (h *Hold) Release(ctx context.Context) error {
	if h.lease == nil || h.run.stopCause() != nil {
		return nil //nolint:nilerr // the hold belongs to the execution now
	}
	h.run.mu.Lock()
	delete(h.run.leases, h.lease)
	h.run.mu.Unlock()
	_, err := RetryTransient(ctx, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, h.lease.Release(ctx)
	})
	return err
}
