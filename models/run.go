package models

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

var errNoAnswer = errors.New("the answer has no choices")

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
	trip := newRoundTrip(config, r.req.IdempotencyKey, body, cancel)
	defer trip.close()

	var parts assembler = &assembly{}
	if api == APIResponses {
		parts = &response{}
	}
	exchange := r.exchangeStream
	if d.has(noStream) {
		exchange = r.exchangeDocument
	}
	err = exchange(ctx, trip, api, parts)
	if err == nil && !parts.complete(false) && parts.empty() {
		err = config.suspectBaseURL(errNoAnswer)
	}
	if err != nil {
		r.unknown = trip.mayBeBilled(err)
		return answer{}, trip.toError(ctx, err)
	}
	r.show(parts.flush())
	used, pending := parts.usageSoFar()
	reports := r.client.reportsUsage(used != (Usage{})) // without reports, the estimate is the usage
	r.unknown = used == (Usage{}) && (reports || pending)
	return parts.answer(r.req, r.client.origin(r.req.Model)), nil
}

// receiver yields the pieces of a stream.
type receiver interface {
	RecvRaw() ([]byte, error)
	Close() error
}

// open sends the request for a stream.
func (r *run) open(ctx context.Context, trip *roundTrip, api API) (receiver, error) {
	if api == APIResponses {
		return r.client.openAIClient(trip).CreateResponseStream(ctx, openai.CreateResponseRequest{})
	}
	return r.client.openAIClient(trip).CreateChatCompletionStream(ctx, openai.ChatCompletionRequest{})
}

// exchangeStream receives the answer in chunks.
func (r *run) exchangeStream(ctx context.Context, trip *roundTrip, api API, parts assembler) error {
	stream, err := r.open(ctx, trip, api)
	if err != nil {
		return err
	}
	defer stream.Close()
	for size := 0; ; size = parts.size() {
		chunk, err := stream.RecvRaw()
		ended := errors.Is(err, io.EOF)
		if err != nil {
			err = cutOff(err)
		} else {
			err = r.addChunk(parts, chunk)
		}
		switch complete := parts.complete(trip.sawDone()); {
		case err != nil && complete: // an error after the end loses only the usage
			parts.setUsagePending(!trip.sawDone() && !ended)
			return nil
		case err != nil:
			return err
		case complete && api == APIResponses: // nothing follows, and some servers keep the connection open
			return nil
		case complete:
			trip.awaitUsage(parts.size() > size)
		case parts.overLimit(r.req.MaxTokens):
			r.client.config.Logger.WarnContext(
				ctx,
				"model ignored its limit, answer cut",
				slog.String("model", r.req.Model),
				slog.Int("max_tokens", r.req.MaxTokens),
				slog.Int("bytes", parts.size()),
			)
			parts.truncate(FinishLength)
			return nil
		}
	}
}

// exchangeDocument receives the answer as one document, from servers without streams.
func (r *run) exchangeDocument(ctx context.Context, trip *roundTrip, api API, parts assembler) error {
	var err error
	if api == APIResponses {
		_, err = r.client.openAIClient(trip).CreateResponse(ctx, openai.CreateResponseRequest{})
	} else {
		_, err = r.client.openAIClient(trip).CreateChatCompletion(ctx, openai.ChatCompletionRequest{})
	}
	if err != nil {
		return err
	}
	return r.addChunk(parts, trip.document)
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
