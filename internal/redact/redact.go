// Package redact makes values safe to store: without secrets, bounded in size, valid as jsonb.
//
// A secret is recognized by its name or by its shape, at any depth: in keys, in strings that contain JSON, and in plain
// text such as error messages and headers. [Marker] replaces it. In doubt, the value is removed: a trace that hides too
// much is a nuisance, a leaked key is an incident.
//
// The rules by file:
//   - names.go: names of secrets (password, api_key, contraseña, 密码, …; see [Key]).
//   - named.go: values under such a name in text (name=value, --name value); yaml.go and markup.go: in YAML and XML.
//   - urls.go: passwords in URLs.
//   - commands.go: arguments of commands (curl -u, mysql -p, …).
//   - rule.go: tokens, webhook addresses and key files, by rules.json and the kept rules of gitleaks. One pass finds
//     the few rules that a text needs; their expressions are compiled on first use. tokens.go: tokens that need code.
//   - letters.go: invisible characters and letters that resemble Latin ones.
//   - walk.go: values of JSON.
//
// Guarantees:
//   - It never fails. A value that JSON cannot hold becomes an object with the reason.
//   - The result of [JSON] is valid JSON of at most limit bytes that PostgreSQL accepts as jsonb: no NUL, no invalid
//     UTF-8, no number beyond numeric. Other numbers keep all digits.
//   - A cut states its size. Secrets are removed before cutting, so no cut to a limit leaves half a secret. A string of
//     more than 1 MiB is cut there first, at a space if one is near.
//   - Redaction is idempotent for one limit.
//
// Under an ordinary name it cannot recognize a secret that looks like ordinary text, an id or a hash. The same holds
// for an encoded secret (base64, percent).
//
// Everything here is safe for concurrent use.
package redact

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// Marker replaces a secret.
	Marker = "[redacted]"
	// DefaultLimit is the size in bytes for a limit of zero or less.
	DefaultLimit = 16 << 10
	// MinLimit is the smallest limit; smaller ones are raised.
	MinLimit = 64

	// maxScan bounds the scan of one string; the rest is cut.
	maxScan = 1 << 20
)

// JSON returns v as JSON of at most limit bytes, without secrets. It cuts long strings and names first. If that is not
// enough, the result is {"_truncated": true, "_bytes": n, "_preview": "…"}, where n is the uncut size. A
// json.RawMessage or []byte with valid JSON is read as JSON, else as text.
func JSON(v any, limit int) json.RawMessage {
	limit = bounded(limit)
	tree, err := decode(v)
	if err != nil {
		tree = map[string]any{"_unstorable": fmt.Sprintf("%T", v), "_error": err.Error()}
	}
	tree = walk(tree, 0)
	whole := encode(tree)
	if len(whole) <= limit {
		return whole
	}
	for _, longest := range []int{limit / 2, limit / 8, limit / 32} {
		if longest < MinLimit/2 {
			break
		}
		if out := encode(shorten(tree, longest)); len(out) <= limit {
			return out
		}
	}
	return preview(whole, limit)
}

// Text returns s without secrets, in valid UTF-8 without NUL, cut to at most limit bytes.
func Text(s string, limit int) string {
	return cut(scrub(s, 0), bounded(limit))
}

// bounded applies the default and the minimum to a limit.
func bounded(limit int) int {
	if limit <= 0 {
		return DefaultLimit
	}
	return max(limit, MinLimit)
}

// decode converts v to maps, slices, strings and exact numbers.
func decode(v any) (tree any, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("marshal: panic: %v", p)
		}
	}()
	var raw []byte
	switch v := v.(type) {
	case json.RawMessage:
		raw = v
	case []byte:
		raw = v
	default:
		if raw, err = json.Marshal(v); err != nil {
			return nil, err
		}
	}
	if tree, ok := parse(raw); ok {
		return tree, nil
	}
	if raw == nil {
		return nil, nil
	}
	return string(raw), nil
}

// parse decodes exactly one JSON value.
func parse(raw []byte) (any, bool) {
	if !json.Valid(raw) {
		return nil, false
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, false
	}
	return tree, true
}

// encode returns the compact JSON of a tree of [decode], which always encodes.
func encode(tree any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(tree); err != nil {
		return strconv.AppendQuote(nil, "[not encodable]")
	}
	return bytes.TrimRight(b.Bytes(), "\n")
}

// preview returns the object for a value that is still too large after its strings were cut.
func preview(whole []byte, limit int) json.RawMessage {
	object := map[string]any{"_truncated": true, "_bytes": len(whole)}
	for size := limit; size >= MinLimit/4; size = size * 3 / 4 {
		shown := clip(scrub(clip(string(whole[:min(len(whole), limit)]), size), 0), size)
		object["_preview"] = shown
		if out := encode(object); len(out) <= limit && scrub(shown, 0) == shown {
			return out
		}
	}
	delete(object, "_preview")
	return encode(object)
}

// cut shortens s to at most size bytes, with a mark of the removed size. Scrubbing the result again changes nothing.
func cut(s string, size int) string {
	if len(s) <= size {
		return s
	}
	// The mark is longest when everything is removed.
	for room := size - len(cutMark(len(s))); room > 0; room = room * 3 / 4 {
		kept := clip(s, room)
		out := kept + cutMark(len(s)-len(kept))
		if scrub(out, 0) == out {
			return out
		}
	}
	return cutMark(len(s))
}

// cutMark returns the text that stands for n removed bytes.
func cutMark(n int) string { return cutPrefix + strconv.Itoa(n) + " bytes]" }

// clip returns at most size bytes from the front of s, in whole characters and whole markers.
func clip(s string, size int) string {
	if len(s) <= size {
		return s
	}
	for size > 0 && !utf8.RuneStart(s[size]) {
		size--
	}
	s = s[:size]
	for n := min(len(Marker)-1, len(s)); n > 0; n-- {
		if strings.HasSuffix(s, Marker[:n]) {
			return s[:len(s)-n]
		}
	}
	return s
}

// shorten returns tree with names and strings cut to at most longest bytes.
func shorten(tree any, longest int) any {
	switch v := tree.(type) {
	case map[string]any:
		out := newObject(len(v))
		for _, name := range slices.Sorted(maps.Keys(v)) {
			out.add(cut(name, longest), shorten(v[name], longest))
		}
		return out.members
	case []any:
		out := make([]any, len(v))
		for i, item := range v {
			out[i] = shorten(item, longest)
		}
		return out
	case string:
		return cut(v, longest)
	}
	return tree
}
