// Package models is a client for language models: any endpoint with OpenAI's chat completions or Responses API.
//
// [New] validates a [Config]. [Client.Complete] sends a [Request] and returns a whole [Response] or an error. It
// streams unless the server rejects streams, so [Request.OnDelta] can show the text as it arrives.
//
// Guarantees:
//
//   - A response is complete. A stream that ends without a finish reason or [DONE] is an error. Complete returns no
//     partial response, so the client can repeat the whole request under the same Idempotency-Key.
//   - Output is bounded. If it clearly exceeds [Request.MaxTokens], the client ends the response with the finish reason
//     length, and drops a tool call whose arguments have not begun.
//   - The client retries only transient failures: 429, 5xx, broken connections, and transient errors inside a stream.
//     The waits have jitter, respect Retry-After, and end before the context's deadline. If Retry-After exceeds
//     [Retry.MaxWait], Complete returns the error at once, with RetryAfter set.
//   - An idle attempt ends: the client cancels an attempt that receives no byte for [Config.IdleTimeout], and retries.
//     After a finish reason it waits five seconds for the usage.
//   - Tool calls have one form for all servers: ordered, each with a name and an id, arguments as text. The client does
//     not validate the arguments, which may be invalid JSON.
//   - A response has its usage. Without the server's report, usage is a high estimate with [Usage.Estimated] set. The
//     cost comes from a price table; a model without a price costs 0, and [Response.Priced] is false. A server may bill
//     an attempt that it received, unless it rejected the attempt or reported usage. The client notifies the caller
//     before the next attempt ([Request.BeforeRetry]) or at the end ([Response.Unknown]). A rejected attempt has status
//     4xx (except 408), 501, 503 or 529.
//   - Errors are *[Error], or wrap the context's error or that of [Request.BeforeRetry]. Errors and log lines do not
//     contain a key of four characters or more.
//
// Servers differ. If a server rejects a feature (stream_options, max_tokens, a second system message, the protocol),
// the client drops or replaces it, one feature per rejection. The client remembers the rejected features of a model.
// [ModelInfo] declares features that a model mishandles without a rejection. A provider's opaque fields return
// unchanged to their origin only ([Opaque]).
//
// A [Client] is safe for concurrent use. Between calls it has no goroutines but those of the HTTP client's connections.
package models

import (
	"sync"

	openai "github.com/sashabaranov/go-openai"
)

// Client sends requests to one endpoint.
type Client struct {
	config Config

	mu        sync.Mutex
	dialects  map[string]dialect // rejected features, by model
	densities map[string]density // by model
	reports   bool               // the server has reported usage before
}

// Model returns the default model.
func (c *Client) Model() string { return c.config.Model }

// Priced reports whether the price table has the default model. A budget in money has no effect on models without a
// price.
func (c *Client) Priced() bool { return c.PricedModel(c.config.Model) }

// PricedModel reports whether the price table has a model.
func (c *Client) PricedModel(model string) bool {
	_, found := c.config.Prices.Of(model)
	return found
}

// openAIClient returns go-openai's client on top of one attempt.
func (c *Client) openAIClient(doer openai.HTTPDoer) *openai.Client {
	config := openai.DefaultConfig(c.config.APIKey)
	config.BaseURL = c.config.BaseURL
	config.HTTPClient = doer
	return openai.NewClientWithConfig(config)
}
