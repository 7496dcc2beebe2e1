package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/config"
)

// client sends the HTTP requests of all external participants: admin, workers, other systems and the candidate.
type client struct {
	base, admin, chat string
	http              *http.Client
}

func newClient(base string, cfg config.Config) *client {
	return &client{
		base: base, admin: cfg.AdminToken.Reveal(), chat: browserKey(cfg, nil),
		http: &http.Client{Transport: &http.Transport{}, Timeout: 2 * time.Minute},
	}
}

func (c *client) get(ctx context.Context, path string, into any) error {
	return c.call(ctx, http.MethodGet, path, nil, into)
}

func (c *client) post(ctx context.Context, path string, body, into any) error {
	return c.call(ctx, http.MethodPost, path, body, into)
}

func (c *client) call(ctx context.Context, method, path string, body, into any) error {
	return c.send(ctx, method, path, http.Header{"Authorization": {"Bearer " + c.admin}}, body, into)
}

// sendChat sends a chat message as the candidate. The response is ignored.
func (c *client) sendChat(ctx context.Context, thread, words string) error {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	body := struct {
		Model    string    `json:"model"`
		Messages []message `json:"messages"`
	}{"agent", []message{{"user", words}}}
	header := http.Header{"Authorization": {"Bearer " + c.chat}, "X-Thread-Id": {thread}}
	return c.send(ctx, http.MethodPost, "/v1/chat/completions", header, body, nil)
}

// send sends a JSON request and decodes the response into a value that is not nil. A status other than 2xx is an error.
func (c *client) send(ctx context.Context, method, path string, header http.Header, body, into any) error {
	var content io.Reader
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("%s %s: %w", method, path, err)
		}
		content = bytes.NewReader(encoded)
		header.Set("Content-Type", "application/json")
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, content)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	req.Header = header
	resp, err := c.http.Do(req)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 16<<20))
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: status %d: %.300s", method, path, resp.StatusCode, text)
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%s %s: read the answer: %w", method, path, err)
	}
	return nil
}
