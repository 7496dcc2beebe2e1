// Package problem is how the house answers over HTTP when something is not as asked for: RFC 9457,
// application/problem+json.
//
// A handler returns an error, and Write makes an answer of it. An error that is a *Problem is answered as
// it stands; those of the packages below get the status that they mean (a lane that is busy is a conflict
// with its holder, an id that nobody knows is not found); any other is a 500 that says only that the log
// has the cause. So a client never sees SQL, addresses or a stack, and an operator always does.
//
// It promises:
//
//   - Type tells programs the sort of problem. It is about:blank where the status says it all.
//   - trace_id is there where a trace is, also as X-Trace-Id; holder is there where a lane is held.
//   - A change that is based on a revision which is not there any more is refused (412) with what is there now and
//     what was to be written.
//   - A problem that time may cure (503, a busy lane) has Retry-After.
//   - No answer is kept by a cache.
//
// Routes that speak OpenAI's protocol write the same errors in its format with WriteOpenAI.
package problem

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"strconv"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ContentType is that of every problem.
const ContentType = "application/problem+json"

// Problem is an error as the client gets it.
type Problem struct {
	Type    string `json:"type"`
	Title   string `json:"title"`
	Status  int    `json:"status"`
	Detail  string `json:"detail"`
	TraceID string `json:"trace_id,omitempty"`
	Holder  string `json:"holder,omitempty"` // of the lane or lock that is in the way
	Scope   string `json:"scope,omitempty"`  // that the caller lacks (403)
	// Of a change that was based on something else than what is there (412): what is there now, and what was to be
	// written.
	Current any `json:"current,omitempty"`
	Yours   any `json:"yours,omitempty"`
}

// New returns a problem whose type and title are those of the status. What format and args say is told to
// the client.
func New(status int, format string, args ...any) *Problem {
	return &Problem{
		Type: "about:blank", Title: http.StatusText(status), Status: status,
		Detail: fmt.Sprintf(format, args...),
	}
}

// Kind names a problem that clients tell apart beyond its status: name is a word with hyphens, title is
// for people. It changes p and returns it.
func (p *Problem) Kind(name, title string) *Problem {
	p.Type, p.Title = "urn:lanekeeper:problem:"+name, title
	return p
}

// WithHolder says who holds what is in the way. It changes p and returns it.
func (p *Problem) WithHolder(owner string) *Problem {
	p.Holder = owner
	return p
}

// WithScope names the scope that the caller lacks. It changes p and returns it.
func (p *Problem) WithScope(scope string) *Problem {
	p.Scope = scope
	return p
}

// WithTrace says in which trace it happened. It changes p and returns it.
func (p *Problem) WithTrace(id string) *Problem {
	p.TraceID = id
	return p
}

// WithBoth says what is there and what was to be written. It changes p and returns it.
func (p *Problem) WithBoth(current, yours any) *Problem {
	p.Current, p.Yours = current, yours
	return p
}

func (p *Problem) Error() string { return p.Title + ": " + p.Detail }

// Write answers with what err means to the client, and logs what the client is not told. traceID may be
// empty; log may be nil. Nothing may have been written to w before.
func Write(w http.ResponseWriter, r *http.Request, err error, traceID string, log *slog.Logger) {
	p := told(r, err, traceID, log)
	send(w, r, p, ContentType, p, log)
}

var lockInPath = regexp.MustCompile(`/lock/[^/]+`)

// Path is the path of a request as it may be logged: the id of a run lock is a secret.
func Path(r *http.Request) string { return lockInPath.ReplaceAllString(r.URL.Path, "/lock/[redacted]") }

// told is the problem to answer with. What is news for the operator goes to the log.
func told(r *http.Request, err error, traceID string, log *slog.Logger) *Problem {
	p, news := Of(err)
	if news && log != nil {
		about := []any{"method", r.Method, "path", Path(r), "status", p.Status, "trace_id", traceID, "error", err}
		if what, todo := postgres.Trouble(err); what != "" {
			about = append(about, "trouble", what, "hint", todo)
		}
		log.ErrorContext(r.Context(), "request failed", about...)
	}
	said := *p
	said.TraceID = cmp.Or(said.TraceID, traceID)
	return &said
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
		log.DebugContext(r.Context(), "client went away", "path", Path(r), "error", err)
	}
}
