package webhooks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	sendTimeout = 15 * time.Second
	longestStop = 24 * time.Hour // that a target may ask for
	maxAnswer   = 4 << 10
)

// Poster posts what is signed as Standard Webhooks says. Client comes from skills.NewGuardedClient; its redirects are not
// followed. A nil Getenv is the process's environment.
type Poster struct {
	Client *http.Client
	Getenv func(string) string
}

// Request is one request to a target.
type Request struct {
	ID      string // the webhook-id, the same for every attempt
	TraceID string
	URL     string
	Secrets []string // references; each signs
	Payload string   // JSON
	SentAt  time.Time
}

// Response is how a request ended. Only 2xx is a success, and has no Error.
type Response struct {
	Status int    // of HTTP; 0 without an answer
	Answer string // the beginning of its body
	Error  string // without the address: its query may be a secret
	Class  string // secret, refused, network, http_status, …
	Pause  time.Duration
	Gone   bool // the target wants no more
}

// Post makes one request, of at most 15 seconds. Pause is how long the target asked to be left alone, at most a day.
func (p Poster) Post(ctx context.Context, l Request) Response {
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	secrets, err := Secrets(l.Secrets, p.Getenv)
	if err != nil {
		return Response{Error: err.Error(), Class: "secret"}
	}
	headers, err := signature.Sign(secrets, l.ID, l.SentAt, []byte(l.Payload))
	if err != nil {
		return Response{Error: err.Error(), Class: "secret"}
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, l.URL, strings.NewReader(l.Payload))
	if err != nil {
		return Response{Error: err.Error(), Class: "refused"}
	}
	request.Header = headers
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("User-Agent", "lanekeeper")
	request.Header.Set("X-Trace-Id", l.TraceID)
	if parent := trace.Traceparent(ctx); parent != "" {
		request.Header.Set("Traceparent", parent)
	}
	client := *p.Client
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	response, err := client.Do(request)
	if err != nil {
		return unsent(err)
	}
	defer func() { _ = response.Body.Close() }()                    // only read from: nothing is lost
	said, _ := io.ReadAll(io.LimitReader(response.Body, maxAnswer)) // what it says is only for the log
	return judged(response, string(said))
}

// unsent is the receipt of a request without an answer.
func unsent(err error) Response {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	r := Response{Error: err.Error(), Class: "network"}
	if ce, ok := errors.AsType[*skills.CallError](err); ok {
		r.Class = ce.Class
	}
	return r
}

// judged reads the answer.
func judged(response *http.Response, said string) Response {
	r := Response{Status: response.StatusCode, Answer: said}
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

// retryAfter reads seconds or a date; 0 when there is neither.
func retryAfter(text string, now time.Time) time.Duration {
	if seconds, err := strconv.Atoi(text); err == nil {
		return min(max(time.Duration(seconds), 0)*time.Second, longestStop)
	}
	if at, err := http.ParseTime(text); err == nil {
		return min(max(at.Sub(now), 0), longestStop)
	}
	return 0
}
