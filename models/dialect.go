package models

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
)

// dialect is what a server has turned out not to understand. Its zero value is the full protocol.
type dialect struct {
	noUsage  bool // refuses stream_options
	noStream bool // refuses stream
	newLimit bool // refuses max_tokens in favour of max_completion_tokens
}

// after is the dialect to try next, when the refusal shows that d asks for too much. Every
// change takes something away, so a request goes through at most three.
func (d dialect) after(refusal *Error, req Request) (next dialect, changed bool) {
	switch refusal.Status {
	case http.StatusBadRequest, http.StatusUnprocessableEntity, http.StatusNotImplemented, http.StatusMethodNotAllowed,
		http.StatusNotAcceptable, http.StatusUnsupportedMediaType:
	default:
		return d, false
	}
	words := strings.ToLower(refusal.Code + " " + refusal.param + " " + refusal.Message)
	next = d
	switch {
	case strings.Contains(words, "stream_options") || strings.Contains(words, "include_usage"):
		next.noUsage = true
	case strings.Contains(words, "max_completion_tokens") && req.MaxTokens > 0:
		next.newLimit = true
	case strings.Contains(words, "stream") && soundsUnsupported(words):
		next.noStream = true
	}
	return next, next != d
}

// soundsUnsupported reports whether a refusal is of the kind that names what a server does not have.
func soundsUnsupported(words string) bool {
	for _, sign := range []string{
		"support", "not implemented", "not allowed", "not permitted", "not available", "not enabled", "unknown",
		"unrecogni", "unexpected", "must be false", "disabled", "invalid",
	} {
		if strings.Contains(words, sign) {
			return true
		}
	}
	return false
}

func (c *Client) understood() dialect {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dialect
}

// learn remembers a dialect for all later requests, together with what others have learned meanwhile.
func (c *Client) learn(ctx context.Context, d dialect) {
	c.mu.Lock()
	c.dialect.noUsage = c.dialect.noUsage || d.noUsage
	c.dialect.noStream = c.dialect.noStream || d.noStream
	c.dialect.newLimit = c.dialect.newLimit || d.newLimit
	c.mu.Unlock()
	c.config.Logger.InfoContext(ctx, "model endpoint adapted", slog.Bool("without_stream_options", d.noUsage),
		slog.Bool("without_streaming", d.noStream), slog.Bool("with_max_completion_tokens", d.newLimit))
}
