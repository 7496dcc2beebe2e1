package chat

import (
	"encoding/json"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
)

// wireFormat is a response format of either protocol. Chat completions nest the schema.
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

// formOf returns the requested format of an answer; nil for text. param names the parameter; nested is set for chat
// completions.
func formOf(param string, raw json.RawMessage, nested bool) (*reason.Form, error) {
	if !isSet(raw) {
		return nil, nil
	}
	var f wireFormat
	if json.Unmarshal(raw, &f) != nil {
		return nil, badRequest(param, "unsupported_value", "%s: %s", param, reasonFormat)
	}
	switch f.Type {
	case "text":
		return nil, nil
	case "json_object":
		return &reason.Form{}, nil
	case "json_schema":
	default:
		return nil, badRequest(param, "unsupported_value", "%s: %s", param, reasonFormat)
	}
	s := &f.wireSchema
	if nested {
		if s, param = f.JSONSchema, param+".json_schema"; s == nil {
			return nil, badRequest(param, "missing_required_parameter", "Missing required parameter: %s.", param)
		}
	}
	if s.Name == "" {
		return nil, badRequest(param+".name", "missing_required_parameter", "Missing required parameter: %s.name.", param)
	}
	form := &reason.Form{
		Name: s.Name, Description: postgres.Text(s.Description), Schema: string(s.Schema),
		Strict: s.Strict != nil && *s.Strict,
	}
	if !isSet(s.Schema) {
		form.Schema = "{}"
	}
	if err := form.Check(); err != nil {
		return nil, badRequest(param+".schema", "invalid_json_schema", "The schema of %s is not usable: %s.", param, err)
	}
	return form, nil
}

// approvalPendingError ends a connection that waits too long for an approval. The notice would break the format.
func approvalPendingError(x string) error {
	r := conflict("approval_pending", "%s Attach to it: GET /v1/chat/completions/%s", approvalNotice, CompletionID(x))
	r.stored, r.CompletionID = true, CompletionID(x)
	return r
}

// formats is the format as a response repeats it; nil for text.
func formats(in input) map[string]any {
	switch f := in.Form; {
	case f == nil:
		return nil
	case f.Schema == "":
		return map[string]any{"type": "json_object"}
	default:
		return map[string]any{
			"type": "json_schema", "name": f.Name, "description": nullIfEmpty(f.Description), "strict": f.Strict,
			"schema": json.RawMessage(f.Schema),
		}
	}
}

func nullIfEmpty(s string) any {
	if s == "" {
		return nil
	}
	return s
}
