package skills

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
)

// Bounds of a result.
const (
	maxResultBytes = 256 << 10
	maxResultDepth = 100
)

// encodeResult encodes value as JSON that a jsonb column accepts. It fails if the result exceeds maxResultBytes or
// maxResultDepth.
func encodeResult(value any) (json.RawMessage, error) {
	raw, err := exactjson.Encode(value)
	if err != nil {
		return nil, newCallError(ClassHandler, "the result cannot be written as JSON: %s", err)
	}
	if len(raw) > maxResultBytes {
		return nil, tooLarge(len(raw))
	}
	tree, err := exactjson.Decode(raw)
	if err != nil {
		return nil, newCallError(ClassHandler, "the result cannot be read as JSON: %s", err)
	}
	tree, err = sanitize(tree, 0)
	if err != nil {
		return nil, err
	}
	result, err := exactjson.Encode(tree)
	if err != nil {
		return nil, newCallError(ClassHandler, "the result cannot be written as JSON: %s", err)
	}
	if len(result) > maxResultBytes { // sanitize can make the result longer
		return nil, tooLarge(len(result))
	}
	return result, nil
}

func tooLarge(size int) error {
	return newCallError(ClassTooLarge, "the result has %d bytes, over the limit of %d: request less", size, maxResultBytes)
}

// sanitize replaces each NUL with U+FFFD, because jsonb rejects NUL. It turns numbers beyond float64 into strings,
// because readers of JSON lose or reject them. It rejects deep nesting.
func sanitize(value any, depth int) (any, error) {
	if depth > maxResultDepth {
		return nil, newCallError(ClassTooLarge, "the result is nested more than %d levels deep", maxResultDepth)
	}
	switch v := value.(type) {
	case string:
		return replaceNUL(v), nil
	case json.Number:
		return float64Safe(v), nil
	case []any:
		for i := range v {
			item, err := sanitize(v[i], depth+1)
			if err != nil {
				return nil, err
			}
			v[i] = item
		}
		return v, nil
	case map[string]any:
		cleaned := make(map[string]any, len(v))
		for key := range v {
			item, err := sanitize(v[key], depth+1)
			if err != nil {
				return nil, err
			}
			cleaned[replaceNUL(key)] = item
		}
		return cleaned, nil
	}
	return value, nil
}

func replaceNUL(s string) string { return strings.ReplaceAll(s, "\x00", "\uFFFD") }

// float64Safe returns n, or n as a string if it overflows float64, underflows to zero, or is a zero with an exponent
// that jsonb may reject.
func float64Safe(n json.Number) any {
	f, err := n.Float64()
	if err != nil || f == 0 && strings.ContainsAny(fmt.Sprint(exactjson.PlainNumbers(n)), "123456789") {
		return n.String()
	}
	return n
}
