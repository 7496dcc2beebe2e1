package flows

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
)

// classTemplate is the class of actions that ended because of a template or a name in it.
const classTemplate = "template"

// template is a text with references to variables.
type template struct {
	parts []part
}

// part is a piece of text, or a reference.
type part struct {
	text string
	ref  *reference
}

// reference is what stands between {{ and }}.
type reference struct {
	path     []string // name, then keys and indexes
	fallback any
	has      bool // a fallback
}

var (
	referencePath = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*(\.[a-zA-Z0-9_-]+)*$`)
	defaultFilter = regexp.MustCompile(`^default\s*:\s*(.+)$`)
)

// parseTemplate reads a text; nil when there is no template in it.
func parseTemplate(text string) (*template, error) {
	if !strings.Contains(text, "{{") {
		return nil, nil
	}
	t := &template{}
	for rest := text; rest != ""; {
		before, after, found := strings.Cut(rest, "{{")
		if before != "" {
			t.parts = append(t.parts, part{text: before})
		}
		if !found {
			break
		}
		inner, next, closed := cutReference(after)
		if !closed {
			return nil, fmt.Errorf("the template {{%s is not closed with }}", shorten(after))
		}
		piece, err := parseReference(strings.TrimSpace(inner))
		if err != nil {
			return nil, fmt.Errorf("the template {{%s}} %w", shorten(inner), err)
		}
		t.parts = append(t.parts, piece)
		rest = next
	}
	return t, nil
}

// cutReference cuts at the }} that closes, one in quotes left out.
func cutReference(text string) (inner, rest string, closed bool) {
	var quote byte
	for i := 0; i < len(text); i++ {
		switch {
		case quote != 0 && text[i] == '\\':
			i++
		case quote != 0:
			if text[i] == quote {
				quote = 0
			}
		case text[i] == '"' || text[i] == '\'':
			quote = text[i]
		case strings.HasPrefix(text[i:], "}}"):
			return text[:i], text[i+2:], true
		}
	}
	return text, "", false
}

func parseReference(inner string) (part, error) {
	if strings.HasPrefix(inner, `"`) || strings.HasPrefix(inner, "'") {
		value, err := literal(inner)
		text, isText := value.(string)
		if err != nil || !isText {
			return part{}, errors.New("is not a text in quotes")
		}
		return part{text: text}, nil
	}
	path, fallback := inner, ""
	if before, after, found := strings.Cut(inner, "??"); found {
		path, fallback = strings.TrimSpace(before), strings.TrimSpace(after)
	} else if before, after, found := strings.Cut(inner, "|"); found {
		match := defaultFilter.FindStringSubmatch(strings.TrimSpace(after))
		if match == nil {
			return part{}, errors.New(`knows no other filter than default: write {{name | default: "x"}}`)
		}
		path, fallback = strings.TrimSpace(before), match[1]
	}
	if !referencePath.MatchString(path) {
		return part{}, errors.New(`is not the name of a variable: write {{name}}, {{a.b}} or {{name ?? "x"}}`)
	}
	ref := &reference{path: strings.Split(path, ".")}
	if path != inner {
		value, err := literal(fallback)
		if err != nil {
			return part{}, errors.New(`has a default that is no text in quotes, number, true, false or null`)
		}
		ref.fallback, ref.has = value, true
	}
	return part{ref: ref}, nil
}

// literal reads a default: JSON, or a text in single quotes.
func literal(text string) (any, error) {
	if n := len(text); n >= 2 && text[0] == '\'' && text[n-1] == '\'' {
		return text[1 : n-1], nil
	}
	if !json.Valid([]byte(text)) {
		return nil, errors.New("is not JSON")
	}
	return parsed(json.RawMessage(text))
}

// whole reports whether the template is one reference and nothing else.
func (t *template) whole() bool { return len(t.parts) == 1 && t.parts[0].ref != nil }

