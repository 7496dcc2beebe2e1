package models

import (
	"encoding/json"

	openai "github.com/sashabaranov/go-openai"
)

const (
	// DefaultMaxTokens is what [Client.Quote] expects of an answer whose length the request does not bound.
	DefaultMaxTokens = 4096
	// ThinkingMaxTokens is what it expects of models whose hidden reasoning counts as part of the answer.
	ThinkingMaxTokens = 16_384

	bytesPerToken     = 4 // of English prose; other languages and code have fewer
	leastBytesToken   = 2 // of dense JSON and numbers
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

// Quote reckons a request's worst case. No tokenizer is at hand: it is a token for every two bytes of messages and
// tools, and eight for each of them. Ordinary prompts use about half of that. A model without a price costs
// nothing. (A missing usage is estimated by the same rule with four bytes a token, which is close for English.)
func (c *Client) Quote(req Request) Quote {
	if req.Model == "" {
		req.Model = c.config.Model
	}
	q := Quote{PromptTokens: estimate(req, leastBytesToken, reservePerMessage), AnswerTokens: req.MaxTokens}
	if q.AnswerTokens <= 0 {
		q.AnswerTokens = DefaultMaxTokens
		if wantsNewLimit(req.Model) {
			q.AnswerTokens = ThinkingMaxTokens
		}
	}
	price, _ := c.config.Prices.Of(req.Model)
	q.PromptUSD, q.TokenUSD = float64(q.PromptTokens)*max(price.Prompt, price.Cached)/1e6, price.Completion/1e6
	return q
}

// EstimateTokens is about what messages come to as a prompt: a token for every four bytes, four for each message.
func EstimateTokens(messages []openai.ChatCompletionMessage) int {
	return estimatePrompt(Request{Messages: messages})
}

func estimatePrompt(req Request) int { return estimate(req, bytesPerToken, tokensPerMessage) }

func estimateMessage(m openai.ChatCompletionMessage) int {
	text, _ := measure(m)
	return ceilDiv(text, bytesPerToken)
}

func estimate(req Request, perToken, overhead int) int {
	size, extra := 0, 0
	for _, m := range req.Messages {
		text, images := measure(m)
		size += text
		extra += overhead + images*imageTokens
	}
	for _, tool := range req.Tools {
		if encoded, err := json.Marshal(tool); err == nil { // one that cannot be encoded is never sent
			size += len(encoded)
		}
		extra += overhead
	}
	return ceilDiv(size, perToken) + extra
}

// measure is the bytes of text in a message, and the number of its images.
func measure(m openai.ChatCompletionMessage) (text, images int) {
	text = len(m.Content) + len(m.Refusal) + len(m.ReasoningContent) + len(m.Name) + len(m.ToolCallID)
	for _, call := range m.ToolCalls {
		text += len(call.ID) + len(call.Function.Name) + len(call.Function.Arguments)
	}
	for _, p := range m.MultiContent {
		text += len(p.Text)
		if p.ImageURL != nil {
			images++
		}
	}
	return text, images
}

func ceilDiv(a, b int) int { return (a + b - 1) / b }
