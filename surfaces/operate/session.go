package operate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/oklog/ulid/v2"

	"github.com/lanekeeper/lanekeeper/agents"
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
	slot chan struct{} // full while a turn runs or the lane is released
	wake chan struct{} // has room for one value, which starts the next poll at once

	mu             sync.Mutex
	agent          string // named by the admin; empty: the agent of the thread, or the default agent
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

// Session returns the session with an id; empty creates one. keep makes it hold the lane between turns. Session
// acquires nothing yet. A malformed id is threads.ErrInvalid.
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

// NewSessionID returns an unused session id.
func NewSessionID() string { return "ses_" + ulid.Make().String() }

// SetAgent selects the agent from the next turn on; empty keeps the session's. An unknown agent is a problem with
// status 404.
func (s *Session) SetAgent(ctx context.Context, agent string) error {
	name, err := s.o.findAgent(ctx, agent)
	if err != nil {
		return err
	}
	s.selectAgent(name)
	return nil
}

// selectAgent selects a known agent; empty keeps the session's.
func (s *Session) selectAgent(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.agent = cmp.Or(name, s.agent)
}

// findAgent returns the name of an agent, or a problem if there is none; empty for an empty one.
func (o *Operate) findAgent(ctx context.Context, agent string) (name string, err error) {
	if agent == "" {
		return "", nil
	}
	if o.Loop.Agents == nil {
		if agent != o.Agent {
			return "", problem.New(http.StatusNotFound, "there is no agent %.60q", agent)
		}
		return agent, nil
	}
	a, err := o.Loop.Agents.Find(ctx, o.Pool, agent)
	if errors.Is(err, agents.ErrNotFound) {
		err = problem.New(http.StatusNotFound, "there is no agent %.60q; see GET /v1/models, or agent agents ls", agent)
	}
	return a.Name, err
}

// agentName returns the agent of a new session.
func (s *Session) agentName(ctx context.Context) (string, error) {
	s.mu.Lock()
	selected := s.agent
	s.mu.Unlock()
	if selected != "" || s.o.Loop.Agents == nil {
		return cmp.Or(selected, s.o.Agent), nil
	}
	a, err := s.o.Loop.Agents.Default(ctx, s.o.Pool)
	return a.Name, err
}

// threadAgent returns the agent of the session's thread. It rejects another named agent. The default agent takes over a
// thread of a disabled agent.
func (s *Session) threadAgent(ctx context.Context, tx pgx.Tx, thread, newAgent string) (string, error) {
	if thread == newAgent || s.o.Loop.Agents == nil {
		return newAgent, nil
	}
	current, err := s.o.Loop.Agents.Acting(ctx, tx, thread)
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	selected := s.agent
	s.mu.Unlock()
	if selected != "" && selected != current.Name {
		return "", problem.New(http.StatusConflict, "session %s is one with %s; begin another session for %s",
			s.id, current.Name, selected)
	}
	return current.Name, nil
}
