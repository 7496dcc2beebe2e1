package models

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
)

// dialect is the set of features that a server rejected for a model. Zero is the full protocol.
type dialect uint32

const (
	noUsage             dialect = 1 << iota // rejects stream_options
	noStream                                // rejects stream
	maxCompletionTokens                     // demands max_completion_tokens instead of max_tokens
	noChat                                  // demands the Responses API
	noResponses                             // has no Responses API
	singleSystemMessage                     // accepts one system message, at the front
	noTemperature                           // rejects a temperature
	noEffort                                // has no reasoning effort
	noSchema                                // has no structured outputs
	noImages                                // accepts only text
	noInclude                               // rejects include of a Responses request
	noStore                                 // rejects store
	needsReasoning                          // demands reasoning_content on each message with calls
	noReasoning                             // rejects reasoning in the history
	noOpaque                                // rejects its own opaque fields
)

// dialectNames are the names of the bits in logs, in order.
var dialectNames = []string{
	"without stream_options", "without streaming", "with max_completion_tokens", "over the Responses API",
	"over chat completions", "one system message", "without temperature", "without reasoning effort",
	"without structured outputs", "without images", "without include", "without store", "with reasoning_content",
	"without reasoning", "without opaque members",
}

func (d dialect) has(bit dialect) bool { return d&bit != 0 }

func (d dialect) names() (names []string) {
	for i, name := range dialectNames {
		if d.has(1 << i) {
			names = append(names, name)
		}
	}
	return names
}

// attemptedRequest is a rejected request.
type attemptedRequest struct {
	req Request
	api API
	own API // the configured protocol
}

// next returns the dialect to try next, if the refusal shows a rejected feature. Each change sets a bit, so the number
// of tries is at most that of the bits.
func (d dialect) next(refusal *Error, s attemptedRequest) (next dialect, changed bool) {
	words := strings.ToLower(refusal.Code + " " + refusal.param + " " + refusal.Message)
	words = strings.ReplaceAll(words, "invalid_request_error", "") // a generic type that isUnsupported would match
	switch refusal.Status {
	case http.StatusBadRequest, http.StatusUnprocessableEntity, http.StatusNotImplemented,
		http.StatusMethodNotAllowed, http.StatusNotAcceptable, http.StatusUnsupportedMediaType:
	case http.StatusNotFound:
		return d.afterNotFound(words, s)
	case http.StatusInternalServerError: // llama.cpp, for templates that raise an exception
		if !aboutRoles(words) {
			return d, false
		}
	default:
		return d, false
	}
	if refusal.Code == codeContentFilter {
		return d, false
	}
	for _, subtract := range []func(dialect, string, attemptedRequest) dialect{
		dialect.withoutAPI, dialect.withoutOption, dialect.withoutHistory, dialect.withoutStream,
	} {
		if next = subtract(d, words, s); next != d {
			return next, true
		}
	}
	return d, false
}

// afterNotFound drops the Responses API if the server lacks its route. An unknown model is no reason to drop it.
func (d dialect) afterNotFound(words string, s attemptedRequest) (next dialect, changed bool) {
	next = d
	model := strings.ToLower(s.req.Model)
	switch {
	case s.own != APIAuto || s.api != APIResponses || d.has(noChat):
	case strings.Contains(words, "model") && strings.Contains(words, model), strings.Contains(words, "model_not_found"):
	default:
		next |= noResponses
	}
	return next, next != d
}

// withoutAPI changes the protocol, once in each direction.
func (d dialect) withoutAPI(words string, s attemptedRequest) dialect {
	switch {
	case s.own != APIAuto:
	case s.api == APIChat && !d.has(noResponses) &&
		(strings.Contains(words, "/responses") || strings.Contains(words, "responses api")):
		d |= noChat
	case s.api == APIResponses && !d.has(noChat) && strings.Contains(words, "/responses") && isUnsupported(words):
		d |= noResponses
	}
	return d
}

