package telemetry

import (
	"encoding/json"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// said is a message as OpenAI's protocol has it and the log keeps it.
type said struct {
	Role       string `json:"role"`
	Content    any    `json:"content"`
	ToolCallID string `json:"tool_call_id"`
	ToolCalls  []struct {
		ID       string `json:"id"`
		Function struct {
			Name      string `json:"name"`
			Arguments string `json:"arguments"`
		} `json:"function"`
	} `json:"tool_calls"`
}

// message is one as the GenAI conventions have it.
type message struct {
	Role  string           `json:"role"`
	Parts []map[string]any `json:"parts"`
}

// messages turns the messages of a model call's row into those of the conventions, as JSON. What the row had to cut
// is no list of messages any more, and is given as it is.
func messages(raw json.RawMessage, asked bool) string {
	if len(raw) == 0 || string(raw) == "null" || string(raw) == "{}" {
		return ""
	}
	var list []said
	var input struct {
		Messages []said `json:"messages"`
	}
	var answer said
	switch {
	case asked && json.Unmarshal(raw, &input) == nil && len(input.Messages) > 0:
		list = input.Messages
	case !asked && json.Unmarshal(raw, &answer) == nil && answer.Role != "":
		list = []said{answer}
	default:
		return redacted(raw)
	}
	converted := make([]message, len(list))
	for i, m := range list {
		converted[i] = message{Role: m.Role, Parts: m.parts()}
	}
	return string(redact.JSON(converted, maxContent))
}

func (m said) parts() []map[string]any {
	parts := []map[string]any{}
	switch {
	case m.Role == "tool":
		parts = append(parts, map[string]any{"type": "tool_call_response", "id": m.ToolCallID, "response": m.Content})
	case m.Content != nil && m.Content != "":
		parts = append(parts, map[string]any{"type": "text", "content": m.Content})
	}
	for _, c := range m.ToolCalls {
		var arguments any = c.Function.Arguments
		if json.Valid([]byte(c.Function.Arguments)) {
			arguments = json.RawMessage(c.Function.Arguments)
		}
		parts = append(parts, map[string]any{
			"type": "tool_call", "id": c.ID, "name": c.Function.Name,
			"arguments": arguments,
		})
	}
	return parts
}
