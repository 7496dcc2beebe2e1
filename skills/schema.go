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
)

const schemaURL = "skill:parameters"

// noLoader keeps a schema from reading files or the network. References resolve inside the schema.
type noLoader struct{}

func (noLoader) Load(url string) (any, error) {
	return nil, fmt.Errorf("%s is outside this schema, and only references inside it are followed", url)
}

func compile(schema json.RawMessage) (*jsonschema.Schema, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(schema))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.UseLoader(noLoader{})
	c.AssertFormat()
	if err := c.AddResource(schemaURL, doc); err != nil {
		return nil, err
	}
	return c.Compile(schemaURL)
}

// resolveParameters returns the stored schema and its property names.
func resolveParameters(parameters map[string]any) (json.RawMessage, []string, []error) {
	schema := make(map[string]any, len(parameters)+3)
	maps.Copy(schema, parameters)
	if len(schema) == 0 {
		schema["type"] = "object"
	}
	if schema["type"] != "object" {
		return nil, nil, []error{errors.New(`parameters.type: must be "object": a model passes arguments by name`)}
	}
	if schema["properties"] == nil {
		schema["properties"] = map[string]any{}
	}
	closeSchema(schema)
	raw, err := json.Marshal(schema)
	if err != nil {
		return nil, nil, []error{fmt.Errorf("parameters: %w", err)}
	}
	if strings.Contains(string(raw), `\u0000`) {
		return nil, nil, []error{errors.New("parameters: has a NUL character")}
	}
	if deeperThan(raw, maxSchemaDepth) {
		return nil, nil, []error{fmt.Errorf("parameters: are nested more than %d levels deep", maxSchemaDepth)}
	}
	compiled, err := compile(raw)
	if err != nil {
		return nil, nil, schemaProblems(err)
	}
	return raw, propertyNames(compiled), nil
}

// maxSchemaDepth bounds the nesting of a schema. Compile time grows with the cube of the depth: a schema of 100 KB
// could take minutes.
const maxSchemaDepth = 200

// deeperThan reports JSON nested beyond a limit.
func deeperThan(text []byte, most int) bool {
	quoted, depth := false, 0
	for i := 0; i < len(text) && depth <= most; i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{', c == '[':
			depth++
		case c == '}', c == ']':
			depth--
		}
	}
	return depth > most
}

// closeSchema forbids undeclared arguments, unless the schema decides it.
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
func schemaProblems(err error) []error {
	var invalid *jsonschema.ValidationError
	if sv, ok := errors.AsType[*jsonschema.SchemaValidationError](err); ok && errors.As(sv.Err, &invalid) {
		var problems []error
		for _, v := range violations(invalid) {
			problems = append(problems, fmt.Errorf("parameters%s: %s", strings.ReplaceAll(v.Path, "/", "."), v.Message))
		}
		return problems
	}
	return []error{fmt.Errorf("parameters: %w", err)}
}

func propertyNames(s *jsonschema.Schema) []string {
	names := make([]string, 0, len(s.Properties))
	for name := range s.Properties {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Violation is one mismatch between arguments and their schema.
type Violation struct {
	Path    string `json:"path"` // JSON pointer into the arguments; empty for the whole
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

// violations lists the innermost causes of a validation error. The library's flat list drops causes behind a
// reference.
func violations(e *jsonschema.ValidationError) []Violation {
	var all []Violation
	for _, cause := range e.Causes {
		for _, v := range violations(cause) {
			if !slices.Contains(all, v) {
				all = append(all, v)
			}
		}
	}
	if leaf := e.BasicOutput(); len(e.Causes) == 0 && leaf.Error != nil {
		all = append(all, Violation{Path: leaf.InstanceLocation, Message: leaf.Error.String()})
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

// unstorable finds NUL characters and numbers beyond any use, which neither PostgreSQL nor most
// services take.
func unstorable(path string, value any, found []Violation) []Violation {
	switch v := value.(type) {
	case string:
		if strings.ContainsRune(v, 0) {
			found = append(found, Violation{Path: path, Message: "has a NUL character"})
		}
	case json.Number:
		if _, ok := portableNumber(v).(json.Number); !ok {
			found = append(found, Violation{Path: path, Message: "is a number out of range"})
		}
	case []any:
		for i, item := range v {
			found = unstorable(fmt.Sprintf("%s/%d", path, i), item, found)
		}
	case map[string]any:
		for key, item := range v {
			found = unstorable(path+"/"+key, item, found)
		}
	}
	return found
}

// withDefaults completes the arguments with the defaults of the properties that are absent.
func withDefaults(s *jsonschema.Schema, args map[string]any) map[string]any {
	full := make(map[string]any, len(args))
	for name, p := range s.Properties {
		if p.Default != nil {
			full[name] = *p.Default
		}
	}
	maps.Copy(full, args)
	return full
}
