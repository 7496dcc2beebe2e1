package chat

import (
	"bytes"
	"encoding/json"
	"slices"
)

// parameters are the documented parameters of a chat completion that the server refuses unless their value changes
// nothing. The server supports the other parameters (request), or ignores them in favour of the agent's settings.
type parameters struct {
	Audio        json.RawMessage `json:"audio"`
	Modalities   json.RawMessage `json:"modalities"`
	Tools        json.RawMessage `json:"tools"`
	ToolChoice   json.RawMessage `json:"tool_choice"`
	Functions    json.RawMessage `json:"functions"`
	FunctionCall json.RawMessage `json:"function_call"`
	Format       json.RawMessage `json:"response_format"`
	Logprobs     json.RawMessage `json:"logprobs"`
	TopLogprobs  json.RawMessage `json:"top_logprobs"`
	LogitBias    json.RawMessage `json:"logit_bias"`
	Stop         json.RawMessage `json:"stop"`
	WebSearch    json.RawMessage `json:"web_search_options"`
	Moderation   json.RawMessage `json:"moderation"`
}

// rule lists the allowed values of a parameter.
type rule struct {
	name    string
	raw     json.RawMessage
	allowed []string // compact JSON; null and absence are always allowed
	why     string
}

// Reasons for refusals, which chat completions and responses share.
const (
	reasonTools = "Client tools are not offered to the model; the agent uses its own. " +
		"Leave them out, or declare a skill in the agent's workspace."
	reasonToolChoice = "A client cannot make the agent call a tool; none and auto are accepted."
	reasonLogprobs   = "Log probabilities are not returned."
	reasonWebSearch  = "Web search is a skill of the agent; a client cannot enable it."
	reasonModeration = "Moderation is not run here."
	reasonFormat     = "The formats of an answer are text, json_object and json_schema."
)

// refuse returns the refusal of the first unsupported parameter.
func (p parameters) refuse() error {
	tools, functions := p.Tools, p.Functions
	if equalsJSON(p.ToolChoice, `"none"`) { // tools then change nothing
		tools = nil
	}
	if equalsJSON(p.FunctionCall, `"none"`) {
		functions = nil
	}
	return refuse([]rule{
		{"audio", p.Audio, nil, "The agent answers in text, not in audio."},
		{"modalities", p.Modalities, []string{`["text"]`, `[]`}, `Only ["text"] is answered.`},
		{"tools", tools, []string{`[]`}, reasonTools},
		{"functions", functions, []string{`[]`}, reasonTools},
		{"tool_choice", p.ToolChoice, []string{`"none"`, `"auto"`}, reasonToolChoice},
		{"function_call", p.FunctionCall, []string{`"none"`, `"auto"`}, reasonToolChoice},
		{"logprobs", p.Logprobs, []string{`false`}, reasonLogprobs},
		{"top_logprobs", p.TopLogprobs, []string{`0`}, reasonLogprobs},
		{"logit_bias", p.LogitBias, []string{`{}`}, "logit_bias is not passed to the model."},
		{"stop", p.Stop, []string{`[]`, `""`}, "Stop sequences are not supported."},
		{"web_search_options", p.WebSearch, nil, reasonWebSearch},
		{"moderation", p.Moderation, nil, reasonModeration},
	})
}

// refuse returns the refusal of the first value that its rule does not allow.
func refuse(rules []rule) error {
	for _, r := range rules {
		if isSet(r.raw) && !slices.ContainsFunc(r.allowed, func(v string) bool { return equalsJSON(r.raw, v) }) {
			return badRequest(r.name, "unsupported_value", "%s: %s", r.name, r.why)
		}
	}
	return nil
}

// isSet reports whether a value is present and not null.
func isSet(raw json.RawMessage) bool { return len(raw) > 0 && !equalsJSON(raw, "null") }

// equalsJSON compares a value with compact JSON.
func equalsJSON(raw json.RawMessage, value string) bool {
	raw = bytes.TrimSpace(raw)
	return string(raw) == value || len(raw) <= 64 && string(compact(raw)) == value
}
