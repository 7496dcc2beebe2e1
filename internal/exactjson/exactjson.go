// Package exactjson decodes and compares JSON without rounding numbers, encodes it without escaping HTML, and writes it
// as YAML.
package exactjson

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"

	"go.yaml.in/yaml/v3"
)

// Decode decodes the JSON value at the beginning of text. Numbers are [json.Number], as written.
func Decode(text []byte) (value any, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	err = d.Decode(&value)
	return value, err
}

// Equal reports whether two texts are the same bytes or begin with the same JSON value. Spaces, the order of keys, and
// exponents up to 400 do not matter.
func Equal(a, b []byte) bool {
	x, err := Decode(a)
	y, otherErr := Decode(b)
	return bytes.Equal(a, b) || err == nil && otherErr == nil && reflect.DeepEqual(PlainNumbers(x), PlainNumbers(y))
}

// Encode encodes a value, without a newline.
func Encode(value any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(value)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// YAML encodes a value as YAML in block style. It goes through JSON, which is valid YAML, to preserve the order of
// keys.
func YAML(value any) ([]byte, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return nil, err
	}
	var node yaml.Node
	text = forbiddenInYAML.ReplaceAllFunc(text, func(character []byte) []byte {
		return fmt.Appendf(nil, `\u%04x`, []rune(string(character))[0])
	})
	if err := yaml.Unmarshal(text, &node); err != nil {
		return nil, err
	}
	blocks(&node)
	return yaml.Marshal(&node)
}

// forbiddenInYAML are the characters that JSON accepts and YAML accepts only as escapes.
var forbiddenInYAML = regexp.MustCompile(`[\x{7f}-\x{9f}\x{fffe}\x{ffff}]`)

// blocks replaces the flow style of JSON with YAML's block style.
func blocks(n *yaml.Node) {
	n.Style = 0
	for _, below := range n.Content {
		blocks(below)
	}
}
