// Package models talks to language models: any endpoint that speaks OpenAI's chat completions or its Responses API.
//
// There is one way to do it. [New] checks a [Config]; [Client.Complete] sends a [Request] and returns a
// [Response], whole or not at all. It always streams, so that [Request.OnDelta] can show the text as it comes.
//
// What it promises:
//
//   - A response is complete: the server said so, by a finish reason or by [DONE]. A stream that ends without
//     either, or is cut, is an error, never a shorter answer. Nothing acts on a response before it is returned, so
//     the whole request can be repeated, under the same Idempotency-Key.
//   - An answer ends: one that goes clearly beyond [Request.MaxTokens], because the server ignores it, is cut here,
//     with the finish reason length, which is also what a server says that keeps to it. A call of which not even
//     the arguments had begun then is left out.
//   - Only what may pass is repeated: 429, 5xx, broken connections, transient errors in the middle of a stream;
//     a few times, with jitter, never earlier than the server's Retry-After, never beyond the context's
//     deadline. A wait longer than [Retry.MaxWait] is the caller's to make: the error comes back at once, with
//     RetryAfter set. Other 4xx are not repeated.
//   - Silence ends: an attempt that receives no byte for [Config.IdleTimeout] is given up and repeated.
//   - Tool calls come out in one form, whatever the server's dialect: ordered, with a name and an id each, the
//     arguments as text. They are not validated; they may be no JSON at all.
//   - Usage is always filled in. Where a server never reports it, it is an estimate above the usual, marked as one.
//     Cost comes from a price table; a model without a price costs 0 and says so ([Response.Priced]). An attempt that
//     the server got, and neither refused nor answered with its usage, may have been billed: the caller hears of it
//     before another is sent ([Request.BeforeRetry]) or at the end ([Response.Unknown]). Refusals are 4xx, 501, 503
//     and 529, but not 408.
//   - Errors are *[Error] or wrap the context's error. No error and no log line contains the key.
//
// Servers differ. What one refuses aloud (stream_options, max_tokens, a second system message, the protocol itself) is
// left out or sent in another form once it has said so, one thing a refusal; the client remembers that for all later
// requests to the model. What a model gets wrong in silence is declared ([Facts]). A provider's own members of messages
// and calls go back to it as they came ([Opaque]), and to nobody else.
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

// DefaultBaseURL is OpenAI's own endpoint.
const DefaultBaseURL = "https://api.openai.com/v1"

// Config says which model to talk to, and how. Only Model is needed for OpenAI itself, besides a key.
type Config struct {
	BaseURL    string       // up to and including /v1 or what stands for it; DefaultBaseURL when empty
	APIKey     string       // sent as a bearer token; empty for servers that want none
	Model      string       // for requests that name none
	HTTPClient *http.Client // one with Go's default transport when nil; its Timeout would cut long streams
	Prices     Prices       // DefaultPrices() when nil
	Logger     *slog.Logger // slog.Default() when nil
	Retry      Retry
	// IdleTimeout is the longest silence within one attempt, from sending to the last byte; 5 minutes when zero.
	IdleTimeout time.Duration
	// ReasoningEffort is passed on to models that know the word ("none", "low", …); left out when empty.
	ReasoningEffort string
	// API is the protocol; [APIAuto] when empty.
	API API
	// Headers and Query are added to each request. Their values are taken for secrets.
	Headers map[string]string
	Query   url.Values
	// Extra is laid over the body of each request: objects member by member; a null takes a member away.
	Extra map[string]json.RawMessage
}

// Retry says how often and how patiently a request is repeated. Zero fields take the defaults.
type Retry struct {
	Attempts int           // in all, the first included; 4
	Base     time.Duration // about the first wait, doubled for each further one; 500 ms
	MaxWait  time.Duration // the longest wait made in here; 30 s
}

