package operate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

var (
	// ErrInterrupt as the cause of ctx cancels the turn even during an approval.
	ErrInterrupt = errors.New("interrupted by the admin")
	// ErrDetach as the cause of ctx detaches a turn that waits for approval, and cancels any other.
	ErrDetach = errors.New("the admin has left")
)

const (
	cancelTimeout = 10 * time.Second // bounds the write of a cancel or of a new turn
	outageTimeout = 30 * time.Second // bounds the retries of a listener or a turn while the database is away
)

// Turn runs a message as a turn and calls emit for each event, one at a time; the last is done or error. It returns
// when the turn has ended or was detached. When ctx ends, the turn is cancelled. A turn that waits for approval
// continues to wait, and Done.Ended is WaitingApproval, unless the cause is ErrInterrupt. Errors before the start emit
// nothing: *lanes.BusyError, ErrBusySession, an invalid message. NUL and invalid UTF-8 are removed from the message.
func (s *Session) Turn(ctx context.Context, message string, wait bool, emit func(Event)) (Done, error) {
	return s.runTurn(ctx, turnRequest{message: message, wait: wait}, emit)
}

// turnRequest is a message with the options of its turn.
type turnRequest struct {
	message string
	agent   string // acts from this turn on; empty keeps the session's agent
	key     string // the dedupe key; empty for none
	wait    bool   // wait for the running turn and for the lane
}

// runTurn is Turn with more options. The agent changes only once the session's earlier turn has ended: a request that
// is refused meanwhile has no effect.
func (s *Session) runTurn(ctx context.Context, t turnRequest, emit func(Event)) (Done, error) {
	message := postgres.Text(t.message)
	if err := s.o.checkMessage(message); err != nil {
		return Done{}, err
	}
	if err := s.acquireSlot(ctx, t.wait); err != nil {
		return Done{}, err
	}
	defer s.releaseSlot(ctx)
	s.selectAgent(t.agent)
	if err := s.acquireLane(ctx, t.wait); err != nil {
		return Done{}, err
	}
	claimed, err := s.insertTurn(ctx, message, t.key)
	if err != nil {
		return Done{}, errors.Join(err, s.releaseLane(ctx))
	}
	return s.followTurn(ctx, claimed, emit)
}

// Resume follows a detached turn of this session.
func (s *Session) Resume(ctx context.Context, execution string, emit func(Event)) (Done, error) {
	x, err := executions.Get(ctx, s.o.Pool, execution)
	if err != nil {
		return Done{}, err
	}
	if x.Flow != Flow || x.ThreadID == nil || *x.ThreadID != s.id {
		return Done{}, fmt.Errorf("resume turn: execution %s is no turn of session %s: %w", execution, s.id,
			executions.ErrNotFound)
	}
	if err := s.acquireSlot(ctx, false); err != nil {
		return Done{}, err
	}
	defer s.releaseSlot(ctx)
	if err := s.acquireLane(ctx, false); err != nil {
		return Done{}, err
	}
	x.ClaimedBy = nil // this session did not claim it
	return s.followTurn(ctx, x, emit)
}

func (o *Operate) checkMessage(message string) error {
	switch {
	case strings.TrimSpace(message) == "":
		return problem.BadBody("message is empty; say something")
	case len(message) > o.MaxMessage:
		return problem.New(http.StatusRequestEntityTooLarge, "message has %d bytes; the most is %d",
			len(message), o.MaxMessage)
	}
	return nil
}

// insertTurn inserts message and turn in one transaction, claimed by this process. It ignores the end of ctx: a commit
// without a confirmation would leave a turn that nobody follows.
func (s *Session) insertTurn(ctx context.Context, message, key string) (claimed executions.Execution, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTimeout)
	defer cancel()
	id := s.takeTraceID()
	agent, err := s.agentName(ctx)
	if err != nil {
		return claimed, fmt.Errorf("begin turn: %w", err)
	}
	err = new(postgres.KeyedTx).Do(ctx, s.o.Pool, s.id, func(tx pgx.Tx) error {
		thread, _, err := threads.Open(ctx, tx, threads.Admin, threads.Thread{
			ID: s.id, Channel: Channel, Agent: agent, Participant: owner,
		})
		if err == nil && thread.Channel != Channel {
			err = threads.ErrForeign
		}
		if err != nil {
			return err
		}
		agent, err := s.threadAgent(ctx, tx, thread.Agent, agent)
		if err != nil {
			return err
		}
		var created bool
		claimed, created, err = s.o.Engine.InsertClaimed(ctx, tx, executions.Spec{
			Flow: Flow, Surface: trace.Operate, TraceID: id, Agent: agent, ThreadID: s.id, Queue: executions.Interactive,
			Priority: 1, Input: turnInput{s.id, message}, DedupeKey: key,
		})
		if err == nil && !created {
			return duplicateProblem(claimed)
		}
		if err != nil {
			return err
		}
		_, err = threads.Post(ctx, tx, threads.NewMessage{
			ThreadID: s.id, Role: threads.User, Content: message, Channel: Channel, ExecutionID: claimed.ID,
			TraceID: claimed.TraceID, Status: threads.Received,
		})
		if err != nil {
			return err
		}
		return activity.Link(ctx, tx, id)
	})
	err = postgres.ExplainLock(ctx, s.o.Pool, err, "session "+s.id, "agent_messages", "agent_threads", "agent_executions")
	if errors.Is(err, threads.ErrForeign) {
		return claimed, problem.New(http.StatusConflict, "session_id %s is the id of a thread that is no session", s.id)
	}
	if err != nil {
		return claimed, fmt.Errorf("begin turn: %w", err)
	}
	return claimed, nil
}

