//go:build unix

package sdks

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// sdkRoutes are the operations that an SDK uses.
var sdkRoutes = []string{
	"GET /v1/executions/{id}", "POST /v1/events", "POST /v1/executions", "POST /v1/executions/{id}/cancel",
	"POST /v1/executions/{id}/checkpoints", "POST /v1/executions/{id}/lock/{lock_id}", "POST /v1/locks", "PUT /v1/locks",
}

// The types of the SDKs are written by hand. Here a worker and its client see only those fields of each response that
// openapi.json declares, and each request and response has to match its schema there.
func TestTheSDKsKeepToTheDocument(t *testing.T) {
	eachSDK(t, func(w *world) {
		d := readDocument(w)
		w.worker("first", testkit.Serve(w, d), 3)
		long := w.start("external:scenario", `{"steps":1,"pause_ms":60000}`)
		id := w.start("external:client", `{}`)
		w.await("add 1", 1)
		w.call("POST", "/v1/executions/"+long+"/cancel", `{"reason":"not needed"}`, nil)
		w.await("aborted 1", 1) // a beat told it
		w.expect(id, "completed", "42, then cancelled: not needed, then 404")
		d.used(w)
	})
}

// document is openapi.json, and a proxy that holds both sides to it.
type document struct {
	*httputil.ReverseProxy
	raw any

	mu    sync.Mutex
	seen  map[string]bool
	wrong []string
}

func readDocument(w *world) *document {
	w.Helper()
	got, err := testkit.Do(w.Context(), http.DefaultClient, "GET", w.base+"/openapi.json", "")
	require.NoError(w, err)
	raw, err := jsonschema.UnmarshalJSON(bytes.NewReader(got.Body))
	require.NoError(w, err)
	target, err := url.Parse(w.base)
	require.NoError(w, err)
	d := &document{ReverseProxy: httputil.NewSingleHostReverseProxy(target), raw: raw, seen: map[string]bool{}}
	d.ModifyResponse = d.answer
	return d
}

// ServeHTTP checks the body of a request and passes it on.
func (d *document) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	operation, _ := d.operation(r)
	d.mu.Lock()
	d.seen[operation] = true
	d.mu.Unlock()
	body, err := io.ReadAll(r.Body)
	if err == nil && len(body) > 0 {
		_, err = d.check(d.of(r, "requestBody", "content", "application/json", "schema"), body)
	}
	if err != nil {
		d.fault("%s with %s: %v", operation, body, err)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	d.ReverseProxy.ServeHTTP(w, r)
}

// answer checks the body of a response and removes what the document does not have.
func (d *document) answer(r *http.Response) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
	kept, err := d.check(d.of(r.Request, "responses", strconv.Itoa(r.StatusCode), "content", kind, "schema"), body)
	if err != nil {
		d.fault("the response of %s %s is %s: %v", r.Request.Method, r.Request.URL.Path, body, err)
		kept = body
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(kept)), int64(len(kept))
	r.Header.Set("Content-Length", strconv.Itoa(len(kept)))
	return nil
}

func (d *document) fault(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wrong = append(d.wrong, fmt.Sprintf(format, args...))
}

// used expects each operation to have been used, and nothing else.
func (d *document) used(w *world) {
	w.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	assert.Equal(w, strings.Join(sdkRoutes, "\n"), strings.Join(slices.Sorted(maps.Keys(d.seen)), "\n"))
	for _, text := range d.wrong {
		w.Error(text)
	}
}

// operation returns method and path as the document has them.
func (d *document) operation(r *http.Request) (operation, path string) {
	parts := strings.Split(r.URL.Path, "/")
	paths := d.at("paths").(map[string]any)
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		want := strings.Split(path, "/")
		same := len(want) == len(parts) && paths[path].(map[string]any)[strings.ToLower(r.Method)] != nil
		for i := range want {
			same = same && (want[i] == parts[i] || strings.HasPrefix(want[i], "{"))
		}
		if same {
			return r.Method + " " + path, path
		}
	}
	return r.Method + " " + r.URL.Path + ", which is not in the document", ""
}

// of returns the pointer to a part of the operation of a request.
func (d *document) of(r *http.Request, parts ...string) []string {
	_, path := d.operation(r)
	return append([]string{"paths", path, strings.ToLower(r.Method)}, parts...)
}

// at returns a part of the document; nil if there is none.
func (d *document) at(pointer ...string) (part any) {
	part = d.raw
	for _, key := range pointer {
		within, _ := part.(map[string]any)
		part = within[key]
	}
	return part
}

// check validates JSON against a schema of the document, and returns it without undeclared properties.
func (d *document) check(pointer []string, text []byte) (kept []byte, err error) {
	schema, is := d.at(pointer...).(map[string]any)
	if !is {
		return nil, fmt.Errorf("the document has no %q", pointer)
	}
	escape := strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D")
	address := "openapi.json#"
	for _, key := range pointer {
		address += "/" + escape.Replace(key)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("openapi.json", d.raw); err != nil {
		return nil, err
	}
	compiled, err := compiler.Compile(address)
	if err != nil {
		return nil, err
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err == nil {
		err = compiled.Validate(value)
	}
	if err != nil {
		return nil, err
	}
	declared, extra := d.declared(schema, value)
	if len(extra) > 0 && pointer[3] == "requestBody" {
		return nil, fmt.Errorf("the document has no %q", extra)
	}
	return json.Marshal(declared)
}

// declared returns a value with the properties that a schema has, and the names of the others.
func (d *document) declared(schema map[string]any, value any) (kept any, extra []string) {
	if reference, is := schema["$ref"].(string); is {
		return d.declared(d.at(strings.Split(strings.TrimPrefix(reference, "#/"), "/")...).(map[string]any), value)
	}
	if either, is := schema["anyOf"].([]any); is { // what may be null
		return d.declared(either[0].(map[string]any), value)
	}
	switch value := value.(type) {
	case []any:
		if items, is := schema["items"].(map[string]any); is {
			for i := range value {
				var more []string
				value[i], more = d.declared(items, value[i])
				extra = append(extra, more...)
			}
		}
	case map[string]any:
		properties, is := schema["properties"].(map[string]any)
		if !is { // any JSON
			return value, nil
		}
		for name, of := range value {
			property, is := properties[name].(map[string]any)
			if !is {
				delete(value, name)
				extra = append(extra, name)
				continue
			}
			var more []string
			value[name], more = d.declared(property, of)
			extra = append(extra, more...)
		}
	}
	return value, extra
}
