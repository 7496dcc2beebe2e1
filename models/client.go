// Package models is a client for language models: any endpoint with OpenAI's chat completions or Responses API.
//
// [New] validates a [Config]. [Client.Complete] sends a [Request] and returns a whole [Response] or an error. It always
// streams, so [Request.OnDelta] can show the text as it arrives.
//
// Guarantees:
//
//   - A response is complete: the server sent a finish reason or [DONE]. A stream without either is an error. No code
//     acts on a partial response, so the client can repeat the whole request under the same Idempotency-Key.
//   - An answer ends. If it clearly exceeds [Request.MaxTokens], the client cuts it with the finish reason length, and
//     drops a call without any arguments.
//   - The client retries only transient failures: 429, 5xx, broken connections, and transient errors inside a stream.
//     The waits have jitter, respect Retry-After, and end before the context's deadline. Instead of a wait beyond
//     [Retry.MaxWait], the error returns at once with RetryAfter set.
//   - Silence ends: the client cancels an attempt without a byte for [Config.IdleTimeout], and retries.
//   - Tool calls have one form for all servers: ordered, each with a name and an id, arguments as text. The client does
//     not validate the arguments, which may be invalid JSON.
//   - Usage is always set. Without the server's report, usage is a high estimate with [Usage.Estimated] set. The cost
//     comes from a price table; a model without a price costs 0, and [Response.Priced] is false. If the server received
//     an attempt, and neither refused it nor answered with usage, it may bill the attempt. The client notifies the
//     caller before the next attempt ([Request.BeforeRetry]) or at the end ([Response.Unknown]). Refusals are 4xx, 501,
//     503 and 529, but not 408.
//   - Errors are *[Error] or wrap the context's error. No error and no log line contains the key.
//
// Servers differ. If a server rejects a feature (stream_options, max_tokens, a second system message, the protocol),
// the client drops or replaces it, one feature per rejection. The client remembers the rejected features of a model.
// [ModelInfo] declares features that a model mishandles without a rejection. A provider's opaque fields return
// unchanged to their origin only ([Opaque]).
//
// A [Client] is safe for concurrent use and holds no goroutine between calls.
package models

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	openai "github.com/sashabaranov/go-openai"
)

// DefaultBaseURL is OpenAI's endpoint.
const DefaultBaseURL = "https://api.openai.com/v1"

// Config configures a client. OpenAI needs only Model and a key.
type Config struct {
	BaseURL    string       // including /v1 or its equivalent; DefaultBaseURL when empty
	APIKey     string       // sent as a bearer token; empty for servers without one
	Model      string       // for requests without a model
	HTTPClient *http.Client // nil for Go's default transport; its Timeout would cut long streams
	Prices     Prices       // DefaultPrices() when nil
	Logger     *slog.Logger // slog.Default() when nil
	Retry      Retry
	// IdleTimeout bounds the silence within one attempt, from sending to the last byte; 5 minutes when zero.
	IdleTimeout time.Duration
	// ReasoningEffort goes to models that support it ("none", "low", …); omitted when empty.
	ReasoningEffort string
	// API is the protocol; [APIAuto] when empty.
	API API
	// Headers and Query go into each request. The client treats their values as secrets.
	Headers map[string]string
	Query   url.Values
	// Extra holds members to merge into the body of each request. A null removes a member.
	Extra map[string]json.RawMessage
}

// Retry configures repeated attempts. Zero fields take the defaults.
type Retry struct {
	Attempts int           // in all, including the first; 4
	Base     time.Duration // approximate first wait, doubled for each further one; 500 ms
	MaxWait  time.Duration // the longest wait; 30 s
}

// Client sends requests to one endpoint.
type Client struct {
	config Config

	mu       sync.Mutex
	dialects map[string]dialect // rejected features, by model
	density  float64            // see Density
	reports  bool               // the server has reported usage
}

// New validates the whole configuration. It opens no connection.
func New(config Config) (*Client, error) {
	config = withDefaults(config)
	var problems []error
	if err := checkBaseURL(config.BaseURL); err != nil {
		problems = append(problems, err)
	}
	if strings.TrimSpace(config.Model) == "" {
		problems = append(problems, errors.New("no model is named: set AGENT_MODEL"))
	}
	if strings.ContainsAny(config.APIKey, "\r\n\x00 ") {
		problems = append(problems, errors.New("the key contains blanks or line breaks: set OPENAI_API_KEY to the key alone"))
	}
	if config.Retry.Attempts < 0 || config.Retry.Base < 0 || config.Retry.MaxWait < 0 || config.IdleTimeout < 0 {
		problems = append(problems, errors.New("attempts and times must not be negative"))
	}
	if !slices.Contains([]API{APIAuto, APIChat, APIResponses}, config.API) {
		problems = append(problems,
			fmt.Errorf("%q is no protocol: set AGENT_MODEL_API to auto, chat or responses", config.API))
	}
	if err := config.Prices.check(); err != nil {
		problems = append(problems, err)
	}
	if len(problems) > 0 {
		return nil, fmt.Errorf("configure model: %w", errors.Join(problems...))
	}
	return &Client{config: config}, nil
}

