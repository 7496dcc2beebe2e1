package api_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// hostile are JSON texts and numbers that the database or a program may not take.
var hostile = []string{
	`"\u0000"`, `"a\u0000b"`, `"\ud800"`, `"\udc00\ud800"`, "\"\xff\xfe\"", `"\u2028\ufeff"`, `1e400`, `-1e308`, `123456789012345678901234567890`, `null`,
	`{"\u0000": "\u0000"}`, `["\u0000"]`, `[[[[]]]]`, `""`, `"` + strings.Repeat("x", 5000) + `"`,
}

var pathParameter = regexp.MustCompile(`\{[^}]*\}`)

// TestNoValueInAnyRouteIsOurMistake puts each hostile value into each place of each route's document: keys, values, parameters.
// Whatever it is, it is taken or refused.
func TestNoValueInAnyRouteIsOurMistake(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := with(t, pool, engine(t, pool))
	asked := 0
	paths := a.doc["paths"].(map[string]any)
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		for method, described := range paths[path].(map[string]any) {
			operation, _ := described.(map[string]any)
			if operation == nil || path == "/openapi.json" || strings.HasSuffix(path, "/events") && method == "get" {
				continue
			}
			for _, value := range hostile {
				for _, body := range a.bodies(operation, value) {
					a.neverOurs(strings.ToUpper(method), path, "a", "", body)
					asked++
				}
				var text string
				if json.Unmarshal([]byte(value), &text) != nil {
					text = value
				}
				if pathParameter.MatchString(path) {
					a.neverOurs(strings.ToUpper(method), path, text, "", a.bodies(operation, `"a"`)[0])
					asked++
				}
				for _, name := range parameters(operation) {
					a.neverOurs(strings.ToUpper(method), path, "a", name+"="+url.QueryEscape(text), "")
					asked++
				}
			}
		}
	}
	if asked < 1000 {
		t.Errorf("only %d requests were made", asked)
	}
}

func (a *agent) neverOurs(method, path, segment, query, body string) {
	a.t.Helper()
	target := &url.URL{Path: pathParameter.ReplaceAllLiteralString(path, segment), RawQuery: query}
	r := httptest.NewRequestWithContext(a.t.Context(), method, "/", strings.NewReader(body))
	r.URL, r.RequestURI = target, target.RequestURI()
	maps.Copy(r.Header, asAdmin())
	w := httptest.NewRecorder()
	a.handler.ServeHTTP(w, r)
	if w.Code >= http.StatusInternalServerError && w.Code != http.StatusServiceUnavailable {
		a.t.Errorf("%s %q ?%s %.300q: %d %s", method, target.Path, query, body, w.Code, w.Body)
	}
}

// parameters are the names of an operation's query parameters.
func parameters(operation map[string]any) (names []string) {
	list, _ := operation["parameters"].([]any)
	for _, one := range list {
		if p, _ := one.(map[string]any); p["in"] == "query" {
			names = append(names, p["name"].(string))
		}
	}
	return names
}

// bodies has the value once in each place of an operation's body, the others being harmless; one empty text without a body.
func (a *agent) bodies(operation map[string]any, value string) []string {
	request, _ := operation["requestBody"].(map[string]any)
	content, _ := request["content"].(map[string]any)
	media, _ := content["application/json"].(map[string]any)
	schema, _ := media["schema"].(map[string]any)
	if schema == nil {
		return []string{""}
	}
	var all []string
	for at := 0; ; at++ {
		f := &filler{a: a, at: at, value: value}
		body := f.fill(schema, 0)
		all = append(all, body)
		if f.places <= at+1 {
			return all
		}
	}
}

// filler writes a document of a schema, with a value at one place.
type filler struct {
	a          *agent
	at, places int
	value      string
}

// here reports whether this place is the one.
func (f *filler) here() bool {
	f.places++
	return f.places-1 == f.at
}

func (f *filler) fill(schema map[string]any, depth int) string {
	if ref, is := schema["$ref"].(string); is {
		schemas := f.a.doc["components"].(map[string]any)["schemas"].(map[string]any)
		schema = schemas[ref[strings.LastIndexByte(ref, '/')+1:]].(map[string]any)
	}
	properties, _ := schema["properties"].(map[string]any)
	more, open := schema["additionalProperties"].(map[string]any)
	switch {
	case depth > 5:
		return `{}`
	case len(properties) > 0:
		var fields []string
		for _, name := range slices.Sorted(maps.Keys(properties)) {
			property, _ := properties[name].(map[string]any)
			fields = append(fields, fmt.Sprintf("%q: %s", name, f.fill(property, depth+1)))
		}
		return "{" + strings.Join(fields, ", ") + "}"
	case open:
		key := `"a"`
		if f.here() && strings.HasPrefix(f.value, `"`) {
			key = f.value
		}
		return "{" + key + ": " + f.fill(more, depth+1) + "}"
	case f.here():
		return f.value
	}
	if items, is := schema["items"].(map[string]any); is {
		return "[" + f.fill(items, depth+1) + "]"
	}
	if values, is := schema["enum"].([]any); is {
		return fmt.Sprintf("%q", values[0])
	}
	switch schema["type"] {
	case "integer", "number":
		return "1"
	case "boolean":
		return "true"
	case "object":
		return "{}"
	}
	return `"a"`
}
