package offline

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	maxDepth  = 8
	maxValues = 1000 // in one call's arguments
)

// filler makes values that fit a JSON Schema.
type filler struct {
	situation
	text    string         // for strings that take any text
	root    map[string]any // where references lead
	guessed bool           // a value had to be invented
	values  int            // made so far
}

// fill makes the call of a tool. known is false when a name had to be invented for it.
func (s situation) fill(t tool) (c call, known bool) {
	f := filler{situation: s, text: clip(strings.Join(strings.Fields(s.prompt), " "), 200), root: t.schema}
	arguments := f.object(t.schema, nil, 0)
	return encoded(t.name, arguments), !f.guessed
}

// fillWith makes the call of a tool with some values given, those that its schema has a place for. It is not ok when
// another required one would have to be invented.
func (s situation) fillWith(t tool, given map[string]any) (c call, ok bool) {
	f := filler{situation: s, text: clip(s.prompt, 200), root: t.schema}
	arguments := f.object(t.schema, given, 0)
	for name := range given {
		if _, has := properties(t.schema)[name]; has && given[name] == nil && slices.Contains(required(t.schema), name) {
			return call{}, false
		}
	}
	return encoded(t.name, arguments), !f.guessed
}

// object fills the required properties, and those that are given.
func (f *filler) object(schema, given map[string]any, depth int) map[string]any {
	out := map[string]any{}
	declared := properties(schema)
	for _, name := range slices.Sorted(maps.Keys(declared)) {
		property, _ := declared[name].(map[string]any)
		if value, has := given[name]; has && value != nil {
			out[name] = fitted(value, f.resolved(property))
		}
	}
	for _, name := range required(schema) {
		if _, has := out[name]; !has {
			property, _ := declared[name].(map[string]any)
			out[name] = f.value(name, property, depth+1)
		}
	}
	return out
}

// value prefers what the schema itself suggests.
func (f *filler) value(name string, schema map[string]any, depth int) any {
	schema = f.resolved(schema)
	if f.values++; depth > maxDepth || f.values > maxValues {
		return nil
	}
	for _, key := range []string{"default", "const"} {
		if v, has := schema[key]; has {
			return v
		}
	}
	for _, key := range []string{"enum", "examples"} {
		if list, _ := schema[key].([]any); len(list) > 0 {
			return list[0]
		}
	}
	for _, key := range []string{"anyOf", "oneOf"} {
		if list, _ := schema[key].([]any); len(list) > 0 {
			first, _ := list[0].(map[string]any)
			return f.value(name, first, depth+1)
		}
	}
	return f.typed(name, schema, depth)
}

func (f *filler) typed(name string, schema map[string]any, depth int) any {
	switch kind(schema) {
	case "object":
		return f.object(schema, nil, depth)
	case "array":
		items, _ := schema["items"].(map[string]any)
		list := []any{}
		for range min(int(number(schema, "minItems", 0)), 10) {
			list = append(list, f.value(name, items, depth+1))
		}
		return list
	case "integer", "number":
		return f.number(name, schema)
	case "boolean":
		return false
	case "null":
		return nil
	}
	return fitted(f.words(name, schema), schema)
}

// number is one that the prompt gives with the property's name, or a modest one within the bounds.
func (f *filler) number(name string, schema map[string]any) any {
	low, high := number(schema, "minimum", math.Inf(-1)), number(schema, "maximum", math.Inf(1))
	low = max(low, number(schema, "exclusiveMinimum", math.Inf(-1))+1)
	high = min(high, number(schema, "exclusiveMaximum", math.Inf(1))-1)
	n := 1.0
	switch {
	case strings.Contains(name, "limit") || strings.Contains(name, "count") || name == "n":
		n = 10
	case strings.Contains(name, "day"):
		n = 7
	}
	said, found := f.said(name, `(?:\s*[:=]\s*|\s+)(\d+(?:\.\d+)?)`)
	if !found {
		said, found = f.captured(`(\d+(?:\.\d+)?)\s+` + spoken(strings.TrimSuffix(name, "s")) + `s?\b`)
	}
	if found {
		if v, err := strconv.ParseFloat(said, 64); err == nil {
			n = v
		}
	}
	n = min(max(n, low), high)
	if step := number(schema, "multipleOf", 0); step > 0 {
		n = max(math.Ceil(n/step), 1) * step
	}
	if kind(schema) == "integer" {
		return int64(n)
	}
	return n
}

// words is the text for a string: of a known format, taken from earlier results or from the prompt, or, for a
// string that asks for free text, the prompt itself. Anything else is a guess.
func (f *filler) words(name string, schema map[string]any) string {
	if format, has := schema["format"].(string); has {
		if text, known := f.formatted(format); known {
			return text
		}
	}
	if text := f.named(name); text != "" {
		return text
	}
	if freeText.MatchString(name) {
		return f.text
	}
	f.guessed = true
	if said, found := f.said(name, `\s+([\w.:/@-]*\w)`); found && !isSmall(strings.ToLower(said)) {
		return said
	}
	if subject := words(f.prompt); len(subject) > 0 {
		return subject[0]
	}
	return "unknown"
}

