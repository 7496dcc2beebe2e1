package models

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
)

// Listed is a model as its server lists it. Most servers say no more than the name.
type Listed struct {
	ID      string
	Context int      // tokens that it takes at once; 0 when the server does not say
	Inputs  []string // what it takes, such as text and image; nil when the server does not say
}

// List asks the server for its models, in the order of their names. Its error is an *[Error].
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

// readList reads OpenAI's form, with the members that vLLM, OpenRouter and others add to it.
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

// API is the protocol that the next request to a model is sent in.
func (c *Client) API(model string) API { return c.api(model, c.understood(model)) }

// Learned says in words what the server has refused of a model, as far as this client has asked.
func (c *Client) Learned(model string) []string { return c.understood(model).names() }

// Price is the price of a model, and whether the table knows it.
func (c *Client) Price(model string) (Price, bool) { return c.config.Prices.Of(model) }

// TakesImages reports whether images are sent to a model: they are, until its facts or its server say otherwise.
func (c *Client) TakesImages(model string) bool {
	return !FactsOf(model).NoImages && !c.understood(model).has(noImages)
}

// String is a price as people read it.
func (p Price) String() string { return fmt.Sprintf("$%g in, $%g out", p.Prompt, p.Completion) }
