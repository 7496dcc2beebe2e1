package chat

import (
	"bytes"
	"encoding/json"
	"slices"
)

// parameters are the documented parameters of a chat completion that the surface refuses when their value asks for
// what it cannot give. The other documented ones are honoured (see request) or listed in agentParameters.
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

// agentParameters are accepted and change nothing: the agent's own setting stands. Stock clients send several of
// them by default, so a refusal would keep those clients away.
func agentParameters() []string {
	return []string{
		"temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "reasoning_effort", "verbosity",
		"parallel_tool_calls", "service_tier", "store", "prediction", "prompt_cache_key", "prompt_cache_options",
		"prompt_cache_retention", "safety_identifier",
	}
}

// rule is what one parameter may ask for.
type rule struct {
	name    string
	raw     json.RawMessage
	allowed []string // compact JSON, beside null and absence
	why     string
}

// Reasons for refusals, which chat completions and responses share.
const (
	whyTools = "The agent's tools are its own and run here; tools of a client are not offered to the model. " +
		"Leave them out, or declare a skill in the agent's workspace."
	whyChoice   = "A client cannot make the agent call a tool; none and auto are accepted."
	whyLogprobs = "Log probabilities are not returned."
	whySearch   = "Searching the web is a skill of the agent's own; a client cannot turn it on."
	whyModerate = "Moderation is not run here."
	whyFormat   = "The formats of an answer are text, json_object and json_schema."
)

// refuse returns what the request asks for in vain.
func (p parameters) refuse() error {
	tools, functions := p.Tools, p.Functions
	if is(p.ToolChoice, `"none"`) { // then they change nothing
		tools = nil
	}
	if is(p.FunctionCall, `"none"`) {
		functions = nil
	}
	return refuse([]rule{
		{"audio", p.Audio, nil, "The agent answers in text, not in audio."},
		{"modalities", p.Modalities, []string{`["text"]`, `[]`}, `Only ["text"] is answered.`},
		{"tools", tools, []string{`[]`}, whyTools},
		{"functions", functions, []string{`[]`}, whyTools},
		{"tool_choice", p.ToolChoice, []string{`"none"`, `"auto"`}, whyChoice},
		{"function_call", p.FunctionCall, []string{`"none"`, `"auto"`}, whyChoice},
		{"logprobs", p.Logprobs, []string{`false`}, whyLogprobs},
		{"top_logprobs", p.TopLogprobs, []string{`0`}, whyLogprobs},
		{"logit_bias", p.LogitBias, []string{`{}`}, "The agent chooses its own words: logit_bias is not passed on."},
		{"stop", p.Stop, []string{`[]`, `""`}, "Stop sequences are not supported: an answer is shown whole."},
		{"web_search_options", p.WebSearch, nil, whySearch},
		{"moderation", p.Moderation, nil, whyModerate},
	})
}

// refuse returns the refusal of the first rule that its value breaks.
func refuse(rules []rule) error {
	for _, r := range rules {
		if given(r.raw) && !slices.ContainsFunc(r.allowed, func(v string) bool { return is(r.raw, v) }) {
			return bad(r.name, "unsupported_value", "%s: %s", r.name, r.why)
		}
	}
	return nil
}

// given reports a value that is there and not null.
func given(raw json.RawMessage) bool { return len(raw) > 0 && !is(raw, "null") }

// is reports whether a value is this compact JSON.
func is(raw json.RawMessage, value string) bool {
	raw = bytes.TrimSpace(raw)
	return string(raw) == value || len(raw) <= 64 && string(compact(raw)) == value
}