// followTurn reports a turn from start to end.
func (s *Session) followTurn(ctx context.Context, x executions.Execution, emit func(Event)) (Done, error) {
	l := &listener{
		session: s, emit: emit, previousClaim: x.Claim, statuses: map[string]activity.Status{}, localClaims: map[int64]bool{},
		shownApprovals: map[string]bool{}, shownDenials: map[string]bool{},
	}
	if x.Status != executions.Waiting && x.Status != executions.Pending {
		l.previousClaim-- // report the present run, too
	}
	s.o.mu.Lock()
	s.o.listeners[x.ID] = l
	s.o.mu.Unlock()
	defer func() {
		s.o.mu.Lock()
		delete(s.o.listeners, x.ID)
		s.o.mu.Unlock()
	}()
	l.send(Event{"start", Start{x.TraceID, s.id, x.ID}})
	ended, detachReason, err := s.follow(ctx, x, l)
	s.reacquireLane(ctx)
	if err != nil {
		l.send(Event{"error", toProblem(err, x.TraceID)})
		return Done{}, err
	}
	done := Done{TraceID: x.TraceID, ExecutionID: x.ID, SessionID: s.id, Ended: detachReason}
	if detachReason == "" {
		if done, err = s.readOutcome(ctx, done, ended); err != nil {
			l.send(Event{"error", toProblem(err, x.TraceID)})
			return done, err
		}
		if text := strings.TrimSpace(done.Text); !strings.HasSuffix(strings.TrimSpace(l.streamedText()), text) {
			l.send(Event{"delta", Delta{done.Text}}) // another process or no model produced it
		}
	} else {
		done.Usage, done.CostUSD = s.usageSoFar(ctx, x)
	}
	if detachReason == WaitingApproval && ctx.Err() != nil && !errors.Is(context.Cause(ctx), ErrDetach) {
		s.logReleaseError(ctx, s.releaseLane(ctx)) // the admin is gone
	}
	l.send(Event{"done", done})
	return done, nil
}

// usageSoFar reads the usage of a detached turn. A failure is only logged.
func (s *Session) usageSoFar(ctx context.Context, x executions.Execution) (activity.Usage, float64) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTimeout)
	defer cancel()
	used, costUSD, err := activity.Spent(ctx, s.o.Pool, x.TraceID)
	if err != nil {
		s.o.log.WarnContext(ctx, "usage of turn not read", "execution", x.ID, "error", err)
	}
	return used, costUSD
}

// toProblem returns the client's view of an error.
func toProblem(err error, traceID string) *problem.Problem {
	p, _ := problem.Of(err)
	copied := *p
	copied.TraceID = cmp.Or(traceID, copied.TraceID)
	return &copied
}

// readOutcome returns the result of an ended turn.
func (s *Session) readOutcome(ctx context.Context, done Done, x executions.Execution) (Done, error) {
	switch x.Status {
	case executions.Completed:
		var o reason.Outcome
		if err := json.Unmarshal(x.Result, &o); err != nil {
			return done, fmt.Errorf("read result of turn: %w", err)
		}
		done.Ended, done.Text, done.Until, done.Usage = o.Ended, o.Text, o.Until, o.Usage
		done.CostUSD = activity.RoundToMicros(o.CostUSD)
		return done, nil
	case executions.Cancelled:
		return done, problem.New(http.StatusConflict, "the turn was cancelled by %s: %s", postgres.Deref(x.CancelledBy),
			postgres.Deref(x.CancelReason)).
			Kind("turn-cancelled", "Turn cancelled").WithTrace(x.TraceID)
	case executions.Failed, executions.Timeout, executions.Pending, executions.Running, executions.Waiting:
	}
	x = x.Redacted(ctx)
	return done, problem.New(http.StatusInternalServerError, "the turn %s: %s", x.Status, postgres.Deref(x.ErrorMessage)).
		Kind("turn-failed", "Turn failed").WithTrace(x.TraceID)
}

