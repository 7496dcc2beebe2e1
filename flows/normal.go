package flows

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// maxVariables is how large all variables of an execution together may be, in bytes of JSON.
const maxVariables = 512 << 10

// normal is a value as its JSON has it when it is read back from the database: whole numbers are int, others float64.
// What an action sets has this form at once, so that the first run and a replay compute alike.
func normal(value any) (any, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		if unsupported, ok := errors.AsType[*json.UnsupportedValueError](err); ok {
			return nil, fmt.Errorf("%s is not a value that JSON has", unsupported.Str)
		}
		return nil, err
	}
	return parsed(raw)
}

// parsed reads JSON in the normal form; nothing at all is null.
func parsed(raw json.RawMessage) (any, error) {
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil, nil
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil {
		return nil, err
	}
	return settled(value), nil
}

func settled(value any) any {
	switch v := value.(type) {
	case json.Number:
		return number(v)
	case string:
		return strings.ReplaceAll(v, "\x00", "\uFFFD") // as the records keep it
	case []any:
		for i, item := range v {
			v[i] = settled(item)
		}
	case map[string]any:
		for key, item := range v {
			v[key] = settled(item)
		}
	}
	return value
}

func number(n json.Number) any {
	if whole, err := strconv.Atoi(string(n)); err == nil {
		return whole
	}
	f, err := n.Float64()
	switch {
	case err != nil:
		return string(n) // beyond any number that programs have
	case f == math.Trunc(f) && math.Abs(f) < 1<<62:
		return int(f)
	}
	return f
}

// object is a value that is one; nil otherwise.
func object(value any) map[string]any {
	found, _ := value.(map[string]any)
	return found
}
