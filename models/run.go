package models

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	openai "github.com/sashabaranov/go-openai"
)

// run is one call of Complete: attempts until one gives an answer.
type run struct {
	client  *Client
	req     Request
	started time.Time
	sent    int     // attempts made, those that only taught a dialect included
	last    Request // as the last attempt had it
	shown   bool    // text of the present attempt went to OnDelta
	unknown bool    // the last attempt may have been billed, and nobody knows for how much
}

// untilDone repeats the request as long as that may help.
func (r *run) untilDone(ctx context.Context) (answer, error) {
	for attempt := 1; ; {
		d := r.client.understood(r.req.Model)
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
		if next, changed := d.after(failure, sent{r.req, api, r.client.config.API}); changed {
			r.client.learn(ctx, r.req.Model, next)
			continue // a refusal: nothing was billed
		}
		if failure.namesResponses() && api == APIChat {
			failure.Advice = adviseResponses
		}
		wait, again := r.client.config.Retry.wait(attempt, failure)
		if !again || !reaches(ctx, wait) {
			return answer{}, failure
		}
		r.client.config.Logger.WarnContext(ctx, "model call repeated", slog.String("model", r.req.Model),
			slog.Int("attempt", attempt), slog.Duration("wait", wait), slog.String("error", failure.Error()))
		if err := sleep(ctx, wait); err != nil {
			return answer{}, fmt.Errorf("complete with %s: %w", r.req.Model, errors.Join(err, failure))
		}
		if err := r.beforeRetry(ctx); err != nil {
			return answer{}, fmt.Errorf("complete with %s again: %w", r.req.Model, err)
		}
		attempt++
	}
}

// beforeRetry has the caller account for an attempt that may have been billed.
func (r *run) beforeRetry(ctx context.Context) (err error) {
	if r.unknown && r.req.BeforeRetry != nil {
		r.unknown = false
		r.req.MaxTokens, err = r.req.BeforeRetry(ctx)
	}
	return err
}

// restart tells a live viewer that what it saw does not count.
func (r *run) restart() {
	if r.shown && r.req.OnRestart != nil {
		r.req.OnRestart()
	}
	r.shown = false
}

// try sends the request once.
func (r *run) try(ctx context.Context, api API, d dialect) (answer, *Error) {
	r.sent++
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r.last = adaptedRequest(r.req, d)
	body, err := r.client.body(r.req, api, d)
	if err != nil {
		return answer{}, &Error{Message: "encode request: " + err.Error(), cause: err}
	}
	link := newLink(r.client.config, r.req.IdempotencyKey, body, cancel)
	defer link.close()

	var parts answering = &assembly{}
	if api == APIResponses {
		parts = &response{}
	}
	exchange := r.stream
	if d.has(noStream) {
		exchange = r.whole
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

// receiver gives the pieces of a stream.
type receiver interface {
	RecvRaw() ([]byte, error)
	Close() error
}

// open sends the request for a stream.
func (r *run) open(ctx context.Context, link *link, api API) (receiver, error) {
	if api == APIResponses {
		return r.client.over(link).CreateResponseStream(ctx, openai.CreateResponseRequest{})
	}
	return r.client.over(link).CreateChatCompletionStream(ctx, openai.ChatCompletionRequest{})
}

// stream assembles the answer from its chunks.
func (r *run) stream(ctx context.Context, link *link, api API, parts answering) error {
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
			err = r.take(parts, chunk)
		}
		switch whole := parts.ended(link.saidDone()); {
		case err != nil && whole: // what breaks after the end costs nothing but the usage
			parts.misses(!link.saidDone() && !ended)
			return nil
		case err != nil:
			return err
		case whole && api == APIResponses: // nothing comes after it, and some servers keep the connection
			return nil
		case !whole && parts.beyond(r.req.MaxTokens):
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

// whole gets the answer in one piece, from servers that do not stream.
func (r *run) whole(ctx context.Context, link *link, api API, parts answering) error {
	var err error
	if api == APIResponses {
		_, err = r.client.over(link).CreateResponse(ctx, openai.CreateResponseRequest{})
	} else {
		_, err = r.client.over(link).CreateChatCompletion(ctx, openai.ChatCompletionRequest{})
	}
	if err != nil {
		return err
	}
	return r.take(parts, link.document)
}

// take adds a chunk to the answer and shows its text.
func (r *run) take(parts answering, chunk []byte) error {
	text, err := parts.add(chunk)
	if err != nil {
		return err
	}
	r.show(text)
	return nil
}

// show gives text to a live viewer.
func (r *run) show(text string) {
	if text != "" && r.req.OnDelta != nil {
		r.shown = true
		r.req.OnDelta(text)
	}
}

// cutOff is the end of a stream as an error.
func cutOff(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("the stream was cut off before its end: %w", err)
}

// sleep waits for d or for the end of ctx, whichever comes first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return contextError(ctx)
	}
}
