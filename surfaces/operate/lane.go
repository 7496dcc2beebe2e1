package operate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// liveLease returns the session's lease while it is alive, else nil.
func (s *Session) liveLease() *lanes.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil || s.lease.Context().Err() != nil {
		return nil
	}
	return s.lease
}

// acquireLane acquires the lane unless the session holds it. The caller holds the slot.
func (s *Session) acquireLane(ctx context.Context, wait bool) error {
	s.mu.Lock()
	s.idleGeneration++
	if s.idle != nil {
		s.idle.Stop()
	}
	s.mu.Unlock()
	s.o.addSession(s)
	if s.liveLease() != nil {
		return nil
	}
	process, err := s.o.Engine.WorkerID(ctx)
	if err != nil {
		return fmt.Errorf("prepare the lane operate: %w", err)
	}
	agent, err := s.agentName(ctx)
	if err != nil {
		return fmt.Errorf("prepare the lane operate: %w", err)
	}
	traceID := trace.New(trace.Operate)
	// The lease outlives the request, but the wait for it does not.
	leaseCtx, cancel := context.WithCancelCause(trace.With(context.WithoutCancel(ctx), trace.Span{
		TraceID: traceID, Surface: trace.Operate, Agent: agent,
	}))
	stopAfter := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	acquire := s.o.Keeper.Acquire
	if wait {
		acquire = s.o.Keeper.AcquireWait
	}
	lease, err := acquire(leaseCtx, Lane, lanes.WithProcess(process))
	if active := stopAfter(); err == nil && !active {
		return errors.Join(context.Cause(ctx), lease.Release(ctx))
	}
	if err != nil {
		cancel(err)
		return err
	}
	s.mu.Lock()
	s.lease, s.cancelLease, s.nextTrace = lease, cancel, traceID
	s.mu.Unlock()
	return nil
}

// reacquireLane acquires the lane again after a turn in another process, if it is free.
func (s *Session) reacquireLane(ctx context.Context) {
	s.mu.Lock()
	wasLent := s.laneLent && s.keepLane && !s.closed
	s.laneLent = false
	s.mu.Unlock()
	if !wasLent || ctx.Err() != nil {
		return
	}
	if err := s.acquireLane(ctx, false); err != nil {
		s.o.log.WarnContext(ctx, "lane not acquired again, the next turn acquires it", "lane", Lane,
			"thread", s.id, "error", err)
	}
}

// closeLane releases the lane and removes the session. The caller holds the slot.
func (s *Session) closeLane(ctx context.Context) error {
	s.o.removeSession(s)
	return s.releaseLane(ctx)
}

// releaseLane releases the lane and keeps the session.
func (s *Session) releaseLane(ctx context.Context) error {
	s.mu.Lock()
	lease, cancel := s.lease, s.cancelLease
	s.lease, s.cancelLease, s.nextTrace = nil, nil, ""
	if s.idle != nil {
		s.idle.Stop()
	}
	s.mu.Unlock()
	if lease == nil {
		return nil
	}
	err := lease.Release(ctx)
	cancel(context.Canceled)
	if errors.Is(err, lanes.ErrLost) {
		return nil // another holder has the lane already
	}
	return err
}

func (s *Session) logReleaseError(ctx context.Context, err error) {
	if err != nil {
		s.o.log.WarnContext(ctx, "lane not freed yet, trying again until its lease ends", "lane", Lane,
			"thread", s.id, "error", err)
	}
}

// laneGuard holds the lane for a run: under its session's lease, or headless by its own hold, acquired before the
// next step.
type laneGuard struct {
	log    *slog.Logger
	keeper *lanes.Keeper
	owner  string // prefix of the lane's owner while the execution holds it
	cancel context.CancelCauseFunc
	hold   *executions.Hold // headless, while it is held
	// headless marks a run without a session. A lane of an earlier claim still belongs to the execution.
	headless bool
}

// guardLane returns a context that ends when the lane is lost. For a headless run, each step first acquires the lane.
func (o *Operate) guardLane(ctx context.Context, execution string, listener *listener) (context.Context, *laneGuard) {
	ctx, cancel := context.WithCancelCause(trace.WithLane(ctx, Lane))
	p := &laneGuard{log: o.log, keeper: o.Keeper, owner: execution + "#", cancel: cancel}
	if listener != nil {
		listener.onStop(cancel)
		if lease := listener.session.liveLease(); lease != nil {
			context.AfterFunc(lease.Context(), func() { cancel(context.Cause(lease.Context())) })
			return ctx, p
		}
	}
	p.headless = true
	return executions.Gate(ctx, p.acquire), p
}

// maxLaneWait bounds a headless turn's wait for the lane.
const maxLaneWait = 7 * 24 * time.Hour

// acquire acquires the lane for a headless run and waits durably while it is busy.
func (p *laneGuard) acquire(ctx context.Context) error {
	for p.hold == nil {
		hold, err := executions.Lane(ctx, Lane)
		switch {
		case errors.Is(err, lanes.ErrBusy):
			outcome, err := executions.Wait(ctx, "operate is free", executions.LaneFree(Lane, maxLaneWait))
			if err != nil {
				return err
			}
			if outcome.TimedOut {
				return fmt.Errorf("acquire lane %s: it was not free for %s: %w", Lane, maxLaneWait, executions.ErrTimedOut)
			}
		case err != nil:
			return err
		default:
			p.hold = hold
			context.AfterFunc(hold.Context(), func() {
				if cause := context.Cause(hold.Context()); errors.Is(cause, lanes.ErrLost) {
					p.cancel(cause)
				}
			})
		}
	}
	return nil
}

// release releases a headless run's lane before an approval, which may take days, and before a delegated task, which
// may need an approval. A session's lease stays. A resumed run may have no hold: if its predecessor died with the
// lane, that belongs to the execution and is released.
func (p *laneGuard) release(ctx context.Context) {
	if !p.headless {
		return
	}
	var err error
	if p.hold == nil {
		held, holderErr := p.keeper.Holder(ctx, Lane)
		if holderErr == nil && (held == nil || !strings.HasPrefix(held.Holder, p.owner)) {
			return
		}
		if err = holderErr; err == nil {
			p.hold, err = executions.Lane(ctx, Lane)
		}
	}
	if err == nil {
		err = p.hold.Release(ctx)
	}
	if err != nil {
		p.log.WarnContext(ctx, "lane not freed, it ends with its lease", "lane", Lane, "error", err)
	}
	p.hold = nil
}
