package skills

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
)

const (
	maxResult  = 256 << 10
	maxDepth   = 100
	maxNumeric = 300 // the largest decimal exponent that every reader takes
)

// encodeResult makes JSON of value that PostgreSQL stores and readers in other languages take.
func encodeResult(value any) (json.RawMessage, error) {
	raw, err := json.Marshal(value)
	if err != nil {
		return nil, failure(ClassHandler, "the result cannot be written as JSON: %s", err)
	}
	if len(raw) > 2*maxResult { // escapes of HTML may go
		return nil, tooLarge(len(raw))
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, failure(ClassHandler, "the result cannot be read as JSON: %s", err)
	}
	tree, err = clean(tree, 0)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	if err := e.Encode(tree); err != nil {
		return nil, failure(ClassHandler, "the result cannot be written as JSON: %s", err)
	}
	result := bytes.TrimRight(out.Bytes(), "\n")
	if len(result) > maxResult {
		return nil, tooLarge(len(result))
	}
	return result, nil
}

func tooLarge(size int) error {
	return failure(ClassTooLarge, "the result has %d bytes; at most %d are taken: ask for less", size, maxResult)
}

func clean(value any, depth int) (any, error) {
	if depth > maxDepth {
		return nil, failure(ClassTooLarge, "the result is nested more than %d deep", maxDepth)
	}
	switch v := value.(type) {
	case string:
		return noNUL(v), nil
	case json.Number:
		return portable(v), nil
	case []any:
		for i := range v {
			item, err := clean(v[i], depth+1)
			if err != nil {
				return nil, err
			}
			v[i] = item
		}
		return v, nil
	case map[string]any:
		cleaned := make(map[string]any, len(v))
		for key := range v {
			item, err := clean(v[key], depth+1)
			if err != nil {
				return nil, err
			}
			cleaned[noNUL(key)] = item
		}
		return cleaned, nil
	}
	return value, nil
}

func noNUL(s string) string { return strings.ReplaceAll(s, "\x00", "\uFFFD") }

// portable keeps a number, or writes it as a string where its exponent is beyond what PostgreSQL takes.
func portable(n json.Number) any {
	_, exponent, ok := strings.Cut(strings.ToLower(n.String()), "e")
	if !ok {
		return n
	}
	if e, err := strconv.Atoi(exponent); err != nil || e > maxNumeric || e < -maxNumeric {
		return n.String()
	}
	return n
}
