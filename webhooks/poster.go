package webhooks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Poster sends requests. Those with secrets are signed by Standard Webhooks. Client comes from skills.NewGuardedClient;
// redirects are not followed. A nil Getenv reads the process's environment.
type Poster struct {
	Client *http.Client
	Getenv func(string) string
}

const (
	sendTimeout = 15 * time.Second
	maxPause    = 24 * time.Hour // longest pause that a target may request
	maxAnswer   = 4 << 10
)

// Request is one request to a target.
type Request struct {
	ID      string // the webhook-id, equal for every attempt
	TraceID string
	URL     string   // an address, or a reference to one
	Secrets []string // references; each one signs
	Payload string   // JSON
	SentAt  time.Time
}

// Response is the outcome of a request. Only a 2xx is a success and has no Error.
type Response struct {
	Status int    // HTTP status; 0 without a response
	Answer string // the beginning of the body
	Error  string // without the URL, whose query may be a secret
	Class  string // secret, network, http_status, or a class of [skills.CallError], such as refused
	Pause  time.Duration
	Gone   bool // the target rejects further messages
}

// Post makes one request within 15 seconds. Pause is the wait that the target requested, at most a day.
func (p Poster) Post(ctx context.Context, r Request) Response {
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	secrets, err := Secrets(r.Secrets, p.Getenv)
	if err != nil {
		return Response{Error: err.Error(), Class: "secret"}
	}
	if isReference(r.URL) {
		if r.URL, err = resolveSecret(r.URL, p.getenv()); err != nil {
			return Response{Error: err.Error(), Class: "secret"}
		}
	}
	headers := http.Header{}
	if len(secrets) > 0 {
		if headers, err = signature.Sign(secrets, r.ID, r.SentAt, []byte(r.Payload)); err != nil {
			return Response{Error: err.Error(), Class: "secret"}
		}
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, r.URL, strings.NewReader(r.Payload))
	if err != nil {
		// The error contains the URL, which may be a secret.
		return Response{Error: "the target's url is not a URL", Class: "refused"}
	}
	request.Header = headers
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("User-Agent", "lanekeeper")
	request.Header.Set("X-Trace-Id", r.TraceID)
	if parent := trace.Traceparent(ctx); parent != "" {
		request.Header.Set("Traceparent", parent)
	}
	client := *p.Client
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	response, err := client.Do(request)
	if err != nil {
		return connectionFailure(err)
	}
	defer func() { _ = response.Body.Close() }()
	body, _ := io.ReadAll(io.LimitReader(response.Body, maxAnswer)) // the body is only logged
	return classifyResponse(response, string(body))
}

func (p Poster) getenv() func(string) string {
	if p.Getenv == nil {
		return os.Getenv
	}
	return p.Getenv
}

// connectionFailure is the outcome of a request without a response.
func connectionFailure(err error) Response {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	r := Response{Error: err.Error(), Class: "network"}
	if ce, ok := errors.AsType[*skills.CallError](err); ok {
		r.Class = ce.Class
	}
	return r
}

func classifyResponse(response *http.Response, body string) Response {
	r := Response{Status: response.StatusCode, Answer: body}
	if r.Status >= 200 && r.Status < 300 {
		return r
	}
	r.Error, r.Class = fmt.Sprintf("it answered %s", response.Status), "http_status"
	switch r.Status {
	case http.StatusGone:
		r.Gone = true
	case http.StatusTooManyRequests, http.StatusServiceUnavailable, http.StatusBadGateway, http.StatusGatewayTimeout:
		r.Pause = retryAfter(response.Header.Get("Retry-After"), time.Now())
	}
	return r
}

// retryAfter parses the seconds or the date of Retry-After. It returns 0 for another text.
func retryAfter(text string, now time.Time) time.Duration {
	if seconds, err := strconv.Atoi(text); err == nil {
		return time.Duration(min(max(seconds, 0), int(maxPause/time.Second))) * time.Second
	}
	if at, err := http.ParseTime(text); err == nil {
		return min(max(at.Sub(now), 0), maxPause)
	}
	return 0
}
