package offline

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

const (
	nothing     = "nothing (0 rows)"
	rowsShown   = 3
	valuesShown = 3
	maxFact     = 300 // bytes of one tool's facts
)

// facts is what a call's result says, in short: the first rows with their figures.
func (c call) facts() string {
	if text, own := c.own(); own {
		return c.name + ": " + clip(text, 2*ownShown*maxEntry)
	}
	value, err := decoded(c.result)
	if rows := rowsOf(c.result); err != nil && c.cut != "" && len(rows) > 0 {
		return c.name + ": " + clip(describeRows(rows), maxFact)
	}
	if err != nil {
		return c.name + ": " + clip(firstFigures(c.result), maxFact)
	}
	return c.name + ": " + clip(describe(value), maxFact)
}

// failure is why a call came to nothing.
func (c call) failure() string {
	text := c.result
	if object, ok := mustDecode(c.result).(map[string]any); ok {
		text = strings.TrimPrefix(fmt.Sprintf("%s: %s", plain(object["error"]), plain(object["message"])+plain(object["reason"])), ": ")
	}
	return c.name + ": " + clip(strings.TrimSuffix(strings.TrimSpace(strings.ReplaceAll(text, "\n", " ")), ":"), 160)
}

// decoded keeps numbers as they were written.
func decoded(text string) (any, error) {
	d := json.NewDecoder(bytes.NewReader([]byte(text)))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	return v, nil
}

// mustDecode is nil for what is no JSON.
func mustDecode(text string) any {
	v, err := decoded(text)
	if err != nil {
		return nil
	}
	return v
}

// describe puts a value in a line.
func describe(v any) string {
	switch v := v.(type) {
	case []any:
		return describeRows(v)
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if rows, ok := v[key].([]any); ok && (len(rows) == 0 || isObject(rows[0])) {
				return describeRows(rows)
			}
		}
		return describeRow(v)
	default:
		return plain(v)
	}
}

func describeRows(rows []any) string {
	if len(rows) == 0 {
		return nothing
	}
	var parts []string
	for _, row := range rows[:min(len(rows), rowsShown)] {
		if object, ok := row.(map[string]any); ok {
			parts = append(parts, describeRow(object))
		} else {
			parts = append(parts, plain(row))
		}
	}
	text := strings.Join(parts, ", ")
	if len(rows) > rowsShown {
		text += fmt.Sprintf(" (%d rows)", len(rows))
	}
	return text
}

// describeRow is the row's name and its first figures.
func describeRow(row map[string]any) string {
	var name string
	var figures, others []string
	for _, key := range slices.Sorted(maps.Keys(row)) {
		text := clip(plain(row[key]), 60)
		_, isNumber := row[key].(json.Number)
		inWords, isText := row[key].(string)
		switch {
		case text == "" || volatile.MatchString(text) || isObject(row[key]):
		case isNumber && (key == "oid" || key == "pid" || key == "id"):
		case isNumber, isText && hasDigit(inWords) && len(figures) < valuesShown && !namesIt(key):
			figures = append(figures, key+" "+text)
		case isText && (name == "" || namesIt(key)):
			name = text
		default:
			others = append(others, key+" "+text)
		}
	}
	if len(figures) == 0 {
		figures = others
	}
	return strings.TrimSpace(name + " " + strings.Join(figures[:min(len(figures), valuesShown)], " "))
}

// namesIt reports whether a column is likely to be what a row is called.
func namesIt(key string) bool {
	switch key {
	case "name", "table", "table_name", "relation", "relname", "index", "index_name", "title", "key", "label", "query":
		return true
	}
	return false
}

// volatile matches times and uuids, which are not worth quoting.
var volatile = regexp.MustCompile(`^\d{4}-\d\d-\d\d[T ]|^[0-9a-f]{8}-[0-9a-f]{4}-`)

func isObject(v any) bool {
	_, object := v.(map[string]any)
	return object
}

// plain is a scalar as text.
func plain(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case string:
		return strings.Join(strings.Fields(v), " ")
	case json.Number:
		return v.String()
	case bool:
		return fmt.Sprint(v)
	}
	text, err := json.Marshal(v)
	if err != nil {
		return ""
	}
	return string(text)
}

// firstFigures is the first line of a text that has a figure, or the first line.
func firstFigures(text string) string {
	first := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if hasDigit(line) {
			return line
		}
		if first == "" {
			first = line
		}
	}
	return first
}

// clip bounds a text in bytes, without cutting a character in two.
func clip(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}
