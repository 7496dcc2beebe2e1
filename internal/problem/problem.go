// Package problem writes HTTP errors: RFC 9457, application/problem+json.
//
// A handler returns an error, and Write sends the response. Write sends a *Problem unchanged. An error of a package
// below gets its status: a busy lane is a conflict with its holder, an unknown id is not found. Any other error is a
// 500 that only refers to the log. So a client never sees SQL, addresses or a stack; an operator finds them in the log.
//
// Guarantees:
//
//   - Type names the kind of problem for programs. It is about:blank if the status is enough.
//   - A problem of a trace has trace_id, also as X-Trace-Id. A problem of a held lane has holder.
//   - A change of a stale revision is rejected (412). The problem has the current value and the rejected one.
//   - A temporary problem (503, a busy lane) has Retry-After.
//   - No cache stores a problem.
//
// Routes of OpenAI's protocol write the same errors with WriteOpenAI, in OpenAI's format.
package problem

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// ContentType is the content type of every problem.
const ContentType = "application/problem+json"

// Problem is an error in the form that the client receives.
type Problem struct {
	Type    string `json:"type"`
	Title   string `json:"title"`
	Status  int    `json:"status"`
	Detail  string `json:"detail"`
	TraceID string `json:"trace_id,omitempty"`
	Holder  string `json:"holder,omitempty"` // of the blocking lane or lock
	Scope   string `json:"scope,omitempty"`  // that the caller lacks (403)
	// The current value and the rejected one, for a change of a stale revision (412).
	Current any `json:"current,omitempty"`
	Yours   any `json:"yours,omitempty"`
}

// New returns a problem with the title of the status. The client sees the text of format and args.
func New(status int, format string, args ...any) *Problem {
	return &Problem{
		Type: "about:blank", Title: http.StatusText(status), Status: status,
		Detail: fmt.Sprintf(format, args...),
	}
}

// BadParameter returns a problem of a query parameter.
func BadParameter(format string, args ...any) *Problem {
	return New(http.StatusBadRequest, format, args...).Kind("bad-parameter", "Bad parameter")
}

// BadBody returns a problem of a request's body.
func BadBody(format string, args ...any) *Problem {
	return New(http.StatusBadRequest, format, args...).Kind("bad-body", "Bad body")
}

// Kind names a problem that clients distinguish beyond its status: name is a word with hyphens, title is for people.
// It changes p and returns it.
func (p *Problem) Kind(name, title string) *Problem {
	p.Type, p.Title = "urn:lanekeeper:problem:"+name, title
	return p
}

// WithHolder names the holder of the blocking lane or lock. It changes p and returns it.
func (p *Problem) WithHolder(owner string) *Problem {
	p.Holder = owner
	return p
}

// WithScope names the scope that the caller lacks. It changes p and returns it.
func (p *Problem) WithScope(scope string) *Problem {
	p.Scope = scope
	return p
}

// WithTrace names the trace of the problem. It changes p and returns it.
func (p *Problem) WithTrace(id string) *Problem {
	p.TraceID = id
	return p
}

// WithBoth adds the current value and the rejected one. It changes p and returns it.
func (p *Problem) WithBoth(current, yours any) *Problem {
	p.Current, p.Yours = current, yours
	return p
}

func (p *Problem) Error() string { return p.Title + ": " + p.Detail }

// Write sends the problem of err, and logs a cause that it hides from the client. traceID may be empty; log may be nil.
// The caller must not have written to w.
func Write(w http.ResponseWriter, r *http.Request, err error, traceID string, log *slog.Logger) {
	p := answerOf(r, err, traceID, log)
	send(w, r, p, ContentType, p, log)
}

var lockInPath = regexp.MustCompile(`/lock/[^/]+`)

// Path returns a request's path for the log, without the id of a run lock, which is a secret.
func Path(r *http.Request) string { return lockInPath.ReplaceAllString(r.URL.Path, "/lock/[redacted]") }

// answerOf returns the problem of an error, and logs a cause that concerns the operator.
func answerOf(r *http.Request, err error, traceID string, log *slog.Logger) *Problem {
	p, news := Of(err)
	if news && log != nil {
		about := []any{"method", r.Method, "path", Path(r), "status", p.Status, "trace_id", traceID, "error", err}
		if what, todo := postgres.Diagnose(err); what != "" {
			about = append(about, "trouble", what, "hint", todo)
		}
		log.ErrorContext(r.Context(), "request failed", about...)
	}
	named := *p
	named.TraceID = cmp.Or(named.TraceID, traceID)
	return &named
}

