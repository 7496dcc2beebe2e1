package flows

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

// inputSchema is what a flow takes.
type inputSchema struct {
	schema *jsonschema.Schema
}

// noLoader keeps a schema from reading files or the network.
type noLoader struct{}

func (noLoader) Load(url string) (any, error) {
	return nil, fmt.Errorf("%s is outside this schema, and only references inside it are followed", url)
}

// compileInput reads a flow's schema; nil when it has none.
func compileInput(schema map[string]any) (*inputSchema, error) {
	if len(schema) == 0 {
		return nil, nil
	}
	if schema["type"] != "object" {
		return nil, fmt.Errorf(`input.type: must be "object": an input has names`)
	}
	raw, err := json.Marshal(schema)
	if err != nil {
		return nil, fmt.Errorf("input: %w", err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("input: %w", err)
	}
	c := jsonschema.NewCompiler()
	c.UseLoader(noLoader{})
	c.AssertFormat()
	const url = "flow:input"
	if err := c.AddResource(url, doc); err != nil {
		return nil, fmt.Errorf("input: %w", err)
	}
	compiled, err := c.Compile(url)
	if err != nil {
		return nil, fmt.Errorf("input: %s", oneLine(err))
	}
	return &inputSchema{compiled}, nil
}

// InvalidInput reports an input that a flow does not take. Over HTTP it is 422.
type InvalidInput struct {
	Flow   string
	Reason string
}

func (e *InvalidInput) Error() string {
	return fmt.Sprintf("flow %s does not take this input: %s", e.Flow, e.Reason)
}

// ErrorClass is the sort of error, as the records keep it.
func (e *InvalidInput) ErrorClass() string { return "invalid_input" }

// accept checks an input and completes it with the defaults of the properties that are absent. Nothing at all is the
// empty object.
func (s *inputSchema) accept(flow string, raw json.RawMessage) (any, error) {
	if trimmed := bytes.TrimSpace(raw); len(trimmed) == 0 || string(trimmed) == "null" {
		raw = json.RawMessage(`{}`)
	}
	if s == nil {
		return parsed(raw)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, &InvalidInput{flow, "it is not JSON: " + err.Error()}
	}
	if given, ok := doc.(map[string]any); ok {
		full := make(map[string]any, len(given))
		for name, p := range s.schema.Properties {
			if p.Default != nil {
				full[name] = *p.Default
			}
		}
		maps.Copy(full, given)
		doc = full
	}
	if err := s.schema.Validate(doc); err != nil {
		return nil, &InvalidInput{flow, oneLine(err)}
	}
	return normal(doc)
}

// oneLine is the library's error without its headline.
func oneLine(err error) string {
	lines := strings.Split(err.Error(), "\n")
	if len(lines) > 1 {
		lines = lines[1:]
	}
	for i, line := range lines {
		lines[i] = strings.TrimPrefix(strings.TrimSpace(line), "- ")
	}
	return strings.Join(lines, "; ")
}
