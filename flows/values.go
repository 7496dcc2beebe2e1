package flows

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// normalize returns a value in the form that the database returns: whole numbers up to 2^62 are int, others float64,
// and a number beyond float64 is its text. Every variable is normalized when it is set, so the first run and a replay
// compute the same values.
func normalize(value any) (any, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		if unsupported, ok := errors.AsType[*json.UnsupportedValueError](err); ok {
			return nil, fmt.Errorf("%s is not a value that JSON has", unsupported.Str)
		}
		return nil, err
	}
	return decodeNormal(raw)
}

// decodeNormal decodes JSON and normalizes the value. Empty JSON is null.
func decodeNormal(raw json.RawMessage) (any, error) {
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil, nil
	}
	value, err := exactjson.Decode(raw)
	return normalizeTree(value), err
}

// exactMap decodes whole numbers as int, where encoding/json would make them float64.
type exactMap map[string]any

// UnmarshalJSON implements json.Unmarshaler.
func (m *exactMap) UnmarshalJSON(raw []byte) error {
	value, err := decodeNormal(raw)
	*m = asObject(value)
	return err
}

func normalizeTree(value any) any {
	switch v := value.(type) {
	case json.Number:
		return normalizeNumber(v)
	case string:
		return strings.ReplaceAll(v, "\x00", "\uFFFD") // jsonb cannot store NUL; the records replace it the same way
	case []any:
		for i, item := range v {
			v[i] = normalizeTree(item)
		}
	case map[string]any:
		for key, item := range v {
			v[key] = normalizeTree(item)
		}
	}
	return value
}

// normalizeNumber returns an int if the number is whole and fits. jsonb may have rewritten 1e3 as 1000.
func normalizeNumber(n json.Number) any {
	if whole, err := strconv.Atoi(string(n)); err == nil {
		return whole
	}
	f, err := n.Float64()
	switch {
	case err != nil:
		return string(n) // beyond the range of number types
	case f == math.Trunc(f) && math.Abs(f) < 1<<62:
		return int(f)
	}
	return f
}

// asObject returns a value that is a map, or nil.
func asObject(value any) map[string]any {
	fields, _ := value.(map[string]any)
	return fields
}

// formatText formats a value within a text. A list of scalars is joined by commas; other structures are JSON.
func formatText(value any) string {
	switch v := value.(type) {
	case nil:
		return ""
	case string:
		return v
	case []any:
		words := make([]string, len(v))
		for i, item := range v {
			switch item.(type) {
			case []any, map[string]any:
				return encodeJSON(value)
			}
			words[i] = formatText(item)
		}
		return strings.Join(words, ", ")
	case map[string]any:
		return encodeJSON(value)
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return fmt.Sprint(value)
}

func encodeJSON(value any) string {
	text, err := exactjson.Encode(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(text)
}

// truncate cuts a text for a message.
func truncate(text string) string { return textcut.Text(text, 60) }