// Model returns the default model.
func (c *Client) Model() string { return c.config.Model }

// Priced reports whether the price table has the default model. A money limit does not bound other models.
func (c *Client) Priced() bool { return c.PricedModel(c.config.Model) }

// PricedModel reports whether the price table has a model.
func (c *Client) PricedModel(model string) bool {
	_, found := c.config.Prices.Of(model)
	return found
}

func withDefaults(config Config) Config {
	config.BaseURL = cmp.Or(config.BaseURL, DefaultBaseURL)
	config.BaseURL = strings.TrimRight(config.BaseURL, "/")
	if config.HTTPClient == nil {
		config.HTTPClient = &http.Client{}
	}
	if config.Prices == nil {
		config.Prices = DefaultPrices()
	}
	if config.Logger == nil {
		config.Logger = slog.Default()
	}
	config.IdleTimeout = cmp.Or(config.IdleTimeout, 5*time.Minute)
	config.API = cmp.Or(config.API, APIAuto)
	config.Retry = config.Retry.withDefaults()
	return config
}

// checkBaseURL rejects a URL that cannot work or would leak a secret into logs. Its errors omit the URL.
func checkBaseURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return errors.New("the base URL cannot be parsed: set OPENAI_BASE_URL to a URL such as " + DefaultBaseURL)
	case u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "":
		return errors.New("the base URL has no http or https host: set OPENAI_BASE_URL to a URL such as " + DefaultBaseURL)
	case u.User != nil:
		return errors.New("the base URL contains credentials: move them to OPENAI_API_KEY")
	case u.RawQuery != "" || u.Fragment != "":
		return errors.New(
			"the base URL has a query or a fragment: end OPENAI_BASE_URL with its path, and set AGENT_MODEL_QUERY")
	case strings.HasSuffix(u.Path, "/chat/completions"):
		return errors.New("the base URL names the route too: leave /chat/completions out of OPENAI_BASE_URL")
	case strings.HasSuffix(u.Path, "/responses"):
		return errors.New("the base URL names the route too: leave /responses out of OPENAI_BASE_URL")
	}
	return nil
}

// openAIClient returns go-openai's client on top of one attempt.
func (c *Client) openAIClient(doer openai.HTTPDoer) *openai.Client {
	config := openai.DefaultConfig(c.config.APIKey)
	config.BaseURL = c.config.BaseURL
	config.HTTPClient = doer
	return openai.NewClientWithConfig(config)
}

// maxRetryAfter bounds a server's Retry-After.
const maxRetryAfter = 7 * 24 * time.Hour

func (r Retry) withDefaults() Retry {
	return Retry{
		Attempts: cmp.Or(r.Attempts, 4),
		Base:     cmp.Or(r.Base, 500*time.Millisecond),
		MaxWait:  cmp.Or(r.MaxWait, 30*time.Second),
	}
}

// wait returns the wait after an attempt, counted from 1, and whether to retry. The wait is between half and all of
// Base, doubled for each attempt, and at least the server's Retry-After.
func (r Retry) wait(attempt int, failure *Error) (time.Duration, bool) {
	if !failure.Retryable || attempt >= r.Attempts || failure.RetryAfter > r.MaxWait {
		return 0, false
	}
	step := r.MaxWait
	if shift := attempt - 1; shift < 20 {
		step = min(r.Base<<shift, r.MaxWait)
	}
	if failure.RetryAfter > 0 {
		return failure.RetryAfter + jitter(min(step, failure.RetryAfter/4)), true
	}
	return step/2 + jitter(step/2), true
}

func jitter(d time.Duration) time.Duration { return rand.N(d + 1) }

func outlives(ctx context.Context, wait time.Duration) bool {
	deadline, bounded := ctx.Deadline()
	return !bounded || time.Until(deadline) > wait
}