// send writes body, with the headers that p asks for.
func send(w http.ResponseWriter, r *http.Request, p *Problem, contentType string, body any, log *slog.Logger) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(body) // plain fields: cannot fail
	h := w.Header()
	if p.TraceID != "" {
		h.Set("X-Trace-Id", p.TraceID)
	}
	if h.Get("Retry-After") == "" && p.Status == http.StatusServiceUnavailable {
		h.Set("Retry-After", "2")
	}
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(b.Len()))
	w.WriteHeader(p.Status)
	if _, err := w.Write(b.Bytes()); err != nil && log != nil {
		log.DebugContext(r.Context(), "write response", "path", Path(r), "error", err)
	}
}

// UnknownField returns the first field of a JSON object that the struct behind into lacks; empty for none. It compares
// letter case, which json.Decoder.DisallowUnknownFields ignores.
func UnknownField(raw []byte, into any) (string, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return "", err
	}
	for _, f := range reflect.VisibleFields(reflect.TypeOf(into).Elem()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		delete(members, name)
	}
	left := append(slices.Sorted(maps.Keys(members)), "")
	return left[0], nil
}

// Of returns the problem that the client may see. news reports that the cause belongs in the log, for the operator.
func Of(err error) (p *Problem, news bool) {
	if errors.As(err, &p) {
		return p, false
	}
	if p, news = ofType(err); p != nil {
		return p, news
	}
	switch {
	case is(err, activity.ErrCursor):
		return BadParameter("parameter cursor is not a cursor of this listing"), false
	case is(err, trace.ErrInvalid, lanes.ErrInvalid):
		return New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id"), false
	case is(err, activity.ErrNotFound, executions.ErrNotFound, skills.ErrNotFound, memory.ErrNotFound,
		memory.ErrConflictNotFound, objectives.ErrNotFound,
		automations.ErrNotFound, automations.ErrRunNotFound, approvals.ErrNotFound, threads.ErrNotFound, webhooks.ErrNotFound,
		documents.ErrNotFound, channels.ErrNotFound, evals.ErrNotFound, agents.ErrNotFound):
		return New(http.StatusNotFound, "%s", err), false
	case is(err, approvals.ErrFourEyes):
		return New(http.StatusForbidden, "%s", approvals.ErrFourEyes).Kind("four-eyes", "Four eyes"), false
	case is(err, documents.ErrTooLarge):
		return New(http.StatusRequestEntityTooLarge, "%s", err), false
	case is(err, documents.ErrTooMany):
		return New(http.StatusConflict, "%s", err), false
	case is(err, threads.ErrEmpty, documents.ErrEmpty, documents.ErrForm):
		return BadBody("%s", err), false
	case is(err, memory.ErrConflictDecided, memory.ErrConflictsFull, objectives.ErrNotActive, objectives.ErrConflict,
		objectives.ErrNoEvidence,
		objectives.ErrNameTaken, automations.ErrProposal, automations.ErrSkillDisabled, automations.ErrNameTaken,
		approvals.ErrDecided):
		return New(http.StatusConflict, "%s", err), false
	case is(err, context.Canceled):
		return New(http.StatusServiceUnavailable, "the request was given up"), false
	case is(err, executions.ErrPaused): // before ErrDraining, which it also is
		return New(http.StatusConflict, "%s", err).Kind("paused", "Autonomous work is paused"), false
	case is(err, executions.ErrDraining):
		return New(http.StatusServiceUnavailable, "this process shuts down; try again").Kind("draining", "Draining"), false
	case postgres.Locked(err):
		what, _ := postgres.Diagnose(err)
		return New(http.StatusServiceUnavailable, "%s; try again", what).Kind("locked", "Locked"), true
	case Away(err):
		what, _ := postgres.Diagnose(err) // the advice is for the operator, in the log
		return New(http.StatusServiceUnavailable, "%s; try again", cmp.Or(what, "the database does not answer")).
			Kind("database-away", "Database away"), true
	}
	return New(http.StatusInternalServerError, "something went wrong here; the log has the cause"), true
}

