package executions

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Hold is a lane that an execution holds. It belongs to the execution, not to the process: a park keeps
// it, a new claim takes it over with a new token, and the execution's end frees it. Where the run is handed back,
// because its process shuts down or the agent is paused, it stays with the execution if it is a thread's; any other
// is free for others until the execution goes on and takes it again.
type Hold struct {
	run   *run
	lease *lanes.Lease
	ctx   context.Context
}

// Lane takes a lane for the execution that ctx belongs to, or keeps the hold it has; errors.Is(err,
// lanes.ErrBusy) when somebody else holds it. It is not a step: whether a lane is free is asked anew in
// every run.
//
// So a run also takes anew, and releases, the lanes of what it has on record. A flow that takes one lane twice gives
// it up, in a run that goes on within the second part, at the Release of the first; and one that takes several, each
// after the other, may hold a later one while it waits for an earlier. Take a lane once, and hold it until all that
// it protects is done.
//
// A child that its parent waits for (Trigger with Wait) borrows a lane that the parent holds, or the parent's parent if
// that waits too, and so on; it goes back when the child releases it or ends. The child may come here before its parent
// has begun to wait: then Lane holds the goroutine until it has, for at most a minute.
func Lane(ctx context.Context, name string, opts ...lanes.Option) (*Hold, error) {
	deadline := time.Now().Add(lendTimeout)
	return acquireLane(ctx, name, func(r *run, detached context.Context) (*lanes.Lease, error) {
		for pause := minLendPause; ; pause = min(2*pause, maxLendPause) {
			lease, err := r.e.keeper.AcquireAs(detached, lanes.ClaimOwner(r.exec.ID, r.exec.Claim), name, opts...)
			busy, ok := errors.AsType[*lanes.BusyError](err)
			if !ok || !busy.Soon || time.Now().After(deadline) || !sleep(ctx, pause) {
				return lease, err
			}
		}
	})
}

const (
	lendTimeout  = time.Minute // a parent whose process died before it waited is taken up again within that
	minLendPause = 2 * time.Millisecond
	maxLendPause = time.Second
)

// LaneWait is Lane that stands in the lane's queue until its turn comes, for at most patience; then
// errors.Is(err, lanes.ErrBusy). It holds the goroutine, so it is for a run that somebody is looking at; others
// wait durably with LaneFree.
func LaneWait(ctx context.Context, name string, patience time.Duration, opts ...lanes.Option) (*Hold, error) {
	deadline := time.Now().Add(patience)
	return acquireLane(ctx, name, func(r *run, detached context.Context) (*lanes.Lease, error) {
		// The lease's context derives from this one, so it is not ended when the wait is over.
		waiting, stop := context.WithCancelCause(detached)
		defer context.AfterFunc(ctx, func() { stop(context.Cause(ctx)) })()
		remaining := max(time.Until(deadline), time.Millisecond)
		return r.e.keeper.AwaitAs(waiting, lanes.ClaimOwner(r.exec.ID, r.exec.Claim), name,
			append(opts, lanes.WithPatience(remaining))...)
	})
}

func acquireLane(ctx context.Context, name string, acquire func(r *run, ctx context.Context) (*lanes.Lease, error)) (*Hold, error) {
	r, err := runFrom(ctx)
	if err != nil {
		return nil, err
	}
	if poison := r.stopCause(); poison != nil {
		return nil, poison
	}
	if r.replay != nil {
		return r.replay.answerLane(ctx, r, name)
	}
	detached := withGrace(ctx, 5*time.Second)
	lease, err := RetryTransient(ctx, func(context.Context) (*lanes.Lease, error) {
		lease, err := acquire(r, detached)
		if err != nil {
			return nil, err
		}
		return lease, r.fenceLease(detached, lease)
	})
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx) // what was taken is the execution's, and goes with it
	case err != nil:
		return nil, fmt.Errorf("take lane: %w", err)
	}
	r.mu.Lock()
	if r.leases == nil {
		r.leases = make(map[*lanes.Lease]struct{}, 1)
	}
	maps.DeleteFunc(r.leases, func(l *lanes.Lease, _ struct{}) bool { return l.Lane() == name && leaseLost(l) }) // it is taken again
	r.leases[lease] = struct{}{}
	r.mu.Unlock()
	held, end := context.WithCancelCause(lease.Context())
	context.AfterFunc(ctx, func() { end(context.Cause(ctx)) })
	return &Hold{run: r, lease: lease, ctx: trace.WithLane(held, name)}, nil
}

