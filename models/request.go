package models

import (
	"cmp"
	"context"
	"errors"
	"time"
)

// Request is one turn to complete.
type Request struct {
	Model       string // the client's when empty
	Messages    []Message
	Tools       []Tool
	MaxTokens   int      // bound of the answer; the server's default when zero
	Effort      string   // of reasoning, in the model's words ("low", "high", …); the client's when empty
	Schema      *Schema  // of a JSON answer, where the server supports it; nil for text
	Temperature *float32 // the server's default when nil
	// Fallback says that the caller has another model. Then the client does not repeat a silent attempt. It accepts
	// silence for at most half of the time until the context's deadline.
	Fallback bool
	// IdempotencyKey is sent as a header with every attempt.
	IdempotencyKey string
	// OnDelta receives the answer's text in pieces, on the goroutine of Complete.
	OnDelta func(text string)
	// BeforeRetry runs before a retry if the server may bill the last attempt. Such an attempt reached the server, which
	// neither refused nor answered it. BeforeRetry returns the new bound of the answer. An error ends the call.
	BeforeRetry func(ctx context.Context) (maxTokens int, err error)
	// OnRestart runs after a failed attempt whose text OnDelta had received. The text starts over.
	OnRestart func()
}

// Response is a whole answer.
type Response struct {
	Message      Message      // role assistant
	FinishReason FinishReason // tool_calls if there are any, unless the answer was truncated
	Model        string       // as the server names it
	Usage        Usage
	CostUSD      float64
	Priced       bool          // false if the price table lacks the model
	Duration     time.Duration // including retries and waits
	Attempts     int           // requests sent, including rejected dialects
	// Unknown means that the server may bill the last attempt at an unknown amount. The attempt reached the server, which
	// neither refused it nor reported usage. Usage is then an estimate, or empty beside an error. For a whole answer of a
	// server that has never reported usage, Unknown is false: the estimate counts as its usage.
	Unknown bool
	// Sent is the request of the last attempt, see [Client.Prepared].
	Sent Request
}

// Usage counts tokens. CachedTokens and CacheWriteTokens are parts of PromptTokens: tokens read from the server's
// cache, and tokens written to it.
type Usage struct {
	PromptTokens     int
	CompletionTokens int
	TotalTokens      int
	CachedTokens     int
	CacheWriteTokens int  `json:",omitempty"`
	Estimated        bool // the server reported no usage; [Client.Quote] documents the estimate
}

// Complete sends the request and returns the whole answer. The package comment lists the retries.
//
// The error is an *[Error] for a failure of the server or the connection. It wraps the context's error if ctx ended.
// Beside an error, the Response has no Message, FinishReason, Usage and CostUSD.
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

// complete applies the client's defaults and repairs the messages.
func (c *Client) complete(req Request) Request {
	req.Model = cmp.Or(req.Model, c.config.Model)
	req.Effort = cmp.Or(req.Effort, c.config.ReasoningEffort)
	req.Messages = repairHistory(req.Messages)
	return req
}

// Prepared returns a request in the form to send: with defaults, repaired, and acceptable to the server. The client may
// still learn another form while it sends.
func (c *Client) Prepared(req Request) Request {
	req = c.complete(req)
	return adaptRequest(req, c.dialectFor(req.Model))
}

// response prices the answer and estimates missing usage.
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

// failed returns the response of a call without an answer.
func (r *run) failed() Response {
	_, found := r.client.config.Prices.Of(r.req.Model)
	return Response{
		Model: r.req.Model, Priced: found, Duration: time.Since(r.started), Attempts: r.attempts, Unknown: r.unknown,
		Sent: r.last,
	}
}

// orEstimate fills in missing counts, for an answer of a given length.
func (u Usage) orEstimate(req Request, completion int) Usage {
	u.TotalTokens = cmp.Or(u.TotalTokens, u.PromptTokens+u.CompletionTokens)
	if u.TotalTokens == 0 {
		u.PromptTokens, _ = mostTokensOf(req)
		u.CompletionTokens, u.Estimated = completion, true
		u.TotalTokens = u.PromptTokens + u.CompletionTokens
	}
	return u
}

// contextError distinguishes an ended context from a server's failure.
func contextError(ctx context.Context) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, ctx.Err()) {
		return cause
	}
	return errors.Join(ctx.Err(), cause)
}

// body encodes the request in a form that the server accepts.
func (c *Client) body(req Request, api API, d dialect) (string, error) {
	known := LookupModel(req.Model)
	req = adaptRequest(req, d)
	var o object
	o.set("model", req.Model)
	var err error
	if api == APIResponses {
		err = c.responsesBody(&o, req, d)
	} else {
		err = c.chatBody(&o, req, d, known)
	}
	if err != nil {
		return "", err
	}
	if !d.has(noStream) {
		o.set("stream", true)
	}
	if req.Temperature != nil {
		o.set("temperature", *req.Temperature)
	}
	o.merge(c.config.Extra)
	return o.end()
}
