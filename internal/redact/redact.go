// Package redact makes values fit to be kept: without secrets, within a size, storable as jsonb.
//
// A secret is known by the name it is under or by its own look. Both are looked for at any depth, in keys, in strings
// that contain JSON, and in plain text such as error messages and header lines. What is found becomes [Marker]. When in
// doubt it is removed: a trace that hides too much is a nuisance, one that shows a key is an incident.
//
// The rules, one subject a file:
//   - key.go, language.go: the names of secrets (password, api_key, contraseña, 密码, …; see [Key]). invisible.go sees
//     through invisible characters and letters that only look like Latin ones.
//   - named.go, yaml.go, markup.go, walk.go: how a name and its value are joined (name=value, name: |,
//     <name>value</name>, --name value, {"name": …, "value": …}).
//   - url.go, parameter.go, command.go, keyblock.go: user information and parameters of URLs, headers, the arguments of
//     commands (curl -u, mysql -p, …), files of private keys.
//   - token.go, discord.go: vendors' tokens and webhook addresses of our own list. gitleaks.go: those of gitleaks, made
//     from gitleaks/gitleaks.toml, with the rules that are not taken and why.
//   - rule.go, keyword.go: how the rules run. One pass finds the few that a text needs; expressions are compiled then.
//
// What it promises:
//   - It never fails. A value that JSON cannot hold becomes an object that says so.
//   - The result of [JSON] is valid JSON of at most limit bytes that PostgreSQL accepts as jsonb:
//     no NUL, no invalid UTF-8, no number beyond numeric. Numbers are otherwise kept to the digit.
//   - What is cut says how much was cut. Removal comes before cutting, so no cut saves half a secret.
//   - Doing it twice with the same limit changes nothing more.
//
// What it cannot know: a secret that looks like ordinary text under an ordinary name, one whose shape is that of an id
// or of a hash, or one that is encoded (base64, percent) and has no telling name.
//
// Everything here is safe for concurrent use.
package redact

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

const (
	// Marker stands where a secret was.
	Marker = "[redacted]"
	// DefaultLimit is the size in bytes when the given limit is zero or less.
	DefaultLimit = 16 << 10
	// MinLimit is the smallest size in bytes; smaller limits are raised to it.
	MinLimit = 64

	// maxScan bounds the work on one string; what is beyond it is cut unseen.
	maxScan = 1 << 20
)

// JSON returns v as JSON of at most limit bytes, without secrets. Long strings are cut first; if
// that is not enough the result is {"_truncated": true, "_bytes": n, "_preview": "…"}, where n is
// the size before cutting. A json.RawMessage or []byte that is JSON is taken as JSON, else as text.
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

// decode turns v into maps, slices, strings and exact numbers.
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

// parse reads exactly one JSON value.
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

// encode is the compact JSON of a tree that [decode] made, which always has one.
func encode(tree any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(tree); err != nil {
		return strconv.AppendQuote(nil, "[not encodable]")
	}
	return bytes.TrimRight(b.Bytes(), "\n")
}

// preview stands for a value that is too large even with its strings cut.
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

// cut shortens s to at most size bytes, with a mark that says how many are gone. What is kept is
// such that scrubbing it again changes nothing.
func cut(s string, size int) string {
	if len(s) <= size {
		return s
	}
	// The mark is at its longest when everything is gone.
	for room := size - len(cutMark(len(s))); room > 0; room = room * 3 / 4 {
		kept := clip(s, room)
		out := kept + cutMark(len(s)-len(kept))
		if scrub(out, 0) == out {
			return out
		}
	}
	return cutMark(len(s))
}

// cutMark is put where n bytes were.
func cutMark(n int) string { return cutPrefix + strconv.Itoa(n) + " bytes]" }

// clip takes at most size bytes off the front of s, in whole characters and whole markers.
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
