package operate

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// ErrBusySession reports a session with a running turn.
var ErrBusySession error = problem.New(http.StatusConflict,
	"a turn of this session is under way; wait for its end, or send wait: true").Kind("turn-under-way", "Turn under way")

// slotPollInterval is how often a turn that may not wait checks the slot.
const slotPollInterval = 5 * time.Millisecond

// Session is an admin's session. It is safe for concurrent use; its turns run one at a time.
type Session struct {
	o    *Operate
	id   string
	slot chan struct{} // has a token while a turn is taken or the lane is being freed
	wake chan struct{} // has room for one; a token starts the next poll at once

	mu             sync.Mutex
	agent          string // named by the admin; empty: the thread's, or the default one
	keepLane       bool   // hold the lane between turns
	lease          *lanes.Lease
	cancelLease    context.CancelCauseFunc // of the lease's context
	nextTrace      trace.ID                // of the next turn; the lease has it, too
	idle           *time.Timer
	idleGeneration int  // of the idle timer: a timer of an earlier generation has no effect
	turnActive     bool // a turn has the slot
	closed         bool
	laneLent       bool // the lane was released for a turn that another process resumed
}

// ID returns the id of the session and its thread.
func (s *Session) ID() string { return s.id }

// Session returns the session with an id; empty creates one. keep makes it hold the lane between turns. It acquires
// nothing yet. A malformed id is threads.ErrInvalid.
func (o *Operate) Session(id string, keep bool) (*Session, error) {
	if id == "" {
		id = NewSessionID()
	}
	if err := threads.CheckID(id); err != nil {
		return nil, fmt.Errorf("the session is not opened: %w", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.sessions[id]
	if s == nil {
		s = &Session{o: o, id: id, slot: make(chan struct{}, 1), wake: make(chan struct{}, 1)}
		o.sessions[id] = s
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keepLane, s.closed = s.keepLane || keep, false
	return s, nil
}

// Hold acquires the lane before the first turn. A busy lane is a *lanes.BusyError; with wait it queues until ctx
// ends.
func (s *Session) Hold(ctx context.Context, wait bool) error {
	if err := s.acquireSlot(ctx, wait); err != nil {
		return err
	}
	defer s.releaseSlot(ctx)
	return s.acquireLane(ctx, wait)
}

// Touch restarts the idle timer.
func (s *Session) Touch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle != nil && s.idle.Stop() {
		s.idle.Reset(s.o.Idle)
	}
}

// Wake polls the running turn at once, for example after an approval.
func (s *Session) Wake() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Close ends the session and releases the lane, after the running turn if there is one.
func (s *Session) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	select {
	case s.slot <- struct{}{}:
		defer func() { <-s.slot }()
		return s.closeLane(ctx)
	default:
		return nil // releaseSlot of the running turn releases the lane
	}
}

// acquireSlot acquires the session's slot for a turn. Without wait it still waits for a release of the lane, but not
// for a turn.
func (s *Session) acquireSlot(ctx context.Context, wait bool) error {
	var tick <-chan time.Time
	if !wait {
		ticker := time.NewTicker(slotPollInterval)
		defer ticker.Stop()
		tick = ticker.C
	}
	for {
		select {
		case s.slot <- struct{}{}:
			s.setTurnActive(true)
			return nil
		default:
		}
		if !wait && s.isTurnActive() {
			return ErrBusySession
		}
		select {
		case s.slot <- struct{}{}:
			s.setTurnActive(true)
			return nil
		case <-tick:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *Session) setTurnActive(active bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turnActive = active
}

func (s *Session) isTurnActive() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.turnActive
}

// releaseSlot ends a turn: the session keeps the lane until idle, or releases it.
func (s *Session) releaseSlot(ctx context.Context) {
	s.mu.Lock()
	s.turnActive = false
	keepLane := s.keepLane && !s.closed && s.lease != nil && s.lease.Context().Err() == nil
	if keepLane {
		s.idleGeneration++
		generation := s.idleGeneration
		s.idle = time.AfterFunc(s.o.Idle, func() { s.expireIdle(generation) })
	}
	s.mu.Unlock()
	if !keepLane {
		s.logReleaseError(ctx, s.closeLane(ctx))
	}
	<-s.slot
	s.mu.Lock()
	closedMeanwhile := keepLane && s.closed // a concurrent Close found the slot taken
	s.mu.Unlock()
	if closedMeanwhile {
		s.logReleaseError(ctx, s.Close(ctx))
	}
}

// expireIdle releases the lane of an idle session, unless a turn started since.
func (s *Session) expireIdle(generation int) {
	s.slot <- struct{}{} // releaseSlot, which set the timer, may still have the slot
	defer func() { <-s.slot }()
	s.mu.Lock()
	resumed := s.idleGeneration != generation && !s.closed // a turn has begun since
	s.mu.Unlock()
	if resumed {
		return
	}
	ctx := context.Background()
	s.o.log.InfoContext(ctx, "session idle, lane freed", "thread", s.id, "idle", s.o.Idle.String())
	s.logReleaseError(ctx, s.closeLane(ctx))
}

func (s *Session) logReleaseError(ctx context.Context, err error) {
	if err != nil {
		s.o.log.WarnContext(ctx, "lane not freed yet, trying again until its lease ends", "lane", Lane,
			"thread", s.id, "error", err)
	}
}

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
		return nil // nothing to give back
	}
	return err
}

// takeTraceID returns the trace id of the next turn.
func (s *Session) takeTraceID() trace.ID {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := s.nextTrace
	s.nextTrace = ""
	if id == "" {
		id = trace.New(trace.Operate)
	}
	return id
}

// addSession registers a session, also one that was removed and is used again.
func (o *Operate) addSession(s *Session) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.sessions[s.id] == nil {
		o.sessions[s.id] = s
	}
}

func (o *Operate) removeSession(s *Session) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.sessions[s.id] == s {
		delete(o.sessions, s.id)
	}
}
