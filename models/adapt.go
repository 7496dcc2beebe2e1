package models

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
)

// adaptRequest returns a request in a form that the server accepts.
func adaptRequest(req Request, d dialect) Request {
	known := LookupModel(req.Model)
	req.Messages = adaptHistory(withForm(req, d, known), d, known)
	if req.Schema != nil && asInstruction(req.Schema, d, known) {
		req.Schema = nil
	}
	if d.has(noTemperature) || known.NoTemperature {
		req.Temperature = nil
	}
	if d.has(noEffort) {
		req.Effort = ""
	}
	return req
}

// adaptHistory returns the history in a form that the model accepts.
func adaptHistory(messages []Message, d dialect, known ModelInfo) []Message {
	if d.has(noImages) || known.NoImages {
		messages = withoutImages(messages)
	}
	if d.has(singleSystemMessage) || known.SingleSystemMessage {
		messages = foldSystem(messages)
	}
	return messages
}

// foldSystem returns a history with at most one system message, at the front. It appends a later system text to the
// preceding message, or makes it a user message after an answer of the model. Consecutive user messages become one,
// because these servers demand alternating roles.
func foldSystem(messages []Message) []Message {
	var out []Message
	for _, m := range messages {
		last := len(out) - 1
		switch {
		case last >= 0 && m.Role == RoleSystem && out[last].Role != RoleAssistant:
			out[last] = appendContent(out[last], m)
		case last >= 0 && m.Role == RoleSystem:
			m.Role = RoleUser
			out = append(out, m)
		case last >= 0 && m.Role == RoleUser && out[last].Role == RoleUser:
			out[last] = appendContent(out[last], m)
		default:
			out = append(out, m)
		}
	}
	return out
}

// appendContent returns m with the content of another message appended.
func appendContent(m, next Message) Message {
	if len(m.Parts) == 0 {
		m.Content = strings.Join(slices.DeleteFunc([]string{m.Content, next.Content}, isBlank), "\n\n")
		m.Parts = next.Parts
		return m
	}
	m.Parts = slices.Clip(m.Parts)
	if next.Content != "" {
		m.Parts = append(m.Parts, Part{Text: next.Content})
	}
	m.Parts = append(m.Parts, next.Parts...)
	return m
}

func isBlank(text string) bool { return text == "" }

// needsFolding reports whether folding changes the history.
func needsFolding(messages []Message) bool {
	for i, m := range messages {
		if i > 0 && (m.Role == RoleSystem || m.Role == RoleUser && messages[i-1].Role == RoleUser) {
			return true
		}
	}
	return false
}

// withoutImages replaces each image with the text imageLeftOut.
func withoutImages(messages []Message) []Message {
	out := slices.Clone(messages)
	for i, m := range out {
		if !slices.ContainsFunc(m.Parts, isImage) {
			continue
		}
		texts := []string{m.Content}
		for _, p := range m.Parts {
			if isImage(p) {
				p.Text = imageLeftOut
			}
			texts = append(texts, p.Text)
		}
		out[i].Content, out[i].Parts = strings.Join(slices.DeleteFunc(texts, isBlank), "\n"), nil
	}
	return out
}

// imageLeftOut replaces an image that the model does not accept.
const imageLeftOut = "[An image was left out here: this model takes text alone.]"

func isImage(p Part) bool { return p.Image != nil }

func (r Request) hasImages() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool { return slices.ContainsFunc(m.Parts, isImage) })
}

// hasCalls reports whether the history has calls.
func (r Request) hasCalls() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool { return len(m.ToolCalls) > 0 })
}

// hasReasoning reports whether the history has reasoning.
func (r Request) hasReasoning() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool { return m.Reasoning != "" })
}

// hasOpaque reports whether the history has opaque fields.
func (r Request) hasOpaque() bool {
	return slices.ContainsFunc(r.Messages, func(m Message) bool {
		return m.Opaque != nil || slices.ContainsFunc(m.ToolCalls, func(c ToolCall) bool { return c.Opaque != nil })
	})
}

// repairHistory repairs what servers reject in a history. A model may call an impossible name (multi_tool_use.parallel)
// or send arguments that are no object. The next request quotes that call, so repairHistory repairs it. Servers also
// reject messages without content, above all tool results.
func repairHistory(history []Message) []Message {
	messages := make([]Message, len(history))
	for i, m := range history {
		asReceived := m.digest()
		if m.Content == "" && len(m.Parts) == 0 && len(m.ToolCalls) == 0 {
			m.Content = "(empty)"
		}
		if m.Role == RoleTool && m.Name != "" {
			m.Name = validName(m.Name)
		}
		m.ToolCalls = repairCalls(m.ToolCalls)
		m.Opaque = m.Opaque.repaired(asReceived, m.digest())
		messages[i] = m
	}
	return messages
}

// Sendable returns a reply for the next request: invalid arguments become an empty object, because servers reject
// them. Opaque fields stay.
func (m Message) Sendable() Message {
	asReceived := m.digest()
	m.ToolCalls = slices.Clone(m.ToolCalls)
	for i, c := range m.ToolCalls {
		if !json.Valid([]byte(c.Arguments)) {
			m.ToolCalls[i].Arguments = "{}"
		}
	}
	m.Opaque = m.Opaque.repaired(asReceived, m.digest())
	return m
}

// repairCalls repairs calls and leaves valid ones unchanged.
func repairCalls(made []ToolCall) []ToolCall {
	if len(made) == 0 {
		return nil
	}
	calls := make([]ToolCall, len(made))
	for i, c := range made {
		c.Name = validName(c.Name)
		if !isObject(c.Arguments) {
			c.Arguments = "{}"
		}
		calls[i] = c
	}
	return calls
}

func validName(name string) string {
	name = notInNames.ReplaceAllString(name, "_")
	return name[:min(len(name), maxToolName)]
}

// maxToolName bounds a tool's name.
const maxToolName = 64

var notInNames = regexp.MustCompile(`[^a-zA-Z0-9_-]`)

// isObject rejects null, unlike decoding into a map.
func isObject(arguments string) bool {
	var members map[string]json.RawMessage
	return json.Unmarshal([]byte(arguments), &members) == nil && members != nil
}
