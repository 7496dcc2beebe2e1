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

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/lanes"
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

// Handler answers POST /v1/operate: server-sent events, or one document for Accept: application/json. It decides nothing
// about who may call it.
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
	o.NoteSkipped(ctx, session, busy)
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
