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
//   - A 503 has Retry-After.
//   - No cache stores a problem.
//
// Routes of OpenAI's protocol write the same errors with WriteOpenAI, in OpenAI's format.
package problem

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
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

func (p *Problem) Error() string { return p.Title + ": " + p.Detail }

// Write sends the problem of err, and logs a cause that it hides from the client. traceID may be empty; log may be nil.
// The caller must not have written to w.
func Write(w http.ResponseWriter, r *http.Request, err error, traceID string, log *slog.Logger) {
	p := problemOf(r, err, traceID, log)
	send(w, r, p, ContentType, p, log)
}

var lockInPath = regexp.MustCompile(`/lock/[^/]+`)

// Path returns a request's path for the log, without the id of a run lock, which is a secret.
func Path(r *http.Request) string { return lockInPath.ReplaceAllString(r.URL.Path, "/lock/[redacted]") }

// problemOf returns the problem of an error with its trace, and logs a cause that concerns the operator.
func problemOf(r *http.Request, err error, traceID string, log *slog.Logger) *Problem {
	p, forLog := Of(err)
	if forLog && log != nil {
		fields := []any{"method", r.Method, "path", Path(r), "status", p.Status, "trace_id", traceID, "error", err}
		if what, todo := postgres.Diagnose(err); what != "" {
			fields = append(fields, "trouble", what, "hint", todo)
		}
		log.ErrorContext(r.Context(), "request failed", fields...)
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

// UnknownField returns the first name in a JSON object, in alphabetical order, that is no field of the struct behind
// into; empty for none. In contrast to json.Decoder.DisallowUnknownFields, it distinguishes upper and lower case.
func UnknownField(raw []byte, into any) (string, error) {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		return "", err
	}
	for _, f := range reflect.VisibleFields(reflect.TypeOf(into).Elem()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		delete(members, name)
	}
	if unknown := slices.Sorted(maps.Keys(members)); len(unknown) > 0 {
		return unknown[0], nil
	}
	return "", nil
}
