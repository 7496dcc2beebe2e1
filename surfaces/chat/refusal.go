package chat

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
)

// Refusal is an answer that says no, as OpenAI's protocol does.
type Refusal struct {
	Status     int // of HTTP
	Type, Code string
	Param      string
	Message    string
	RetryAfter time.Duration
	// CompletionID names the turn that stands in the way.
	CompletionID string
	// stored says that the message is in the thread: sending it again would say it twice.
	stored bool
}

// Error is what the client is told.
func (r *Refusal) Error() string { return r.Message }

// bad is a request that cannot be understood.
func bad(param, code, format string, args ...any) *Refusal {
	return &Refusal{
		Status: http.StatusBadRequest, Type: "invalid_request_error", Code: code, Param: param,
		Message: fmt.Sprintf(format, args...),
	}
}

// unknown is said of what does not exist and of what belongs to somebody else, so that the two look alike.
func unknown(code, format string, args ...any) *Refusal {
	return &Refusal{
		Status: http.StatusNotFound, Type: "invalid_request_error", Code: code,
		Message: fmt.Sprintf(format, args...),
	}
}

// conflict is a request that cannot be served now.
func conflict(code, format string, args ...any) *Refusal {
	return &Refusal{
		Status: http.StatusConflict, Type: "invalid_request_error", Code: code,
		Message: fmt.Sprintf(format, args...),
	}
}

// broken is a fault on this side; the cause is in the log.
func broken(status int, code, message string) *Refusal {
	return &Refusal{Status: status, Type: "server_error", Code: code, Message: message}
}

// failure is the refusal in the form of the protocol.
func (r *Refusal) failure() chatwire.Failure {
	f := chatwire.Failure{Message: r.Message, Type: r.Type, Code: r.Code}
	if r.Param != "" {
		f.Param = &r.Param
	}
	return f
}

// write sends the refusal.
func (r *Refusal) write(w http.ResponseWriter, req *http.Request, log *slog.Logger) {
	if r.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(r.RetryAfter.Seconds()))))
	}
	if r.CompletionID != "" {
		w.Header().Set("X-Completion-Id", r.CompletionID)
	}
	if r.stored || r.Status == http.StatusConflict {
		w.Header().Set("X-Should-Retry", "false") // the stock clients would send the message again
	}
	if err := chatwire.WriteFailure(w, r.Status, r.failure()); err != nil {
		log.DebugContext(req.Context(), "answer not sent", "error", err)
	}
}

// text is a string of the request's JSON; null and absent are empty.
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
