package models

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
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
	// neither refused it nor reported usage. Usage is then an estimate, or empty beside an error.
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
// Beside an error, the Response holds only Sent and Unknown.
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
		u.PromptTokens, u.CompletionTokens, u.Estimated = mostTokensOf(req), completion, true
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

// object writes the members of a JSON object in order, unchanged.
type object struct {
	names []string
	texts map[string]string
	err   error
}

// set adds a member.
func (o *object) set(name string, value any) {
	encoded, err := exactjson.Encode(value)
	if err != nil && o.err == nil {
		o.err = err
	}
	o.raw(name, string(encoded))
}

// raw adds or replaces a member that is JSON already.
func (o *object) raw(name, text string) {
	if o.texts == nil {
		o.texts = map[string]string{}
	}
	if _, known := o.texts[name]; !known {
		o.names = append(o.names, name)
	}
	o.texts[name] = text
}

// members adds members that are JSON already, by name.
func (o *object) members(texts map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		o.raw(name, texts[name])
	}
}

// merge merges another object. It merges member objects by member; any other value replaces the present value. A null
// removes a member.
func (o *object) merge(extra map[string]json.RawMessage) {
	for _, name := range slices.Sorted(maps.Keys(extra)) {
		value := extra[name]
		var present, members map[string]json.RawMessage
		switch {
		case isNull(value):
			delete(o.texts, name)
			o.names = slices.DeleteFunc(o.names, func(n string) bool { return n == name })
		case json.Unmarshal([]byte(o.texts[name]), &present) == nil && present != nil &&
			json.Unmarshal(value, &members) == nil && members != nil:
			var inner object
			for _, n := range slices.Sorted(maps.Keys(present)) {
				inner.raw(n, string(present[n]))
			}
			inner.merge(members)
			text, err := inner.end()
			if err != nil && o.err == nil {
				o.err = err
			}
			o.raw(name, text)
		default:
			o.raw(name, string(value))
		}
	}
}

func (o *object) end() (string, error) {
	var out bytes.Buffer
	out.WriteByte('{')
	for i, name := range o.names {
		if i > 0 {
			out.WriteByte(',')
		}
		encoded, err := exactjson.Encode(name)
		if err != nil && o.err == nil {
			o.err = err
		}
		out.Write(encoded)
		out.WriteByte(':')
		out.WriteString(o.texts[name])
	}
	out.WriteByte('}')
	return out.String(), o.err
}

// list returns a JSON array of JSON texts.
func list(texts []string) string {
	var out bytes.Buffer
	out.WriteByte('[')
	for i, text := range texts {
		if i > 0 {
			out.WriteByte(',')
		}
		out.WriteString(text)
	}
	out.WriteByte(']')
	return out.String()
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

// Schema is the demanded form of an answer: a JSON Schema, or any object when Schema is empty.
type Schema struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	Schema      json.RawMessage `json:"schema"`
	// Strict makes servers demand that the schema requires every member and allows no others.
	Strict bool `json:"strict"`

	inWords bool // the server rejected this schema
}

// The formats of an answer, as both protocols name them.
const (
	formatSchema = "json_schema"
	formatObject = "json_object"
)

// format returns the form of chat completions.
func (s *Schema) format() map[string]any {
	if len(s.Schema) == 0 {
		return map[string]any{"type": formatObject}
	}
	return map[string]any{"type": formatSchema, "json_schema": s}
}

// flatFormat returns the form of the Responses API.
func (s *Schema) flatFormat() any {
	if len(s.Schema) == 0 {
		return map[string]any{"type": formatObject}
	}
	return struct {
		Type string `json:"type"`
		Schema
	}{formatSchema, *s}
}

// asInstruction reports whether the form goes into the prompt because the server does not support this schema.
func asInstruction(s *Schema, d dialect, known ModelInfo) bool {
	return s.inWords || d.has(noSchema) || known.NoSchema
}

// instruction returns the form as an instruction.
func (s *Schema) instruction() string {
	if len(s.Schema) == 0 {
		return "[Form of the final answer: one JSON object, and nothing else: no words around it, no code fence.]"
	}
	return "[Form of the final answer: JSON of the schema below, and nothing else: " +
		"no words around it, no code fence.]\n" +
		string(s.Schema)
}

// withForm returns the history of a request, with the form as an instruction where the server lacks structured
// outputs. The "any object" form always needs it, because OpenAI rejects a request without the word JSON.
//
// The instruction goes into the last user message. A client sent the schema, so the schema has no higher rank.
func withForm(req Request, d dialect, known ModelInfo) []Message {
	s := req.Schema
	if s == nil || len(s.Schema) > 0 && !asInstruction(s, d, known) {
		return req.Messages
	}
	for i := len(req.Messages) - 1; i >= 0; i-- {
		if req.Messages[i].Role == RoleUser {
			messages := slices.Clone(req.Messages)
			messages[i] = appendContent(messages[i], Message{Content: s.instruction()})
			return messages
		}
	}
	return append(slices.Clip(req.Messages), Message{Role: RoleUser, Content: s.instruction()})
}

// schemaRefused switches this call to an instruction if the server rejects the schema. The dialect stays, because
// another schema may pass.
func (r *run) schemaRefused(refusal *Error) bool {
	if r.req.Schema == nil || r.req.Schema.inWords || refusal.Status != 400 && refusal.Status != 422 {
		return false
	}
	words := strings.ToLower(refusal.Code + " " + refusal.Message)
	if !strings.Contains(words, "invalid schema") && !strings.Contains(words, "invalid_json_schema") {
		return false
	}
	inWords := *r.req.Schema
	inWords.inWords, r.req.Schema = true, &inWords
	return true
}

