package models

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lanekeeper/lanekeeper/trace"
)

// roundTrip is the HTTP client of go-openai for one attempt. Its fields outlive go-openai's call, so the caller learns
// what the server sent. It replaces the request's body, because go-openai lacks some fields, and sets headers. It keeps
// refusals with all headers, filters event streams and accepts a whole document instead of a stream. It enforces the
// idle timeout.
//
// One goroutine uses it. A goroutine of net/http may set requestSent.
type roundTrip struct {
	config         Config
	idempotencyKey string
	requestBody    string // the body that replaces go-openai's
	idle           *time.Timer
	answered       bool        // the finish reason arrived; usage may follow
	requestSent    atomic.Bool // the request may have left this process

	body     io.ReadCloser
	failure  *Error     // the server refused
	lines    *dataLines // set if the answer is a stream
	document []byte     // set if the answer is whole
}

// newRoundTrip starts the idle timer, which calls cancel.
func newRoundTrip(config Config, idempotencyKey, body string, cancel context.CancelCauseFunc) *roundTrip {
	t := &roundTrip{config: config, idempotencyKey: idempotencyKey, requestBody: body}
	t.idle = time.AfterFunc(config.IdleTimeout, func() {
		cancel(&idleError{config.IdleTimeout})
	})
	return t
}

// close stops the timer and closes the body.
func (t *roundTrip) close() {
	t.idle.Stop()
	if t.body != nil {
		t.body.Close() // all needed bytes were read
	}
}

// usageTimeout bounds the wait for the usage after a complete answer. Some servers neither send it nor end the stream.
const usageTimeout = 5 * time.Second

// awaitUsage bounds the rest of a stream whose answer is complete. Some servers send the finish reason early: more of
// the answer begins the wait anew.
func (t *roundTrip) awaitUsage(grew bool) {
	if grew || !t.answered {
		t.answered = true
		t.idle.Reset(min(t.config.IdleTimeout, usageTimeout))
	}
}

// sawDone reports whether the stream's end marker arrived.
func (t *roundTrip) sawDone() bool { return t.lines != nil && t.lines.done }

// Do sends a request of go-openai.
func (t *roundTrip) Do(req *http.Request) (*http.Response, error) {
	t.config.apply(req)
	if t.idempotencyKey != "" {
		req.Header.Set("Idempotency-Key", t.idempotencyKey)
	}
	if parent := trace.Traceparent(req.Context()); parent != "" {
		req.Header.Set("Traceparent", parent)
	}
	ctx := httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { t.requestSent.Store(true) },
	})
	req = req.WithContext(ctx)
	req.Body, req.ContentLength = io.NopCloser(strings.NewReader(t.requestBody)), int64(len(t.requestBody))
	req.GetBody = nil // net/http would use it after a broken connection to repeat the request, with go-openai's body
	resp, err := t.config.HTTPClient.Do(req)
	if err != nil {
		return nil, err
	}
	t.body = resp.Body
	body := bufio.NewReader(&idleReader{body: resp.Body, trip: t})
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		t.readRefusal(resp, body)
		return withBody(resp, "{}"), nil // failure has the refusal
	}
	if first, err := firstByte(body); err == nil && first == '<' {
		return nil, t.config.suspectBaseURL(errWebPage)
	} else if err == nil && (first == '{' || first == '[') {
		return t.readDocument(resp, body)
	}
	t.lines = newDataLines(body)
	resp.Body = io.NopCloser(t.lines)
	return resp, nil
}

// readRefusal stores the reason of a refusal.
func (t *roundTrip) readRefusal(resp *http.Response, body io.Reader) {
	text, err := io.ReadAll(io.LimitReader(body, maxRefusalBytes))
	if err != nil && len(text) == 0 {
		text = []byte(http.StatusText(resp.StatusCode)) // the status decides; the connection cut the message
	}
	t.failure = apiError(resp.StatusCode, resp.Header, text)
}

// maxRefusalBytes bounds the bytes read of a refusal.
const maxRefusalBytes = 64 << 10

// readDocument stores an answer in one piece. If go-openai requested a stream, it gets a stream of one chunk. Otherwise
// it gets {}, and the caller reads the document.
func (t *roundTrip) readDocument(resp *http.Response, body io.Reader) (*http.Response, error) {
	text, err := io.ReadAll(io.LimitReader(body, maxAnswerBytes+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxAnswerBytes {
		return nil, errAnswerTooLong
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, text); err != nil {
		return nil, fmt.Errorf("decode answer: %w", err)
	}
	t.document = compact.Bytes()
	if resp.Request.Header.Get("Accept") != "text/event-stream" {
		return withBody(resp, "{}"), nil
	}
	t.lines = newDataLines(bytes.NewReader(append(slices.Clip(t.document), "\ndata: [DONE]\n"...)))
	resp.Body = io.NopCloser(t.lines)
	return resp, nil
}

// mayBeBilled reports whether a failed attempt may have used tokens: the server may have received the attempt and did
// not refuse it. A gateway's timeout shows nothing about the model behind the gateway.
func (t *roundTrip) mayBeBilled(err error) bool {
	if t.failure == nil {
		return t.requestSent.Load() && !errors.Is(err, errWebPage)
	}
	switch status := t.failure.Status; status {
	case http.StatusNotImplemented, http.StatusServiceUnavailable, statusOverloaded:
		return false
	case http.StatusRequestTimeout:
		return true
	default:
		return status >= 500
	}
}

// statusOverloaded is the status of some providers instead of 503.
const statusOverloaded = 529

// toError returns the error of a failed attempt.
func (t *roundTrip) toError(ctx context.Context, err error) *Error {
	var silent *idleError
	var failure *Error
	switch {
	case t.failure != nil:
		failure = t.failure
	case errors.As(context.Cause(ctx), &silent):
		failure = &Error{Message: silent.Error(), Retryable: true, cause: silent}
	case !errors.As(err, &failure):
		failure = transportError(err)
	}
	return failure.scrubbed(t.config.secrets())
}

var errWebPage = errors.New("the answer is a web page")

// idleError is the cause of an attempt that the idle timer cancelled.
type idleError struct{ after time.Duration }

func (e *idleError) Error() string {
	after := e.after
	if after > time.Second {
		after = after.Round(time.Second)
	}
	return fmt.Sprintf("the server was silent for %s", after)
}

// idleReader resets the idle timer on each read of an incomplete answer.
type idleReader struct {
	body io.Reader
	trip *roundTrip
}

func (r *idleReader) Read(p []byte) (int, error) {
	n, err := r.body.Read(p)
	if n > 0 && !r.trip.answered {
		r.trip.idle.Reset(r.trip.config.IdleTimeout)
	}
	return n, err
}

// firstByte peeks at the first byte that is not white space.
func firstByte(body *bufio.Reader) (byte, error) {
	for {
		next, err := body.Peek(1)
		if err != nil {
			return 0, err
		}
		if !bytes.ContainsAny(next, " \t\r\n") {
			return next[0], nil
		}
		if _, err := body.Discard(1); err != nil {
			return 0, err
		}
	}
}

// withBody replaces the body of a response.
func withBody(resp *http.Response, body string) *http.Response {
	resp.Body = io.NopCloser(strings.NewReader(body))
	return resp
}
