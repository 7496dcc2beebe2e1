package models

import (
	"encoding/json"
	"regexp"

	openai "github.com/sashabaranov/go-openai"
)

// longestName is how long a tool's name may be.
const longestName = 64

var notInNames = regexp.MustCompile(`[^a-zA-Z0-9_-]`)

// acceptable is a history as servers take it. A model may call a tool by a name that no tool can have
// (multi_tool_use.parallel), or with arguments that are no object; it is told so, but the request that tells it
// carries the call, and would be refused for it. A message without content loses the field in go-openai, which is
// refused in the answer of a tool.
func acceptable(history []openai.ChatCompletionMessage) []openai.ChatCompletionMessage {
	messages := make([]openai.ChatCompletionMessage, len(history))
	for i, m := range history {
		if m.Content == "" && len(m.MultiContent) == 0 && len(m.ToolCalls) == 0 {
			m.Content = "(empty)"
		}
		if m.Role == openai.ChatMessageRoleTool && m.Name != "" {
			m.Name = possibleName(m.Name)
		}
		m.ToolCalls = possibleCalls(m.ToolCalls)
		messages[i] = m
	}
	return messages
}

// possibleCalls leaves calls that are in order as they are.
func possibleCalls(made []openai.ToolCall) []openai.ToolCall {
	if len(made) == 0 {
		return nil
	}
	calls := make([]openai.ToolCall, len(made))
	for i, c := range made {
		c.Function.Name = possibleName(c.Function.Name)
		if !isObject(c.Function.Arguments) {
			c.Function.Arguments = "{}"
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
