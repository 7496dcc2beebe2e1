package models

import (
	"maps"
	"net/url"
	"slices"
	"strings"
)

// API returns the protocol of the next request to a model.
func (c *Client) API(model string) API { return c.api(model, c.dialectFor(model)) }

// RejectedFeatures lists the features that the server has rejected for a model.
func (c *Client) RejectedFeatures(model string) []string { return c.dialectFor(model).names() }

// Price returns the price of a model. ok is false for a model outside the price table.
func (c *Client) Price(model string) (price Price, ok bool) { return c.config.Prices.Of(model) }

// SupportsImages reports whether the client sends images to a model. It is false if the model table or a past rejection
// says so.
func (c *Client) SupportsImages(model string) bool {
	return !LookupModel(model).NoImages && !c.dialectFor(model).has(noImages)
}

// API is a protocol of a model server.
type API string

// Protocols.
const (
	APIAuto      API = "auto" // chosen for the server and the model
	APIChat      API = "chat"
	APIResponses API = "responses"
)

// ModelInfo describes a model before the first request. It is zero for unknown models. The client learns further limits
// from rejected requests.
type ModelInfo struct {
	Context               int    // context length in tokens; 0 if unknown
	Responses             bool   // prefers the Responses API
	MaxCompletionTokens   bool   // requires max_completion_tokens instead of max_tokens
	Reasoning             bool   // hidden reasoning counts as output
	NoTemperature         bool   // rejects a temperature
	SingleSystemMessage   bool   // accepts one system message, at the front
	ReasoningField        string // required on each message with calls, even if empty
	RequiresCallSignature bool   // rejects calls without their signature
	NoImages              bool   // accepts only text
	NoSchema              bool   // ignores structured outputs
}

// modelInfo is keyed by name prefix. The longest prefix wins.
var modelInfo = map[string]ModelInfo{
	"offline":      {NoImages: true},
	"gpt-3.5":      {Context: 16_385, NoImages: true},
	"gpt-4o":       {Context: 128_000},
	"gpt-4.1":      {Context: 1_047_576},
	"o1":           {Context: 200_000, MaxCompletionTokens: true, Reasoning: true, NoTemperature: true},
	"o3":           {Context: 200_000, MaxCompletionTokens: true, Reasoning: true, NoTemperature: true},
	"o3-mini":      {Context: 200_000, MaxCompletionTokens: true, Reasoning: true, NoTemperature: true, NoImages: true},
	"o4":           {Context: 200_000, MaxCompletionTokens: true, Reasoning: true, NoTemperature: true},
	"gpt-5":        {Context: 400_000, MaxCompletionTokens: true, Reasoning: true, NoTemperature: true},
	"gpt-5.4":      {Context: 400_000, MaxCompletionTokens: true, Reasoning: true, NoTemperature: true, Responses: true},
	"gpt-5.5":      {Context: 400_000, MaxCompletionTokens: true, Reasoning: true, NoTemperature: true, Responses: true},
	"gpt-5.6":      {Context: 400_000, MaxCompletionTokens: true, Reasoning: true, NoTemperature: true, Responses: true},
	"gpt-6":        {MaxCompletionTokens: true, Reasoning: true, NoTemperature: true, Responses: true},
	"gemini-2.5":   {Context: 1_048_576, Reasoning: true, SingleSystemMessage: true},
	"gemini-3":     {Context: 1_048_576, Reasoning: true, SingleSystemMessage: true, RequiresCallSignature: true},
	"gemini":       {SingleSystemMessage: true},
	"qwen3.5":      {SingleSystemMessage: true, Reasoning: true},
	"qwen3.6":      {SingleSystemMessage: true, Reasoning: true},
	"qwen-3.5":     {SingleSystemMessage: true, Reasoning: true},
	"qwen-3.6":     {SingleSystemMessage: true, Reasoning: true},
	"mistral":      {SingleSystemMessage: true},
	"ministral":    {SingleSystemMessage: true},
	"magistral":    {SingleSystemMessage: true, Reasoning: true},
	"devstral":     {SingleSystemMessage: true, NoImages: true},
	"codestral":    {SingleSystemMessage: true, NoImages: true},
	"kimi":         {ReasoningField: "reasoning_content", Reasoning: true},
	"kimi-k2":      {Context: 262_144, ReasoningField: "reasoning_content", Reasoning: true, NoImages: true},
	"deepseek":     {Context: 128_000, ReasoningField: "reasoning_content", NoImages: true},
	"deepseek-r":   {Context: 128_000, ReasoningField: "reasoning_content", Reasoning: true, NoImages: true},
	"deepseek-ocr": {}, // reads images, unlike the other models of this prefix
	"claude":       {Context: 200_000, SingleSystemMessage: true, NoSchema: true},
}

// LookupModel returns the entry of a model. Case and a leading provider or owner (openai/gpt-6-sol) are ignored.
func LookupModel(model string) ModelInfo {
	name := strings.ToLower(model)
	name = name[strings.LastIndex(name, "/")+1:]
	best := ""
	for prefix := range modelInfo {
		if strings.HasPrefix(name, prefix) && len(prefix) > len(best) {
			best = prefix
		}
	}
	return modelInfo[best]
}

// KnownPrefixes lists the name prefixes of known models, sorted.
func KnownPrefixes() []string { return slices.Sorted(maps.Keys(modelInfo)) }

// isOpenAI reports whether the endpoint is OpenAI's.
func (c *Client) isOpenAI() bool {
	u, err := url.Parse(c.config.BaseURL)
	return err == nil && (u.Hostname() == "api.openai.com" || strings.HasSuffix(u.Hostname(), ".api.openai.com"))
}

// api returns the protocol for a model: configured, declared in the model table, or learned.
func (c *Client) api(model string, d dialect) API {
	switch {
	case c.config.API == APIChat || c.config.API == APIResponses:
		return c.config.API
	case d.has(noChat):
		return APIResponses
	case !d.has(noResponses) && c.isOpenAI() && LookupModel(model).Responses:
		return APIResponses
	}
	return APIChat
}
