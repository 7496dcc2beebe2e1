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

// Body is what POST /v1/operate reads.
type Body struct {
	Message string `json:"message"`
	// SessionID goes on with a session and keeps the lane for it between turns. Without one the turn is a session
	// of its own, whose lane is freed when it ends.
	SessionID string `json:"session_id,omitempty"`
	// Agent is who acts; the session's agent, or the default one, when empty.
	Agent string `json:"agent,omitempty"`
	// Wait stands in the lane's queue when another admin is at work.
	Wait bool `json:"wait,omitempty"`
}

// Answer is what POST /v1/operate answers as one document, to a client that accepts application/json. With an
// approval that waits for its decision Ended is waiting_approval, the status 202, and the turn goes on by itself when
// it is decided.
type Answer struct {
	Done
	Tools     []ToolCall `json:"tools"`
	Approvals []Approval `json:"approvals"`
}

// Add keeps an event for the document.
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

// errAnswered ends a turn's request whose client cannot hear what comes later.
var errAnswered = errors.New("the request was answered")

// Handler answers POST /v1/operate: server-sent events, or one document for Accept: application/json. It decides
// nothing about who may call it.
func (o *Operate) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := o.readBody(w, r)
		if err != nil {
			problem.Write(w, r, err, "", o.log)
			return
		}
		key, err := o.unused(r.Context(), turnKey(r, body))
		if err != nil {
			problem.Write(w, r, err, "", o.log)
			return
		}
		s, err := o.Session(body.SessionID, body.SessionID != "")
		if err != nil {
			problem.Write(w, r, err, "", o.log)
			return
		}
		if err := s.As(r.Context(), body.Agent); err != nil {
			problem.Write(w, r, err, "", o.log)
			return
		}
		if wantsDocument(r) {
			o.document(w, r, s, body, key)
			return
		}
		o.stream(w, r, s, body, key)
	})
}

// readBody reads one JSON object with no other fields than Body's.
func (o *Operate) readBody(w http.ResponseWriter, r *http.Request) (Body, error) {
	var body Body
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); r.Header.Get("Content-Type") != "" &&
		(err != nil || kind != "application/json") {
		return body, problem.New(http.StatusUnsupportedMediaType, "send the body as application/json, not %.60q", r.Header.Get("Content-Type"))
	}
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(6*o.MaxMessage)+4096)) // a byte is at most \u0000
	if err == nil {
		err = decode(raw, &body)
	}
	if tooLong, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return body, problem.New(http.StatusRequestEntityTooLarge, "the body is longer than %d bytes", tooLong.Limit)
	}
	if err != nil {
		return body, badBody("the body is not {message, session_id?, agent?, wait?}: %s", bodyFault(err))
	}
	if threads.CheckID(body.SessionID) != nil && body.SessionID != "" {
		return body, badBody("session_id: %s", threads.ErrInvalid)
	}
	return body, o.checkMessage(postgres.Text(body.Message))
}

// decode reads exactly one object with no other fields than body's.
func decode(raw []byte, body *Body) error {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(body); err != nil {
		return err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more follows the object")
	}
	name, err := problem.Stray(raw, body)
	if err == nil && name != "" {
		err = fmt.Errorf("unknown field %.60q", name)
	}
	return err
}

func badBody(format string, args ...any) error {
	return problem.New(http.StatusBadRequest, format, args...).Kind("bad-body", "Bad body")
}

// bodyFault says in the client's words what is wrong with its JSON.
func bodyFault(err error) string {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		if wrong.Field == "" {
			return "it is a " + wrong.Value
		}
		return fmt.Sprintf("%s is a %s", wrong.Field, wrong.Value)
	}
	if errors.Is(err, io.EOF) {
		return "it is empty"
	}
	return strings.TrimPrefix(err.Error(), "json: ")
}

// wantsDocument reports a client that asks for JSON and not for a stream.
func wantsDocument(r *http.Request) bool {
	accept := strings.Join(r.Header.Values("Accept"), ",")
	return strings.Contains(accept, "application/json") && !strings.Contains(accept, "text/event-stream")
}

// refusal is an error that came before the turn began, as the client gets it: who holds the lane is named.
func (o *Operate) refusal(ctx context.Context, session string, err error) error {
	busy, ok := errors.AsType[*lanes.BusyError](err)
	if !ok {
		return err
	}
	o.RecordSkipped(ctx, session, busy)
	return problem.New(http.StatusConflict, "%s; send wait: true to wait, or follow GET /v1/operate/watch", o.Explain(ctx, busy)).
		Kind("lane-busy", "Lane busy").WithHolder(busy.Holder)
}

