package workspace

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// decoder decodes one document and collects problems.
type decoder struct {
	file     string
	problems Problems
}

// maxDepth bounds the nesting of a document.
const maxDepth = 50

func (d *decoder) add(node *yaml.Node, format string, args ...any) {
	d.problems.add(position(d.file, node), format, args...)
}

// object decodes a mapping into a struct by its yaml tags. path is its position, "" at the top; extra lists keys
// handled elsewhere.
func (d *decoder) object(node *yaml.Node, into reflect.Value, path string, extra ...string) {
	if node.Kind != yaml.MappingNode {
		d.add(node, "%sis %s; it must be a mapping of keys to values", prefix(path), describeNode(node))
		return
	}
	fields := fieldsOf(into.Type())
	for _, pair := range d.pairs(node, path) {
		key := pair.key.Value
		index := slices.Index(fields, key)
		switch {
		case slices.Contains(extra, key):
		case index < 0:
			d.add(pair.key, "%s", unknownName("key", join(path, key), key, append(slices.Clone(extra), fields...)))
		default:
			d.value(pair.value, into.Field(index), join(path, key))
			d.rejectEmptyChoice(pair.value, key, join(path, key))
		}
	}
}

// choices are the keys whose value is one of a few words, with a default if the key is left out.
var choices = []string{
	"access", "challenge", "channel", "class", "effort", "encoding", "format", "memory", "pairing", "scheme", "scope",
	"surface", "transport", "trigger", "trust", "type",
}

// rejectEmptyChoice rejects an empty text of a choice, which a definition reads as its default.
func (d *decoder) rejectEmptyChoice(node *yaml.Node, key, path string) {
	if slices.Contains(choices, key) && node.Kind == yaml.ScalarNode && node.ShortTag() == "!!str" && node.Value == "" {
		d.empty(node, path, reflect.String)
	}
}

func (d *decoder) empty(node *yaml.Node, path string, kind reflect.Kind) {
	advice := "give it a value, or leave the key out"
	if kind == reflect.Slice {
		advice = "leave the key out for its default, or write [] for an empty list"
	}
	d.add(node, "%s: is empty; %s", path, advice)
}

// pair is one entry of a mapping.
type pair struct{ key, value *yaml.Node }

// pairs lists the entries of a mapping, with text keys and no duplicates.
func (d *decoder) pairs(node *yaml.Node, path string) []pair {
	first := make(map[string]*yaml.Node)
	var pairs []pair
	for i := 0; i+1 < len(node.Content); i += 2 {
		key := node.Content[i]
		switch {
		case key.Kind == yaml.AliasNode || key.ShortTag() == "!!merge":
			d.add(key, "%saliases and merge keys are not supported; write the value out", prefix(path))
		case key.Kind != yaml.ScalarNode || key.ShortTag() == "!!null":
			d.add(key, "%sa key must be a text", prefix(path))
		case first[key.Value] != nil:
			d.add(key, "%s: is given twice, first in line %d", join(path, key.Value), first[key.Value].Line)
		default:
			first[key.Value] = key
			pairs = append(pairs, pair{key, node.Content[i+1]})
		}
	}
	return pairs
}

// value decodes a node into a field. A null is a value of fields without a fixed type; other fields reject it, because
// a definition would read it as the default.
func (d *decoder) value(node *yaml.Node, into reflect.Value, path string) {
	if node.Kind == yaml.AliasNode {
		d.add(node, "%s: aliases are not supported; write the value out", path)
		return
	}
	if node.ShortTag() == "!!null" && into.Kind() != reflect.Interface {
		d.empty(node, path, into.Kind())
		return
	}
	switch into.Type() {
	case reflect.TypeFor[json.RawMessage]():
		d.raw(node, into, path)
		return
	case reflect.TypeFor[time.Duration]():
		d.duration(node, into, path)
		return
	}
	switch into.Kind() {
	case reflect.Struct:
		d.object(node, into, path)
	case reflect.Pointer:
		into.Set(reflect.New(into.Type().Elem()))
		d.value(node, into.Elem(), path)
	case reflect.Slice:
		d.list(node, into, path)
	case reflect.Map:
		if into.Type().Elem().Kind() == reflect.Interface {
			d.openValue(node, into, path)
			return
		}
		d.mapping(node, into, path)
	case reflect.Interface:
		d.openValue(node, into, path)
	default:
		d.scalar(node, into, path)
	}
}

// mapping decodes a mapping whose values have a fixed type.
func (d *decoder) mapping(node *yaml.Node, into reflect.Value, path string) {
	if node.Kind != yaml.MappingNode {
		d.add(node, "%s: is %s; it must be a mapping of keys to values", path, describeNode(node))
		return
	}
	into.Set(reflect.MakeMap(into.Type()))
	for _, pair := range d.pairs(node, path) {
		value := reflect.New(into.Type().Elem()).Elem()
		d.value(pair.value, value, join(path, pair.key.Value))
		into.SetMapIndex(reflect.ValueOf(pair.key.Value), value)
	}
}

