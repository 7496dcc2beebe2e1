package redact

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// maxDepth is how deep objects, arrays and JSON inside strings may nest.
const maxDepth = 100

// tooDeep stands for what nests deeper.
const tooDeep = "[cut: nested too deeply]"

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

// walkObject decides by name first, then looks inside. The name counts as it was and as it will be shown, which may be
// shorter.
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

// hideDescribed removes the text of an object that says its name: {"name": "password", "value": "…"}.
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

// wordStrength is the strength of a value that may be the name of another one: one word, short enough never to be cut.
func wordStrength(word string) strength {
	if len(word) > MinLimit/2 || strings.Contains(word, cutPrefix) || strings.ContainsAny(word, " \t\n") {
		return ordinary
	}
	return classify(word)
}

// walkList looks inside the items of a list. If they are the words of a command, what follows the flag of a secret is
// one.
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

// flagStrength is the strength of the name of a flag like --password.
func flagStrength(item any) strength {
	word, ok := item.(string)
	if !ok || !strings.HasPrefix(word, "-") || strings.ContainsAny(word, " =:") {
		return ordinary
	}
	return wordStrength(word)
}

// hide reports whether a value under a name of this strength is a secret.
func hide(s strength, value any) bool {
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

// object collects members whose names may have become the same: later ones are numbered.
type object struct {
	members map[string]any
	next    map[string]int
}

// newObject makes room for size members.
func newObject(size int) object {
	return object{members: make(map[string]any, size), next: map[string]int{}}
}

// add puts in a member, under another name if its own is taken.
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

// number keeps n to the digit, unless it is beyond PostgreSQL's numeric: then it is a string.
func number(n json.Number) any {
	const (
		digits   = 1000
		exponent = 1000
	)
	s := n.String()
	if len(s) > digits {
		return s
	}
	if at := strings.IndexAny(s, "eE"); at >= 0 {
		e, err := strconv.Atoi(s[at+1:])
		if err != nil || e > exponent || e < -exponent {
			return s
		}
	}
	return n
}

// shorten returns tree with its names and strings cut to at most longest bytes.
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
