package models

import (
	"cmp"
	"encoding/json"
	"strings"
	"time"
)

// Quote is the approximate worst case of one attempt, for a budget reservation.
type Quote struct {
	Model        string
	PromptTokens int
	Images       int
	PromptUSD    float64
	AnswerTokens int     // MaxTokens, or the model's default
	TokenUSD     float64 // of each output token
}

// Quote estimates a request's worst case without a tokenizer. It counts one token for two letters or blanks, and one
// for every other byte, also of a run above 24 bytes. A message and a tool add eight tokens, an image 1500. Opaque
// fields count one token for four bytes. Tokenizers rarely exceed that; ordinary prompts use about half. A model
// without a price costs nothing. The same rule estimates missing usage.
func (c *Client) Quote(req Request) Quote {
	req.Model = cmp.Or(req.Model, c.config.Model)
	tokens, images := mostTokensOf(req)
	q := Quote{Model: req.Model, PromptTokens: tokens, Images: images, AnswerTokens: req.MaxTokens}
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

const (
	// DefaultMaxTokens is the expected length of an unbounded answer in [Client.Quote].
	DefaultMaxTokens = 4096
	// ThinkingMaxTokens replaces DefaultMaxTokens for models whose hidden reasoning counts as output.
	ThinkingMaxTokens = 16_384

	bytesPerToken     = 4    // of English prose; other languages and code have fewer
	longestWord       = 24   // letters; a longer run is base64 or the like, with a token per letter
	tokensPerMessage  = 4    // overhead of the chat format
	reservePerMessage = 8    // the same, in a worst case
	imageTokens       = 1500 // of an image at high detail
)

// EstimateTokens estimates messages as a prompt: a token for four bytes, four for each message, and 1500 for each
// image.
func EstimateTokens(messages []Message) int {
	return estimatePrompt(Request{Messages: messages})
}

func estimatePrompt(req Request) int {
	all, parts := size(req)
	return ceilDiv(all.bytes, bytesPerToken) + parts*tokensPerMessage + all.images*imageTokens
}

// mostTokensOf returns the upper estimate of a prompt's size, in tokens, and the number of its images.
func mostTokensOf(req Request) (tokens, images int) {
	all, parts := size(req)
	return all.most() + parts*reservePerMessage, all.images
}

// extent is an amount of input.
type extent struct {
	bytes  int
	halves int // upper bound, in half tokens
	images int
}

// most returns the upper estimate in tokens.
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

// density relates the token counts of a model's server to quotes. ratio is the counted tokens per quoted token of a
// long prompt. overhead is the additional tokens of each prompt, such as those of a hidden system prompt. seen is when
// a prompt last had at least half of the overhead.
type density struct {
	ratio, overhead float64
	seen            time.Time
}

const (
	longPrompt = 20_000 // tokens of a quote; the overhead of a shorter prompt may exceed its text
	maxDensity = 2      // a letter is half a token of a quote, and hardly more than one of a server
	// overheadTTL is how long an overhead counts. Without it, one wrong count could forbid every call that corrects it.
	overheadTTL = 10 * time.Minute
)

// density returns what is learnt of a model. The caller holds mu.
func (c *Client) density(model string) density {
	learnt := c.densities[model]
	if time.Since(learnt.seen) > overheadTTL {
		learnt.overhead = 0
	}
	return learnt
}

// Density is the factor by which a budget multiplies a quote, at least 1. It covers what the model's server counted
// for earlier prompts without images. Density is safe for concurrent use.
func (c *Client) Density(q Quote) float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	learnt := c.density(q.Model)
	return max(learnt.ratio, 1) + learnt.overhead/float64(max(q.PromptTokens, 1))
}

// reportsUsage reports whether the server has ever reported usage.
func (c *Client) reportsUsage(now bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reports = c.reports || now
	return c.reports
}

// ObserveUsage updates the density of a quote's model from the server's count in u. A prompt with images is ignored:
// what an image counts says nothing about text. ObserveUsage is safe for concurrent use.
func (c *Client) ObserveUsage(q Quote, u Usage) {
	if q.PromptTokens <= 0 || q.Images > 0 || u.Estimated {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	learnt, quoted, counted := c.density(q.Model), float64(q.PromptTokens), float64(u.PromptTokens)
	if q.PromptTokens >= longPrompt {
		learnt.ratio = max(learnt.ratio, min((counted-learnt.overhead)/quoted, maxDensity))
	}
	if extra := counted - quoted*max(learnt.ratio, 1); extra > 0 && extra >= learnt.overhead/2 {
		learnt.overhead, learnt.seen = max(learnt.overhead, extra), time.Now()
	}
	c.densities[q.Model] = learnt
}