// document answers with the whole turn at once.
func (o *Operate) document(w http.ResponseWriter, r *http.Request, s *Session, body Body, key string) {
	ctx, leave := context.WithCancelCause(r.Context())
	defer leave(nil)
	answer := Answer{Tools: []ToolCall{}, Approvals: []Approval{}}
	traceID, begun := "", false
	done, err := s.turn(ctx, body.Message, key, body.Wait, func(e Event) {
		answer.Add(e)
		switch data := e.Data.(type) {
		case Start:
			traceID, begun = data.TraceID, true
		case Approval:
			leave(errAnswered)
		}
	})
	if err != nil {
		if !begun {
			err = o.refusal(r.Context(), s.id, err)
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
		o.log.DebugContext(r.Context(), "client went away", "path", r.URL.Path, "error", err)
	}
}

// stream answers with events. With wait the answer begins before the lane is held, so that the connection lives.
func (o *Operate) stream(w http.ResponseWriter, r *http.Request, s *Session, body Body, key string) {
	ctx, leave := context.WithCancelCause(r.Context())
	defer leave(nil)
	out := newStream(w, leave)
	defer out.keepAlive(o.KeepAlive)()
	if body.Wait {
		out.comment("waiting for the lane " + Lane)
	}
	_, err := s.turn(ctx, body.Message, key, body.Wait, out.event)
	switch {
	case err == nil, out.wrote():
	case !out.opened():
		problem.Write(w, r, o.refusal(r.Context(), s.id, err), "", o.log)
	default:
		out.event(Event{"error", said(o.refusal(r.Context(), s.id, err), "")})
	}
}

// writeLimit is how long a client may take to take an event.
const writeLimit = 30 * time.Second

// stream writes server-sent events. The headers go out with the first thing written. A client that takes nothing
// any more ends the request.
type stream struct {
	w      http.ResponseWriter
	leave  context.CancelCauseFunc
	closed chan struct{}

	mu     sync.Mutex
	open   bool
	events int
	broken bool
}

func newStream(w http.ResponseWriter, leave context.CancelCauseFunc) *stream {
	return &stream{w: w, leave: leave, closed: make(chan struct{})}
}

// opened reports whether anything was written, wrote whether an event was.
func (s *stream) opened() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

func (s *stream) wrote() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.events > 0
}

// event writes one event.
func (s *stream) event(e Event) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	data := e.Data
	if data == nil {
		data = struct{}{}
	}
	if err := encoder.Encode(data); err != nil { // a tool's arguments are JSON by then, so there is nothing that cannot be
		text.Reset()
		fmt.Fprintf(&text, "%q\n", err.Error())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if start, first := data.(Start); first && !s.open {
		s.w.Header().Set("X-Trace-Id", start.TraceID)
	}
	s.events++
	s.write(sse.Event{Name: e.Name, Data: strings.TrimSuffix(text.String(), "\n")}.Append(nil))
}

// comment writes what clients pass over.
func (s *stream) comment(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(sse.Comment(nil, text))
}

// write sends bytes at once. The caller holds mu.
func (s *stream) write(text []byte) {
	if s.broken {
		return
	}
	control := http.NewResponseController(s.w)
	if !s.open {
		s.open = true
		h := s.w.Header()
		h.Set("Content-Type", "text/event-stream")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Accel-Buffering", "no") // proxies must not collect it
		s.w.WriteHeader(http.StatusOK)
	}
	// A writer that knows no deadlines or cannot flush still gets the bytes.
	_ = control.SetWriteDeadline(time.Now().Add(writeLimit))
	_, err := s.w.Write(text)
	if err == nil {
		_ = control.Flush()
		return
	}
	s.broken = true
	s.leave(fmt.Errorf("write event: %w", err))
}

// keepAlive writes a comment whenever nothing was written for a while, once the stream is open. The function that it
// returns ends that.
func (s *stream) keepAlive(every time.Duration) (end func()) {
	var beating sync.WaitGroup
	beating.Go(func() {
		ticker := time.NewTicker(every)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				if s.opened() {
					s.comment("keep-alive")
				}
			case <-s.closed:
				return
			}
		}
	})
	return func() {
		close(s.closed)
		beating.Wait()
	}
}

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