// ofType is Of for errors that carry values; nil for others.
func ofType(err error) (p *Problem, news bool) {
	if busy, ok := errors.AsType[*lanes.BusyError](err); ok {
		return New(http.StatusConflict, "%s", busy).Kind("lane-busy", "Lane busy").WithHolder(busy.Holder), false
	}
	if blocked, ok := errors.AsType[*lanes.BlockedError](err); ok {
		return New(http.StatusConflict, "%s; try again, or end that transaction", blocked.Reason).Kind("lane-in-use",
			"Lane in use"), false
	}
	if refused, ok := errors.AsType[*executions.RunError](err); ok {
		return ofRun(refused), false
	}
	if stale, ok := errors.AsType[*memory.ConflictError](err); ok {
		return ofConflict(stale), false
	}
	if stale, ok := errors.AsType[*postgres.StaleError](err); ok {
		return New(http.StatusPreconditionFailed, "%s", stale).Kind("changed-meanwhile", "Changed meanwhile"), false
	}
	if locked, ok := errors.AsType[*postgres.LockedError](err); ok {
		return New(http.StatusServiceUnavailable, "%s; try again, or end that transaction", locked).Kind("locked", "Locked"),
			true
	}
	return nil, false
}

// ofConflict returns the problem of a changed memory entry, with both values.
func ofConflict(c *memory.ConflictError) *Problem {
	p := New(http.StatusPreconditionFailed, "%s", c).Kind("changed-meanwhile", "Changed meanwhile")
	if c.Theirs != nil {
		p.Current = c.Theirs
	}
	if c.Yours != nil {
		p.Yours = c.Yours
	}
	return p
}

// ofRun returns the worker's problem for an error of a run lock.
func ofRun(err *executions.RunError) *Problem {
	p := New(http.StatusConflict, "%s", err).WithHolder(err.Holder).WithTrace(err.TraceID)
	switch {
	case is(err, executions.ErrMalformed):
		p.Status = http.StatusBadRequest
		return p.Kind("bad-body", "Bad body")
	case is(err, executions.ErrHeld):
		return p.Kind("lock-held", "Lock held")
	case is(err, executions.ErrVoid):
		return p.Kind("lock-void", "Lock void")
	case is(err, executions.ErrOutputConflict):
		return p.Kind("step-recorded", "Step recorded otherwise")
	case is(err, executions.ErrNotReady):
		return p.Kind("run-waits", "Run waits")
	case is(err, executions.ErrEnded):
		return p.Kind("run-ended", "Run ended")
	case is(err, executions.ErrPaused):
		return p.Kind("paused", "Autonomous work is paused")
	}
	return p.Kind("not-outside", "Not for workers outside")
}

// is reports whether err is any of targets.
func is(err error, targets ...error) bool {
	for _, target := range targets {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// Away reports an unavailable database: unreachable, starting, stopping, full, read-only or too slow, also for a lock
// or a session.
func Away(err error) bool {
	if _, unreachable := errors.AsType[*pgconn.ConnectError](err); unreachable {
		return true
	}
	if _, broken := errors.AsType[net.Error](err); broken {
		return true
	}
	if strings.HasPrefix(postgres.Code(err), "08") { // a pooler whose server is away
		return true
	}
	// ErrConnClosed: a rollback on a broken connection
	return postgres.Locked(err) || is(err, context.DeadlineExceeded, io.ErrUnexpectedEOF, pgconn.ErrConnClosed) ||
		postgres.IsCode(err, "25006", "25P03", "25P04", "53000", "53100", "53200", "53300", "57014", "57P01", "57P02",
			"57P03", "57P05")
}

// WriteOpenAI is Write in OpenAI's format.
func WriteOpenAI(w http.ResponseWriter, r *http.Request, err error, traceID string, log *slog.Logger) {
	p := answerOf(r, err, traceID, log)
	if p.TraceID != "" {
		w.Header().Set("X-Request-Id", p.TraceID) // stock clients show it
	}
	send(w, r, p, "application/json", map[string]chatwire.Failure{"error": p.OpenAI()}, log)
}

// OpenAI returns p in OpenAI's format. Stock clients choose their typed error by the HTTP status. The name of Kind
// becomes the code.
func (p *Problem) OpenAI() chatwire.Failure {
	return chatwire.Failure{Message: p.Detail, Type: openAIType(p.Status), Code: p.code()}
}

func (p *Problem) code() string {
	if name, named := strings.CutPrefix(p.Type, "urn:lanekeeper:problem:"); named {
		return strings.ReplaceAll(name, "-", "_")
	}
	switch p.Status {
	case http.StatusUnauthorized:
		return "invalid_api_key"
	case http.StatusTooManyRequests:
		return "rate_limit_exceeded"
	case http.StatusInternalServerError:
		return "server_error"
	}
	return strings.ReplaceAll(strings.ToLower(http.StatusText(p.Status)), " ", "_")
}

func openAIType(status int) string {
	switch {
	case status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case status >= http.StatusInternalServerError:
		return "server_error"
	}
	return "invalid_request_error"
}
