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
)

// A json.RawMessage, or a json.Number, is given back as it was written, and the database writes JSON in a way of its own. So a result that has one is
// brought into that form at once: what the first run goes on with, and may give to its next step as input, is then what a replay gets.

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

// asStored is JSON as jsonb gives it back: members by length and then by bytes, numbers without exponents, and its own spaces.
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

// longestExponent bounds what a number without its exponent takes to write; what is beyond it the database refuses, or nobody writes.
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
