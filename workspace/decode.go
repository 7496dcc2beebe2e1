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
)

// maxDepth is how deep a document may be nested.
const maxDepth = 50

// decoder reads the nodes of one document into a definition, and gathers what is wrong.
type decoder struct {
	file     string
	problems Problems
}

func (d *decoder) add(node *yaml.Node, format string, args ...any) {
	d.problems.add(position(d.file, node), format, args...)
}

// object reads a mapping into a struct by its yaml tags. path is where the mapping is in its document ("" at
// the top), and extra names the keys that are somebody else's.
func (d *decoder) object(node *yaml.Node, into reflect.Value, path string, extra ...string) {
	if node.Kind != yaml.MappingNode {
		d.add(node, "%sis %s; it must be a mapping of keys to values", prefix(path), what(node))
		return
	}
	fields := fieldsOf(into.Type())
	for _, pair := range d.pairs(node, path) {
		key := pair.key.Value
		index := slices.Index(fields, key)
		switch {
		case slices.Contains(extra, key):
		case index < 0:
			d.add(pair.key, "%s", unknown("key", join(path, key), key, append(slices.Clone(extra), fields...)))
		default:
			d.value(pair.value, into.Field(index), join(path, key))
		}
	}
}

// pair is one entry of a mapping.
type pair struct{ key, value *yaml.Node }

// pairs are the entries of a mapping whose keys are texts, each once.
func (d *decoder) pairs(node *yaml.Node, path string) []pair {
	first := make(map[string]*yaml.Node)
	var pairs []pair
	for i := 0; i+1 < len(node.Content); i += 2 {
		key := node.Content[i]
		switch {
		case key.Kind == yaml.AliasNode || key.ShortTag() == "!!merge":
			d.add(key, "%saliases and merge keys are not taken; write the value out", prefix(path))
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

// value reads a node into a field. An empty value leaves the field as it is.
func (d *decoder) value(node *yaml.Node, into reflect.Value, path string) {
	if node.Kind == yaml.AliasNode {
		d.add(node, "%s: aliases are not taken; write the value out", path)
		return
	}
	if node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null" {
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
	case reflect.Map, reflect.Interface:
		d.open(node, into, path)
	default:
		d.scalar(node, into, path)
	}
}

func (d *decoder) list(node *yaml.Node, into reflect.Value, path string) {
	if node.Kind != yaml.SequenceNode {
		d.add(node, "%s: is %s; it must be a list", path, what(node))
		return
	}
	items := reflect.MakeSlice(into.Type(), len(node.Content), len(node.Content))
	for i, item := range node.Content {
		d.value(item, items.Index(i), fmt.Sprintf("%s[%d]", path, i))
	}
	into.Set(items)
}

// open reads what has no fixed shape, such as a JSON Schema.
func (d *decoder) open(node *yaml.Node, into reflect.Value, path string) {
	value := reflect.ValueOf(d.plain(node, path, 0))
	switch {
	case !value.IsValid():
	case value.Type().AssignableTo(into.Type()):
		into.Set(value)
	default:
		d.add(node, "%s: is %s; it must be a mapping of keys to values", path, what(node))
	}
}

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
		d.add(node, "%s: is %s; it must be a duration such as 500ms, 30s or 24h", path, what(node))
		return
	}
	into.SetInt(int64(value))
}

// scalar reads a text, a whole number, a number or a truth value. Every scalar is a text where a text is wanted; nothing
// else is converted.
func (d *decoder) scalar(node *yaml.Node, into reflect.Value, path string) {
	wanted, tags := "a number", []string{"!!int", "!!float"}
	switch {
	case into.Kind() == reflect.String:
		wanted, tags = "text", nil
	case into.Kind() == reflect.Bool:
		wanted, tags = "true or false", []string{"!!bool"}
	case into.CanInt() || into.CanUint():
		wanted, tags = "a whole number", []string{"!!int"}
	}
	fits := node.Kind == yaml.ScalarNode && node.ShortTag() != "!!binary" && (tags == nil || slices.Contains(tags, node.ShortTag()))
	if fits && tags == nil {
		into.SetString(node.Value)
		return
	}
	if !fits || node.Decode(into.Addr().Interface()) != nil {
		d.add(node, "%s: is %s; it must be %s", path, what(node), wanted)
	}
}

// plain is a node as JSON has it.
func (d *decoder) plain(node *yaml.Node, path string, depth int) any {
	switch {
	case depth > maxDepth:
		d.add(node, "%s: is nested more than %d deep", path, maxDepth)
	case node.Kind == yaml.AliasNode:
		d.add(node, "%s: aliases are not taken; write the value out", path)
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
			d.add(node, "%s: %s cannot be read: %s", path, what(node), err)
		}
	default:
		d.add(node, "%s: the tag %s is not taken", path, node.Tag)
	}
	if f, ok := value.(float64); ok && (math.IsNaN(f) || math.IsInf(f, 0)) {
		d.add(node, "%s: %s is not a number that JSON has", path, node.Value)
		return nil
	}
	return value
}

// what names a node in an error.
func what(node *yaml.Node) string {
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
	const longest = 40
	text := node.Value
	if len(text) > longest {
		text = strings.ToValidUTF8(text[:longest], "") + "…"
	}
	return fmt.Sprintf("%q", text)
}

// fieldsOf lists the yaml keys of a struct, by field.
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
