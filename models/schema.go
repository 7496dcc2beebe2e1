package models

import (
	"encoding/json"
	"slices"
	"strings"
)

// Schema is the form that an answer is to have: JSON of a schema, or any object when Schema is empty.
type Schema struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	Schema      json.RawMessage `json:"schema"`
	Strict      bool            `json:"strict"` // servers then want every member required and no others allowed

	inWords bool // the server has refused this one
}

// The formats of an answer, as both protocols name them.
const (
	formatSchema = "json_schema"
	formatObject = "json_object"
)

// format is the form as chat completions have it.
func (s *Schema) format() map[string]any {
	if len(s.Schema) == 0 {
		return map[string]any{"type": formatObject}
	}
	return map[string]any{"type": formatSchema, "json_schema": s}
}

// flatFormat is the form as the Responses API has it.
func (s *Schema) flatFormat() any {
	if len(s.Schema) == 0 {
		return map[string]any{"type": formatObject}
	}
	return struct {
		Type string `json:"type"`
		Schema
	}{formatSchema, *s}
}

// inWords reports whether the server has no structured outputs, or not for this schema.
func inWords(s *Schema, d dialect, known Facts) bool {
	return s.inWords || d.has(noSchema) || known.NoSchema
}

// rule is the form in words.
func (s *Schema) rule() string {
	if len(s.Schema) == 0 {
		return "[Form of the final answer: one JSON object, and nothing else: no words around it, no code fence.]"
	}
	return "[Form of the final answer: JSON of the schema below, and nothing else: " +
		"no words around it, no code fence.]\n" +
		string(s.Schema)
}

// withForm is the history of a request. The form is added in words where the server does not get it otherwise. Any
// object always needs the words: OpenAI refuses a request for one that does not say JSON.
//
// The words go to the last that the user said. A client sends the schema, so it has no more rank than that.
func withForm(req Request, d dialect, known Facts) []Message {
	s := req.Schema
	if s == nil || len(s.Schema) > 0 && !inWords(s, d, known) {
		return req.Messages
	}
	for i := len(req.Messages) - 1; i >= 0; i-- {
		if req.Messages[i].Role == RoleUser {
			messages := slices.Clone(req.Messages)
			messages[i] = with(messages[i], Message{Content: s.rule()})
			return messages
		}
	}
	return append(slices.Clip(req.Messages), Message{Role: RoleUser, Content: s.rule()})
}

// schemaRefused asks for the form in words, this once, when the server refuses the schema itself. Its dialect is not
// to blame: another schema may pass.
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
