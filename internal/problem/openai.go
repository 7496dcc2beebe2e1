package problem

import (
	"log/slog"
	"net/http"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
)

// WriteOpenAI is Write in OpenAI's format.
func WriteOpenAI(w http.ResponseWriter, r *http.Request, err error, traceID string, log *slog.Logger) {
	p := problemOf(r, err, traceID, log)
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
