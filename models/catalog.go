package models

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Listed is a model in a server's list. Most servers list only the name.
type Listed struct {
	ID      string
	Context int      // context length in tokens; 0 if the server omits it
	Inputs  []string // input types, such as text and image; nil if the server omits them
}

// List asks the server for its models, sorted by name. Its error is an *[Error].
func (c *Client) List(ctx context.Context) ([]Listed, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.config.BaseURL+"/models", http.NoBody)
	if err != nil {
		return nil, (&Error{Message: "list models: " + err.Error(), cause: err}).scrubbed(c.config.secrets())
	}
	if c.config.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+c.config.APIKey)
	}
	for name, value := range c.config.Headers {
		req.Header.Set(name, value)
	}
	req.URL.RawQuery = c.config.Query.Encode()
	resp, err := c.config.HTTPClient.Do(req)
	if err != nil {
		return nil, transportError(err).scrubbed(c.config.secrets())
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return nil, transportError(err).scrubbed(c.config.secrets())
	}
	if resp.StatusCode != http.StatusOK {
		refused := refusal(resp.StatusCode, resp.Header, body[:min(len(body), maxRefusalBytes)])
		return nil, refused.scrubbed(c.config.secrets())
	}
	return readList(body)
}

// readList decodes OpenAI's list, with the fields that vLLM, OpenRouter and others add.
func readList(body []byte) ([]Listed, error) {
	var answer struct {
		Data []struct {
			ID            string `json:"id"`
			ContextLength int    `json:"context_length"` // OpenRouter, Kimi
			MaxModelLen   int    `json:"max_model_len"`  // vLLM
			ContextWindow int    `json:"context_window"` // Groq
			Architecture  struct {
				Inputs []string `json:"input_modalities"` // OpenRouter
			} `json:"architecture"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &answer); err != nil || answer.Data == nil {
		return nil, &Error{Message: "the answer to GET /models is no list of models", cause: err}
	}
	listed := make([]Listed, len(answer.Data))
	for i, m := range answer.Data {
		listed[i] = Listed{m.ID, max(m.ContextLength, m.MaxModelLen, m.ContextWindow), m.Architecture.Inputs}
	}
	slices.SortFunc(listed, func(a, b Listed) int { return strings.Compare(a.ID, b.ID) })
	return listed, nil
}

// API returns the protocol of the next request to a model.
func (c *Client) API(model string) API { return c.api(model, c.dialectFor(model)) }

// Learned names the features that the server has rejected for a model.
func (c *Client) Learned(model string) []string { return c.dialectFor(model).names() }

// Price returns the price of a model. ok is false for a model outside the table.
func (c *Client) Price(model string) (Price, bool) { return c.config.Prices.Of(model) }

// TakesImages reports whether the client sends images to a model. It does, unless the facts or the server exclude
// images.
func (c *Client) TakesImages(model string) bool {
	return !FactsOf(model).NoImages && !c.dialectFor(model).has(noImages)
}

// API is a protocol.
type API string

// The protocols.
const (
	APIAuto      API = "auto" // chosen for the server and the model
	APIChat      API = "chat"
	APIResponses API = "responses"
)

// Facts describe a model before the first request. Unknown models have the zero value. The client learns further limits
// from refusals.
type Facts struct {
	Context       int    // context length in tokens; 0 if unknown
	Responses     bool   // OpenAI serves it best, or only, over the Responses API
	NewLimit      bool   // it needs max_completion_tokens instead of max_tokens
	Thinks        bool   // hidden reasoning counts as output
	NoTemperature bool   // it rejects a temperature
	OneSystem     bool   // its template accepts one system message, at the front
	Echo          string // field required on each message with calls; empty without reasoning
	Signed        bool   // it rejects calls without their signature
	NoImages      bool   // it accepts only text
	NoSchema      bool   // it ignores structured outputs
}

// facts has the facts by prefix of the name; the longest prefix wins.
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

// FactsOf returns the facts of a model. Case and a leading provider or owner (openai/gpt-6-sol) do not matter.
func FactsOf(model string) Facts {
	name := strings.ToLower(model)
	name = name[strings.LastIndex(name, "/")+1:]
	best := ""
	for prefix := range facts {
		if strings.HasPrefix(name, prefix) && len(prefix) > len(best) {
			best = prefix
		}
	}
	return facts[best]
}

// KnownModels lists the prefixes with facts, sorted.
func KnownModels() []string { return slices.Sorted(maps.Keys(facts)) }

// openAI reports whether the endpoint is OpenAI's.
func (c *Client) openAI() bool {
	u, err := url.Parse(c.config.BaseURL)
	return err == nil && (u.Hostname() == "api.openai.com" || strings.HasSuffix(u.Hostname(), ".api.openai.com"))
}

// api returns the protocol for a model: configured, known or learned.
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
