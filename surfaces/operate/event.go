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

// Event is what a turn shows while it is taken. Name is start, delta, restart, tool, approval, done or error, and for
// a watcher also lane; Data is the value of that name below, or a *problem.Problem for error.
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

// Delta is a piece of the model's text. The event restart, which has no data, says that the pieces since the last
// tool call do not count, because the model is asked again.
type Delta struct {
	Text string `json:"text"`
}

// ToolCall is the start or the end of a tool call.
type ToolCall struct {
	ID         string          `json:"id"`
	Name       string          `json:"name"`
	Arguments  json.RawMessage `json:"arguments"`
	Status     string          `json:"status"` // started, success, error, unknown, skipped or pending_approval
	Result     json.RawMessage `json:"result,omitempty"`
	Error      string          `json:"error,omitempty"`
	DurationMS *int64          `json:"duration_ms,omitempty"`
}

// Approval is a call that waits for an admin's decision. Arguments are exactly those of the call.
type Approval struct {
	ID        string          `json:"id"`
	Skill     string          `json:"skill"`
	Arguments json.RawMessage `json:"arguments"`
	ExpiresAt time.Time       `json:"expires_at"`
}

// Done is the last event of a turn that has an answer. Ended is as in reason.Outcome; a turn that was left while it
// waits for an approval is WaitingApproval, and one that was left because the process shuts down is HandedOn: Usage and
// CostUSD are then those until it was left.
type Done struct {
	TraceID     string         `json:"trace_id"`
	ExecutionID string         `json:"execution_id"`
	SessionID   string         `json:"session_id"`
	Ended       string         `json:"ended"`
	Text        string         `json:"text"`
	Until       time.Time      `json:"until,omitzero"` // when the limit that ended it begins anew
	Usage       activity.Usage `json:"usage"`
	CostUSD     float64        `json:"cost_usd"`
}

// How a turn ends for who listened to it, besides what reason.Outcome says.
const (
	WaitingApproval = "waiting_approval"
	HandedOn        = "handed_on"
)

// maxEvent bounds each value of a tool event, in bytes.
const maxEvent = 16 << 10

// toolCall is a tool event as it may be shown: bounded and without secrets.
func toolCall(e reason.ToolEvent) ToolCall {
	c := ToolCall{ID: e.ID, Name: redact.Text(e.Name, 200), Arguments: redact.JSON(e.Arguments, maxEvent), Status: "started"}
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

func approvalOf(a approvals.Approval) Approval {
	return Approval{ID: a.ID, Skill: a.SkillName, Arguments: a.Arguments, ExpiresAt: a.ExpiresAt.UTC()}
}

// live is a turn that somebody in this process listens to. It outlasts a park: whichever run of the
// execution happens in this process shows itself here.
type live struct {
	session *Session
	emit    func(Event) // one at a time

	mu       sync.Mutex
	text     string          // streamed since the last tool call
	asked    map[string]bool // approvals that were shown
	asking   bool            // the last thing shown was an approval
	stopping error           // why the run must stop although the database was not told
	stop     []func(error)
}

func (l *live) show(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asking = e.Name == "approval"
	switch data := e.Data.(type) {
	case Delta:
		l.text += data.Text
	case ToolCall:
		l.text = ""
	case Approval:
		if l.asked[data.ID] {
			return
		}
		l.asked[data.ID] = true
	case nil:
		l.text = ""
	}
	l.emit(e)
}

// awaiting reports whether the turn has asked for an approval and shown nothing since.
func (l *live) awaiting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asking
}

// streamed is the text since the last tool call.
func (l *live) streamed() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text
}

// halt stops the run in this process, if there is one.
func (l *live) halt(cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopping = cause
	for _, stop := range l.stop {
		stop(cause)
	}
}

// onHalt calls stop when the turn is halted, also when it was before.
func (l *live) onHalt(stop func(error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stop = append(l.stop, stop)
	if l.stopping != nil {
		stop(l.stopping)
	}
}