// follow runs or polls a turn until it has ended or is detached. A goroutine interrupts it when ctx ends; follow
// waits for that goroutine.
func (s *Session) follow(
	ctx context.Context, x executions.Execution, l *listener,
) (ended executions.Execution, detachReason string, err error) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	var reason string
	wg.Go(func() {
		select {
		case <-ctx.Done():
			reason = s.o.interruptTurn(ctx, x.ID, l)
		case <-done:
		}
	})
	awaitInterrupt := func() string {
		if ctx.Err() == nil {
			return ""
		}
		wg.Wait()
		return reason
	}
	defer func() {
		close(done)
		wg.Wait()
	}()
	runCtx := context.WithoutCancel(ctx)
	if x.ClaimedBy != nil {
		if _, err := s.o.Engine.RunClaimed(runCtx, &x); err != nil {
			if !problem.Away(err) {
				return x, "", err
			}
			s.o.log.WarnContext(ctx, "turn interrupted by an outage", "execution", x.ID, "error", err)
		}
	}
	var awaySince time.Time // of the first failed write in a row
	for {
		current, err := s.o.readExecution(runCtx, x.ID)
		if err != nil {
			return x, "", err
		}
		if err := s.o.sendRemoteEvents(runCtx, current, l); err != nil {
			s.o.log.WarnContext(ctx, "calls of a turn in another process not shown", "execution", x.ID, "error", err)
		}
		if current.Status.Ended() {
			return current, "", nil
		}
		detachReason := awaitInterrupt()
		// A cancel that met another transaction's lock is only requested, and this process may run no sweep.
		if detachReason == "" && ctx.Err() != nil {
			detachReason = s.o.interruptTurn(ctx, x.ID, l)
		}
		if detachReason != "" {
			return current, detachReason, nil
		}
		if s.o.isDraining() {
			return current, HandedOn, nil
		}
		pause, err := s.advance(ctx, current)
		switch {
		case err == nil:
			awaySince = time.Time{}
		case !problem.Away(err), !awaySince.IsZero() && time.Since(awaySince) > outageTimeout:
			return x, "", err
		case awaySince.IsZero():
			awaySince = time.Now()
			s.o.log.WarnContext(ctx, "turn not continued during an outage", "execution", x.ID, "error", err)
		}
		s.o.sleep(ctx, pause, s.wake)
	}
}

// sendRemoteEvents sends the events of a turn's runs in other processes. Their answer comes with the end of the turn.
// It reads the newest activity.MaxLimit activities: older ones of a longer turn are not sent if no poll has seen them.
func (o *Operate) sendRemoteEvents(ctx context.Context, x executions.Execution, l *listener) error {
	if l.isLocalClaim(x.Claim) {
		return nil
	}
	requested, err := approvals.List(ctx, o.Pool, approvals.Filter{TraceIDs: []trace.ID{trace.ID(x.TraceID)}})
	if err != nil {
		return err
	}
	rows, _, err := activity.Recent(ctx, o.Pool, activity.Filter{
		TraceID: x.TraceID, Kinds: []activity.Kind{activity.KindCall, activity.KindModel}, Limit: activity.MaxLimit,
	})
	if err != nil {
		return err
	}
	for _, a := range slices.Backward(requested) {
		if a.Status == "rejected" && l.isApprovalShown(a.ID) {
			l.sendCall(ToolCall{
				ID: a.ID, Name: a.SkillName, Arguments: redact.JSON(a.Arguments, maxEvent), Status: statusDenied,
				Error: redact.Text(a.Reason, maxEvent), ApprovalID: a.ID,
			})
		}
	}
	for _, row := range slices.Backward(rows) {
		if postgres.Deref(row.ExecutionID) == x.ID && row.Purpose == Flow && row.Claim != nil && !l.isLocalClaim(*row.Claim) {
			l.sendRow(row)
		}
	}
	for _, a := range slices.Backward(requested) {
		if a.Status == "pending" && x.Status == executions.Waiting {
			l.send(Event{"approval", newApproval(a)})
		}
	}
	return nil
}

// sendRow sends an activity of another process if its status has changed. A text of the model without calls is the
// answer, which followTurn sends.
func (l *listener) sendRow(row activity.Row) {
	before, known := l.statuses[row.ID]
	l.statuses[row.ID] = row.Status
	switch {
	case known && before == row.Status, row.Status == activity.PendingApproval:
	case row.Kind == activity.KindModel:
		if text := modelText(row); text != "" && len(row.LedTo) > 0 {
			l.send(Event{"delta", Delta{text}})
		}
	case known || row.Status == activity.Running:
		l.send(Event{"tool", toolCallFromRow(row)})
	default:
		l.sendCall(toolCallFromRow(row))
	}
}

