package models

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
)

// ListedModel is an entry of GET /models. Most servers send only the name.
type ListedModel struct {
	ID      string
	Context int      // context length in tokens; 0 if the server omits it
	Inputs  []string // input types, such as text and image; nil if the server omits them
}

// List returns the models of GET /models, sorted by name. Its error is an *[Error].
func (c *Client) List(ctx context.Context) ([]ListedModel, error) {
	listed, failure := c.list(ctx)
	if failure != nil {
		return nil, failure.scrubbed(c.config.secrets())
	}
	return listed, nil
}

func (c *Client) list(ctx context.Context) ([]ListedModel, *Error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.config.BaseURL+"/models", http.NoBody)
	if err != nil {
		return nil, &Error{Message: "list models: " + err.Error(), cause: err}
	}
	if c.config.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+c.config.APIKey)
	}
	c.config.apply(req)
	resp, err := c.config.HTTPClient.Do(req)
	if err != nil {
		return nil, transportError(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return nil, transportError(err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, apiError(resp.StatusCode, resp.Header, body[:min(len(body), maxRefusalBytes)])
	}
	return decodeList(body)
}

// apply sets the configured headers and query parameters.
func (c Config) apply(req *http.Request) {
	for name, value := range c.Headers {
		req.Header.Set(name, value)
	}
	if len(c.Query) > 0 {
		req.URL.RawQuery = c.Query.Encode()
	}
}

// decodeList decodes OpenAI's list, with the fields that vLLM, OpenRouter and others add.
func decodeList(body []byte) ([]ListedModel, *Error) {
	var response struct {
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
	if err := json.Unmarshal(body, &response); err != nil || response.Data == nil {
		return nil, &Error{Message: "GET /models: response has no data array", cause: err}
	}
	listed := make([]ListedModel, len(response.Data))
	for i, m := range response.Data {
		listed[i] = ListedModel{m.ID, max(m.ContextLength, m.MaxModelLen, m.ContextWindow), m.Architecture.Inputs}
	}
	slices.SortFunc(listed, func(a, b ListedModel) int { return strings.Compare(a.ID, b.ID) })
	return listed, nil
}
