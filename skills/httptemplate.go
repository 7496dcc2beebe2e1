package skills

import (
	"net/url"
	"slices"
	"strings"
)

// fill puts arguments into the URL. In the path an argument is one segment, or a part of one: it is
// escaped, and one that would climb ("..") is refused. An absent optional argument of the query
// leaves its parameter out.
func (h httpHandler) fill(args map[string]any) (*url.URL, error) {
	path, query, _ := strings.Cut(h.url, "?")
	var refused error
	path = argumentReference.ReplaceAllStringFunc(path, func(reference string) string {
		name := strings.Trim(reference, "{}")
		text := scalarText(args[name])
		if text == "" || strings.Trim(text, ".") == "" {
			refused = failure(ClassRefused, "argument %s: %q cannot be part of a path", name, text)
		}
		return url.PathEscape(text)
	})
	if refused != nil {
		return nil, refused
	}
	u, err := url.Parse(path)
	if err != nil {
		return nil, failure(ClassHandler, "fill in the URL: %s", err)
	}
	u.RawQuery = fillQuery(query, args)
	return u, nil
}

func fillQuery(query string, args map[string]any) string {
	var parts []string
	for part := range strings.SplitSeq(query, "&") {
		if part == "" {
			continue
		}
		absent := false
		part = argumentReference.ReplaceAllStringFunc(part, func(reference string) string {
			value, ok := args[strings.Trim(reference, "{}")]
			absent = absent || !ok || value == nil
			return url.QueryEscape(scalarText(value))
		})
		if !absent {
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, "&")
}

// fillTemplate puts arguments into a body: a string that is nothing but {name} becomes the argument
// with its type; {name} inside a longer string becomes its text. ok is false when an argument is
// absent; such an entry is left out of its object or array.
func fillTemplate(template any, args map[string]any) (value any, ok bool) {
	switch t := template.(type) {
	case string:
		return fillString(t, args)
	case []any:
		items := make([]any, 0, len(t))
		for _, item := range t {
			if v, ok := fillTemplate(item, args); ok {
				items = append(items, v)
			}
		}
		return items, true
	case map[string]any:
		filled := make(map[string]any, len(t))
		for key, item := range t {
			if v, ok := fillTemplate(item, args); ok {
				filled[key] = v
			}
		}
		return filled, true
	}
	return template, true
}

func fillString(text string, args map[string]any) (any, bool) {
	if match := argumentReference.FindString(text); match != "" && match == text {
		value, ok := args[strings.Trim(text, "{}")]
		return value, ok
	}
	complete := true
	filled := argumentReference.ReplaceAllStringFunc(text, func(reference string) string {
		value, ok := args[strings.Trim(reference, "{}")]
		complete = complete && ok
		return scalarText(value)
	})
	return filled, complete
}

func templateReferences(template any, found []string) []string {
	switch t := template.(type) {
	case string:
		for _, name := range references(t) {
			if !slices.Contains(found, name) {
				found = append(found, name)
			}
		}
	case []any:
		for _, item := range t {
			found = templateReferences(item, found)
		}
	case map[string]any:
		for _, item := range t {
			found = templateReferences(item, found)
		}
	}
	return found
}
