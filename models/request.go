package models

import (
	"cmp"
	"context"
	"errors"
	"time"
)

// Request is one turn to be completed.
type Request struct {
	Model       string // the client's when empty
	Messages    []Message
	Tools       []Tool
	MaxTokens   int      // upper bound of the answer; the server's own when zero
	Effort      string   // of reasoning, in the model's words ("low", "high", …); the client's when empty
	Schema      *Schema  // of an answer in JSON, where the server can promise that; nil for one in words
	Temperature *float32 // the server's own when nil
	// IdempotencyKey is sent as the header of that name with every attempt.
	IdempotencyKey string
	// OnDelta gets the answer's text piece by piece, on the goroutine that called Complete.
	OnDelta func(text string)
	// BeforeRetry is called before the request is sent again, when the attempt before may have been billed: the
	// server got it, and neither refused nor answered it. It returns the upper bound of the answer from then on; an
	// error ends the call.
	BeforeRetry func(ctx context.Context) (maxTokens int, err error)
	// OnRestart is called when text was given to OnDelta and the attempt it came from has come to
	// nothing: what follows begins anew.
	OnRestart func()
}

// Response is a whole answer.
type Response struct {
	Message      Message      // role assistant
	FinishReason FinishReason // tool_calls whenever there are any, unless the answer was cut short
	Model        string       // as the server names it
	Usage        Usage
	CostUSD      float64
	Priced       bool          // false when the price table does not know the model
	Duration     time.Duration // with repetitions and waits
	Attempts     int           // requests that were sent for it, refused dialects included
	// Unknown says that the last attempt may have been billed and nobody knows for how much: the server got it, and
	// neither refused it nor said what it used. Usage is an estimate then, too low or too high, or empty besides an
	// error.
	Unknown bool
	// Sent is the request as the last attempt had it, see [Client.Prepared].
	Sent Request
}

// Usage is in tokens. CachedTokens and CacheWriteTokens are part of PromptTokens: those that the server had read
// before, and those that it keeps for the next time.
type Usage struct {
	PromptTokens     int
	CompletionTokens int
	TotalTokens      int
	CachedTokens     int
	CacheWriteTokens int  `json:",omitempty"`
	Estimated        bool // the server did not say; see [Client.Quote] for how it is reckoned
}

// Complete sends the request and returns the whole answer. See the package comment for what is repeated.
//
// The error is an *[Error] when the server or the connection is at fault, and wraps the context's error when
// ctx ended first. Besides an error, the Response says only what was sent, and whether what was used is unknown.
func (c *Client) Complete(ctx context.Context, req Request) (Response, error) {
	if len(req.Messages) == 0 {
		return Response{}, &Error{Message: "the request has no messages"}
	}
	req = c.complete(req)
	run := run{client: c, req: req, started: time.Now()}
	answer, err := run.untilDone(ctx)
	if err != nil {
		return run.failed(), err
	}
	return run.response(answer), nil
}

// complete fills in the client's defaults and repairs the messages.
func (c *Client) complete(req Request) Request {
	if req.Model == "" {
		req.Model = c.config.Model
	}
	req.Effort = cmp.Or(req.Effort, c.config.ReasoningEffort)
	req.Messages = acceptable(req.Messages)
	return req
}

// Prepared is a request as it goes out: with the client's defaults, repaired, and in the form that the server is known
// to take. While it is sent, the client may learn that the server wants another.
func (c *Client) Prepared(req Request) Request {
	req = c.complete(req)
	return adaptedRequest(req, c.understood(req.Model))
}

// response prices the answer and estimates what the server did not count.
func (r *run) response(a answer) Response {
	resp := r.failed()
	resp.Message, resp.FinishReason = a.message, a.finish
	resp.Usage = a.usage.orEstimate(r.req, measure(a.message).most())
	resp.Model = cmp.Or(a.model, resp.Model)
	price, found := r.client.config.Prices.Of(resp.Model)
	if !found {
		price, found = r.client.config.Prices.Of(r.req.Model)
	}
	resp.CostUSD, resp.Priced = price.Cost(resp.Usage), found
	return resp
}

// failed is what is known without an answer.
func (r *run) failed() Response {
	_, found := r.client.config.Prices.Of(r.req.Model)
	return Response{
		Model: r.req.Model, Priced: found, Duration: time.Since(r.started), Attempts: r.sent, Unknown: r.unknown,
		Sent: r.last,
	}
}

// orEstimate fills in what the server did not count, for an answer of so many tokens.
func (u Usage) orEstimate(req Request, completion int) Usage {
	if u.TotalTokens == 0 {
		u.TotalTokens = u.PromptTokens + u.CompletionTokens
	}
	if u.TotalTokens == 0 {
		u.PromptTokens, u.CompletionTokens, u.Estimated = mostTokensOf(req), completion, true
		u.TotalTokens = u.PromptTokens + u.CompletionTokens
	}
	return u
}

// contextError tells an ended context from a server's fault.
func contextError(ctx context.Context) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, ctx.Err()) {
		return cause
	}
	return errors.Join(ctx.Err(), cause)
}
