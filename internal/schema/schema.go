// Package schema compiles JSON Schemas from files, servers and clients. A schema reads neither files nor the network:
// references resolve inside it.
package schema

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

const url = "schema:root"

// noLoader refuses every reference that leaves the schema.
type noLoader struct{}

func (noLoader) Load(url string) (any, error) {
	return nil, fmt.Errorf("%s is outside this schema, and only references inside it are followed", url)
}

// Compile compiles the text of a schema. configure sets the compiler's options.
func Compile(text []byte, configure func(*jsonschema.Compiler)) (*jsonschema.Schema, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.UseLoader(noLoader{})
	configure(c)
	if err := c.AddResource(url, doc); err != nil {
		return nil, err
	}
	return c.Compile(url)
}

// WithDefaults completes an object with the defaults of its absent properties.
func WithDefaults(s *jsonschema.Schema, object map[string]any) map[string]any {
	full := make(map[string]any, len(object))
	for name, p := range s.Properties {
		if p.Default != nil {
			full[name] = *p.Default
		}
	}
	maps.Copy(full, object)
	return full
}

// CheckDefaults rejects the defaults of properties that violate their own schemas.
func CheckDefaults(s *jsonschema.Schema) error {
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		p := s.Properties[name]
		if p.Default == nil {
			continue
		}
		if err := p.Validate(*p.Default); err != nil {
			return fmt.Errorf("properties.%s.default: %s", name, strings.TrimPrefix(OneLine(err), "at '': "))
		}
	}
	return nil
}

// Given returns the value that a schema names: its constant, its default, or its first example or enumerated value.
func Given(s map[string]any) (value any, has bool) {
	for _, name := range []string{"const", "default"} {
		if value, has = s[name]; has {
			return value, true
		}
	}
	for _, name := range []string{"examples", "enum"} {
		if list, _ := s[name].([]any); len(list) > 0 {
			return list[0], true
		}
	}
	return nil, false
}

// Order sorts the causes of a validation error, which the library lists in random order.
func Order(e *jsonschema.ValidationError) {
	if undeclared, ok := e.ErrorKind.(*kind.AdditionalProperties); ok {
		slices.Sort(undeclared.Properties)
	}
	for _, cause := range e.Causes {
		Order(cause)
	}
	slices.SortStableFunc(e.Causes, func(a, b *jsonschema.ValidationError) int {
		return cmp.Or(slices.Compare(a.InstanceLocation, b.InstanceLocation),
			slices.Compare(a.ErrorKind.KeywordPath(), b.ErrorKind.KeywordPath()))
	})
}

// OneLine returns the text of a validation error without its headline, and without the empty path of the whole value.
func OneLine(err error) string {
	if invalid, ok := errors.AsType[*jsonschema.ValidationError](err); ok {
		Order(invalid)
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) > 1 {
		lines = lines[1:]
	}
	for i, line := range lines {
		lines[i] = strings.TrimPrefix(strings.TrimPrefix(strings.TrimSpace(line), "- "), "at '': ")
	}
	return strings.Join(lines, "; ")
}

// Depth returns the nesting depth of the objects and lists of a JSON text. It stops counting above most. The time to
// compile a schema grows with the cube of its depth.
func Depth(text []byte, most int) (deepest int) {
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
			deepest = max(deepest, depth)
		case c == '}', c == ']':
			depth--
		}
	}
	return deepest
}
