package webhooks

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"regexp"
	"strconv"
	"strings"
)

// Content is the data that a delivery's paths read.
//
// A path is body, body.issue.number, body.items.0.id (a number indexes a list), header.x-github-event, delivery (the
// sender's delivery id) or endpoint. In a template a path stands in braces: issue-{body.issue.number}. Other braces
// of a prompt stay.
type Content struct {
	Endpoint, DeliveryID string
	Header               http.Header
	Body                 any // decoded JSON, with json.Number; a string for format text
}

var (
	pathRegexp                 = regexp.MustCompile(`^(delivery|endpoint|body(\.[^.{}\s]+)*|header\.[A-Za-z0-9-]+)$`)
	placeholderRegexp          = regexp.MustCompile(`\{(delivery|endpoint|body(?:\.[^.{}\s]+)*|header\.[A-Za-z0-9-]+)\}`)
	braceRegexp                = regexp.MustCompile(`[{}]`)
	malformedPlaceholderRegexp = regexp.MustCompile(`\{\{|\{\s*(body|header|delivery|endpoint)\b`)
)

// checkPath returns an error for a text that is not a path.
func checkPath(path string) error {
	if !pathRegexp.MatchString(path) {
		return fmt.Errorf("%q is not a path; write body.field, body.list.0.field, header.name, delivery or endpoint", path)
	}
	return nil
}

// checkTemplate returns an error for a template with an invalid placeholder. invalid matches such a placeholder in the
// text without the valid placeholders.
func checkTemplate(text string, invalid *regexp.Regexp) error {
	if remainder := placeholderRegexp.ReplaceAllString(text, ""); invalid.MatchString(remainder) {
		return errors.New("has braces that are not a placeholder; write {body.field}, {header.name}, {delivery} or {endpoint}")
	}
	return nil
}

// parseBody decodes valid JSON.
func parseBody(raw []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, fmt.Errorf("parse body: %w", err)
	}
	return v, nil
}

// At returns the value at a path, or an error.
func (c Content) At(path string) (any, error) {
	if err := checkPath(path); err != nil {
		return nil, err
	}
	root, rest, _ := strings.Cut(path, ".")
	switch root {
	case "delivery":
		return c.DeliveryID, nil
	case "endpoint":
		return c.Endpoint, nil
	case "header":
		values := c.Header[textproto.CanonicalMIMEHeaderKey(rest)]
		if len(values) == 0 {
			return nil, fmt.Errorf("%s: the delivery has no such header", path)
		}
		return values[0], nil
	}
	value := c.Body
	for step := range strings.SplitSeq(rest, ".") {
		if step == "" {
			break
		}
		var ok bool
		if value, ok = descend(value, step); !ok {
			return nil, fmt.Errorf("%s: the body has nothing at %q", path, step)
		}
	}
	return value, nil
}

func descend(value any, step string) (any, bool) {
	switch value := value.(type) {
	case map[string]any:
		v, ok := value[step]
		return v, ok
	case []any:
		i, err := strconv.Atoi(step)
		if err != nil || i < 0 || i >= len(value) {
			return nil, false
		}
		return value[i], true
	}
	return nil, false
}

// Text fills a template with scalars. A missing value, a list, an object or null is an error.
func (c Content) Text(template string) (string, error) {
	return c.fill(template, func(path string, v any) (string, error) {
		switch v := v.(type) {
		case string:
			return v, nil
		case json.Number:
			return v.String(), nil
		case bool:
			return strconv.FormatBool(v), nil
		}
		return "", fmt.Errorf("%s: is %s, not a text, a number or a truth value", path, kindOf(v))
	})
}

// Quoted fills a template with values as JSON, each cut at maxBytes. The quotes separate the sender's text from the
// admin's.
func (c Content) Quoted(template string, maxBytes int) (string, error) {
	return c.fill(template, func(_ string, v any) (string, error) { return quote(v, maxBytes), nil })
}

func (c Content) fill(template string, format func(path string, v any) (string, error)) (string, error) {
	var problems []error
	text := placeholderRegexp.ReplaceAllStringFunc(template, func(match string) string {
		path := match[1 : len(match)-1]
		v, err := c.At(path)
		if err == nil {
			match, err = format(path, v)
		}
		if err != nil {
			problems = append(problems, err)
		}
		return match
	})
	return text, errors.Join(problems...)
}

// quote encodes a value as JSON. It cuts JSON longer than maxBytes, and marks the cut.
func quote(v any, maxBytes int) string {
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(true) // escapes < and >, so that the value cannot close a tag of the prompt
	if err := e.Encode(v); err != nil {
		return "null"
	}
	text := strings.TrimSuffix(out.String(), "\n")
	if len(text) <= maxBytes {
		return text
	}
	return strings.ToValidUTF8(text[:maxBytes], "") + fmt.Sprintf("… (cut: %d bytes in all)", len(text))
}

func kindOf(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case []any:
		return "a list"
	case map[string]any:
		return "an object"
	}
	return fmt.Sprintf("%T", v)
}

// Matches reports whether every path of a filter has the wanted value, or one of several. A missing path does not
// match, because events differ in their fields.
func (c Content) Matches(when map[string]any) bool {
	for path, want := range when {
		v, err := c.At(path)
		if err != nil {
			return false
		}
		options, isList := want.([]any)
		if !isList {
			options = []any{want}
		}
		found := false
		for _, option := range options {
			found = found || equalScalars(v, option)
		}
		if !found {
			return false
		}
	}
	return true
}

// equalScalars compares scalars. A header is a text, so it equals a number with the same digits. A number with a
// fraction or an exponent is compared as a number. Two texts, such as the versions 1.1 and 1.10, are compared as texts.
func equalScalars(a, b any) bool {
	x, okA := scalar(a)
	y, okB := scalar(b)
	_, textA := a.(string)
	_, textB := b.(string)
	if !okA || !okB || x == y || textA && textB || !strings.ContainsAny(x+y, ".eE") {
		return okA && okB && x == y
	}
	m, errA := strconv.ParseFloat(x, 64)
	n, errB := strconv.ParseFloat(y, 64)
	return errA == nil && errB == nil && m == n
}

func scalar(v any) (string, bool) {
	switch v := v.(type) {
	case nil:
		return "null", true
	case float64: // a filter's number, as the database returns it
		return strconv.FormatFloat(v, 'f', -1, 64), true
	case string, bool, json.Number, int, int64, uint64:
		return fmt.Sprint(v), true
	}
	return "", false
}
