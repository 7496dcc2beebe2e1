package offline

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"

	jsonschema "github.com/lanekeeper/lanekeeper/internal/schema"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

const maxValues = 1000 // in one call's arguments

// filler generates values for a JSON Schema. It does not follow references.
type filler struct {
	turn
	text     string // for parameters that accept any text
	invented bool   // a value came from neither the schema, the message nor a result
	values   int
}

// fill makes a call of a tool. known is false if a required argument had to be invented.
func (t turn) fill(tl tool, values map[string]any) (c call, known bool) {
	f := filler{turn: t, text: textcut.Text(oneLine(t.prompt), 200)}
	return call{name: tl.name, arguments: encode(f.object(tl.schema, values))}, !f.invented
}

// object fills the required properties and those given.
func (f *filler) object(schema, values map[string]any) map[string]any {
	out := map[string]any{}
	properties, _ := schema["properties"].(map[string]any)
	for name, value := range values {
		if _, declared := properties[name]; declared && value != "" {
			out[name] = value
		}
	}
	for _, name := range required(schema) {
		if _, has := out[name]; !has {
			property, _ := properties[name].(map[string]any)
			out[name] = f.value(name, property)
		}
	}
	return out
}

func required(schema map[string]any) (names []string) {
	list, _ := schema["required"].([]any)
	for _, name := range list {
		names = append(names, fmt.Sprint(name))
	}
	return names
}

func (f *filler) value(name string, schema map[string]any) any {
	if f.values++; f.values > maxValues {
		return nil
	}
	if value, has := jsonschema.Given(schema); has {
		return value
	}
	switch fmt.Sprint(schema["type"]) {
	case "object":
		return f.object(schema, nil)
	case "array":
		items, _ := schema["items"].(map[string]any)
		list := []any{}
		for range min(int(bound(schema, "minItems", 0)), 10) {
			list = append(list, f.value(name, items))
		}
		return list
	case "integer":
		return int64(f.number(name, schema))
	case "number":
		return f.number(name, schema)
	case "boolean":
		return false
	}
	text := []rune(cmp.Or(f.find(fmt.Sprint(schema["format"]), name), f.string(name)))
	return string(text[:min(len(text), max(0, int(bound(schema, "maxLength", 1000))))])
}

// number returns the message's number for a parameter, or a small one, within the schema's bounds.
func (f *filler) number(name string, schema map[string]any) float64 {
	n, err := strconv.ParseFloat(f.find("number", name), 64)
	if err != nil {
		n = 1
	}
	return min(max(n, bound(schema, "minimum", math.Inf(-1))), bound(schema, "maximum", math.Inf(1)))
}

func bound(schema map[string]any, key string, otherwise float64) float64 {
	if n, ok := schema[key].(float64); ok {
		return n
	}
	return otherwise
}

// string returns a text for a parameter. It prefers "name: value" in the message, then an earlier result with that
// name. A parameter for free text gets the whole message.
func (f *filler) string(name string) string {
	if text := f.find("named", name); text != "" {
		return text
	}
	column := regexp.MustCompile(`"` + regexp.QuoteMeta(name) + `(?:_name)?":\s*"([^"]+)"`)
	for _, c := range f.calls {
		if m := column.FindStringSubmatch(c.result); m != nil && !c.failed {
			return m[1]
		}
	}
	if listed("free_text", strings.ToLower(name)) {
		return f.text
	}
	f.invented = true
	return cmp.Or(f.find("guessed", name), append(stems(f.prompt), "unknown")[0])
}

// find returns the message's value for a parameter.
func (f *filler) find(kind, name string) string {
	spoken := strings.ReplaceAll(regexp.QuoteMeta(name), "_", "[_ ]")
	for _, value := range lexicon.Values[kind] {
		value = `(?i)\b` + strings.ReplaceAll(value, "NAME", spoken)
		if m := regexp.MustCompile(value).FindStringSubmatch(f.prompt); m != nil {
			return m[1]
		}
	}
	return ""
}

func encode(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return "{}" // decoded JSON encodes without an error
	}
	return string(text)
}
