package flows

import (
	"encoding/json"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// FuzzTemplate searches for a template that panics, that renders differently the second time, or whose text without
// references changes.
func FuzzTemplate(f *testing.F) {
	for _, text := range []string{
		"", "{{", "{{}}", "a {{name}} b", `{{a.0.b ?? "x"}}`, "{{ name | default: 'it''s' }}",
		`{{name | default: 1e400}}`, `{{name ?? "}}"}}`,
		"{{name ?? 'a\\'b'}}", `{{"{{"}}name}}`, "{{a.-1}}", "{{a.99999999999999999999}}", "{{name}}{{name}}",
		"{{\x00}}", "{{name ?? \xff}}",
	} {
		f.Add(text, `{"name": "v", "a": [{"b": 1.5}, null, "x"], "_": {"b": [1, [2]]}}`)
	}
	f.Fuzz(func(t *testing.T, text, variables string) {
		vars := map[string]any{}
		if json.Unmarshal([]byte(variables), &vars) != nil {
			return
		}
		parsed, err := parseTemplate(text)
		if err != nil || parsed == nil {
			return
		}
		rendered, err := parsed.value(vars)
		if err != nil {
			return
		}
		second, err := fill(parseTree(text, "", func(string, error) {}), vars)
		assert.Truef(t, err == nil && encodeJSON(second) == encodeJSON(rendered), "%q is %v, then %v, %v", text, rendered,
			second, err)
		_, err = json.Marshal(rendered)
		assert.NoError(t, err, text, "gives", rendered, "which is not JSON")
	})
}

// FuzzExpression searches for an expression that panics, exceeds its bounds, or has a value that is not JSON.
func FuzzExpression(f *testing.F) {
	for _, text := range []string{
		"", "n > 1", "n ?? 0", "list | filter(# > 1) | len()", "all(list, {# > 0})", `split(text, "")[0] + "x"`,
		"fromJSON(text)", "toJSON($env)",
		"let x = n; x / 0", "int('9999999999999999999')", "n % 0", "round(n / 0)", "list[9]", "text[-1:]", "n in list",
		"not (text matches '(')", "min(list)",
		"text matches '^(a+)+$'", "first(list)?.a", "-n", "1/0 == -1/0", "float('nan')", "float('inf')", "[float('inf')]",
		"{'a': n}", "type(nil)",
	} {
		f.Add(text, `{"n": 3, "list": [1, 2.5, "x"], "text": "aaaa"}`)
	}
	f.Fuzz(func(t *testing.T, text, variables string) {
		vars := map[string]any{}
		if json.Unmarshal([]byte(variables), &vars) != nil {
			return
		}
		compiled, err := compileExpression(text)
		if err != nil {
			return
		}
		before := encodeJSON(vars)
		value, err := compiled.value(vars)
		if err != nil {
			return
		}
		_, err = json.Marshal(value)
		assert.NoError(t, err, text, "gives", value, "which is not JSON")
		assert.Equal(t, before, encodeJSON(vars), text)
	})
}

// FuzzDefinition searches for a definition that panics, or a valid one whose stored form is invalid.
func FuzzDefinition(f *testing.F) {
	for _, text := range []string{
		"name: a\nactions: [{actionType: send_message, parameters: {message: 'hi {{name ?? \"you\"}}'}}]",
		"name: a\ninput: {type: object, properties: {n: {type: integer, default: x}}}\nactions: [{actionType: wait_for_response, timeout: 1d12h, onTimeout: retry}]",
		"name: a\nactions: [{actionType: if, parameters: {condition: 'n > 1', then: [{actionType: end}]}}]",
		"name: a\nvariables: {executionId: 1}\nactions: [{actionType: set_variable, when: '{{x}}'}, 3, null]",
		"name: a\ninput: {$ref: 'file:///etc/passwd'}\nactions: []", "name: a\nactions: [{actionType: for_each, " +
			"parameters: {items: '{{list}}', actions: []}}]",
		"actions: &a [*a]", "name: .inf\nactions: {? [a] : b}",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var tree any
		if yaml.Unmarshal([]byte(text), &tree) != nil {
			return
		}
		raw, err := json.Marshal(tree)
		if err != nil {
			return
		}
		var d Definition
		if json.Unmarshal(raw, &d) != nil || Validate(d) != nil {
			return
		}
		stored, err := json.Marshal(d)
		require.NoError(t, err, text, "cannot be stored")
		var decoded Definition
		require.NoError(t, json.Unmarshal(stored, &decoded), stored, "cannot be read back")
		assert.NoError(t, Validate(decoded), stored, "is valid before the store, and not after")
	})
}

// FuzzLength searches for a duration that is negative, or longer than the maximum.
func FuzzLength(f *testing.F) {
	for _, text := range []string{"90m", "1d12h", "0.5ms", "99999999999w", "1h1h", "-1s", "1e9s", "", "5200w"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, err := parseDuration(text)
		assert.Truef(t, err != nil || d >= 0 && d.Hours() <= 100*365*24, "%q is %s", text, d)
		if err == nil {
			formatDuration(d)
		}
	})
}

func TestDefaultMayContainOperatorsAndQuotes(t *testing.T) {
	t.Parallel()
	for _, text := range []string{`{{name ?? 'a' b 'c'}}`, `{{name ?? '}}`, `{{name ?? 'a\'}}`, `{{name ?? 'a'b}}`} {
		_, err := parseTemplate(text)
		assert.Truef(t, err != nil, "%s is accepted", text)
	}
	for text, want := range map[string]string{
		`{{name ?? 'it\'s \d\\'}}`:     `it's \d\`,
		"{{name | default: '1\n2'}}":   "1\n2",
		`{{name | default: "what??"}}`: "what??",
		`{{name ?? "a | b"}}`:          "a | b",
	} {
		parsed, err := parseTemplate(text)
		require.NoError(t, err)
		got, err := parsed.value(map[string]any{})
		require.NoError(t, err)
		assert.Equal(t, any(want), got, text)
	}
}
