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

// ErrBusySession reports a session in which a turn is under way.
var ErrBusySession error = problem.New(http.StatusConflict,
	"a turn of this session is under way; wait for its end, or send wait: true").Kind("turn-under-way", "Turn under way")

// lookAtSlot is how often a turn that may not wait looks whether another has begun.
const lookAtSlot = 5 * time.Millisecond

// Session is one admin at work. Its methods may be called from any goroutine; its turns are taken one at a time.
type Session struct {
	o    *Operate
	id   string
	slot chan struct{} // has a token while a turn is taken or the lane is being freed
	look chan struct{} // has room for one: look at the turn now

	mu             sync.Mutex
	agent          string // that the admin named; empty: the thread's, or the default one
	keep           bool   // hold the lane between turns
	lease          *lanes.Lease
	end            context.CancelCauseFunc // of the lease's context
	next           trace.ID                // of the next turn: the lease is held in its name
	idle           *time.Timer
	idleGeneration int  // of the idle timer: a timer of an earlier generation has no effect
	turnActive     bool // a turn has the slot, from begin to rest
	closed         bool
	lent           bool // the lane was left to a turn that another process went on with
}

// ID is the session's id, and its thread's.
func (s *Session) ID() string { return s.id }

// Session returns the session with an id, which this process may have already; empty makes a new one. keep says that
// it holds the lane between turns. It takes nothing yet; an id that cannot be is threads.ErrInvalid.
func (o *Operate) Session(id string, keep bool) (*Session, error) {
	if id == "" {
		id = NewSessionID()
	}
	if err := threads.CheckID(id); err != nil {
		return nil, fmt.Errorf("open session: %w", err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	s := o.sessions[id]
	if s == nil {
		s = &Session{o: o, id: id, slot: make(chan struct{}, 1), look: make(chan struct{}, 1)}
		o.sessions[id] = s
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep, s.closed = s.keep || keep, false
	return s, nil
}

// Hold takes the lane now, before the first turn; *lanes.BusyError when another has it. With wait it stands in
// the lane's queue until ctx ends.
func (s *Session) Hold(ctx context.Context, wait bool) error {
	if err := s.begin(ctx, wait); err != nil {
		return err
	}
	defer s.rest(ctx)
	err := s.enter(ctx, wait)
	return err
}

// Touch says that the admin is there, so that the session does not count as idle.
func (s *Session) Touch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle != nil && s.idle.Stop() {
		s.idle.Reset(s.o.Idle)
	}
}

// Look has the turn under way looked at now, after something was done that it may have waited for.
func (s *Session) Look() {
	select {
	case s.look <- struct{}{}:
	default:
	}
}

// Close ends the session and frees the lane, at the end of the turn where one is under way.
func (s *Session) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	select {
	case s.slot <- struct{}{}:
		defer func() { <-s.slot }()
		return s.free(ctx)
	default:
		return nil // who takes the turn frees the lane
	}
}

// begin waits for the session's turn to be taken. Without wait it waits for the lane to be freed, which takes a moment,
// and not for a turn.
func (s *Session) begin(ctx context.Context, wait bool) error {
	var look <-chan time.Time
	if !wait {
		ticker := time.NewTicker(lookAtSlot)
		defer ticker.Stop()
		look = ticker.C
	}
	for {
		select {
		case s.slot <- struct{}{}:
			s.takesTurn(true)
			return nil
		default:
		}
		if !wait && s.takingTurn() {
			return ErrBusySession
		}
		select {
		case s.slot <- struct{}{}:
			s.takesTurn(true)
			return nil
		case <-look:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *Session) takesTurn(turns bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turnActive = turns
}

func (s *Session) takingTurn() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.turnActive
}

// rest ends what begin began: the lane is kept for a while, or freed.
func (s *Session) rest(ctx context.Context) {
	s.mu.Lock()
	s.turnActive = false
	stay := s.keep && !s.closed && s.lease != nil && s.lease.Context().Err() == nil
	if stay {
		s.idleGeneration++
		rest := s.idleGeneration
		s.idle = time.AfterFunc(s.o.Idle, func() { s.idled(rest) })
	}
	s.mu.Unlock()
	if !stay {
		s.report(ctx, s.free(ctx))
	}
	<-s.slot
	s.mu.Lock()
	left := stay && s.closed // who closed it in this moment found the slot taken
	s.mu.Unlock()
	if left {
		s.report(ctx, s.Close(ctx))
	}
}

// idled frees the lane of an admin who has said nothing since a rest for long.
func (s *Session) idled(rest int) {
	s.slot <- struct{}{} // it may be the rest itself that has it still, and a turn gives it back
	defer func() { <-s.slot }()
	s.mu.Lock()
	again := s.idleGeneration != rest && !s.closed // a turn has begun since
	s.mu.Unlock()
	if again {
		return
	}
	ctx := context.Background()
	s.o.log.InfoContext(ctx, "session idle, lane freed", "session", s.id, "idle", s.o.Idle.String())
	s.report(ctx, s.free(ctx))
}

func (s *Session) report(ctx context.Context, err error) {
	if err != nil {
		s.o.log.WarnContext(ctx, "lane not freed yet, trying again until its lease ends", "lane", Lane, "session", s.id, "error", err)
	}
}

// held is the session's lease, while it is alive.
func (s *Session) held() *lanes.Lease {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lease == nil || s.lease.Context().Err() != nil {
		return nil
	}
	return s.lease
}

// enter takes the lane for the session if it does not hold it. The caller has the slot.
func (s *Session) enter(ctx context.Context, wait bool) error {
	s.mu.Lock()
	s.idleGeneration++
	if s.idle != nil {
		s.idle.Stop()
	}
	s.mu.Unlock()
	s.o.remember(s)
	if s.held() != nil {
		return nil
	}
	process, err := s.o.Engine.WorkerID(ctx)
	if err != nil {
		return fmt.Errorf("open session: %w", err)
	}
	acting, err := s.acting(ctx)
	if err != nil {
		return fmt.Errorf("open session: %w", err)
	}
	next := trace.New(trace.Operate)
	// The lease outlives the request, but the wait for it does not.
	base, end := context.WithCancelCause(trace.With(context.WithoutCancel(ctx), trace.Span{
		TraceID: next, Surface: trace.Operate, Agent: acting,
	}))
	gone := context.AfterFunc(ctx, func() { end(context.Cause(ctx)) })
	acquire := s.o.Keeper.Acquire
	if wait {
		acquire = s.o.Keeper.AcquireWait
	}
	lease, err := acquire(base, Lane, lanes.WithProcess(process))
	if stayed := gone(); err == nil && !stayed {
		return errors.Join(context.Cause(ctx), lease.Release(ctx))
	}
	if err != nil {
		end(err)
		return err
	}
	s.mu.Lock()
	s.lease, s.end, s.next = lease, end, next
	s.mu.Unlock()
	return nil
}

// regain takes the lane back that was left to a turn elsewhere, if nobody else has it by now.
func (s *Session) regain(ctx context.Context) {
	s.mu.Lock()
	lent := s.lent && s.keep && !s.closed
	s.lent = false
	s.mu.Unlock()
	if !lent || ctx.Err() != nil {
		return
	}
	if err := s.enter(ctx, false); err != nil {
		s.o.log.WarnContext(ctx, "lane not taken back, the next turn asks for it", "lane", Lane, "session", s.id, "error", err)
	}
}

// free gives the lane back. The caller has the slot.
func (s *Session) free(ctx context.Context) error {
	s.o.forget(s)
	return s.release(ctx)
}

// release gives the lane back and keeps the session.
func (s *Session) release(ctx context.Context) error {
	s.mu.Lock()
	lease, end := s.lease, s.end
	s.lease, s.end, s.next = nil, nil, ""
	if s.idle != nil {
		s.idle.Stop()
	}
	s.mu.Unlock()
	if lease == nil {
		return nil
	}
	err := lease.Release(ctx)
	end(context.Canceled)
	if errors.Is(err, lanes.ErrLost) {
		return nil // nothing to give back
	}
	return err
}

// traceID is that of the next turn.
func (s *Session) traceID() trace.ID {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := s.next
	s.next = ""
	if id == "" {
		id = trace.New(trace.Operate)
	}
	return id
}

// remember lists a session among those at work. One that had been freed is there again with who still had it.
func (o *Operate) remember(s *Session) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.sessions[s.id] == nil {
		o.sessions[s.id] = s
	}
}

// forget takes a session out of the list of those at work.
func (o *Operate) forget(s *Session) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.sessions[s.id] == s {
		delete(o.sessions, s.id)
	}
}
