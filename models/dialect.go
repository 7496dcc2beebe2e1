package models

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
)

// dialect is what a server has turned out not to understand, of one model. Zero is the full protocol; a refusal
// sets a bit.
type dialect uint32

const (
	noUsage       dialect = 1 << iota // refuses stream_options
	noStream                          // refuses stream
	newLimit                          // refuses max_tokens in favour of max_completion_tokens
	noChat                            // wants the Responses API
	noResponses                       // has no Responses API
	oneSystem                         // takes one system message, the first
	noTemperature                     // refuses a temperature
	noEffort                          // does not know reasoning effort
	noSchema                          // has no structured outputs
	noImages                          // takes text alone
	noInclude                         // refuses include of a Responses request
	noStore                           // refuses store
	echo                              // wants reasoning_content on each message with calls
	noEcho                            // refuses reasoning in the history
	noOpaque                          // refuses the other members that it sent
)

// dialectNames are the bits in order, as logs have them.
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

// sent is what a refused request asked for.
type sent struct {
	req Request
	api API
	own API // the protocol that is set
}

// after is the dialect to try next, when the refusal shows that d asks for too much. Every
// change takes something away, so a request goes through a few at most.
func (d dialect) after(refusal *Error, s sent) (next dialect, changed bool) {
	words := strings.ToLower(refusal.Code + " " + refusal.param + " " + refusal.Message)
	words = strings.ReplaceAll(words, "invalid_request_error", "") // says nothing, and would sound unsupported
	switch refusal.Status {
	case http.StatusBadRequest, http.StatusUnprocessableEntity, http.StatusNotImplemented,
		http.StatusMethodNotAllowed, http.StatusNotAcceptable, http.StatusUnsupportedMediaType:
	case http.StatusNotFound:
		return d.afterNotFound(words, s)
	case http.StatusInternalServerError: // llama.cpp, of templates that raise an exception
		if !aboutRoles(words) {
			return d, false
		}
	default:
		return d, false
	}
	if refusal.Code == codeContentFilter {
		return d, false
	}
	for _, subtract := range []func(dialect, string, sent) dialect{
		dialect.withoutAPI, dialect.withoutOption, dialect.withoutHistory, dialect.withoutStream,
	} {
		if next = subtract(d, words, s); next != d {
			return next, true
		}
	}
	return d, false
}

// afterNotFound gives the Responses API up when the server has no such route. A model that is not found is no
// reason to.
func (d dialect) afterNotFound(words string, s sent) (next dialect, changed bool) {
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

// withoutAPI changes the protocol, each way once.
func (d dialect) withoutAPI(words string, s sent) dialect {
	switch {
	case s.own != APIAuto:
	case s.api == APIChat && !d.has(noResponses) &&
		(strings.Contains(words, "/responses") || strings.Contains(words, "responses api")):
		d |= noChat
	case s.api == APIResponses && !d.has(noChat) && strings.Contains(words, "/responses") && soundsUnsupported(words):
		d |= noResponses
	}
	return d
}

// withoutOption leaves an option out that the refusal names.
func (d dialect) withoutOption(words string, s sent) dialect {
	names := func(options ...string) bool {
		for _, option := range options {
			if strings.Contains(words, option) {
				return true
			}
		}
		return false
	}
	unsupported := soundsUnsupported(words)
	switch {
	case names("stream_options", "include_usage"):
		d |= noUsage
	case s.api == APIChat && names("max_completion_tokens") && s.req.MaxTokens > 0:
		d |= newLimit
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
	case names("image") && s.req.images() && (unsupported || names("text only", "only text", "multimodal", "vision")):
		d |= noImages
	}
	return d
}

// withoutHistory sends the history in another form.
func (d dialect) withoutHistory(words string, s sent) dialect {
	unsupported := soundsUnsupported(words)
	switch {
	case aboutRoles(words) && severalSystem(s.req.Messages):
		d |= oneSystem
	case strings.Contains(words, "reasoning_content") && !unsupported && s.req.calls():
		d |= echo
	case strings.Contains(words, "reasoning_content") && s.req.thought():
		d |= noEcho
	case s.req.opaque() && unsupported:
		for _, name := range append([]string{"reasoning_details", "reasoning"}, opaqueMembers...) {
			if strings.Contains(words, name) {
				d |= noOpaque
			}
		}
	}
	return d
}

// withoutStream asks for the answer in one piece.
func (d dialect) withoutStream(words string, _ sent) dialect {
	if strings.Contains(words, "stream") && soundsUnsupported(words) {
		d |= noStream
	}
	return d
}

// aboutRoles reports whether a refusal is about who may speak when.
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

// soundsUnsupported reports whether a refusal is of the kind that names what a server does not have.
func soundsUnsupported(words string) bool {
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

// understood is what is known and learned of a model.
func (c *Client) understood(model string) dialect {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dialects[model]
}

// learn remembers a dialect for all later requests to a model, together with what others have learned meanwhile.
func (c *Client) learn(ctx context.Context, model string, d dialect) {
	c.mu.Lock()
	if c.dialects == nil {
		c.dialects = map[string]dialect{}
	}
	d |= c.dialects[model]
	c.dialects[model] = d
	c.mu.Unlock()
	c.config.Logger.InfoContext(ctx, "model endpoint adapted", slog.String("model", model),
		slog.Any("learned", d.names()))
}
