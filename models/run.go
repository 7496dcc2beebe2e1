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
	sent    int  // attempts made, those that only taught a dialect included
	shown   bool // text of the present attempt went to OnDelta
	unknown bool // the last attempt may have been billed, and nobody knows for how much
}

// untilDone repeats the request as long as that may help.
func (r *run) untilDone(ctx context.Context) (answer, error) {
	for attempt := 1; ; {
		d := r.client.understood()
		a, failure := r.try(ctx, d)
		if failure == nil {
			return a, nil
		}
		if ctx.Err() != nil {
			return answer{}, fmt.Errorf("complete with %s: %w", r.req.Model, contextError(ctx))
		}
		r.restart()
		if next, changed := d.after(failure, r.req); changed {
			r.client.learn(ctx, next)
			continue // a refusal: nothing was billed
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
func (r *run) try(ctx context.Context, d dialect) (answer, *Error) {
	r.sent++
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	body, err := r.client.chatBody(r.req, d)
	if err != nil {
		return answer{}, &Error{Message: "encode request: " + err.Error(), cause: err}
	}
	link := newLink(r.client.config, r.req.IdempotencyKey, body, cancel)
	defer link.close()

	exchange := r.stream
	if d.noStream {
		exchange = r.whole
	}
	parts := &assembly{}
	err = exchange(ctx, link, parts)
	if err == nil && parts.finish == "" && parts.empty() {
		err = errNoAnswer
	}
	if err != nil {
		r.unknown = link.mayBeBilled(err)
		return answer{}, link.explain(ctx, err)
	}
	reports := r.client.reportsUsage(parts.usage != (Usage{}))
	r.unknown = parts.usage == (Usage{}) && (reports || parts.cut)
	return parts.answer(r.req, r.client.origin(r.req.Model)), nil
}

// stream assembles the answer from its chunks.
func (r *run) stream(ctx context.Context, link *link, parts *assembly) error {
	stream, err := r.client.api(link).CreateChatCompletionStream(ctx, openai.ChatCompletionRequest{})
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
		switch whole := parts.finish != "" || link.saidDone(); {
		case err != nil && whole: // what breaks after the end costs nothing but the usage
			parts.cut = !link.saidDone() && !ended
			return nil
		case err != nil:
			return err
		case !whole && parts.beyond(r.req.MaxTokens):
			r.client.config.Logger.WarnContext(ctx, "model ignored its limit, answer cut", slog.String("model", r.req.Model),
				slog.Int("max_tokens", r.req.MaxTokens), slog.Int("bytes", parts.size()))
			parts.finish, parts.cut = FinishLength, true
			return nil
		}
	}
}

// whole gets the answer in one piece, from servers that do not stream.
func (r *run) whole(ctx context.Context, link *link, parts *assembly) error {
	if _, err := r.client.api(link).CreateChatCompletion(ctx, openai.ChatCompletionRequest{}); err != nil {
		return err
	}
	return r.take(parts, link.document)
}

// take adds a chunk to the answer and shows its text.
func (r *run) take(parts *assembly, chunk []byte) error {
	text, err := parts.add(chunk)
	if err != nil {
		return err
	}
	if text != "" && r.req.OnDelta != nil {
		r.shown = true
		r.req.OnDelta(text)
	}
	return nil
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