// Client sends requests to one endpoint.
type Client struct {
	config Config

	mu       sync.Mutex
	dialects map[string]dialect // what the server has turned out not to understand, by model
	density  float64            // see Density
	reports  bool               // the server has reported usage
}

// New checks the configuration, all of it at once, and makes no connection.
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
		problems = append(problems,
			errors.New("the key contains blanks or line breaks: set OPENAI_API_KEY to the key alone"))
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

// Model is the model that answers requests which name none.
func (c *Client) Model() string { return c.config.Model }

// Priced reports whether the price table knows that model. A limit of money does not hold for one it does not know.
func (c *Client) Priced() bool {
	_, found := c.config.Prices.Of(c.config.Model)
	return found
}

func withDefaults(config Config) Config {
	if config.BaseURL == "" {
		config.BaseURL = DefaultBaseURL
	}
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
	if config.IdleTimeout == 0 {
		config.IdleTimeout = 5 * time.Minute
	}
	if config.API == "" {
		config.API = APIAuto
	}
	config.Retry = config.Retry.withDefaults()
	return config
}

// checkBaseURL refuses what could not work or would leak a secret into logs. Its errors do not show the URL.
func checkBaseURL(text string) error {
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return errors.New("the base URL cannot be parsed: set OPENAI_BASE_URL to a URL such as " + DefaultBaseURL)
	case u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "":
		return errors.New("the base URL has no http or https host: set OPENAI_BASE_URL to a URL such as " +
			DefaultBaseURL)
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

// over is go-openai's client over one attempt.
func (c *Client) over(doer openai.HTTPDoer) *openai.Client {
	config := openai.DefaultConfig(c.config.APIKey)
	config.BaseURL = c.config.BaseURL
	config.HTTPClient = doer
	return openai.NewClientWithConfig(config)
}

// longestRetryAfter is how long a server's word is believed.
const longestRetryAfter = 7 * 24 * time.Hour

func (r Retry) withDefaults() Retry {
	return Retry{
		Attempts: cmp.Or(r.Attempts, 4),
		Base:     cmp.Or(r.Base, 500*time.Millisecond),
		MaxWait:  cmp.Or(r.MaxWait, 30*time.Second),
	}
}

// wait is how long to wait after the given attempt, counted from 1, and whether to go on at all. The
// wait is between half and all of Base, doubled for each attempt made, and never shorter than the server asked.
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

// reaches reports whether ctx lives longer than a wait.
func reaches(ctx context.Context, wait time.Duration) bool {
	deadline, bounded := ctx.Deadline()
	return !bounded || time.Until(deadline) > wait
}

// retryAfter reads how long a server wants to be left alone: Retry-After-Ms, or Retry-After in seconds or as an HTTP
// date. What is not understood or already past is 0.
func retryAfter(header http.Header, now time.Time) time.Duration {
	if ms, err := strconv.ParseFloat(header.Get("Retry-After-Ms"), 64); err == nil {
		return believed(ms / 1000)
	}
	text := header.Get("Retry-After")
	if seconds, err := strconv.ParseFloat(text, 64); err == nil {
		return believed(seconds)
	}
	if date, err := http.ParseTime(text); err == nil {
		return believed(date.Sub(now).Seconds())
	}
	return 0
}

func believed(seconds float64) time.Duration {
	if !(seconds > 0) { // also when it is no number
		return 0
	}
	return time.Duration(min(seconds, longestRetryAfter.Seconds()) * float64(time.Second))
}

// transportError is an error of the connection, or of go-openai before it sent anything.
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

// refusedUnsent reports whether go-openai found the request unfit for the model it names.
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

// Embed returns the vector of each text, in the order of the texts. It makes one attempt: callers that can wait repeat
// it themselves. Its error is an *[Error] or wraps the context's error. Extra and Facts do not apply to it.
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
	_, err = c.over(link).CreateEmbeddings(attempt, wanted)
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

// readEmbeddings reads OpenAI's form of an answer. Servers may list the vectors in any order.
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
