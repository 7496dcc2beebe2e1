// Package exactjson decodes JSON without rounding numbers, and encodes it without escaping HTML.
package exactjson

import (
	"bytes"
	"encoding/json"
)

// Decode decodes the JSON value at the beginning of text. Numbers are [json.Number], as written.
func Decode(text []byte) (value any, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	err = d.Decode(&value)
	return value, err
}

// Encode encodes a value, without a newline.
func Encode(value any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(value)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}
