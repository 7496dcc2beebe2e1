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

// template is a text with references to variables: {{name}}, {{a.b}}, {{name ?? "x"}} or {{name | default: "x"}}.
type template struct {
	parts []part
}

// part is a piece of text, or a reference.
type part struct {
	text string
	ref  *variableRef
}

// variableRef is the variable between {{ and }}, with its default.
type variableRef struct {
	path         []string // a name, then keys and indexes
	defaultValue any
	hasDefault   bool
}

// classTemplate is the error class of a template that failed at run time.
const classTemplate = "template"

// parseTemplate parses a text. It returns nil if the text has no template.
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
			return nil, fmt.Errorf("the template {{%s is not closed with }} outside quotes", truncate(after))
		}
		piece, err := parseReference(strings.TrimSpace(inner))
		if err != nil {
			return nil, fmt.Errorf("the template {{%s}} %w", truncate(inner), err)
		}
		t.parts = append(t.parts, piece)
		rest = next
	}
	return t, nil
}

// cutReference cuts at the closing }} outside quotes.
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

var (
	referencePath = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*(\.[a-zA-Z0-9_-]+)*$`)
	defaultFilter = regexp.MustCompile(`(?s)^default\s*:\s*(.+)$`)
)

// parseReference parses what stands between two pairs of braces: a variable with an optional default, or a quoted text.
func parseReference(inner string) (part, error) {
	if strings.HasPrefix(inner, `"`) || strings.HasPrefix(inner, "'") {
		value, err := parseDefault(inner)
		text, isText := value.(string)
		if err != nil || !isText {
			return part{}, errors.New("is not a text in quotes")
		}
		return part{text: text}, nil
	}
	path, defaultText := inner, ""
	if before, after, found := strings.Cut(inner, "??"); found && !strings.Contains(before, "|") {
		path, defaultText = strings.TrimSpace(before), strings.TrimSpace(after)
	} else if before, after, found := strings.Cut(inner, "|"); found {
		match := defaultFilter.FindStringSubmatch(strings.TrimSpace(after))
		if match == nil {
			return part{}, errors.New(`knows no other filter than default: write {{name | default: "x"}}`)
		}
		path, defaultText = strings.TrimSpace(before), match[1]
	}
	if !referencePath.MatchString(path) {
		return part{}, errors.New(`is not the name of a variable: write {{name}}, {{a.b}} or {{name ?? "x"}}`)
	}
	ref := &variableRef{path: strings.Split(path, ".")}
	if path != inner {
		value, err := parseDefault(defaultText)
		if err != nil {
			return part{}, errors.New(`has a default that is neither a text in quotes nor JSON`)
		}
		ref.defaultValue, ref.hasDefault = value, true
	}
	return part{ref: ref}, nil
}

// parseDefault parses a default value: JSON, or a text in single quotes.
func parseDefault(text string) (any, error) {
	if strings.HasPrefix(text, "'") {
		return parseSingleQuoted(text[1:])
	}
	if !json.Valid([]byte(text)) {
		return nil, errors.New("is not JSON")
	}
	return decodeNormal(json.RawMessage(text))
}

// parseSingleQuoted parses a text and its closing quote. A backslash escapes a quote or a backslash.
func parseSingleQuoted(text string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(text); i++ {
		switch {
		case text[i] == '\'' && i == len(text)-1:
			return b.String(), nil
		case text[i] == '\'':
			return "", errors.New("has text after the closing quote")
		case text[i] == '\\' && strings.ContainsAny(text[i+1:min(i+2, len(text))], `'\`):
			i++
		}
		b.WriteByte(text[i])
	}
	return "", errors.New("is not closed")
}

// isSingleReference reports whether the template is one reference without further text.
func (t *template) isSingleReference() bool { return len(t.parts) == 1 && t.parts[0].ref != nil }

// value fills in the template. A single reference keeps the type of its value.
func (t *template) value(vars map[string]any) (any, error) {
	if t.isSingleReference() {
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
		if value == nil && !p.ref.hasDefault {
			return nil, classErrorf(classTemplate, "variable %q is null; give it a default: {{%s ?? \"…\"}}", p.ref, p.ref)
		}
		b.WriteString(formatText(value))
	}
	return b.String(), nil
}

func (r *variableRef) String() string { return strings.Join(r.path, ".") }

// value resolves the path. The default replaces null, too.
func (r *variableRef) value(vars map[string]any) (any, error) {
	var current any = vars
	for i, key := range r.path {
		next, found := lookUp(current, key)
		switch {
		case !found && r.hasDefault:
			return r.defaultValue, nil
		case !found:
			return nil, r.missing(vars, i)
		}
		current = next
	}
	if current == nil && r.hasDefault {
		return r.defaultValue, nil
	}
	return current, nil
}

func (r *variableRef) missing(vars map[string]any, depth int) error {
	hint := ""
	if near := nearest.To(r.path[0], slices.Sorted(maps.Keys(vars))); depth == 0 && near != "" {
		hint = fmt.Sprintf(", did you mean %q?", near)
	}
	return classErrorf(classTemplate,
		"variable %q is not known%s; set it before, or give it a default: {{%s ?? \"…\"}}", r, hint, r)
}

// lookUp returns the value of a map's key, or the item at a list's index.
func lookUp(container any, key string) (any, bool) {
	switch v := container.(type) {
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

// parseTree parses the templates in a value's texts. A text with one becomes *template.
func parseTree(value any, path string, report func(path string, err error)) any {
	switch v := value.(type) {
	case string:
		t, err := parseTemplate(v)
		if err != nil {
			report(path, err)
		}
		if t != nil {
			return t
		}
	case []any:
		tree := make([]any, len(v))
		for i, item := range v {
			tree[i] = parseTree(item, fmt.Sprintf("%s[%d]", path, i), report)
		}
		return tree
	case map[string]any:
		tree := make(map[string]any, len(v))
		for key, item := range v {
			tree[key] = parseTree(item, path+"."+key, report)
		}
		return tree
	}
	return value
}

// fill returns a tree with its templates filled in.
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