// sendCall sends the start and the end of a call.
func (l *listener) sendCall(c ToolCall) {
	l.send(Event{"tool", ToolCall{
		ID: c.ID, Name: c.Name, Arguments: c.Arguments, Status: "started", ApprovalID: c.ApprovalID,
	}})
	l.send(Event{"tool", c})
}

// readExecution reads a turn's row. It retries while the database restarts.
func (o *Operate) readExecution(ctx context.Context, id string) (executions.Execution, error) {
	for deadline := time.Now().Add(outageTimeout); ; {
		x, err := executions.Get(ctx, o.Pool, id)
		if err == nil || !problem.Away(err) || time.Now().After(deadline) {
			return x, err
		}
		o.log.WarnContext(ctx, "database unavailable, looking again", "execution", id, "error", err)
		o.sleep(ctx, o.Poll, nil)
	}
}

// advance claims a ready turn or child, or lends the lane to the process that resumed the turn. It returns the pause
// before the next poll.
func (s *Session) advance(ctx context.Context, x executions.Execution) (time.Duration, error) {
	runCtx := context.WithoutCancel(ctx)
	kind, key := postgres.Deref(x.WaitingFor), postgres.Deref(x.WaitingKey)
	switch {
	case x.Status != executions.Waiting && x.ClaimedBy == nil:
		return retryInterval, s.o.Engine.ClaimAndRun(runCtx, x.ID)
	case x.Status == executions.Waiting && kind == "lane" && key == Lane:
		// Another process resumed the turn and needs the lane for it.
		s.mu.Lock()
		s.laneLent = true
		s.mu.Unlock()
		return s.o.Poll, s.releaseLane(runCtx)
	case x.Status == executions.Waiting && kind == "agent":
		if err := s.o.Engine.ClaimAndRun(ctx, key); ctx.Err() == nil { // in case no other process runs it
			return s.o.Poll, err
		}
	}
	return s.o.Poll, nil
}

// sleep waits until the timer, ctx or wake. After an interrupt it polls soon.
func (o *Operate) sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) {
	ended := ctx.Done()
	if ctx.Err() != nil {
		ended, d = nil, retryInterval
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ended:
	case <-wake:
	}
}

func (o *Operate) isDraining() bool { return errors.Is(o.Engine.Live(), executions.ErrDraining) }

// interruptTurn cancels a turn whose admin has left, or returns why it continues. A turn that has posted its answer
// completes without a summary.
func (o *Operate) interruptTurn(ctx context.Context, id string, l *listener) (detachReason string) {
	cause := context.Cause(ctx)
	cancelCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cancelTimeout)
	defer cancel()
	if o.isDraining() || errors.Is(cause, executions.ErrDraining) {
		return HandedOn
	}
	if l.completeAnswered() {
		return ""
	}
	if !errors.Is(cause, ErrInterrupt) && o.isWaitingForApproval(cancelCtx, id, l) {
		return WaitingApproval
	}
	by, cancelReason := activity.ActorFrom(ctx).Name, "the admin left"
	if ended, ok := errors.AsType[*principals.AccessEnded](cause); ok {
		by, cancelReason = cmp.Or(ended.By, by), ended.Reason
	} else if errors.Is(cause, ErrInterrupt) {
		cancelReason = "interrupted"
	}
	if _, err := o.Engine.Cancel(cancelCtx, id, by, cancelReason); err != nil {
		o.log.ErrorContext(cancelCtx, "turn not cancelled, stopped in this process", "execution", id, "error", err)
		l.stopRun(executions.ErrCancelled)
	}
	return ""
}

// isWaitingForApproval reports whether a turn, or the delegated task that it waits for, waits for approval. It polls
// while a turn that requested one has not recorded its wait.
func (o *Operate) isWaitingForApproval(ctx context.Context, id string, l *listener) bool {
	for {
		x, err := executions.Get(ctx, o.Pool, id)
		visited := map[string]bool{} // executions of outside workers may wait for each other
		for err == nil && x.Status == executions.Waiting && postgres.Deref(x.WaitingFor) == "agent" && !visited[x.ID] {
			visited[x.ID] = true
			x, err = executions.Get(ctx, o.Pool, postgres.Deref(x.WaitingKey))
		}
		switch {
		case err != nil || ctx.Err() != nil:
			return false
		case x.Status == executions.Waiting:
			return postgres.Deref(x.WaitingFor) == "approval"
		case x.ID == id && x.Status.Ended() || !l.isAwaitingApproval():
			return false
		}
		sleep.For(ctx, retryInterval)
	}
}
