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

// roundTrip is the exchange of one attempt, between go-openai and the network. It replaces the body, because go-openai
// lacks some fields, and sets headers. It reads refusals with all headers and filters event streams. It accepts a whole
// document instead of a stream, and enforces the idle timeout.
type roundTrip struct {
	config      Config
	key         string // idempotency key
	requestBody string // the body that replaces go-openai's
	idle        *time.Timer
	complete    bool        // the answer is; usage may follow
	requestSent atomic.Bool // the request may have left this process

	body     io.ReadCloser
	failure  *Error     // the server refused
	lines    *dataLines // set if the answer is a stream
	document []byte     // set if the answer is whole
}

// newRoundTrip starts the idle timer, which calls cancel.
func newRoundTrip(config Config, idempotencyKey, body string, cancel context.CancelCauseFunc) *roundTrip {
	l := &roundTrip{config: config, key: idempotencyKey, requestBody: body}
	l.idle = time.AfterFunc(config.IdleTimeout, func() {
		cancel(&idleError{config.IdleTimeout})
	})
	return l
}

// close stops the timer and closes the body.
func (l *roundTrip) close() {
	l.idle.Stop()
	if l.body != nil {
		l.body.Close() // all needed bytes were read
	}
}

// usageTimeout bounds the wait for the usage after a complete answer. Some servers neither send it nor end the stream.
const usageTimeout = 5 * time.Second

// awaitUsage bounds the rest of a stream whose answer is complete. Some servers send the finish reason early: more of
// the answer begins the wait anew.
func (l *roundTrip) awaitUsage(grew bool) {
	if grew || !l.complete {
		l.complete = true
		l.idle.Reset(min(l.config.IdleTimeout, usageTimeout))
	}
}

// sawDone reports whether the stream's end marker arrived.
func (l *roundTrip) sawDone() bool { return l.lines != nil && l.lines.done }

// Do sends a request of go-openai.
func (l *roundTrip) Do(req *http.Request) (*http.Response, error) {
	l.config.apply(req)
	if l.key != "" {
		req.Header.Set("Idempotency-Key", l.key)
	}
	if parent := trace.Traceparent(req.Context()); parent != "" {
		req.Header.Set("Traceparent", parent)
	}
	ctx := httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { l.requestSent.Store(true) },
	})
	req = req.WithContext(ctx)
	req.Body, req.ContentLength = io.NopCloser(strings.NewReader(l.requestBody)), int64(len(l.requestBody))
	req.GetBody = nil // net/http would use it after a broken connection to repeat the request, with go-openai's body
	resp, err := l.config.HTTPClient.Do(req)
	if err != nil {
		return nil, err
	}
	l.body = resp.Body
	body := bufio.NewReader(&idleReader{body: resp.Body, trip: l})
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		l.readRefusal(resp, body)
		return replaced(resp, []byte("{}")), nil
	}
	if first, err := firstByte(body); err == nil && first == '<' {
		return nil, l.config.suspectBaseURL(errWebPage)
	} else if err == nil && (first == '{' || first == '[') {
		return l.readDocument(resp, body)
	}
	l.lines = newDataLines(body)
	resp.Body = io.NopCloser(l.lines)
	return resp, nil
}

// readRefusal stores the reason of a refusal.
func (l *roundTrip) readRefusal(resp *http.Response, body io.Reader) {
	text, err := io.ReadAll(io.LimitReader(body, maxRefusalBytes))
	if err != nil && len(text) == 0 {
		text = []byte(http.StatusText(resp.StatusCode)) // the status decides; the connection cut the message
	}
	l.failure = apiError(resp.StatusCode, resp.Header, text)
}

// maxRefusalBytes bounds the bytes read of a refusal.
const maxRefusalBytes = 64 << 10

// readDocument stores an answer in one piece and passes the answer on. If go-openai requested a stream, it gets a
// stream of one chunk.
func (l *roundTrip) readDocument(resp *http.Response, body io.Reader) (*http.Response, error) {
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
	l.document = compact.Bytes()
	if resp.Request.Header.Get("Accept") != "text/event-stream" {
		return replaced(resp, []byte("{}")), nil
	}
	l.lines = newDataLines(bytes.NewReader(append(slices.Clip(l.document), "\ndata: [DONE]\n"...)))
	resp.Body = io.NopCloser(l.lines)
	return resp, nil
}

// mayBeBilled reports whether a failed attempt may have used tokens: the server may have received the attempt and did
// not refuse it. A gateway's timeout shows nothing about the model behind the gateway.
func (l *roundTrip) mayBeBilled(err error) bool {
	if l.failure == nil {
		return l.requestSent.Load() && !errors.Is(err, errWebPage)
	}
	switch status := l.failure.Status; status {
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
func (l *roundTrip) toError(ctx context.Context, err error) *Error {
	var silent *idleError
	var failure *Error
	switch {
	case l.failure != nil:
		failure = l.failure
	case errors.As(context.Cause(ctx), &silent):
		failure = &Error{Message: silent.Error(), Retryable: true, cause: silent}
	case !errors.As(err, &failure):
		failure = transportError(err)
	}
	return failure.scrubbed(l.config.secrets())
}

var (
	errNoAnswer = errors.New("the answer has no choices")
	errWebPage  = errors.New("the answer is a web page")
)

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

func (h *idleReader) Read(p []byte) (int, error) {
	n, err := h.body.Read(p)
	if n > 0 && !h.trip.complete {
		h.trip.idle.Reset(h.trip.config.IdleTimeout)
	}
	return n, err
}

// firstByte peeks at the first byte that is not white space.
func firstByte(in *bufio.Reader) (byte, error) {
	for {
		next, err := in.Peek(1)
		if err != nil {
			return 0, err
		}
		if !bytes.ContainsAny(next, " \t\r\n") {
			return next[0], nil
		}
		if _, err := in.Discard(1); err != nil {
			return 0, err
		}
	}
}

func replaced(resp *http.Response, body []byte) *http.Response {
	resp.Body = io.NopCloser(bytes.NewReader(body))
	return resp
}
