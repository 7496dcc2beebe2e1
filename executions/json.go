package executions

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math/big"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// encode returns the JSON of v to store. jsonb rejects U+0000 and lone surrogates, and text must be valid UTF-8, so
// encode replaces these by U+FFFD. altered reports whether the stored value may differ from v, as with raw JSON in v.
func encode(v any) (text json.RawMessage, altered bool, err error) {
	text, altered, err = sanitize(v)
	if err != nil || !containsRawJSON(reflect.TypeOf(v)) {
		return text, altered, err
	}
	text, err = jsonbText(text)
	return text, true, err
}

// maxResult bounds a stored result, as check_agent_size does for the functions in SQL.
const maxResult = 16 << 20

// encodeResult is encode for the result of a step or flow.
func encodeResult(v any) (text json.RawMessage, altered bool, err error) {
	text, altered, err = encode(v)
	if err == nil && len(text) > maxResult {
		err = fmt.Errorf("it has %d bytes, more than 16 MiB", len(text))
	}
	return text, altered, err
}

// sanitize returns the JSON of v with the replacements of encode.
func sanitize(v any) (text json.RawMessage, altered bool, err error) {
	if text, err = safeMarshal(v); err != nil {
		return nil, false, err
	}
	if unsigned := stripNegativeZero(text); len(unsigned) < len(text) {
		text, altered = unsigned, true
	}
	if !utf8.Valid(text) { // a json.RawMessage may have invalid UTF-8
		text, altered = bytes.ToValidUTF8(text, []byte("\ufffd")), true
	}
	if !bytes.Contains(text, []byte(`\u`)) {
		return text, altered, nil
	}
	if !bytes.Contains(text, []byte(`\u0000`)) && !bytes.Contains(bytes.ToLower(text), []byte(`\ud`)) {
		return text, altered || bytes.Contains(text, []byte(`\ufffd`)), nil // the encoder replaced invalid UTF-8
	}
	d := json.NewDecoder(bytes.NewReader(text)) // replaces lone surrogates
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, false, fmt.Errorf("decode encoded JSON: %w", err)
	}
	text, err = json.Marshal(replaceNUL(tree))
	return text, true, err
}

// safeMarshal is json.Marshal that returns a panic of the value's methods as an error.
func safeMarshal(v any) (text []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return json.Marshal(v)
}

// stripNegativeZero removes the sign of zeros, as jsonb does.
func stripNegativeZero(text []byte) []byte {
	if !bytes.Contains(text, []byte("-0")) {
		return text
	}
	var out []byte
	quoted, start := false, 0
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case !quoted && c == '-' && startsWithZero(text[i+1:]) && (i == 0 || text[i-1]|0x20 != 'e'):
			out, start = append(out, text[start:i]...), i+1
		}
	}
	return append(out, text[start:]...)
}

// startsWithZero reports whether the number at the start of text is zero.
func startsWithZero(text []byte) bool {
	rest := bytes.TrimLeft(text, "0.")
	return len(rest) < len(text) && (len(rest) == 0 || rest[0] < '1' || rest[0] > '9')
}

// replaceNUL replaces U+0000 in all strings of a decoded JSON value.
func replaceNUL(tree any) any {
	switch v := tree.(type) {
	case string:
		return strings.ReplaceAll(v, "\x00", "\ufffd")
	case []any:
		for i := range v {
			v[i] = replaceNUL(v[i])
		}
	case map[string]any:
		replaced := make(map[string]any, len(v))
		for name, member := range v {
			replaced[strings.ReplaceAll(name, "\x00", "\ufffd")] = replaceNUL(member)
		}
		return replaced
	}
	return tree
}

// decode reads a stored value.
func decode[T any](text []byte) (value T, err error) {
	if err := json.Unmarshal(text, &value); err != nil {
		return value, fmt.Errorf("decode stored result: %w", err)
	}
	return value, nil
}

// containsRawJSON reports whether a type contains json.RawMessage or json.Number. parents are the enclosing types. Such
// a value keeps the original JSON text, but jsonb rewrites that text. So encode converts the text to the form of jsonb,
// and the first run gets the same value as a replay.
func containsRawJSON(t reflect.Type, parents ...reflect.Type) bool {
	if t == nil || slices.Contains(parents, t) {
		return false
	}
	if t == reflect.TypeFor[json.RawMessage]() || t == reflect.TypeFor[json.Number]() {
		return true
	}
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return containsRawJSON(t.Elem(), parents...)
	case reflect.Struct:
		parents = append(slices.Clip(parents), t)
		for f := range t.Fields() {
			if (f.IsExported() || f.Anonymous) && containsRawJSON(f.Type, parents...) {
				return true
			}
		}
	default:
	}
	return false
}

// jsonbText formats JSON as jsonb does: with members sorted by length and then by bytes, numbers without exponents, and
// a space after each comma and colon.
func jsonbText(text json.RawMessage) (json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, fmt.Errorf("decode encoded JSON: %w", err)
	}
	return appendJSONB(nil, tree), nil
}

func appendJSONB(b []byte, tree any) []byte {
	switch v := tree.(type) {
	case string:
		return appendString(b, v)
	case json.Number:
		return append(b, expandNumber(string(v))...)
	case bool:
		return strconv.AppendBool(b, v)
	case []any:
		b = append(b, '[')
		for i := range v {
			b = appendJSONB(appendComma(b, i), v[i])
		}
		return append(b, ']')
	case map[string]any:
		names := make([]string, 0, len(v))
		for name := range v {
			names = append(names, name)
		}
		slices.SortFunc(names, func(x, y string) int { return cmp.Or(len(x)-len(y), strings.Compare(x, y)) })
		b = append(b, '{')
		for i, name := range names {
			b = append(appendString(appendComma(b, i), name), ": "...)
			b = appendJSONB(b, v[name])
		}
		return append(b, '}')
	}
	return append(b, "null"...)
}

// appendComma appends a separator before every element but the first.
func appendComma(b []byte, i int) []byte {
	if i > 0 {
		return append(b, ", "...)
	}
	return b
}

// appendString appends a string with the necessary escapes only.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for i := range len(s) {
		c := s[i]
		if index := strings.IndexByte("\"\\\b\f\n\r\t", c); index >= 0 {
			b = append(b, '\\', `"\bfnrt`[index])
		} else if c < ' ' {
			b = fmt.Appendf(b, `\u%04x`, c)
		} else {
			b = append(b, c)
		}
	}
	return append(b, '"')
}

// maxExponent bounds the exponents that expandNumber expands. jsonb rejects most numbers with larger ones.
const maxExponent = 1000

// expandNumber returns a number without an exponent, and zero without a sign.
func expandNumber(text string) string {
	mantissa, exponent, hasExponent := strings.Cut(strings.ToLower(text), "e")
	exp, err := strconv.Atoi(cmp.Or(exponent, "0"))
	if err != nil || max(exp, -exp) > maxExponent {
		return text
	}
	if !hasExponent {
		if strings.Trim(text, "-0.") == "" {
			return strings.TrimPrefix(text, "-")
		}
		return text
	}
	exact, ok := new(big.Rat).SetString(text)
	if !ok {
		return text
	}
	_, fraction, _ := strings.Cut(mantissa, ".")
	return exact.FloatString(max(0, len(fraction)-exp))
}
