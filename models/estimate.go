package models

import (
	"encoding/json"
	"strings"
)

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
