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

// encode makes the JSON that is stored. jsonb can hold neither U+0000 nor half a surrogate pair, and no text bytes
// that are not UTF-8; all become U+FFFD, and mended says that what is stored differs from v, as also JSON does that v
// keeps as it was written.
func encode(v any) (text json.RawMessage, mended bool, err error) {
	text, mended, err = holdable(v)
	if err != nil || !verbatim(reflect.TypeOf(v)) {
		return text, mended, err
	}
	text, err = asStored(text)
	return text, true, err
}

// holdable is JSON that jsonb can hold.
func holdable(v any) (text json.RawMessage, mended bool, err error) {
	if text, err = marshal(v); err != nil {
		return nil, false, err
	}
	if unsigned := withoutMinusZero(text); len(unsigned) < len(text) {
		text, mended = unsigned, true
	}
	if !utf8.Valid(text) { // of a json.RawMessage
		text, mended = bytes.ToValidUTF8(text, []byte("\ufffd")), true
	}
	if !bytes.Contains(text, []byte(`\u`)) {
		return text, mended, nil
	}
	if !bytes.Contains(text, []byte(`\u0000`)) && !bytes.Contains(bytes.ToLower(text), []byte(`\ud`)) {
		return text, mended || bytes.Contains(text, []byte(`\ufffd`)), nil // which stands for bytes that are not UTF-8
	}
	d := json.NewDecoder(bytes.NewReader(text)) // which mends the surrogates
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, false, fmt.Errorf("read own JSON: %w", err)
	}
	text, err = json.Marshal(withoutNUL(tree))
	return text, true, err
}

// marshal makes JSON of what the code has made; a method of it that panics is an error.
func marshal(v any) (text []byte, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return json.Marshal(v)
}

// withoutMinusZero takes the sign from zeros, as jsonb does.
func withoutMinusZero(text []byte) []byte {
	if !bytes.Contains(text, []byte("-0")) {
		return text
	}
	var kept []byte
	quoted, from := false, 0
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case !quoted && c == '-' && zeroAt(text[i+1:]) && (i == 0 || text[i-1]|0x20 != 'e'):
			kept, from = append(kept, text[from:i]...), i+1
		}
	}
	return append(kept, text[from:]...)
}

// zeroAt reports that the number with which a text begins is zero.
func zeroAt(text []byte) bool {
	rest := bytes.TrimLeft(text, "0.")
	return len(rest) < len(text) && (len(rest) == 0 || rest[0] < '1' || rest[0] > '9')
}

func withoutNUL(tree any) any {
	switch v := tree.(type) {
	case string:
		return strings.ReplaceAll(v, "\x00", "\ufffd")
	case []any:
		for i := range v {
			v[i] = withoutNUL(v[i])
		}
	case map[string]any:
		mended := make(map[string]any, len(v))
		for name, member := range v {
			mended[strings.ReplaceAll(name, "\x00", "\ufffd")] = withoutNUL(member)
		}
		return mended
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

// A json.RawMessage, or a json.Number, is given back as it was written, and the database writes JSON in a way of its
// own. So a result that has one is brought into that form at once: what the first run goes on with, and may give to
// its next step as input, is then what a replay gets.

// verbatim reports a type whose values keep JSON as it was written; within are those that it is part of.
func verbatim(t reflect.Type, within ...reflect.Type) bool {
	if t == nil || slices.Contains(within, t) {
		return false
	}
	if t == reflect.TypeFor[json.RawMessage]() || t == reflect.TypeFor[json.Number]() {
		return true
	}
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return verbatim(t.Elem(), within...)
	case reflect.Struct:
		within = append(slices.Clip(within), t)
		for f := range t.Fields() {
			if (f.IsExported() || f.Anonymous) && verbatim(f.Type, within...) {
				return true
			}
		}
	default:
	}
	return false
}

// asStored is JSON as jsonb gives it back: members by length and then by bytes, numbers without exponents, and its
// own spaces.
func asStored(text json.RawMessage) (json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, fmt.Errorf("read own JSON: %w", err)
	}
	return appendStored(nil, tree), nil
}

func appendStored(b []byte, tree any) []byte {
	switch v := tree.(type) {
	case string:
		return appendText(b, v)
	case json.Number:
		return append(b, plainNumber(string(v))...)
	case bool:
		return strconv.AppendBool(b, v)
	case []any:
		b = append(b, '[')
		for i := range v {
			b = appendStored(separate(b, i), v[i])
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
			b = append(appendText(separate(b, i), name), ": "...)
			b = appendStored(b, v[name])
		}
		return append(b, '}')
	}
	return append(b, "null"...)
}

func separate(b []byte, i int) []byte {
	if i > 0 {
		return append(b, ", "...)
	}
	return b
}

// appendText writes a string, in which only what must be escaped is.
func appendText(b []byte, s string) []byte {
	b = append(b, '"')
	for i := range len(s) {
		c := s[i]
		if at := strings.IndexByte("\"\\\b\f\n\r\t", c); at >= 0 {
			b = append(b, '\\', `"\bfnrt`[at])
		} else if c < ' ' {
			b = fmt.Appendf(b, `\u%04x`, c)
		} else {
			b = append(b, c)
		}
	}
	return append(b, '"')
}

// longestExponent bounds what a number without its exponent takes to write; what is beyond it the database refuses,
// or nobody writes.
const longestExponent = 1000

// plainNumber is a number without an exponent, and zero without a sign.
func plainNumber(text string) string {
	mantissa, exponent, long := strings.Cut(strings.ToLower(text), "e")
	exp, err := strconv.Atoi(cmp.Or(exponent, "0"))
	if err != nil || max(exp, -exp) > longestExponent {
		return text
	}
	if !long {
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
