package skills

import (
	"bytes"
	"encoding/json"
	"testing"
)

// FuzzArguments looks for a schema or arguments that panic, a schema that reads what is outside of it, and arguments
// that are taken and cannot be stored.
func FuzzArguments(f *testing.F) {
	for _, schema := range []string{
		`{"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "default": 2}}, "required": ["n"]}`,
		`{"type": "object", "properties": {"s": {"type": "string", "pattern": "^(a+)+$", "format": "date-time"}}}`,
		`{"type": "object", "$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}`,
		`{"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}}`,
		`{"type": "object", "properties": {"l": {"type": "array", "uniqueItems": true, "items": {"multipleOf": 0.01}}}}`,
		`{"type": "object", "properties": {"s": {"pattern": "("}}}`, `{"type": "object", "$schema": "http://json-schema.org/draft-04/schema#", "id": "x"}`,
		`{"type": "object", "$dynamicRef": "#x", "$dynamicAnchor": "x"}`, `{"type": "object", "properties": {"s": {"const": "\ud800"}}}`,
	} {
		for _, args := range []string{``, `{}`, `{"n": 1}`, `{"n": 1e400, "s": "aaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}`, `{"s": "\u0000"}`, `{"s":"\ud800"}`, `[1]`, "{\"s\":\"\xff\"}"} {
			f.Add(schema, args)
		}
	}
	f.Fuzz(func(t *testing.T, schema, args string) {
		var parameters map[string]any
		if json.Unmarshal([]byte(schema), &parameters) != nil || len(args) > 1<<12 {
			return
		}
		raw, _, problems := resolveParameters(parameters)
		if len(problems) > 0 {
			return
		}
		compiled, err := compile(raw)
		if err != nil {
			t.Fatalf("%s is resolved, and not compiled: %v", raw, err)
		}
		if bytes.Contains(raw, []byte("\x00")) || bytes.Contains(raw, []byte(`\u0000`)) {
			t.Errorf("%s cannot be stored", raw)
		}
		value, wrong := decodeArgs(json.RawMessage(args))
		if len(wrong) > 0 {
			return
		}
		if object, ok := value.(map[string]any); ok {
			value = withDefaults(compiled, object)
		}
		if compiled.Validate(value) != nil {
			return
		}
		text, err := json.Marshal(value)
		if err != nil || bytes.Contains(text, []byte(`\u0000`)) {
			t.Errorf("%s takes %s, which is %s, %v", raw, args, text, err)
		}
	})
}
