package models

import (
	"maps"
	"net/url"
	"slices"
	"strings"
)

// API is the protocol that a request is sent in.
type API string

// The protocols.
const (
	APIAuto      API = "auto" // what fits the server and the model
	APIChat      API = "chat"
	APIResponses API = "responses"
)

// Facts is what is known of a model before it was asked. Unknown models have the zero value, which suits most
// servers: what they refuse is learned.
type Facts struct {
	Context       int    // tokens that it takes at once; 0 when that is not known
	Responses     bool   // OpenAI serves it best, or only, over the Responses API
	NewLimit      bool   // it takes max_completion_tokens, and refuses max_tokens
	Thinks        bool   // hidden reasoning counts as part of its answers
	NoTemperature bool   // it refuses a temperature
	OneSystem     bool   // its template takes one system message, the first
	Echo          string // the member that must be on each of its messages with calls, empty where it did not think
	Signed        bool   // it refuses calls without its signature
	NoImages      bool   // it takes text alone
	NoSchema      bool   // it ignores structured outputs in silence
}

// facts is by name: of a name that begins so the longest decides.
var facts = map[string]Facts{
	"offline":      {NoImages: true},
	"gpt-3.5":      {Context: 16_385, NoImages: true},
	"gpt-4o":       {Context: 128_000},
	"gpt-4.1":      {Context: 1_047_576},
	"o1":           {Context: 200_000, NewLimit: true, Thinks: true, NoTemperature: true},
	"o3":           {Context: 200_000, NewLimit: true, Thinks: true, NoTemperature: true},
	"o3-mini":      {Context: 200_000, NewLimit: true, Thinks: true, NoTemperature: true, NoImages: true},
	"o4":           {Context: 200_000, NewLimit: true, Thinks: true, NoTemperature: true},
	"gpt-5":        {Context: 400_000, NewLimit: true, Thinks: true, NoTemperature: true},
	"gpt-5.4":      {Context: 400_000, NewLimit: true, Thinks: true, NoTemperature: true, Responses: true},
	"gpt-5.5":      {Context: 400_000, NewLimit: true, Thinks: true, NoTemperature: true, Responses: true},
	"gpt-5.6":      {Context: 400_000, NewLimit: true, Thinks: true, NoTemperature: true, Responses: true},
	"gpt-6":        {NewLimit: true, Thinks: true, NoTemperature: true, Responses: true},
	"gemini-2.5":   {Context: 1_048_576, Thinks: true, OneSystem: true},
	"gemini-3":     {Context: 1_048_576, Thinks: true, OneSystem: true, Signed: true},
	"gemini":       {OneSystem: true},
	"qwen3.5":      {OneSystem: true, Thinks: true},
	"qwen3.6":      {OneSystem: true, Thinks: true},
	"qwen-3.5":     {OneSystem: true, Thinks: true},
	"qwen-3.6":     {OneSystem: true, Thinks: true},
	"mistral":      {OneSystem: true},
	"ministral":    {OneSystem: true},
	"magistral":    {OneSystem: true, Thinks: true},
	"devstral":     {OneSystem: true, NoImages: true},
	"codestral":    {OneSystem: true, NoImages: true},
	"kimi":         {Echo: "reasoning_content", Thinks: true},
	"kimi-k2":      {Context: 262_144, Echo: "reasoning_content", Thinks: true, NoImages: true},
	"deepseek":     {Context: 128_000, Echo: "reasoning_content", NoImages: true},
	"deepseek-r":   {Context: 128_000, Echo: "reasoning_content", Thinks: true, NoImages: true},
	"claude":       {Context: 200_000, OneSystem: true, NoSchema: true},
	"deepseek-ocr": {},
}

// FactsOf is what is known of a model. A name with a provider or an owner in front (openai/gpt-6-sol) counts
// without it, whatever its case.
func FactsOf(model string) Facts {
	name := strings.ToLower(model)
	name = name[strings.LastIndex(name, "/")+1:]
	best := ""
	for begins := range facts {
		if strings.HasPrefix(name, begins) && len(begins) > len(best) {
			best = begins
		}
	}
	return facts[best]
}

// KnownModels are the beginnings of names that facts are known of, in order.
func KnownModels() []string { return slices.Sorted(maps.Keys(facts)) }

// openAI reports whether the client talks to OpenAI itself.
func (c *Client) openAI() bool {
	u, err := url.Parse(c.config.BaseURL)
	return err == nil && (u.Hostname() == "api.openai.com" || strings.HasSuffix(u.Hostname(), ".api.openai.com"))
}

// api is the protocol for a model, as far as that is set, known or learned.
func (c *Client) api(model string, d dialect) API {
	switch {
	case c.config.API == APIChat || c.config.API == APIResponses:
		return c.config.API
	case d.has(noChat):
		return APIResponses
	case !d.has(noResponses) && c.openAI() && FactsOf(model).Responses:
		return APIResponses
	}
	return APIChat
}