const (
	// DefaultMaxTokens is the expected length of an unbounded answer in [Client.Quote].
	DefaultMaxTokens = 4096
	// ThinkingMaxTokens replaces DefaultMaxTokens for models whose hidden reasoning counts as output.
	ThinkingMaxTokens = 16_384

	bytesPerToken     = 4 // of English prose; other languages and code have fewer
	longestWord       = 24
	tokensPerMessage  = 4 // overhead of the chat format
	reservePerMessage = 8
	imageTokens       = 1500
)

// Quote is the approximate worst case of one attempt, for a budget reservation.
type Quote struct {
	PromptTokens int
	PromptUSD    float64
	AnswerTokens int     // MaxTokens, or the model's default
	TokenUSD     float64 // of each output token
}

// Quote estimates a request's worst case without a tokenizer. It counts one token for two letters or blanks, one for
// every other byte, and eight for each message and tool. Tokenizers rarely exceed that; ordinary prompts use about
// half. A model without a price costs nothing. The same rule estimates missing usage.
func (c *Client) Quote(req Request) Quote {
	req.Model = cmp.Or(req.Model, c.config.Model)
	q := Quote{PromptTokens: mostTokensOf(req), AnswerTokens: req.MaxTokens}
	if q.AnswerTokens <= 0 {
		q.AnswerTokens = DefaultMaxTokens
		if LookupModel(req.Model).Reasoning {
			q.AnswerTokens = ThinkingMaxTokens
		}
	}
	price, _ := c.config.Prices.Of(req.Model)
	rate := price.at(q.PromptTokens)
	q.PromptUSD = float64(q.PromptTokens) * max(rate.Prompt, rate.Cached, rate.CacheWrite) / 1e6
	q.TokenUSD = rate.Completion / 1e6
	return q
}

// EstimateTokens estimates messages as a prompt: a token for four bytes, and four for each message.
func EstimateTokens(messages []Message) int {
	return estimatePrompt(Request{Messages: messages})
}

func estimatePrompt(req Request) int {
	all, parts := size(req)
	return ceilDiv(all.bytes, bytesPerToken) + parts*tokensPerMessage + all.images*imageTokens
}

// mostTokensOf returns the largest size of a prompt.
func mostTokensOf(req Request) int {
	all, parts := size(req)
	return all.most() + parts*reservePerMessage
}

// extent is an amount of input.
type extent struct {
	bytes  int
	halves int // upper bound, in half tokens
	images int
}

// most returns the upper bound in tokens.
func (e extent) most() int { return ceilDiv(e.halves, 2) + e.images*imageTokens }

// add counts text. Letters in words and blanks are half a token each. Digits, signs, other scripts and non-words
// count one.
func (e *extent) add(text string) {
	e.bytes += len(text)
	word := 0
	for i := range len(text) {
		b := text[i]
		letter := b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z'
		if word++; b == ' ' || b == '\n' {
			word = 0
		}
		if (letter || word == 0) && word <= longestWord {
			e.halves++
		} else {
			e.halves += 2
		}
	}
}

// addOpaque counts fields that a provider gets back: about a token for four bytes, as for encrypted reasoning. Other
// items of an answer count as their text and calls.
func (e *extent) addOpaque(o *Opaque) {
	if o == nil {
		return
	}
	bytes := 0
	for _, text := range o.Members {
		bytes += len(text)
	}
	for _, item := range o.Items {
		if strings.Contains(item, "encrypted_content") {
			bytes += len(item)
		}
	}
	e.bytes += bytes
	e.halves += bytes / 2
}

// size measures a prompt; parts is its number of messages and tools.
func size(req Request) (all extent, parts int) {
	for _, m := range req.Messages {
		one := measure(m)
		all = extent{all.bytes + one.bytes, all.halves + one.halves, all.images + one.images}
	}
	for _, tool := range req.Tools {
		if encoded, err := json.Marshal(tool); err == nil { // the client never sends a tool that does not encode
			all.add(string(encoded))
		}
	}
	if req.Schema != nil {
		all.add(req.Schema.instruction())
	}
	return all, len(req.Messages) + len(req.Tools)
}

func measure(m Message) (e extent) {
	for _, text := range []string{m.Content, m.Refusal, m.Reasoning, m.Name, m.ToolCallID} {
		e.add(text)
	}
	e.addOpaque(m.Opaque)
	for _, call := range m.ToolCalls {
		e.addOpaque(call.Opaque)
		e.add(call.ID)
		e.add(call.Name)
		e.add(call.Arguments)
	}
	for _, p := range m.Parts {
		e.add(p.Text)
		if p.Image != nil {
			e.images++
		}
	}
	return e
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }

// Density is the largest ratio of tokens counted by the server to tokens of [Client.Quote]; at least 1. A budget
// multiplies its quotes by this ratio. Density is safe for concurrent use.
func (c *Client) Density() float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(c.density, 1)
}

// reportsUsage reports whether the server has ever reported usage.
func (c *Client) reportsUsage(now bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reports = c.reports || now
	return c.reports
}

// ObserveUsage updates the density from a prompt's estimate and the server's count in u. It is safe for concurrent use.
func (c *Client) ObserveUsage(estimated int, u Usage) {
	if estimated <= 0 || u.Estimated {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.density = max(c.density, float64(u.PromptTokens)/float64(estimated))
}