func (d *decoder) list(node *yaml.Node, into reflect.Value, path string) {
	if node.Kind != yaml.SequenceNode {
		d.add(node, "%s: is %s; it must be a list", path, describeNode(node))
		return
	}
	items := reflect.MakeSlice(into.Type(), len(node.Content), len(node.Content))
	for i, item := range node.Content {
		d.value(item, items.Index(i), fmt.Sprintf("%s[%d]", path, i))
	}
	into.Set(items)
}

// openValue decodes a value without a fixed type, such as a JSON Schema.
func (d *decoder) openValue(node *yaml.Node, into reflect.Value, path string) {
	if into.Type() == reflect.TypeFor[map[string]string]() && node.Kind == yaml.MappingNode {
		texts := map[string]string{}
		for _, pair := range d.pairs(node, path) {
			var text string
			d.value(pair.value, reflect.ValueOf(&text).Elem(), join(path, pair.key.Value))
			texts[pair.key.Value] = text
		}
		into.Set(reflect.ValueOf(texts))
		return
	}
	value := reflect.ValueOf(d.plain(node, path, 0))
	switch {
	case !value.IsValid():
	case value.Type().AssignableTo(into.Type()):
		into.Set(value)
	default:
		d.add(node, "%s: is %s; it must be a mapping of keys to values", path, describeNode(node))
	}
}

// raw encodes a value without a fixed type as JSON.
func (d *decoder) raw(node *yaml.Node, into reflect.Value, path string) {
	raw, err := json.Marshal(d.plain(node, path, 0))
	if err != nil {
		d.add(node, "%s: %s", path, err)
		return
	}
	into.SetBytes(raw)
}

func (d *decoder) duration(node *yaml.Node, into reflect.Value, path string) {
	value, err := time.ParseDuration(node.Value)
	if err != nil || node.Kind != yaml.ScalarNode {
		d.add(node, "%s: is %s; it must be a duration such as 500ms, 30s or 24h", path, describeNode(node))
		return
	}
	into.SetInt(int64(value))
}

// scalar decodes text, numbers and booleans. A field of text accepts every scalar except !!binary, as it is written. A
// field of another type accepts only scalars of its type.
func (d *decoder) scalar(node *yaml.Node, into reflect.Value, path string) {
	wanted, tags := "a number", []string{"!!int", "!!float"} // no tags: all
	switch {
	case into.Kind() == reflect.String:
		wanted, tags = "text", nil
	case into.Kind() == reflect.Bool:
		wanted, tags = "true or false", []string{"!!bool"}
	case into.CanInt() || into.CanUint():
		wanted, tags = "a whole number", []string{"!!int"}
	}
	fits := node.Kind == yaml.ScalarNode && node.ShortTag() != "!!binary" &&
		(tags == nil || slices.Contains(tags, node.ShortTag()))
	if fits && tags == nil {
		into.SetString(node.Value)
		return
	}
	if !fits || node.Decode(into.Addr().Interface()) != nil ||
		into.CanFloat() && (math.IsNaN(into.Float()) || math.IsInf(into.Float(), 0)) {
		d.add(node, "%s: is %s; it must be %s", path, describeNode(node), wanted)
	}
}

// plain converts a node to its JSON value.
func (d *decoder) plain(node *yaml.Node, path string, depth int) any {
	switch {
	case depth > maxDepth:
		d.add(node, "%s: is nested more than %d deep", path, maxDepth)
	case node.Kind == yaml.AliasNode:
		d.add(node, "%s: aliases are not supported; write the value out", path)
	case node.Kind == yaml.MappingNode:
		object := make(map[string]any, len(node.Content)/2)
		for _, pair := range d.pairs(node, path) {
			object[pair.key.Value] = d.plain(pair.value, join(path, pair.key.Value), depth+1)
		}
		return object
	case node.Kind == yaml.SequenceNode:
		list := make([]any, len(node.Content))
		for i, item := range node.Content {
			list[i] = d.plain(item, fmt.Sprintf("%s[%d]", path, i), depth+1)
		}
		return list
	default:
		return d.plainScalar(node, path)
	}
	return nil
}

func (d *decoder) plainScalar(node *yaml.Node, path string) any {
	var value any
	switch node.ShortTag() {
	case "!!str", "!!timestamp":
		return node.Value
	case "!!null", "!!bool", "!!int", "!!float":
		if err := node.Decode(&value); err != nil {
			d.add(node, "%s: %s cannot be read: %s", path, describeNode(node), err)
		}
	default:
		d.add(node, "%s: the tag %s is not supported", path, node.Tag)
	}
	if f, ok := value.(float64); ok && (math.IsNaN(f) || math.IsInf(f, 0)) {
		d.add(node, "%s: %s is not a number in JSON", path, node.Value)
		return nil
	}
	return value
}

// describeNode describes a node in an error.
func describeNode(node *yaml.Node) string {
	switch node.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias"
	}
	if node.ShortTag() == "!!null" {
		return "empty"
	}
	return fmt.Sprintf("%q", textcut.Text(node.Value, 40))
}

func fieldsOf(t reflect.Type) []string {
	names := make([]string, t.NumField())
	for i := range names {
		names[i], _, _ = strings.Cut(t.Field(i).Tag.Get("yaml"), ",")
	}
	return names
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func prefix(path string) string {
	if path == "" {
		return ""
	}
	return path + ": "
}
