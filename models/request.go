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

// object writes the members of a JSON object in the order given, and byte for byte as given.
type object struct {
	names []string
	texts map[string]string
	err   error
}

// set adds a member.
func (o *object) set(name string, value any) {
	encoded, err := encode(value)
	if err != nil && o.err == nil {
		o.err = err
	}
	o.raw(name, string(encoded))
}

// raw adds a member that is JSON already, or replaces it.
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

// merge lays an object over this one: objects member by member, else the other's value stands. A null takes a
// member away.
func (o *object) merge(extra map[string]json.RawMessage) {
	for _, name := range slices.Sorted(maps.Keys(extra)) {
		value := extra[name]
		var mine, more map[string]json.RawMessage
		switch {
		case isNull(value):
			delete(o.texts, name)
			o.names = slices.DeleteFunc(o.names, func(n string) bool { return n == name })
		case json.Unmarshal([]byte(o.texts[name]), &mine) == nil && mine != nil &&
			json.Unmarshal(value, &more) == nil && more != nil:
			var inner object
			for _, n := range slices.Sorted(maps.Keys(mine)) {
				inner.raw(n, string(mine[n]))
			}
			inner.merge(more)
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

// end is the whole object.
func (o *object) end() (string, error) {
	var out bytes.Buffer
	out.WriteByte('{')
	for i, name := range o.names {
		if i > 0 {
			out.WriteByte(',')
		}
		encoded, err := encode(name)
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

// list is a JSON array of texts that are JSON.
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

// body is the request in the form that the server is known to understand.
func (c *Client) body(req Request, api API, d dialect) (string, error) {
	known := FactsOf(req.Model)
	req = adaptedRequest(req, d)
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

// Schema is the form that an answer is to have: JSON of a schema, or any object when Schema is empty.
type Schema struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	Schema      json.RawMessage `json:"schema"`
	Strict      bool            `json:"strict"` // servers then want every member required and no others allowed

	inWords bool // the server has refused this one
}

// The formats of an answer, as both protocols name them.
const (
	formatSchema = "json_schema"
	formatObject = "json_object"
)

// format is the form as chat completions have it.
func (s *Schema) format() map[string]any {
	if len(s.Schema) == 0 {
		return map[string]any{"type": formatObject}
	}
	return map[string]any{"type": formatSchema, "json_schema": s}
}

// flatFormat is the form as the Responses API has it.
func (s *Schema) flatFormat() any {
	if len(s.Schema) == 0 {
		return map[string]any{"type": formatObject}
	}
	return struct {
		Type string `json:"type"`
		Schema
	}{formatSchema, *s}
}

// inWords reports whether the server has no structured outputs, or not for this schema.
func inWords(s *Schema, d dialect, known Facts) bool {
	return s.inWords || d.has(noSchema) || known.NoSchema
}

// rule is the form in words.
func (s *Schema) rule() string {
	if len(s.Schema) == 0 {
		return "[Form of the final answer: one JSON object, and nothing else: no words around it, no code fence.]"
	}
	return "[Form of the final answer: JSON of the schema below, and nothing else: " +
		"no words around it, no code fence.]\n" +
		string(s.Schema)
}

// withForm is the history of a request. The form is added in words where the server does not get it otherwise. Any
// object always needs the words: OpenAI refuses a request for one that does not say JSON.
//
// The words go to the last that the user said. A client sends the schema, so it has no more rank than that.
func withForm(req Request, d dialect, known Facts) []Message {
	s := req.Schema
	if s == nil || len(s.Schema) > 0 && !inWords(s, d, known) {
		return req.Messages
	}
	for i := len(req.Messages) - 1; i >= 0; i-- {
		if req.Messages[i].Role == RoleUser {
			messages := slices.Clone(req.Messages)
			messages[i] = with(messages[i], Message{Content: s.rule()})
			return messages
		}
	}
	return append(slices.Clip(req.Messages), Message{Role: RoleUser, Content: s.rule()})
}

// schemaRefused asks for the form in words, this once, when the server refuses the schema itself. Its dialect is not
// to blame: another schema may pass.
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
	// DefaultMaxTokens is what [Client.Quote] expects of an answer whose length the request does not bound.
	DefaultMaxTokens = 4096
	// ThinkingMaxTokens is what it expects of models whose hidden reasoning counts as part of the answer.
	ThinkingMaxTokens = 16_384

	bytesPerToken     = 4 // of English prose; other languages and code have fewer
	longestWord       = 24
	tokensPerMessage  = 4 // what the chat format adds
	reservePerMessage = 8
	imageTokens       = 1500
)

// Quote is about the most that one attempt of a request can use and cost, for budgets to set aside beforehand.
type Quote struct {
	PromptTokens int
	PromptUSD    float64
	AnswerTokens int     // MaxTokens, or what is usual for the model
	TokenUSD     float64 // of each token of the answer
}

// Quote reckons a request's worst case. No tokenizer is at hand, so it takes a token for every two letters and
// blanks, and one for every other byte, and eight for each message and tool: tokenizers hardly ever make more.
// Ordinary prompts use about half of that. A model without a price costs nothing. (A missing usage is estimated by
// the same rule.)
func (c *Client) Quote(req Request) Quote {
	if req.Model == "" {
		req.Model = c.config.Model
	}
	q := Quote{PromptTokens: mostTokensOf(req), AnswerTokens: req.MaxTokens}
	if q.AnswerTokens <= 0 {
		q.AnswerTokens = DefaultMaxTokens
		if FactsOf(req.Model).Thinks {
			q.AnswerTokens = ThinkingMaxTokens
		}
	}
	price, _ := c.config.Prices.Of(req.Model)
	rate := price.at(q.PromptTokens)
	q.PromptUSD = float64(q.PromptTokens) * max(rate.Prompt, rate.Cached, rate.CacheWrite) / 1e6
	q.TokenUSD = rate.Completion / 1e6
	return q
}

// EstimateTokens is about what messages come to as a prompt: a token for every four bytes, four for each message.
func EstimateTokens(messages []Message) int {
	return estimatePrompt(Request{Messages: messages})
}

func estimatePrompt(req Request) int {
	all, parts := size(req)
	return ceilDiv(all.bytes, bytesPerToken) + parts*tokensPerMessage + all.images*imageTokens
}

// mostTokensOf is the most that a prompt comes to.
func mostTokensOf(req Request) int {
	all, parts := size(req)
	return all.most() + parts*reservePerMessage
}

// extent is how much there is to read.
type extent struct {
	bytes  int
	halves int // of tokens, at the most
	images int
}

// most is how many tokens it can be.
func (e extent) most() int { return ceilDiv(e.halves, 2) + e.images*imageTokens }

// add counts text. Letters in words and blanks are two to a token; digits, signs, other scripts and what is no word
// may be one.
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

// addOpaque counts what a provider gets back: about a token for every four bytes, as encrypted reasoning has. Other
// items of an answer are counted as the text and the calls that they are.
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

// size measures a prompt; parts is how many messages and tools it has.
func size(req Request) (all extent, parts int) {
	for _, m := range req.Messages {
		one := measure(m)
		all = extent{all.bytes + one.bytes, all.halves + one.halves, all.images + one.images}
	}
	for _, tool := range req.Tools {
		if encoded, err := json.Marshal(tool); err == nil { // one that cannot be encoded is never sent
			all.add(string(encoded))
		}
	}
	if req.Schema != nil {
		all.add(req.Schema.rule())
	}
	return all, len(req.Messages) + len(req.Tools)
}

// measure is a message's extent.
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

// Density is how many tokens the server has counted for each one that [Client.Quote] reckoned a prompt at, at the
// most and at least 1. A prompt quoted that much higher is not quoted too low for a server that counts otherwise.
// Safe for concurrent use.
func (c *Client) Density() float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(c.density, 1)
}

// reportsUsage reports whether the server has reported usage, now or before.
func (c *Client) reportsUsage(now bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reports = c.reports || now
	return c.reports
}

// Learn takes from an answer how the server counts: a prompt reckoned at so many tokens was counted as u says. Safe for
// concurrent use.
func (c *Client) Learn(reckoned int, u Usage) {
	if reckoned <= 0 || u.Estimated {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.density = max(c.density, float64(u.PromptTokens)/float64(reckoned))
}
