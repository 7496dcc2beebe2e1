package chat

import (
	"encoding/json"
	"net/http"
	"slices"

	"github.com/lanekeeper/lanekeeper/reason"
)

// wireFormat is a response format of either protocol. Chat completions keep the schema in a member of its own.
type wireFormat struct {
	Type string `json:"type"`
	wireSchema
	JSONSchema *wireSchema `json:"json_schema"`
}

type wireSchema struct {
	Name        string          `json:"name"`
	Description string          `json:"description"`
	Schema      json.RawMessage `json:"schema"`
	Strict      *bool           `json:"strict"`
}

// formOf is the form that a client wants an answer in; nil for words. param names it, and nested says that the schema
// has a member of its own.
func formOf(param string, raw json.RawMessage, nested bool) (*reason.Form, error) {
	if !given(raw) {
		return nil, nil
	}
	var f wireFormat
	if json.Unmarshal(raw, &f) != nil {
		return nil, bad(param, "unsupported_value", "%s: %s", param, whyFormat)
	}
	switch f.Type {
	case "text":
		return nil, nil
	case "json_object":
		return &reason.Form{}, nil
	case "json_schema":
	default:
		return nil, bad(param, "unsupported_value", "%s: %s", param, whyFormat)
	}
	s := &f.wireSchema
	if nested {
		if s, param = f.JSONSchema, param+".json_schema"; s == nil {
			return nil, bad(param, "missing_required_parameter", "Missing required parameter: %s.", param)
		}
	}
	if s.Name == "" {
		return nil, bad(param+".name", "missing_required_parameter", "Missing required parameter: %s.name.", param)
	}
	form := &reason.Form{
		Name: s.Name, Description: s.Description, Schema: string(s.Schema), Strict: s.Strict != nil && *s.Strict,
	}
	if !given(s.Schema) {
		form.Schema = "{}"
	}
	if err := form.Check(); err != nil {
		return nil, bad(param+".schema", "invalid_json_schema", "The schema of %s cannot be used: %s.", param, err)
	}
	return form, nil
}

// unformed is a turn that came to no answer in the form that was asked for. The reason is a message of its thread.
func unformed(a answer) error {
	return &Refusal{
		Status: http.StatusBadGateway, Type: "server_error", Code: "answer_not_in_format", Message: a.Text,
		stored: true,
	}
}

// formPending ends a connection that waits too long for an admin's approval: the notice would not be in the form.
func formPending(x string) error {
	r := conflict("approval_pending", "%s Attach to it: GET /v1/chat/completions/%s", notice, CompletionID(x))
	r.stored, r.CompletionID = true, CompletionID(x)
	return r
}

// formats is the form of an answer as a response repeats it; nil for words.
func formats(in input) map[string]any {
	switch f := in.Form; {
	case f == nil:
		return nil
	case f.Schema == "":
		return map[string]any{"type": "json_object"}
	default:
		return map[string]any{
			"type": "json_schema", "name": f.Name, "description": orNil(f.Description), "strict": f.Strict,
			"schema": json.RawMessage(f.Schema),
		}
	}
}

// orNil is a text, or null.
func orNil(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// passable refuses a form and images in a thread whose messages go to an execution: that answers in words of its own,
// and hears words alone.
func (a UserMessage) passable() error {
	if len(slices.Concat(a.Images...)) > 0 {
		return bad("messages", "image_not_supported",
			"This thread's messages go to an execution that waits for one, and it takes no images.")
	}
	if a.form == nil {
		return nil
	}
	return bad(a.formParam, "unsupported_value",
		"%s: this thread's messages go to an execution that waits for one, and it answers in its own words.",
		a.formParam)
}

// failure is an end that is not to be shown as an answer.
func (a answer) failure() error {
	switch {
	case a.Refused:
		return overLimit(a)
	case a.Unformed:
		return unformed(a)
	}
	return nil
}
