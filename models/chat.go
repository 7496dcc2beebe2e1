package models

import (
	"bytes"
	"maps"
	"slices"
)

// object writes the members of a JSON object in the order given, and byte for byte as given.
type object struct {
	out bytes.Buffer
	err error
}

// set adds a member.
func (o *object) set(name string, value any) {
	encoded, err := encode(value)
	if err != nil && o.err == nil {
		o.err = err
	}
	o.raw(name, string(encoded))
}

// raw adds a member that is JSON already.
func (o *object) raw(name, text string) {
	if o.out.Len() == 0 {
		o.out.WriteByte('{')
	} else {
		o.out.WriteByte(',')
	}
	encoded, err := encode(name)
	if err != nil && o.err == nil {
		o.err = err
	}
	o.out.Write(encoded)
	o.out.WriteByte(':')
	o.out.WriteString(text)
}

// end is the whole object.
func (o *object) end() (string, error) {
	if o.out.Len() == 0 {
		o.out.WriteByte('{')
	}
	o.out.WriteByte('}')
	return o.out.String(), o.err
}

// list is a JSON array of texts that are JSON.
func list(texts []string) string {
	var out bytes.Buffer
	out.WriteByte('[')
	for i, text := range texts {
		if i > 0 {
			out.WriteByte(',')
		}
		out.WriteString(text)
	}
	out.WriteByte(']')
	return out.String()
}

// chatBody is the request as chat completions have it, in the form that the server is known to understand.
func (c *Client) chatBody(req Request, d dialect) (string, error) {
	messages := make([]string, len(req.Messages))
	for i, m := range req.Messages {
		text, err := c.chatMessage(m, c.origin(req.Model))
		if err != nil {
			return "", err
		}
		messages[i] = text
	}
	var o object
	o.set("model", req.Model)
	o.raw("messages", list(messages))
	if len(req.Tools) > 0 {
		o.set("tools", req.Tools)
	}
	if !d.noStream {
		o.set("stream", true)
		if !d.noUsage {
			o.set("stream_options", map[string]bool{"include_usage": true})
		}
	}
	if req.MaxTokens > 0 {
		name := "max_tokens" // most servers know no other
		if d.newLimit || wantsNewLimit(req.Model) {
			name = "max_completion_tokens"
		}
		o.set(name, req.MaxTokens)
	}
	if req.Temperature != nil {
		o.set("temperature", *req.Temperature)
	}
	if c.config.ReasoningEffort != "" {
		o.set("reasoning_effort", c.config.ReasoningEffort)
	}
	return o.end()
}

// chatMessage is a message with what its origin wants back.
func (c *Client) chatMessage(m Message, origin string) (string, error) {
	var o object
	o.set("role", m.Role)
	content, err := m.content()
	if err != nil {
		return "", err
	}
	if content != nil {
		o.raw("content", string(content))
	}
	for _, member := range []struct{ name, text string }{
		{"refusal", m.Refusal}, {"name", m.Name}, {"tool_call_id", m.ToolCallID},
	} {
		if member.text != "" {
			o.set(member.name, member.text)
		}
	}
	if m.Opaque.from(origin, m.digest()) {
		if name := m.Opaque.ReasoningAs; name != "" {
			o.set(name, m.Reasoning)
		}
		o.members(m.Opaque.Members)
	}
	if len(m.ToolCalls) > 0 {
		calls := make([]string, len(m.ToolCalls))
		for i, call := range m.ToolCalls {
			if calls[i], err = chatCall(call, origin); err != nil {
				return "", err
			}
		}
		o.raw("tool_calls", list(calls))
	}
	return o.end()
}

// chatCall is a call with what its origin wants back.
func chatCall(call ToolCall, origin string) (string, error) {
	var o object
	o.set("id", call.ID)
	o.set("type", "function")
	o.set("function", functionCall{call.Name, arguments(call.Arguments)})
	if call.Opaque.from(origin, call.digest()) {
		o.members(call.Opaque.Members)
	}
	return o.end()
}

// members adds members that are JSON already, by name.
func (o *object) members(texts map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		o.raw(name, texts[name])
	}
}

// origin is who may have a provider's opaque members back.
func (c *Client) origin(model string) string { return c.config.BaseURL + " " + model }
