package executions

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"
)

// encode makes the JSON that is stored. jsonb can hold neither U+0000 nor half a surrogate pair, and no text bytes that
// are not UTF-8; all become U+FFFD, and mended says that what is stored differs from v, as also JSON does that v keeps as it was written.
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
