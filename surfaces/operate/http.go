package operate

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/lanes"
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

// Answer is the response of POST /v1/operate for Accept: application/json. The status is 202, and the turn continues
// without the client, if Ended is waiting_approval or handed_on.
type Answer struct {
	Done
	Tools     []ToolCall `json:"tools"`
	Approvals []Approval `json:"approvals"`
}

// Add records ended tool calls and approvals, and ignores other events.
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

// errAnswered detaches a JSON request from its turn at the first pending approval. The turn keeps waiting.
var errAnswered = errors.New("the request was answered")

// Handler serves POST /v1/operate: server-sent events, or one document for Accept: application/json. It does not
// authenticate.
func (o *Operate) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s, t, err := o.openTurn(w, r)
		switch {
		case err != nil:
			problem.Write(w, r, err, "", o.log)
		case wantsJSON(r):
			o.respondJSON(w, r, s, t)
		default:
			o.respondStream(w, r, s, t)
		}
	})
}

// openTurn reads a request and opens its session. A rejected request registers no session, which no turn would remove.
func (o *Operate) openTurn(w http.ResponseWriter, r *http.Request) (s *Session, t turnRequest, err error) {
	body, err := o.readBody(w, r)
	if err != nil {
		return nil, t, err
	}
	t = turnRequest{message: body.Message, wait: body.Wait}
	if t.key, err = o.checkTurnKey(r.Context(), turnKey(r, body)); err != nil {
		return nil, t, err
	}
	if t.agent, err = o.findAgent(r.Context(), body.Agent); err != nil {
		return nil, t, err
	}
	s, err = o.Session(body.SessionID, body.SessionID != "")
	return s, t, err
}

func (o *Operate) readBody(w http.ResponseWriter, r *http.Request) (Body, error) {
	var body Body
	if contentType := r.Header.Get("Content-Type"); contentType != "" {
		mediaType, _, err := mime.ParseMediaType(contentType)
		if err != nil || mediaType != "application/json" {
			return body, problem.New(http.StatusUnsupportedMediaType, "send the body as application/json, not %.60q",
				contentType)
		}
	}
	// JSON may encode each byte of the message with six, such as \u0000. The other fields have 4096 bytes.
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(6*o.MaxMessage)+4096))
	if err == nil {
		err = decode(raw, &body)
	}
	if tooLong, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return body, problem.New(http.StatusRequestEntityTooLarge, "the body is longer than %d bytes", tooLong.Limit)
	}
	if err != nil {
		return body, problem.BadBody("the body is not {message, session_id?, agent?, wait?}: %s", describeBodyError(err))
	}
	if body.SessionID != "" && threads.CheckID(body.SessionID) != nil {
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
			return fmt.Sprintf("it is a %.60s", typeErr.Value)
		}
		return fmt.Sprintf("%s is a %.60s", typeErr.Field, typeErr.Value)
	}
	if errors.Is(err, io.EOF) {
		return "it is empty"
	}
	return fmt.Sprintf("%.200s", strings.TrimPrefix(err.Error(), "json: "))
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
func (o *Operate) respondJSON(w http.ResponseWriter, r *http.Request, s *Session, t turnRequest) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	answer := Answer{Tools: []ToolCall{}, Approvals: []Approval{}}
	traceID, started := "", false
	done, err := s.runTurn(ctx, t, func(e Event) {
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

// respondStream responds with events. With wait, the stream opens before the lane is acquired, so keep-alives reach the
// client.
func (o *Operate) respondStream(w http.ResponseWriter, r *http.Request, s *Session, t turnRequest) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	stream := newEventStream(w, cancel)
	defer stream.keepAlive(o.KeepAlive)()
	if t.wait {
		stream.sendComment("waiting for the lane " + Lane)
	}
	_, err := s.runTurn(ctx, t, stream.sendEvent)
	switch {
	case err == nil, stream.hasEvents(): // runTurn has sent done or error
	case !stream.started():
		problem.Write(w, r, o.busyProblem(r.Context(), s.id, err), "", o.log)
	default:
		stream.sendEvent(Event{"error", toProblem(o.busyProblem(r.Context(), s.id, err), "")})
	}
}

// keyHeader makes a request run once. Package api forgets an attempt whose process died. The turn of that attempt may
// go on, so its execution has a dedupe key, too.
const keyHeader = "Idempotency-Key"

// turnKey derives the dedupe key of a turn from the Idempotency-Key, the caller and the request; empty without an
// Idempotency-Key. Callers do not share keys.
func turnKey(r *http.Request, b Body) string {
	key := r.Header.Get(keyHeader)
	if key == "" {
		return ""
	}
	caller := activity.ActorFrom(r.Context()).Name
	sum := sha256.Sum256([]byte(strings.Join([]string{caller, key, b.SessionID, b.Message}, "\n")))
	return "operate " + hex.EncodeToString(sum[:])
}

// checkTurnKey returns the dedupe key for a new turn, or a problem if the turn exists. The key is free again after 24
// hours, or if the turn failed, timed out or was cancelled. Then the new dedupe key names the earlier turn.
func (o *Operate) checkTurnKey(ctx context.Context, key string) (string, error) {
	for candidate := key; candidate != ""; {
		var id string
		var keyExpired bool
		err := o.Pool.QueryRow(ctx, `
			select id::text, created_at < clock_timestamp() - interval '24 hours' from agent_executions where dedupe_key = @key`,
			postgres.Strict{"key": candidate}).Scan(&id, &keyExpired)
		if errors.Is(err, pgx.ErrNoRows) {
			return candidate, nil
		}
		if err != nil {
			return "", fmt.Errorf("read turn of an idempotency key: %w", err)
		}
		existing, err := executions.Get(ctx, o.Pool, id)
		if err != nil {
			return "", err
		}
		if !keyExpired && (!existing.Status.Ended() || existing.Status == executions.Completed) {
			return "", duplicateProblem(existing)
		}
		candidate = key + " after " + id
	}
	return "", nil
}

// duplicateProblem is the response to a request whose turn exists.
func duplicateProblem(existing executions.Execution) error {
	return problem.New(http.StatusConflict, "this %s was used: its turn is %s; see thread %s",
		keyHeader, existing.Status, postgres.Deref(existing.ThreadID)).
		Kind("idempotency-key-used", "Already handled").WithTrace(existing.TraceID)
}
