package operate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/sse"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/threads"
)

// Body is the request of POST /v1/operate.
type Body struct {
	Message string `json:"message"`
	// SessionID continues a session, which keeps the lane between turns. Without one the turn is its own session and
	// releases the lane at its end.
	SessionID string `json:"session_id,omitempty"`
	// Agent acts in the turn; default the session's agent, else the default agent.
	Agent string `json:"agent,omitempty"`
	// Wait queues for the lane while another admin holds it.
	Wait bool `json:"wait,omitempty"`
}

// Answer is the response of POST /v1/operate for Accept: application/json. With a pending approval Ended is
// waiting_approval and the status 202; the turn resumes after the decision.
type Answer struct {
	Done
	Tools     []ToolCall `json:"tools"`
	Approvals []Approval `json:"approvals"`
}

// Add collects an event.
func (a *Answer) Add(e Event) {
	switch data := e.Data.(type) {
	case ToolCall:
		if data.Status != "started" {
			a.Tools = append(a.Tools, data)
		}
	case Approval:
		a.Approvals = append(a.Approvals, data)
	}
}

// errAnswered detaches a request whose client already has its response.
var errAnswered = errors.New("the request was answered")

// Handler serves POST /v1/operate: server-sent events, or one document for Accept: application/json. It does not
// authenticate.
func (o *Operate) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := o.readBody(w, r)
		if err != nil {
			problem.Write(w, r, err, "", o.log)
			return
		}
		key, err := o.checkTurnKey(r.Context(), turnKey(r, body))
		if err != nil {
			problem.Write(w, r, err, "", o.log)
			return
		}
		s, err := o.Session(body.SessionID, body.SessionID != "")
		if err != nil {
			problem.Write(w, r, err, "", o.log)
			return
		}
		if err := s.SetAgent(r.Context(), body.Agent); err != nil {
			problem.Write(w, r, err, "", o.log)
			return
		}
		if wantsJSON(r) {
			o.respondJSON(w, r, s, body, key)
			return
		}
		o.respondStream(w, r, s, body, key)
	})
}

func (o *Operate) readBody(w http.ResponseWriter, r *http.Request) (Body, error) {
	var body Body
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); r.Header.Get("Content-Type") != "" &&
		(err != nil || kind != "application/json") {
		return body, problem.New(http.StatusUnsupportedMediaType, "send the body as application/json, not %.60q",
			r.Header.Get("Content-Type"))
	}
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(6*o.MaxMessage)+4096)) // a byte is at most \u0000
	if err == nil {
		err = decode(raw, &body)
	}
	if tooLong, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return body, problem.New(http.StatusRequestEntityTooLarge, "the body is longer than %d bytes", tooLong.Limit)
	}
	if err != nil {
		return body, problem.BadBody("the body is not {message, session_id?, agent?, wait?}: %s", describeBodyError(err))
	}
	if threads.CheckID(body.SessionID) != nil && body.SessionID != "" {
		return body, problem.BadBody("session_id: %s", threads.ErrInvalid)
	}
	return body, o.checkMessage(postgres.Text(body.Message))
}

// decode reads exactly one object without unknown fields.
func decode(raw []byte, body *Body) error {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(body); err != nil {
		return err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more follows the object")
	}
	name, err := problem.UnknownField(raw, body)
	if err == nil && name != "" {
		err = fmt.Errorf("unknown field %.60q", name)
	}
	return err
}

// describeBodyError describes a JSON error for the client.
func describeBodyError(err error) string {
	if typeErr, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		if typeErr.Field == "" {
			return "it is a " + typeErr.Value
		}
		return fmt.Sprintf("%s is a %s", typeErr.Field, typeErr.Value)
	}
	if errors.Is(err, io.EOF) {
		return "it is empty"
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

func wantsJSON(r *http.Request) bool {
	accept := strings.Join(r.Header.Values("Accept"), ",")
	return strings.Contains(accept, "application/json") && !strings.Contains(accept, "text/event-stream")
}

// busyProblem maps a busy lane to a problem that names the holder.
func (o *Operate) busyProblem(ctx context.Context, session string, err error) error {
	busy, ok := errors.AsType[*lanes.BusyError](err)
	if !ok {
		return err
	}
	traceID := o.RecordSkipped(ctx, session, busy)
	return problem.New(http.StatusConflict, "%s; send wait: true to wait, or follow GET /v1/operate/watch",
		o.Explain(ctx, busy)).
		Kind("lane-busy", "Lane busy").WithHolder(busy.Holder).WithTrace(traceID)
}

// respondJSON responds with the whole turn at once.
func (o *Operate) respondJSON(w http.ResponseWriter, r *http.Request, s *Session, body Body, key string) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	answer := Answer{Tools: []ToolCall{}, Approvals: []Approval{}}
	traceID, started := "", false
	done, err := s.runTurn(ctx, body.Message, key, body.Wait, func(e Event) {
		answer.Add(e)
		switch data := e.Data.(type) {
		case Start:
			traceID, started = data.TraceID, true
		case Approval:
			cancel(errAnswered)
		}
	})
	if err != nil {
		if !started {
			err = o.busyProblem(r.Context(), s.id, err)
		}
		problem.Write(w, r, err, traceID, o.log)
		return
	}
	answer.Done = done
	status := http.StatusOK
	if done.Ended == WaitingApproval || done.Ended == HandedOn {
		status = http.StatusAccepted
	}
	w.Header().Set("X-Trace-Id", traceID)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(answer); err != nil {
		o.log.DebugContext(r.Context(), "client disconnected", "path", r.URL.Path, "error", err)
	}
}