// value fills the template in. One that is whole keeps its type.
func (t *template) value(vars map[string]any) (any, error) {
	if t.whole() {
		return t.parts[0].ref.value(vars)
	}
	var b strings.Builder
	for _, p := range t.parts {
		if p.ref == nil {
			b.WriteString(p.text)
			continue
		}
		value, err := p.ref.value(vars)
		if err != nil {
			return nil, err
		}
		if value == nil && !p.ref.has {
			return nil, failure(classTemplate, "variable %q is null; give it a default: {{%s ?? \"…\"}}", p.ref, p.ref)
		}
		b.WriteString(inText(value))
	}
	return b.String(), nil
}

func (r *reference) String() string { return strings.Join(r.path, ".") }

// value follows the path. Null is replaced by the default, too.
func (r *reference) value(vars map[string]any) (any, error) {
	var at any = vars
	for i, key := range r.path {
		next, found := member(at, key)
		switch {
		case !found && r.has:
			return r.fallback, nil
		case !found:
			return nil, r.missing(vars, i)
		}
		at = next
	}
	if at == nil && r.has {
		return r.fallback, nil
	}
	return at, nil
}

func (r *reference) missing(vars map[string]any, depth int) error {
	hint := ""
	if near := nearest.To(r.path[0], slices.Sorted(maps.Keys(vars))); depth == 0 && near != "" {
		hint = fmt.Sprintf(", did you mean %q?", near)
	}
	return failure(classTemplate, "variable %q is not known%s; set it before, or give it a default: {{%s ?? \"…\"}}", r, hint, r)
}

// member is a key of a mapping, or an index of a list.
func member(of any, key string) (any, bool) {
	switch v := of.(type) {
	case map[string]any:
		value, found := v[key]
		return value, found
	case []any:
		i, err := strconv.Atoi(key)
		if err != nil || i < 0 || i >= len(v) {
			return nil, false
		}
		return v[i], true
	}
	return nil, false
}

// inText is a value within a text. A list of plain values is written with commas, other structures as JSON.
func inText(value any) string {
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
				return asJSON(value)
			}
			words[i] = inText(item)
		}
		return strings.Join(words, ", ")
	case map[string]any:
		return asJSON(value)
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return fmt.Sprint(value)
}

func asJSON(value any) string {
	var b strings.Builder
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return fmt.Sprint(value)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// parseTree finds the templates in a value's texts. Its texts that have one become *template; everything else stays.
func parseTree(value any, path string, bad func(path string, err error)) any {
	switch v := value.(type) {
	case string:
		t, err := parseTemplate(v)
		if err != nil {
			bad(path, err)
		}
		if t != nil {
			return t
		}
	case []any:
		tree := make([]any, len(v))
		for i, item := range v {
			tree[i] = parseTree(item, fmt.Sprintf("%s[%d]", path, i), bad)
		}
		return tree
	case map[string]any:
		tree := make(map[string]any, len(v))
		for key, item := range v {
			tree[key] = parseTree(item, path+"."+key, bad)
		}
		return tree
	}
	return value
}

// fill is a tree with its templates filled in.
func fill(tree any, vars map[string]any) (any, error) {
	switch v := tree.(type) {
	case *template:
		return v.value(vars)
	case []any:
		list := make([]any, len(v))
		for i, item := range v {
			value, err := fill(item, vars)
			if err != nil {
				return nil, err
			}
			list[i] = value
		}
		return list, nil
	case map[string]any:
		filled := make(map[string]any, len(v))
		for _, key := range slices.Sorted(maps.Keys(v)) {
			value, err := fill(v[key], vars)
			if err != nil {
				return nil, err
			}
			filled[key] = value
		}
		return filled, nil
	}
	return tree, nil
}

// shorten keeps a message readable.
func shorten(text string) string {
	const longest = 60
	if len(text) <= longest {
		return text
	}
	return strings.ToValidUTF8(text[:longest], "") + "…"
}
