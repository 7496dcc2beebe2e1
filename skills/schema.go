package skills

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/schema"
)

func compile(text json.RawMessage) (*jsonschema.Schema, error) {
	return schema.Compile(text, (*jsonschema.Compiler).AssertFormat)
}

// resolveParameters returns the stored schema and its property names. It requires the arguments in the path of an http
// skill. It accepts wrong defaults in the schema of an MCP server: the tool works with an argument.
func resolveParameters(d Definition) (json.RawMessage, []string, fielderr.List) {
	full := make(map[string]any, len(d.Parameters)+3)
	maps.Copy(full, d.Parameters)
	if len(full) == 0 {
		full["type"] = "object"
	}
	if full["type"] != "object" {
		return nil, nil, []error{errors.New(`parameters.type: must be "object": a model passes arguments by name`)}
	}
	if full["properties"] == nil {
		full["properties"] = map[string]any{}
	}
	closeSchema(full)
	requireAll(full, pathArguments(d))
	raw, err := json.Marshal(full)
	if err != nil {
		return nil, nil, []error{fmt.Errorf("parameters: %w", err)}
	}
	if strings.Contains(string(raw), `\u0000`) {
		return nil, nil, []error{errors.New("parameters: has a NUL character")}
	}
	if schema.Depth(raw, maxSchemaDepth) > maxSchemaDepth {
		return nil, nil, []error{fmt.Errorf("parameters: are nested more than %d levels deep", maxSchemaDepth)}
	}
	compiled, err := compile(raw)
	if err != nil {
		return nil, nil, schemaProblems(err)
	}
	names := propertyNames(compiled)
	var problems fielderr.List
	if err := schema.CheckDefaults(compiled); err != nil && !strings.HasPrefix(strings.TrimSpace(d.Handler), "mcp:") {
		problems = append(problems, fmt.Errorf("parameters.%w", err))
	}
	if full["additionalProperties"] != false || full["patternProperties"] != nil {
		return raw, names, problems
	}
	for _, name := range compiled.Required { // no call could pass an undeclared argument
		if !slices.Contains(names, name) {
			problems.Add("parameters.required", "%q is not declared under parameters.properties", name)
		}
	}
	return raw, names, problems
}

// requireAll requires the declared properties of names, except those with a default.
func requireAll(schema map[string]any, names []string) {
	properties, _ := schema["properties"].(map[string]any)
	var required []any
	switch given := schema["required"].(type) {
	case nil:
	case []any:
		required = slices.Clone(given)
	case []string:
		for _, name := range given {
			required = append(required, name)
		}
	default:
		return // the schema does not compile
	}
	for _, name := range names {
		property, declared := properties[name].(map[string]any)
		if _, hasDefault := property["default"]; declared && !hasDefault && !slices.Contains(required, any(name)) {
			required = append(required, name)
			schema["required"] = required
		}
	}
}

// maxSchemaDepth bounds the nesting of a schema: a deep schema of 100 KB could take minutes to compile.
const maxSchemaDepth = 200

// closeSchema forbids undeclared arguments, unless the schema has a rule about them.
func closeSchema(schema map[string]any) {
	for _, k := range []string{
		"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
		"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas",
	} {
		if _, ok := schema[k]; ok {
			return
		}
	}
	schema["additionalProperties"] = false
}

// schemaProblems returns the problems of a schema, one error per place.
func schemaProblems(err error) fielderr.List {
	var invalid *jsonschema.ValidationError
	if sv, ok := errors.AsType[*jsonschema.SchemaValidationError](err); ok && errors.As(sv.Err, &invalid) {
		var problems fielderr.List
		for _, v := range violations(invalid) {
			problems.Add("parameters"+strings.ReplaceAll(v.Path, "/", "."), "%s", v.Message)
		}
		return problems
	}
	return []error{fmt.Errorf("parameters: %w", err)}
}

func propertyNames(s *jsonschema.Schema) []string {
	return slices.Sorted(maps.Keys(s.Properties))
}

// Violation is one mismatch between arguments and their schema.
type Violation struct {
	Path    string `json:"path"` // JSON pointer into the arguments; empty for the arguments themselves
	Message string `json:"message"`
}

// InvalidParams reports arguments that violate the schema. The caller is at fault, not the skill.
type InvalidParams struct {
	Skill      string          `json:"skill"`
	Violations []Violation     `json:"violations"`
	Schema     json.RawMessage `json:"schema"`
}

func (e *InvalidParams) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "call %s: invalid parameters", e.Skill)
	for i, v := range e.Violations {
		b.WriteString([]string{": ", "; "}[min(i, 1)])
		if v.Path != "" {
			b.WriteString(v.Path + ": ")
		}
		b.WriteString(v.Message)
	}
	return b.String()
}

// violations lists the innermost causes of a validation error. The library's own flat list omits causes behind a
// reference.
func violations(e *jsonschema.ValidationError) []Violation {
	schema.Order(e)
	var all []Violation
	seen := map[Violation]bool{}
	var add func(e *jsonschema.ValidationError)
	add = func(e *jsonschema.ValidationError) {
		for _, cause := range e.Causes {
			add(cause)
		}
		if len(e.Causes) > 0 {
			return
		}
		leaf := e.BasicOutput()
		if leaf.Error == nil {
			return
		}
		if v := (Violation{Path: leaf.InstanceLocation, Message: leaf.Error.String()}); !seen[v] {
			seen[v] = true
			all = append(all, v)
		}
	}
	add(e)
	return all
}

// maxViolations bounds the reported violations: a long list may have one for each item.
const maxViolations = 100

// firstViolations returns the first maxViolations, and the number of the others.
func firstViolations(all []Violation) []Violation {
	if more := len(all) - maxViolations; more > 0 {
		return append(all[:maxViolations:maxViolations], Violation{Message: fmt.Sprintf("and %d more", more)})
	}
	return all
}

// decodeArgs decodes arguments as a JSON object. Empty arguments are the empty object.
func decodeArgs(raw json.RawMessage) (any, []Violation) {
	if len(bytes.TrimSpace(raw)) == 0 {
		return map[string]any{}, nil
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, []Violation{{Message: "is not valid JSON: " + err.Error()}}
	}
	return value, unstorable("", value, nil)
}

// unstorable appends a violation for each NUL character and each huge number. PostgreSQL and most services reject them.
func unstorable(path string, value any, found []Violation) []Violation {
	switch v := value.(type) {
	case string:
		if strings.ContainsRune(v, 0) {
			found = append(found, Violation{Path: path, Message: "has a NUL character"})
		}
	case json.Number:
		if _, ok := float64Safe(v).(json.Number); !ok {
			found = append(found, Violation{Path: path, Message: "is a number out of range"})
		}
	case []any:
		for i, item := range v {
			found = unstorable(fmt.Sprintf("%s/%d", path, i), item, found)
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if strings.ContainsRune(key, 0) {
				found = append(found, Violation{Path: path, Message: "has a NUL character in a name"})
			}
			found = unstorable(path+"/"+replaceNUL(key), v[key], found)
		}
	}
	return found
}
