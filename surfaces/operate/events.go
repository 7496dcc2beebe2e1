package operate

import (
	"encoding/json"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/reason"
)

// Event is part of a turn's output. Name is start, delta, restart, tool, approval, done or error, and lane for a
// watcher. Data is the type of that name below, or a *problem.Problem for error.
type Event struct {
	Name string
	Data any
}

// Start is the first event of a turn.
type Start struct {
	TraceID     string `json:"trace_id"`
	SessionID   string `json:"session_id"`
	ExecutionID string `json:"execution_id"`
}

// Delta is a piece of the model's text. The event restart, without data, discards the text since the last tool call,
// because the model call is retried.
type Delta struct {
	Text string `json:"text"`
}

// ToolCall is the start or the end of a tool call.
type ToolCall struct {
	ID         string          `json:"id"`
	Name       string          `json:"name"`
	Arguments  json.RawMessage `json:"arguments"`
	Status     string          `json:"status"` // started, success, error, unknown, skipped, denied or pending_approval
	Result     json.RawMessage `json:"result,omitempty"`
	Error      string          `json:"error,omitempty"`
	DurationMS *int64          `json:"duration_ms,omitempty"`
	ApprovalID string          `json:"-"` // that was requested for the call; empty for none
}

// Approval is a pending call with its exact arguments.
type Approval struct {
	ID        string          `json:"id"`
	Skill     string          `json:"skill"`
	Arguments json.RawMessage `json:"arguments"`
	ExpiresAt time.Time       `json:"expires_at"`
}

// Done is the last event of a successful turn. Ended is as in reason.Outcome, WaitingApproval for a turn detached
// during an approval, or HandedOn at shutdown. For these two, Usage and CostUSD are partial.
type Done struct {
	TraceID     string         `json:"trace_id"`
	ExecutionID string         `json:"execution_id"`
	SessionID   string         `json:"session_id"`
	Ended       string         `json:"ended"`
	Text        string         `json:"text"`
	Until       time.Time      `json:"until,omitzero"` // when the limit that ended the turn resets
	Usage       activity.Usage `json:"usage"`
	CostUSD     float64        `json:"cost_usd"`
}

// Ways to end a turn beside those of reason.Outcome.
const (
	WaitingApproval = "waiting_approval"
	HandedOn        = "handed_on"
)

// statusDenied is the status of a call whose approval was rejected.
const statusDenied = "denied"

// maxEvent bounds each value of a tool event in bytes.
const maxEvent = 16 << 10

// newToolCall redacts and truncates a tool event.
func newToolCall(e reason.ToolEvent) ToolCall {
	c := ToolCall{
		ID: e.ID, Name: redact.Text(e.Name, 200), Arguments: redact.JSON(e.Arguments, maxEvent),
		Status: "started", ApprovalID: e.ApprovalID,
	}
	if !e.Done {
		return c
	}
	ms := e.Duration.Milliseconds()
	c.Status, c.DurationMS = e.Status, &ms
	if e.Error != "" {
		c.Error = redact.Text(e.Error, maxEvent)
	} else {
		c.Result = redact.JSON(json.RawMessage(e.Result), maxEvent)
	}
	return c
}

func newApproval(a approvals.Approval) Approval {
	return Approval{ID: a.ID, Skill: a.SkillName, Arguments: a.Arguments, ExpiresAt: a.ExpiresAt.UTC()}
}

// listener receives the events of a turn, across all runs of its execution. Runs in this process report here. The
// events of runs in other processes come from the database.
type listener struct {
	session       *Session
	emit          func(Event)                // one at a time
	previousClaim int64                      // the last claim before the listener
	statuses      map[string]activity.Status // reported status of each activity of other processes

	mu              sync.Mutex
	text            string          // streamed since the last tool call
	localClaims     map[int64]bool  // runs in this process
	shownApprovals  map[string]bool // approvals that were shown
	shownDenials    map[string]bool // approvals whose denied call was shown
	lastWasApproval bool            // the last event was an approval
	stopCause       error           // why the run must stop although the cancel was not stored
	stopFuncs       []func(error)
	endSummary      func() // set once the answer is posted
}

// send emits an event once: an approval, or a call that its approval denied, may come from both sources.
func (l *listener) send(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastWasApproval = e.Name == "approval"
	switch data := e.Data.(type) {
	case Delta:
		l.text += data.Text
	case ToolCall:
		l.text = ""
		if l.shownDenials[data.ApprovalID] {
			return
		}
		if data.Status == statusDenied && data.ApprovalID != "" {
			l.shownDenials[data.ApprovalID] = true
		}
	case Approval:
		if l.shownApprovals[data.ID] {
			return
		}
		l.shownApprovals[data.ID] = true
	case nil:
		l.text = ""
	}
	l.emit(e)
}

// isLocalClaim reports whether a claim ran in this process, or before the listener.
func (l *listener) isLocalClaim(claim int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return claim <= l.previousClaim || l.localClaims[claim]
}

// addLocalClaim records that a claim runs in this process.
func (l *listener) addLocalClaim(claim int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.localClaims[claim] = true
}

// isApprovalShown reports whether an approval was shown.
func (l *listener) isApprovalShown(approval string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.shownApprovals[approval]
}

// isAwaitingApproval reports whether the last event was an approval.
func (l *listener) isAwaitingApproval() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lastWasApproval
}

// streamedText is the text since the last tool call.
func (l *listener) streamedText() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text
}

// stopRun stops the run in this process, if there is one.
func (l *listener) stopRun(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopCause = cause
	for _, stop := range l.stopFuncs {
		stop(cause)
	}
}

// onAnswered records that the answer is posted, and how to end the summary that follows.
func (l *listener) onAnswered(endSummary func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endSummary = endSummary
}

// completeAnswered ends the summary of a turn whose answer is posted, so that the turn completes. It returns false
// before the answer.
func (l *listener) completeAnswered() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.endSummary == nil {
		return false
	}
	l.endSummary()
	return true
}

// onStop calls stop when the turn is stopped, also if it was stopped before.
func (l *listener) onStop(stop func(error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopFuncs = append(l.stopFuncs, stop)
	if l.stopCause != nil {
		stop(l.stopCause)
	}
}
