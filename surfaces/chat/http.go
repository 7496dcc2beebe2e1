package chat

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/trace"
)

// handler creates the trace of a request and writes its error.
func (c *Chat) handler(serve func(http.ResponseWriter, *http.Request, trace.ID) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := trace.New(trace.Chat)
		stamp(w, string(id), "")
		err := serve(w, r, id)
		var refusal *Refusal
		switch {
		case err == nil:
		case errors.As(err, &refusal):
			refusal.write(w, r, c.Logger)
		case !errors.Is(context.Cause(r.Context()), context.Canceled): // else the client left
			problem.WriteOpenAI(w, r, err, string(id), c.Logger)
		}
	})
}

// stamp sets the headers with the trace and the thread.
func stamp(w http.ResponseWriter, traceID, thread string) {
	w.Header().Set("X-Trace-Id", traceID)
	w.Header().Set("X-Request-Id", traceID) // shown by stock clients
	if thread != "" {
		w.Header().Set(threadHeader, thread)
	}
}

// Refusal is an error of OpenAI's protocol.
type Refusal struct {
	Status     int // of HTTP
	Type, Code string
	Param      string
	Message    string
	RetryAfter time.Duration
	// CompletionID names the turn that causes the refusal.
	CompletionID string
	// stored: the thread has the message, so a retry would store it twice.
	stored bool
}

// Codes of refusals before anything is stored. The same request may succeed later.
const (
	codeRateLimit    = "rate_limit_exceeded"
	codeThreadLocked = "thread_locked"
)

func (r *Refusal) isTemporary() bool { return r.Code == codeRateLimit || r.Code == codeThreadLocked }

// Error returns the message for the client.
func (r *Refusal) Error() string { return r.Message }

// badRequest returns a 400 for a parameter.
func badRequest(param, code, format string, args ...any) *Refusal {
	return &Refusal{
		Status: http.StatusBadRequest, Type: "invalid_request_error", Code: code, Param: param,
		Message: fmt.Sprintf(format, args...),
	}
}

// notFound returns a 404, for a missing object and for an object of another visitor.
func notFound(code, format string, args ...any) *Refusal {
	return &Refusal{
		Status: http.StatusNotFound, Type: "invalid_request_error", Code: code,
		Message: fmt.Sprintf(format, args...),
	}
}

// conflict returns a 409.
func conflict(code, format string, args ...any) *Refusal {
	return &Refusal{
		Status: http.StatusConflict, Type: "invalid_request_error", Code: code,
		Message: fmt.Sprintf(format, args...),
	}
}

// serverError returns a fault of the server. The log has its cause.
func serverError(status int, code, message string) *Refusal {
	return &Refusal{Status: status, Type: "server_error", Code: code, Message: message}
}

// failure converts the refusal to the error of the protocol.
func (r *Refusal) failure() chatwire.Failure {
	f := chatwire.Failure{Message: r.Message, Type: r.Type, Code: r.Code}
	if r.Param != "" {
		f.Param = &r.Param
	}
	return f
}

func (r *Refusal) write(w http.ResponseWriter, req *http.Request, log *slog.Logger) {
	if r.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(r.RetryAfter.Seconds()))))
	}
	if r.CompletionID != "" {
		w.Header().Set("X-Completion-Id", r.CompletionID)
	}
	if r.stored || r.Status == http.StatusConflict {
		w.Header().Set("X-Should-Retry", "false") // stock clients would send the message again
	}
	if err := chatwire.WriteFailure(w, r.Status, r.failure()); err != nil {
		log.DebugContext(req.Context(), "answer not sent", "error", err)
	}
}

// text decodes a JSON string. null and an absent value are empty.
func text(raw json.RawMessage) (string, bool) {
	var s *string
	if len(raw) == 0 {
		return "", true
	}
	if json.Unmarshal(raw, &s) != nil {
		return "", false
	}
	if s == nil {
		return "", true
	}
	return *s, true
}

// retryDelay is the Retry-After of a temporary refusal.
const retryDelay = 2 * time.Second