// fenceLease gives a lane back that a claim took which had been lost by then: its successor would find it held by
// nobody it knows. A claim that is lost after this leaves the lane to its successor.
func (r *run) fenceLease(ctx context.Context, lease *lanes.Lease) error {
	_, err := r.e.pool.Exec(ctx, `select lanekeeper.fence_agent_execution(@id, @claim)`,
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim})
	if err == nil {
		return nil
	}
	if postgres.IsCode(err, "LK001") {
		r.stop(ErrStale)
		err = ErrStale
	}
	if back := lease.Release(ctx); back != nil {
		r.e.log.WarnContext(ctx, "lane of a lost claim not given back", "lane", lease.Lane(), "error", back)
	}
	return err
}

// withGrace is a context that ends some time after ctx. Under it the answer to a statement is heard although
// the run is stopped: a lane that is taken behind its back would stay taken.
func withGrace(ctx context.Context, grace time.Duration) context.Context {
	longer, end := context.WithCancelCause(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() { time.AfterFunc(grace, func() { end(context.Cause(ctx)) }) })
	return longer
}

// LaneHeld reports whether somebody holds a lane; nobody does while lanes are off. It is not a step.
func LaneHeld(ctx context.Context, name string) (bool, error) {
	r, err := runFrom(ctx)
	if err != nil {
		return false, err
	}
	return r.e.keeper.Held(ctx, name)
}

// Context ends with cause lanes.ErrLost when the lane is lost. Work the lane protects runs under it. No step of the
// run begins after that, under this context or another, until this hold is released or the lane is taken again.
func (h *Hold) Context() context.Context { return h.ctx }

// Token is the hold's fencing token; 0 in a replay, where nothing is held.
func (h *Hold) Token() int64 {
	if h.lease == nil {
		return 0
	}
	return h.lease.Token()
}

// Fence guards the writes of tx, as [lanes.Lease.Fence] does. In the transaction of a [StepTx], a lane that was lost
// ends the run with ErrStale; the execution goes on elsewhere.
func (h *Hold) Fence(ctx context.Context, tx postgres.DB) error {
	if h.lease == nil {
		return nil
	}
	return h.lease.Fence(ctx, tx)
}

// leaseLost reports whether a lease was lost.
func leaseLost(l *lanes.Lease) bool { return errors.Is(context.Cause(l.Context()), lanes.ErrLost) }

// Release gives the lane back before the execution ends. In a run that has parked or was stopped it does
// nothing: the hold is the execution's, and a deferred Release that fires while the function unwinds must
// not free it. When a connection breaks or the database is away it tries again, as [RetryTransient] does.
func (h *Hold) Release(ctx context.Context) error {
	if h.lease != nil && h.run.stopCause() == nil {
		return h.release(ctx)
	}
	return nil
}

// release is Release where there is something to give back.
func (h *Hold) release(ctx context.Context) error {
	h.run.mu.Lock()
	delete(h.run.leases, h.lease)
	h.run.mu.Unlock()
	uncertain, released := false, false
	_, err := RetryTransient(ctx, func(ctx context.Context) (struct{}, error) {
		err := h.lease.Release(ctx)
		released = uncertain && errors.Is(err, lanes.ErrLost) // by the try before
		uncertain = uncertain || err != nil
		return struct{}{}, err
	})
	if released {
		return nil
	}
	return err
}
