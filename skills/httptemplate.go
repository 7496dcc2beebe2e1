package skills

import (
	"net/url"
	"regexp"
	"slices"
	"strings"
)

var (
	argumentRegexp   = regexp.MustCompile(`\{([a-zA-Z_][a-zA-Z0-9_-]*)\}`)
	envRegexp        = regexp.MustCompile(`\$\{env:([a-zA-Z_][a-zA-Z0-9_]*)\}`)
	headerNameRegexp = regexp.MustCompile("^[a-zA-Z0-9!#$%&'*+.^_`|~-]+$")
	httpMethods      = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"}
	runtimeHeaders   = []string{
		"Host", "Content-Length", "Transfer-Encoding", "Connection", "Idempotency-Key",
		"Upgrade", "Trailer",
	}
	secretHeaders = []string{"Authorization", "Proxy-Authorization", "Cookie", "X-Api-Key", "Api-Key"}
)

// fill puts arguments into the URL. It escapes an argument of the path, so the argument stays within a segment. It
// refuses absent and empty arguments of the path, and those of dots, such as "..". It omits the query parameter of an
// absent argument.
func (h httpHandler) fill(args map[string]any) (*url.URL, error) {
	path, query, _ := strings.Cut(h.url, "?")
	var refused error
	path = argumentRegexp.ReplaceAllStringFunc(path, func(reference string) string {
		name := strings.Trim(reference, "{}")
		text := scalarText(args[name])
		if args[name] == nil {
			refused = newCallError(ClassRefused, "argument %s is missing; the path of the URL needs it", name)
		} else if text == "" || strings.Trim(text, ".") == "" {
			refused = newCallError(ClassRefused, "argument %s: %q cannot be part of a path", name, text)
		}
		return url.PathEscape(text)
	})
	if refused != nil {
		return nil, refused
	}
	u, err := url.Parse(path)
	if err != nil {
		return nil, newCallError(ClassHandler, "fill in the URL: %s", err)
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
		part = argumentRegexp.ReplaceAllStringFunc(part, func(reference string) string {
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

// withArguments adds arguments to a query, in place of parameters of the same name. Other parameters stay as written.
func withArguments(query string, args map[string]any) string {
	values := url.Values{}
	for name, value := range args {
		values.Set(name, scalarText(value))
	}
	parts := slices.DeleteFunc(strings.Split(query, "&"), func(part string) bool {
		name, _, _ := strings.Cut(part, "=")
		decoded, err := url.QueryUnescape(name)
		return part == "" || err == nil && values.Has(decoded)
	})
	if len(values) > 0 {
		parts = append(parts, values.Encode())
	}
	return strings.Join(parts, "&")
}

// fillTemplate puts arguments into a body. The string {name} becomes the argument with its type. Within a longer
// string, {name} becomes the argument's text. ok is false if an argument is absent. An object or array omits such an
// entry.
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
	if match := argumentRegexp.FindString(text); match != "" && match == text {
		value, ok := args[strings.Trim(text, "{}")]
		return value, ok
	}
	complete := true
	filled := argumentRegexp.ReplaceAllStringFunc(text, func(reference string) string {
		value, ok := args[strings.Trim(reference, "{}")]
		complete = complete && ok
		return scalarText(value)
	})
	return filled, complete
}

func templateArguments(template any, found []string) []string {
	switch t := template.(type) {
	case string:
		for _, name := range argumentNames(t) {
			if !slices.Contains(found, name) {
				found = append(found, name)
			}
		}
	case []any:
		for _, item := range t {
			found = templateArguments(item, found)
		}
	case map[string]any:
		for _, item := range t {
			found = templateArguments(item, found)
		}
	}
	return found
}
