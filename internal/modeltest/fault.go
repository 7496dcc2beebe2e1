package modeltest

import (
	"io"
	"math"
	"net/http"
	"strconv"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/chatwire"
)

// Status refuses the request with an HTTP status and, if retryAfter is positive, a Retry-After in whole
// seconds, rounded up.
func Status(status int, retryAfter time.Duration) Reply {
	kind, code := "server_error", ""
	switch {
	case status == http.StatusTooManyRequests:
		kind, code = "rate_limit_error", "rate_limit_exceeded"
	case status < http.StatusInternalServerError:
		kind = "invalid_request_error"
	}
	return Refusal(status, kind, code, http.StatusText(status), retryAfter)
}

// Refusal is [Status] with a given message.
func Refusal(status int, kind, code, message string, retryAfter time.Duration) Reply {
	return Reply{custom: func(c call) {
		if retryAfter > 0 {
			c.w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(retryAfter.Seconds()))))
		}
		f := chatwire.Failure{Message: message, Type: kind, Code: code}
		if err := chatwire.WriteFailure(c.w, status, f); err != nil {
			return // the client disconnected
		}
	}}
}

// Raw answers with a status, a content type and a body.
func Raw(status int, contentType, body string) Reply {
	return Custom(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		w.WriteHeader(status)
		if _, err := io.WriteString(w, body); err != nil {
			return // the client disconnected
		}
	})
}

// Custom makes h answer. The request's body is already read.
func Custom(h http.HandlerFunc) Reply {
	return Reply{custom: func(c call) { h(c.w, c.r) }}
}

// MidStreamError streams text, then comments, like a waiting provider, then the error message after status 200.
func MidStreamError(text, message string) Reply {
	return stream(func(s *chatwire.Stream) {
		s.Role()
		s.Text(text)
		for range 3 {
			s.Comment("PROCESSING")
		}
		s.Failure(chatwire.Failure{Message: message, Type: "server_error", Code: "server_error"})
	})
}

// CutStream streams text and then drops the connection.
func CutStream(text string) Reply {
	return stream(func(s *chatwire.Stream) {
		s.Role()
		s.Text(text)
		panic(http.ErrAbortHandler) // net/http's way to cut a connection
	})
}

// EndedStream streams text and then ends the body without finish reason and [DONE].
func EndedStream(text string) Reply {
	return stream(func(s *chatwire.Stream) {
		s.Role()
		s.Text(text)
	})
}

// Reset drops the connection without an answer.
func Reset() Reply {
	return Custom(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
}

// MalformedCall calls a tool with invalid JSON.
func MalformedCall(name string) Reply { return ToolCall(name, `{"limit": 3,`) }

// Hang sends nothing until the client disconnects or the test ends.
func Hang() Reply {
	return Reply{custom: func(c call) {
		select {
		case <-c.r.Context().Done():
		case <-c.quit:
		}
	}}
}

// Fragments streams fragments of tool calls, one chunk each, and a finish reason.
func Fragments(fragments ...openai.ToolCall) Reply {
	return stream(func(s *chatwire.Stream) {
		s.Role()
		for _, f := range fragments {
			s.Calls(f)
		}
		s.Finish(openai.FinishReasonToolCalls)
		s.Done()
	})
}

// stream is a reply whose chunks f writes.
func stream(f func(*chatwire.Stream)) Reply {
	return Reply{custom: func(c call) {
		f(chatwire.Open(c.w, "chatcmpl-"+strconv.Itoa(c.n), c.req.Model, created))
	}}
}
