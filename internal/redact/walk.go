package redact

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// walk returns tree without its secrets.
func walk(tree any, depth int) any {
	switch v := tree.(type) {
	case map[string]any:
		if depth >= maxDepth {
			return tooDeep
		}
		return walkObject(v, depth)
	case []any:
		if depth >= maxDepth {
			return tooDeep
		}
		return walkList(v, depth)
	case string:
		return scrub(v, depth+1)
	case json.Number:
		return number(v)
	}
	return tree
}

// maxDepth bounds the nesting of objects, arrays and JSON inside strings.
const maxDepth = 100

// tooDeep replaces a value nested deeper.
const tooDeep = "[cut: nested too deeply]"

// walkObject decides by name first, then searches the value. It tests both the original and the shown name, which may
// be shorter.
func walkObject(members map[string]any, depth int) map[string]any {
	out := newObject(len(members))
	for _, name := range slices.Sorted(maps.Keys(members)) {
		value, shown := any(Marker), scrubPlain(name)
		if !hide(max(classify(name), classify(shown)), members[name]) {
			value = walk(members[name], depth+1)
		}
		out.add(shown, value)
	}
	hideDescribed(out.members)
	return out.members
}

// hideDescribed redacts the text of an object that states its name: {"name": "password", "value": "…"}.
func hideDescribed(members map[string]any) {
	how := ordinary
	for _, member := range [...]string{"name", "Name", "key", "Key"} {
		if name, ok := members[member].(string); ok {
			how = max(how, wordStrength(name))
		}
	}
	for _, member := range [...]string{"value", "Value"} {
		if _, text := members[member].(string); text && hide(how, members[member]) {
			members[member] = Marker
		}
	}
}

// wordStrength returns the strength of a value that may name another value: one word, short enough that no limit cuts
// it. A cut would change the result of a second redaction.
func wordStrength(word string) nameStrength {
	if len(word) > MinLimit/2 || strings.Contains(word, cutPrefix) || strings.ContainsAny(word, " \t\n") {
		return ordinary
	}
	return classify(word)
}

// walkList searches the items of a list. In the words of a command, the value after a secret's flag is a secret.
func walkList(items []any, depth int) []any {
	out := make([]any, len(items))
	after := ordinary
	for i, item := range items {
		if hide(after, item) {
			out[i] = Marker
		} else {
			out[i] = walk(item, depth+1)
		}
		after = flagStrength(out[i])
	}
	return withoutPasswords(out)
}

// flagStrength returns the strength of a flag such as --password.
func flagStrength(item any) nameStrength {
	word, ok := item.(string)
	if !ok || !strings.HasPrefix(word, "-") || strings.ContainsAny(word, " =:") {
		return ordinary
	}
	return wordStrength(word)
}

// hide reports whether a value under a name of this strength is a secret.
func hide(s nameStrength, value any) bool {
	switch v := value.(type) {
	case nil, bool:
		return false
	case string:
		return s != ordinary && v != ""
	case json.Number:
		return s == strong
	case []any:
		return s == strong && len(v) > 0 || s == weak && slices.ContainsFunc(v, isString)
	case map[string]any:
		return s == strong && len(v) > 0
	}
	return s == strong
}

// isString reports whether a value is a string.
func isString(v any) bool {
	_, ok := v.(string)
	return ok
}

// object collects members whose names may have become equal: it numbers later ones.
type object struct {
	members map[string]any
	next    map[string]int
}

// newObject allocates size members.
func newObject(size int) object {
	return object{members: make(map[string]any, size), next: map[string]int{}}
}

// add adds a member, under another name if its own exists.
func (o object) add(name string, value any) {
	tried := name
	for {
		if _, taken := o.members[tried]; !taken {
			o.members[tried] = value
			return
		}
		o.next[name]++
		tried = name + " " + strconv.Itoa(o.next[name]+1)
	}
}

// number returns n, or its text if n may exceed PostgreSQL's numeric. It keeps all digits.
func number(n json.Number) any {
	// PostgreSQL's limits are higher: 131,072 digits before and 16,383 after the point.
	const (
		maxDigits   = 1000
		maxExponent = 1000
	)
	s := n.String()
	if len(s) > maxDigits {
		return s
	}
	if at := strings.IndexAny(s, "eE"); at >= 0 {
		e, err := strconv.Atoi(s[at+1:])
		if err != nil || e > maxExponent || e < -maxExponent {
			return s
		}
	}
	return n
}
