package models

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/sleep"
	"github.com/lanekeeper/lanekeeper/trace"
)

// run is one Complete call: attempts until one succeeds.
type run struct {
	client   *Client
	req      Request
	started  time.Time
	attempts int     // including those that revealed a dialect
	last     Request // request of the last attempt
	shown    bool    // OnDelta received text of the current attempt
	unknown  bool    // the server may bill the last attempt at an unknown amount
}

// untilDone repeats the request while a retry may succeed.
func (r *run) untilDone(ctx context.Context) (answer, error) {
	for attempt := 1; ; {
		d := r.client.dialectFor(r.req.Model)
		api := r.client.api(r.req.Model, d)
		a, failure := r.try(ctx, api, d)
		if failure == nil {
			return a, nil
		}
		if ctx.Err() != nil {
			return answer{}, fmt.Errorf("complete with %s: %w", r.req.Model, contextError(ctx))
		}
		r.restart()
		if r.schemaRefused(failure) {
			continue
		}
		if next, changed := d.next(failure, attemptedRequest{r.req, api, r.client.config.API}); changed {
			r.client.learn(ctx, r.req.Model, next)
			continue // servers do not bill a refusal
		}
		if failure.namesResponses() && api == APIChat {
			failure.Advice = adviseResponses
		}
		wait, retry := r.client.config.Retry.wait(attempt, failure)
		if _, silent := errors.AsType[*idleError](failure); silent && r.req.Fallback || !retry || !deadlineAllows(ctx, wait) {
			return answer{}, failure
		}
		r.client.config.Logger.WarnContext(ctx, "model call repeated", slog.String("model", r.req.Model),
			slog.Int("attempt", attempt), slog.Duration("wait", wait), slog.String("error", failure.Error()))
		if !sleep.For(ctx, wait) {
			return answer{}, fmt.Errorf("complete with %s: %w", r.req.Model, errors.Join(contextError(ctx), failure))
		}
		if err := r.beforeRetry(ctx); err != nil {
			return answer{}, fmt.Errorf("complete with %s again: %w", r.req.Model, err)
		}
		attempt++
	}
}

// beforeRetry lets the caller account for an attempt that the server may bill.
func (r *run) beforeRetry(ctx context.Context) (err error) {
	if r.unknown && r.req.BeforeRetry != nil {
		r.unknown = false
		r.req.MaxTokens, err = r.req.BeforeRetry(ctx)
	}
	return err
}

// restart notifies a live viewer that the displayed text is void.
func (r *run) restart() {
	if r.shown && r.req.OnRestart != nil {
		r.req.OnRestart()
	}
	r.shown = false
}

// try sends the request once.
func (r *run) try(ctx context.Context, api API, d dialect) (answer, *Error) {
	r.attempts++
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r.last = adaptRequest(r.req, d)
	body, err := r.client.body(r.req, api, d)
	if err != nil {
		return answer{}, &Error{Message: "encode request: " + err.Error(), cause: err}
	}
	config := r.client.config
	if deadline, bounded := ctx.Deadline(); bounded && r.req.Fallback {
		config.IdleTimeout = min(config.IdleTimeout, time.Until(deadline)/2)
	}
	link := newLink(config, r.req.IdempotencyKey, body, cancel)
	defer link.close()

	var parts assembler = &assembly{}
	if api == APIResponses {
		parts = &response{}
	}
	exchange := r.exchangeStream
	if d.has(noStream) {
		exchange = r.exchangeDocument
	}
	err = exchange(ctx, link, api, parts)
	if err == nil && !parts.ended(false) && parts.empty() {
		err = errNoAnswer
	}
	if err != nil {
		r.unknown = link.mayBeBilled(err)
		return answer{}, link.explain(ctx, err)
	}
	r.show(parts.rest())
	used, cut := parts.known()
	reports := r.client.reportsUsage(used != (Usage{}))
	r.unknown = used == (Usage{}) && (reports || cut)
	return parts.answer(r.req, r.client.origin(r.req.Model)), nil
}

// receiver yields the pieces of a stream.
type receiver interface {
	RecvRaw() ([]byte, error)
	Close() error
}

// open sends the request for a stream.
func (r *run) open(ctx context.Context, link *link, api API) (receiver, error) {
	if api == APIResponses {
		return r.client.openAIClient(link).CreateResponseStream(ctx, openai.CreateResponseRequest{})
	}
	return r.client.openAIClient(link).CreateChatCompletionStream(ctx, openai.ChatCompletionRequest{})
}

// exchangeStream receives the answer in chunks.
func (r *run) exchangeStream(ctx context.Context, link *link, api API, parts assembler) error {
	stream, err := r.open(ctx, link, api)
	if err != nil {
		return err
	}
	defer stream.Close()
	for {
		chunk, err := stream.RecvRaw()
		ended := errors.Is(err, io.EOF)
		if err != nil {
			err = cutOff(err)
		} else {
			err = r.addChunk(parts, chunk)
		}
		switch complete := parts.ended(link.sawDone()); {
		case err != nil && complete: // an error after the end loses only the usage
			parts.misses(!link.sawDone() && !ended)
			return nil
		case err != nil:
			return err
		case complete && api == APIResponses: // nothing follows, and some servers keep the connection open
			return nil
		case !complete && parts.beyond(r.req.MaxTokens):
			r.client.config.Logger.WarnContext(
				ctx,
				"model ignored its limit, answer cut",
				slog.String("model", r.req.Model),
				slog.Int("max_tokens", r.req.MaxTokens),
				slog.Int("bytes", parts.size()),
			)
			parts.cutAt(FinishLength)
			return nil
		}
	}
}