// withoutOption drops an option that the refusal names.
func (d dialect) withoutOption(words string, s attemptedRequest) dialect {
	names := func(options ...string) bool {
		for _, option := range options {
			if strings.Contains(words, option) {
				return true
			}
		}
		return false
	}
	unsupported := isUnsupported(words)
	switch {
	case names("stream_options", "include_usage"):
		d |= noUsage
	case s.api == APIChat && names("max_completion_tokens") && s.req.MaxTokens > 0:
		d |= maxCompletionTokens
	case names("encrypted_content", "include") && s.api == APIResponses && unsupported:
		d |= noInclude
	case names("'store'", "`store`", "\"store\"", " store ", "store:") && s.api == APIResponses && unsupported:
		d |= noStore
	case names("temperature") && s.req.Temperature != nil && unsupported:
		d |= noTemperature
	case s.req.Schema != nil && !s.req.Schema.inWords && names("response_format", "json_schema", "text.format",
		"structured output", "response mime type", "grammar"):
		d |= noSchema
	case names("reasoning_effort", "reasoning.effort", "reasoning effort") && s.req.Effort != "" &&
		names("unsupported parameter", "unknown parameter", "not permitted", "unrecognized", "unexpected",
			"unknown field"):
		d |= noEffort
	case names("image") && s.req.hasImages() && (unsupported || names("text only", "only text", "multimodal", "vision")):
		d |= noImages
	}
	return d
}

// withoutHistory changes the form of the history.
func (d dialect) withoutHistory(words string, s attemptedRequest) dialect {
	unsupported := isUnsupported(words)
	switch {
	case aboutRoles(words) && needsFolding(s.req.Messages):
		d |= singleSystemMessage
	case strings.Contains(words, "reasoning_content") && !unsupported && s.req.hasCalls():
		d |= needsReasoning
	case strings.Contains(words, "reasoning_content") && s.req.hasReasoning():
		d |= noReasoning
	case s.req.hasOpaque() && unsupported:
		for _, name := range append([]string{"reasoning_details", "reasoning"}, opaqueMembers...) {
			if strings.Contains(words, name) {
				d |= noOpaque
			}
		}
	}
	return d
}

// withoutStream requests the answer in one piece.
func (d dialect) withoutStream(words string, _ attemptedRequest) dialect {
	if strings.Contains(words, "stream") && isUnsupported(words) {
		d |= noStream
	}
	return d
}

// aboutRoles reports a refusal about the order of roles.
func aboutRoles(words string) bool {
	about := strings.Contains(words, "system") || strings.Contains(words, "role")
	for _, sign := range []string{
		"role", "beginning", "must be the first", "at the start", "only one", "single system", "alternate", "template",
		"jinja", "first message", "multiple system",
	} {
		if about && strings.Contains(words, sign) {
			return true
		}
	}
	return false
}

// isUnsupported reports a refusal that names an unsupported feature.
func isUnsupported(words string) bool {
	for _, sign := range []string{
		"support", "not implemented", "not allowed", "not permitted", "not available", "not enabled", "unknown",
		"unrecogni", "unexpected", "must be false", "disabled", "invalid", "extra inputs", "does not accept",
	} {
		if strings.Contains(words, sign) {
			return true
		}
	}
	return false
}

// dialectFor returns the known and learned dialect of a model.
func (c *Client) dialectFor(model string) dialect {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dialects[model]
}

// learn stores a dialect for later requests to a model, merged with concurrent changes.
func (c *Client) learn(ctx context.Context, model string, d dialect) {
	c.mu.Lock()
	if c.dialects == nil {
		c.dialects = map[string]dialect{}
	}
	d |= c.dialects[model]
	c.dialects[model] = d
	c.mu.Unlock()
	c.config.Logger.InfoContext(ctx, "model endpoint adapted", slog.String("model", model), slog.Any("learned", d.names()))
}
