package models

import (
	"encoding/json"
	"slices"
	"strings"
)

// Schema is the demanded form of an answer: a JSON Schema, or any object when Schema is empty.
type Schema struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	Schema      json.RawMessage `json:"schema"`
	// Strict makes servers demand that the schema requires every member and allows no others.
	Strict bool `json:"strict"`

	inWords bool // the server rejected this schema
}

// The formats of an answer, as both protocols name them.
const (
	formatSchema = "json_schema"
	formatObject = "json_object"
)

// format returns the form of chat completions.
func (s *Schema) format() map[string]any {
	if len(s.Schema) == 0 {
		return map[string]any{"type": formatObject}
	}
	return map[string]any{"type": formatSchema, "json_schema": s}
}

// flatFormat returns the form of the Responses API.
func (s *Schema) flatFormat() any {
	if len(s.Schema) == 0 {
		return map[string]any{"type": formatObject}
	}
	return struct {
		Type string `json:"type"`
		Schema
	}{formatSchema, *s}
}

// asInstruction reports whether the form goes into the prompt because the server does not support this schema.
func asInstruction(s *Schema, d dialect, known ModelInfo) bool {
	return s.inWords || d.has(noSchema) || known.NoSchema
}

// instruction returns the form as an instruction.
func (s *Schema) instruction() string {
	if len(s.Schema) == 0 {
		return "[Form of the final answer: one JSON object, and nothing else: no words around it, no code fence.]"
	}
	return "[Form of the final answer: JSON of the schema below, and nothing else: " +
		"no words around it, no code fence.]\n" +
		string(s.Schema)
}

// withForm returns the history of a request, with the form as an instruction where the server lacks structured
// outputs. The "any object" form always needs it, because OpenAI rejects a request without the word JSON.
//
// The instruction goes into the last user message. A client sent the schema, so the schema has no higher rank.
func withForm(req Request, d dialect, known ModelInfo) []Message {
	s := req.Schema
	if s == nil || len(s.Schema) > 0 && !asInstruction(s, d, known) {
		return req.Messages
	}
	for i := len(req.Messages) - 1; i >= 0; i-- {
		if req.Messages[i].Role == RoleUser {
			messages := slices.Clone(req.Messages)
			messages[i] = appendContent(messages[i], Message{Content: s.instruction()})
			return messages
		}
	}
	return append(slices.Clip(req.Messages), Message{Role: RoleUser, Content: s.instruction()})
}

// schemaRefused switches this call to an instruction if the server rejects the schema. The dialect stays, because
// another schema may pass.
func (r *run) schemaRefused(refusal *Error) bool {
	if r.req.Schema == nil || r.req.Schema.inWords || refusal.Status != 400 && refusal.Status != 422 {
		return false
	}
	words := strings.ToLower(refusal.Code + " " + refusal.Message)
	if !strings.Contains(words, "invalid schema") && !strings.Contains(words, "invalid_json_schema") {
		return false
	}
	inWords := *r.req.Schema
	inWords.inWords, r.req.Schema = true, &inWords
	return true
}