// named is a text that the prompt or a result gives for a property: "table: orders", the only thing in quotes, what an
// earlier result has under that name. Of several results' names, one that the prompt mentions is taken.
func (f *filler) named(name string) string {
	if said, found := f.said(name, `\s*[:=]\s*["'`+"`"+`]?([\w.:/@-]*\w)`); found {
		return said
	}
	if quoted := quotation.FindStringSubmatch(f.prompt); quoted != nil {
		return quoted[1]
	}
	first := ""
	for _, c := range f.made {
		if c.failed {
			continue
		}
		for _, text := range lookup(mustDecode(c.result), name) {
			if slices.Contains(strings.Fields(f.prompt), text) {
				return text
			}
			first = cmp.Or(first, text)
		}
	}
	return first
}

var (
	quotation = regexp.MustCompile("[\"`“]([^\"`”\n]{1,100})[\"`”]")
	freeText  = regexp.MustCompile(`(?i)^(q|query|question|text|message|topic|search|term|terms|keyword|keywords|subject|title|summary|note|notes|reason|description|content|goal|prompt|body|result|value|comment|input|answer)$`)
)

// formatted is a text of a known format: one in the prompt, or a harmless constant.
func (f *filler) formatted(format string) (string, bool) {
	known := map[string][2]string{
		"date":      {`\d{4}-\d\d-\d\d`, "2026-01-01"},
		"date-time": {`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)`, "2026-01-01T00:00:00Z"},
		"time":      {`\d\d:\d\d:\d\dZ`, "00:00:00Z"},
		"uuid":      {`[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}`, ""},
		"email":     {`[\w.+-]+@[\w-]+(?:\.[\w-]+)+`, ""},
		"uri":       {`https?://[^\s"'<>)]+`, ""},
		"ipv4":      {`\d{1,3}(?:\.\d{1,3}){3}`, "127.0.0.1"},
	}
	rule, has := known[format]
	if !has {
		return "", false
	}
	if text := regexp.MustCompile(rule[0]).FindString(f.prompt); text != "" {
		return text, true
	}
	if rule[1] != "" {
		return rule[1], true
	}
	f.guessed = true
	return map[string]string{
		"uuid": "00000000-0000-4000-8000-000000000000", "email": "nobody@example.org", "uri": "https://example.org/",
	}[format], true
}

// said looks in the prompt for a value behind a property's name. The pattern of the value has one group.
func (f *filler) said(name, value string) (string, bool) {
	return f.captured(`\b` + spoken(name) + value)
}

// captured is what the one group of a pattern matches in the prompt.
func (f *filler) captured(pattern string) (string, bool) {
	if m := regexp.MustCompile(`(?i)` + pattern).FindStringSubmatch(f.prompt); m != nil {
		return m[1], true
	}
	return "", false
}

// spoken is a pattern for a property's name as people write it.
func spoken(name string) string { return strings.ReplaceAll(regexp.QuoteMeta(name), "_", `[_ ]`) }

// lookup finds the texts under a key, or under one that is the key with or without "_name".
func lookup(v any, key string) []string {
	var found []string
	switch v := v.(type) {
	case []any:
		for _, item := range v {
			found = append(found, lookup(item, key)...)
		}
	case map[string]any:
		for _, k := range slices.Sorted(maps.Keys(v)) {
			text, isText := v[k].(string)
			if isText && text != "" && strings.TrimSuffix(k, "_name") == strings.TrimSuffix(key, "_name") {
				found = append(found, text)
			}
			found = append(found, lookup(v[k], key)...)
		}
	}
	return found
}

// fitted bounds a text to its schema's lengths. Other values stay as they are.
func fitted(value any, schema map[string]any) any {
	text, isText := value.(string)
	if !isText {
		return value
	}
	if kind(schema) == "object" {
		return map[string]any{"text": text}
	}
	r := []rune(text)
	if most := number(schema, "maxLength", math.Inf(1)); float64(len(r)) > most {
		r = r[:int(most)]
	}
	for least := number(schema, "minLength", 0); float64(len(r)) < min(least, 1000); {
		r = append(r, 'x')
	}
	return string(r)
}

// resolved follows references within the schema.
func (f *filler) resolved(schema map[string]any) map[string]any {
	for range maxDepth {
		ref, _ := schema["$ref"].(string)
		path, local := strings.CutPrefix(ref, "#/")
		if !local {
			return schema
		}
		target := f.root
		for part := range strings.SplitSeq(path, "/") {
			target, _ = target[part].(map[string]any)
		}
		schema = target
	}
	return schema
}

// kind is the schema's type; the first that is not null where it has several.
func kind(schema map[string]any) string {
	switch t := schema["type"].(type) {
	case string:
		return t
	case []any:
		for _, one := range t {
			if name, ok := one.(string); ok && name != "null" {
				return name
			}
		}
	}
	if _, has := schema["properties"]; has {
		return "object"
	}
	return ""
}

func properties(schema map[string]any) map[string]any {
	declared, _ := schema["properties"].(map[string]any)
	return declared
}

func required(schema map[string]any) []string {
	list, _ := schema["required"].([]any)
	names := make([]string, 0, len(list))
	for _, name := range list {
		names = append(names, fmt.Sprint(name))
	}
	return names
}

func number(schema map[string]any, key string, otherwise float64) float64 {
	switch n := schema[key].(type) {
	case float64:
		return n
	case json.Number:
		if f, err := n.Float64(); err == nil {
			return f
		}
	}
	return otherwise
}
