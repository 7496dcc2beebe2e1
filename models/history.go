package models

import (
	"encoding/json"
	"regexp"
	"slices"
)

// longestName is how long a tool's name may be.
const longestName = 64

var notInNames = regexp.MustCompile(`[^a-zA-Z0-9_-]`)

// acceptable is a history as servers take it. A model may call a tool by a name that no tool can have
// (multi_tool_use.parallel), or with arguments that are no object; it is told so, but the request that tells it
// carries the call, and would be refused for it. Without content a message is refused,
// above all the answer of a tool.
func acceptable(history []Message) []Message {
	messages := make([]Message, len(history))
	for i, m := range history {
		asReceived := m.digest()
		if m.Content == "" && len(m.Parts) == 0 && len(m.ToolCalls) == 0 {
			m.Content = "(empty)"
		}
		if m.Role == RoleTool && m.Name != "" {
			m.Name = possibleName(m.Name)
		}
		m.ToolCalls = possibleCalls(m.ToolCalls)
		m.Opaque = m.Opaque.repaired(asReceived, m.digest())
		messages[i] = m
	}
	return messages
}

// Sendable is a reply as it goes back to the model with the next request: arguments that are no JSON become an empty
// object, because servers refuse a history that holds them. What came with the reply still goes back beside it.
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

// possibleCalls leaves calls that are in order as they are.
func possibleCalls(made []ToolCall) []ToolCall {
	if len(made) == 0 {
		return nil
	}
	calls := make([]ToolCall, len(made))
	for i, c := range made {
		c.Name = possibleName(c.Name)
		if !isObject(c.Arguments) {
			c.Arguments = "{}"
		}
		calls[i] = c
	}
	return calls
}

func possibleName(name string) string {
	name = notInNames.ReplaceAllString(name, "_")
	return name[:min(len(name), longestName)]
}

// isObject takes null for none, which a Go map does not.
func isObject(arguments string) bool {
	var members map[string]json.RawMessage
	return json.Unmarshal([]byte(arguments), &members) == nil && members != nil
}