// exchangeDocument receives the answer as one document, from servers without streams.
func (r *run) exchangeDocument(ctx context.Context, link *link, api API, parts assembler) error {
	var err error
	if api == APIResponses {
		_, err = r.client.openAIClient(link).CreateResponse(ctx, openai.CreateResponseRequest{})
	} else {
		_, err = r.client.openAIClient(link).CreateChatCompletion(ctx, openai.ChatCompletionRequest{})
	}
	if err != nil {
		return err
	}
	return r.addChunk(parts, link.document)
}

// addChunk adds a chunk to the answer and passes its text to the viewer.
func (r *run) addChunk(parts assembler, chunk []byte) error {
	text, err := parts.add(chunk)
	if err != nil {
		return err
	}
	r.show(text)
	return nil
}

// show passes text to a live viewer.
func (r *run) show(text string) {
	if text != "" && r.req.OnDelta != nil {
		r.shown = true
		r.req.OnDelta(text)
	}
}

// cutOff returns the end of a stream as an error.
func cutOff(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("the stream was cut off before its end: %w", err)
}

// statusOverloaded is the status of some providers instead of 503.
const statusOverloaded = 529

// maxRefusalBytes bounds the bytes read of a refusal.
const maxRefusalBytes = 64 << 10

var (
	errNoAnswer = errors.New("the answer has no choices: is OPENAI_BASE_URL a chat completions endpoint?")
	errWebPage  = errors.New("the answer is a web page: is OPENAI_BASE_URL a chat completions endpoint?")
)

// link is the connection of one attempt, between go-openai and the network. It replaces the body, because go-openai
// lacks some fields, and sets headers. It reads refusals with all headers and filters event streams. It accepts a whole
// document instead of a stream, and enforces the idle timeout.
type link struct {
	config      Config
	key         string // idempotency key
	requestBody string // the body that replaces go-openai's
	idle        *time.Timer
	requestSent atomic.Bool // the request may have left this process

	body     io.ReadCloser
	failure  *Error     // the server refused
	lines    *dataLines // set if the answer is a stream
	document []byte     // set if the answer is whole
}

// newLink starts the idle timer, which calls cancel.
func newLink(config Config, idempotencyKey, body string, cancel context.CancelCauseFunc) *link {
	l := &link{config: config, key: idempotencyKey, requestBody: body}
	l.idle = time.AfterFunc(config.IdleTimeout, func() {
		cancel(&idleError{config.IdleTimeout})
	})
	return l
}

type idleError struct{ after time.Duration }

func (e *idleError) Error() string {
	after := e.after
	if after > time.Second {
		after = after.Round(time.Second)
	}
	return fmt.Sprintf("the server was silent for %s", after)
}

// close stops the timer and closes the body.
func (l *link) close() {
	l.idle.Stop()
	if l.body != nil {
		l.body.Close() // all needed bytes were read
	}
}

// sawDone reports whether the stream's end marker arrived.
func (l *link) sawDone() bool { return l.lines != nil && l.lines.done }

// Do sends a request of go-openai.
func (l *link) Do(req *http.Request) (*http.Response, error) {
	l.config.apply(req)
	if l.key != "" {
		// The name is not canonical: for the canonical name, net/http itself would repeat the request after a broken
		// connection.
		req.Header["idempotency-key"] = []string{l.key}
	}
	if parent := trace.Traceparent(req.Context()); parent != "" {
		req.Header.Set("Traceparent", parent)
	}
	ctx := httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { l.requestSent.Store(true) },
	})
	req = req.WithContext(ctx)
	req.Body, req.ContentLength = io.NopCloser(strings.NewReader(l.requestBody)), int64(len(l.requestBody))
	req.GetBody = nil // forbids net/http to repeat the request
	resp, err := l.config.HTTPClient.Do(req)
	if err != nil {
		return nil, err
	}
	l.body = resp.Body
	body := bufio.NewReader(&idleReader{body: resp.Body, link: l})
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		l.readRefusal(resp, body)
		return replaced(resp, []byte("{}")), nil
	}
	if first, err := firstByte(body); err == nil && first == '<' {
		return nil, errWebPage
	} else if err == nil && (first == '{' || first == '[') {
		return l.readDocument(resp, body)
	}
	l.lines = newDataLines(body)
	resp.Body = io.NopCloser(l.lines)
	return resp, nil
}

// readRefusal stores the reason of a refusal.
func (l *link) readRefusal(resp *http.Response, body io.Reader) {
	text, err := io.ReadAll(io.LimitReader(body, maxRefusalBytes))
	if err != nil && len(text) == 0 {
		text = []byte(http.StatusText(resp.StatusCode)) // the status decides; the connection cut the message
	}
	l.failure = apiError(resp.StatusCode, resp.Header, text)
}

// readDocument stores an answer in one piece and passes the answer on. If go-openai requested a stream, it gets a
// stream of one chunk.
func (l *link) readDocument(resp *http.Response, body io.Reader) (*http.Response, error) {
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
func (l *link) mayBeBilled(err error) bool {
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

// explain returns the error of a failed attempt.
func (l *link) explain(ctx context.Context, err error) *Error {
	var silent *idleError
	var failure *Error
	switch {
	case errors.As(context.Cause(ctx), &silent):
		failure = &Error{Message: silent.Error(), Retryable: true, cause: silent}
	case l.failure != nil:
		failure = l.failure
	case !errors.As(err, &failure):
		failure = transportError(err)
	}
	return failure.scrubbed(l.config.secrets())
}

// idleReader resets the idle timer on each read.
type idleReader struct {
	body io.Reader
	link *link
}

func (h *idleReader) Read(p []byte) (int, error) {
	n, err := h.body.Read(p)
	if n > 0 {
		h.link.idle.Reset(h.link.config.IdleTimeout)
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