// retryAfter reads Retry-After-Ms, or Retry-After in seconds or as an HTTP date. It returns 0 for an invalid or past
// value.
func retryAfter(header http.Header, now time.Time) time.Duration {
	if ms, err := strconv.ParseFloat(header.Get("Retry-After-Ms"), 64); err == nil {
		return plausibleWait(ms / 1000)
	}
	text := header.Get("Retry-After")
	if seconds, err := strconv.ParseFloat(text, 64); err == nil {
		return plausibleWait(seconds)
	}
	if date, err := http.ParseTime(text); err == nil {
		return plausibleWait(date.Sub(now).Seconds())
	}
	return 0
}

func plausibleWait(seconds float64) time.Duration {
	if !(seconds > 0) { // NaN included
		return 0
	}
	return time.Duration(min(seconds, maxRetryAfter.Seconds()) * float64(time.Second))
}

// transportError converts an error of the connection, or of go-openai before it sends.
func transportError(err error) *Error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err // the outer text repeats the URL
	}
	e := &Error{Message: oneLine(err.Error()), Retryable: true, cause: err}
	var dns *net.DNSError
	var certificate *tls.CertificateVerificationError
	var dial *net.OpError
	switch {
	case errors.As(err, &dns):
		e.Code, e.Retryable = codeUnreachable, !dns.IsNotFound
	case errors.As(err, &certificate):
		e.Code, e.Retryable = codeUnreachable, false
	case errors.As(err, &dial) && dial.Op == "dial":
		e.Code = codeUnreachable
	case refusedUnsent(err), errors.Is(err, errWebPage), errors.Is(err, errAnswerTooLong):
		e.Retryable = false
	}
	return e
}

// refusedUnsent reports whether go-openai rejected the request before it sent anything.
func refusedUnsent(err error) bool {
	for _, unfit := range []error{
		openai.ErrChatCompletionInvalidModel, openai.ErrContentFieldsMisused,
		openai.ErrReasoningModelMaxTokensDeprecated, openai.ErrReasoningModelLimitationsOther,
		openai.ErrReasoningModelLimitationsLogprobs, openai.ErrReasoningEffortUnsupported,
		openai.ErrReasoningToolsRequireResponses, openai.ErrReasoningSamplingUnsupported,
	} {
		if errors.Is(err, unfit) {
			return true
		}
	}
	return false
}

// Embed returns the vector of each text, in order. It makes one attempt; the caller may repeat it. Its error is an
// *[Error] or wraps the context's error. Extra and ModelInfo do not apply.
func (c *Client) Embed(ctx context.Context, texts []string) ([][]float32, error) {
	wanted := openai.EmbeddingRequest{
		Input: texts, Model: openai.EmbeddingModel(c.config.Model),
		EncodingFormat: openai.EmbeddingEncodingFormatFloat,
	}
	body, err := json.Marshal(wanted)
	if err != nil {
		return nil, &Error{Message: "encode request: " + err.Error(), cause: err}
	}
	attempt, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	link := newLink(c.config, "", string(body), cancel)
	defer link.close()
	_, err = c.openAIClient(link).CreateEmbeddings(attempt, wanted)
	if err == nil && link.failure == nil {
		vectors, err := readEmbeddings(link.document, len(texts))
		if err != nil {
			return nil, (&Error{Message: err.Error(), cause: err}).scrubbed(c.config.secrets())
		}
		return vectors, nil
	}
	if ctx.Err() != nil {
		return nil, contextError(ctx)
	}
	failure := link.explain(attempt, err)
	if failure.advice() != "" {
		failure.Advice = "check AGENT_EMBEDDING_MODEL, AGENT_EMBEDDING_BASE_URL and AGENT_EMBEDDING_KEY"
	}
	return nil, failure
}

// readEmbeddings decodes OpenAI's response. Servers may list the vectors in any order.
func readEmbeddings(document []byte, texts int) ([][]float32, error) {
	var answer openai.EmbeddingResponse
	if err := json.Unmarshal(document, &answer); err != nil {
		return nil, fmt.Errorf("decode embeddings: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if len(answer.Data) != texts {
		return nil, fmt.Errorf("the server sent %d embeddings of %d texts: "+
			"is this the base URL of an embeddings endpoint?",
			len(answer.Data), texts)
	}
	vectors := make([][]float32, texts)
	for _, e := range answer.Data {
		if e.Index < 0 || e.Index >= texts || vectors[e.Index] != nil || len(e.Embedding) == 0 {
			return nil, fmt.Errorf("the server sent no embedding, or two, of text %d", e.Index)
		}
		vectors[e.Index] = e.Embedding
	}
	return vectors, nil
}