// respondStream responds with events. With wait it opens the stream before it holds the lane, to keep the connection
// alive.
func (o *Operate) respondStream(w http.ResponseWriter, r *http.Request, s *Session, body Body, key string) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	stream := newEventStream(w, cancel)
	defer stream.keepAlive(o.KeepAlive)()
	if body.Wait {
		stream.sendComment("waiting for the lane " + Lane)
	}
	_, err := s.runTurn(ctx, body.Message, key, body.Wait, stream.sendEvent)
	switch {
	case err == nil, stream.hasEvents():
	case !stream.started():
		problem.Write(w, r, o.busyProblem(r.Context(), s.id, err), "", o.log)
	default:
		stream.sendEvent(Event{"error", toProblem(o.busyProblem(r.Context(), s.id, err), "")})
	}
}

// writeTimeout bounds the write of one event.
const writeTimeout = 30 * time.Second

// eventStream writes server-sent events. The first write sends the headers. A failed write cancels the request.
type eventStream struct {
	w      http.ResponseWriter
	cancel context.CancelCauseFunc
	closed chan struct{}

	mu          sync.Mutex
	headersSent bool
	events      int
	failed      bool
}

func newEventStream(w http.ResponseWriter, cancel context.CancelCauseFunc) *eventStream {
	return &eventStream{w: w, cancel: cancel, closed: make(chan struct{})}
}

func (s *eventStream) started() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.headersSent
}

func (s *eventStream) hasEvents() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events > 0
}

func (s *eventStream) sendEvent(e Event) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	data := e.Data
	if data == nil {
		data = struct{}{}
	}
	if err := encoder.Encode(data); err != nil { // all data is valid JSON, so this does not happen
		text.Reset()
		fmt.Fprintf(&text, "%q\n", err.Error())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if start, first := data.(Start); first && !s.headersSent {
		s.w.Header().Set("X-Trace-Id", start.TraceID)
	}
	s.events++
	s.write(sse.Event{Name: e.Name, Data: strings.TrimSuffix(text.String(), "\n")}.Append(nil))
}

// sendComment writes a line that clients ignore.
func (s *eventStream) sendComment(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(sse.Comment(nil, text))
}

// write sends bytes at once. The caller holds mu.
func (s *eventStream) write(text []byte) {
	if s.failed {
		return
	}
	control := http.NewResponseController(s.w)
	if !s.headersSent {
		s.headersSent = true
		h := s.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no") // proxies must not collect it
		s.w.WriteHeader(http.StatusOK)
	}
	// A writer without deadlines or flush still gets the bytes.
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
	_, err := s.w.Write(text)
	if err == nil {
		_ = control.Flush()
		return
	}
	s.failed = true
	s.cancel(fmt.Errorf("write event: %w", err))
}

// keepAlive writes a comment at each interval once the stream is open. The caller must call stop.
func (s *eventStream) keepAlive(interval time.Duration) (stop func()) {
	var wg sync.WaitGroup
	wg.Go(func() {
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				if s.started() {
					s.sendComment("keep-alive")
				}
			case <-s.closed:
				return
			}
		}
	})
	return func() {
		close(s.closed)
		wg.Wait()
	}
}

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
	Until       time.Time      `json:"until,omitzero"` // when the limit that ended it begins anew
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

// listener receives the events of a turn. It outlives a park: each run of the execution in this process reports here,
// and the runs in others are read from the database.
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
}

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

// onStop calls stop when the turn is stopped, also if it was stopped before.
func (l *listener) onStop(stop func(error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopFuncs = append(l.stopFuncs, stop)
	if l.stopCause != nil {
		stop(l.stopCause)
	}
}
