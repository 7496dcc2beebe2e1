package sdks

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// sdkRoutes are the operations that an SDK uses.
var sdkRoutes = []string{
	"GET /v1/executions/{id}", "POST /v1/events", "POST /v1/executions", "POST /v1/executions/{id}/cancel",
	"POST /v1/executions/{id}/checkpoints", "POST /v1/executions/{id}/lock/{lock_id}", "POST /v1/locks", "PUT /v1/locks",
}

// The types of the SDKs are written by hand. Here a worker and its client see only the response fields that
// openapi.json declares, and each request and response has to match its schema there.
func TestSDKsFollowOpenAPI(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		d := readDocument(w)
		w.worker("first", testkit.Serve(w, d), 3)
		long := w.start("external:scenario", `{"steps":1,"pause_ms":60000}`)
		id := w.start("external:client", `{}`)
		w.waitEffects("add 1", 1)
		w.call("POST", "/v1/executions/"+long+"/cancel", `{"reason":"not needed"}`, nil)
		w.waitEffects("aborted 1", 1) // a heartbeat reported it
		w.checkEnd(id, "completed", "42, then cancelled: not needed, then 404")
		d.checkUsed(w)
	})
}

// document is openapi.json, and a proxy that checks both sides against it.
type document struct {
	*httputil.ReverseProxy
	raw any

	mu         sync.Mutex
	seen       map[string]bool
	violations []string
}

func readDocument(w *testEnv) *document {
	w.Helper()
	got, err := testkit.Do(w.Context(), http.DefaultClient, "GET", w.base+"/openapi.json", "")
	require.NoError(w, err)
	raw, err := jsonschema.UnmarshalJSON(bytes.NewReader(got.Body))
	require.NoError(w, err)
	d := &document{ReverseProxy: w.proxy(), raw: raw, seen: map[string]bool{}}
	d.ModifyResponse = d.answer
	return d
}

// ServeHTTP checks the body of a request and forwards it.
func (d *document) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	operation, _ := d.operation(r)
	d.mu.Lock()
	d.seen[operation] = true
	d.mu.Unlock()
	body, err := io.ReadAll(r.Body)
	if err == nil && len(body) > 0 {
		_, err = d.check(d.pointerTo(r, "requestBody", "content", "application/json", "schema"), body)
	}
	if err != nil {
		d.fault("%s with %s: %v", operation, body, err)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	d.ReverseProxy.ServeHTTP(w, r)
}

// answer checks the body of a response and removes undeclared fields.
func (d *document) answer(r *http.Response) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
	kept, err := d.check(d.pointerTo(r.Request, "responses", strconv.Itoa(r.StatusCode), "content", kind, "schema"), body)
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
	d.violations = append(d.violations, fmt.Sprintf(format, args...))
}

// checkUsed checks that every operation was used, and no other.
func (d *document) checkUsed(w *testEnv) {
	w.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	assert.Equal(w, strings.Join(sdkRoutes, "\n"), strings.Join(slices.Sorted(maps.Keys(d.seen)), "\n"))
	for _, text := range d.violations {
		w.Error(text)
	}
}

// operation returns method and path in the form of the document.
func (d *document) operation(r *http.Request) (operation, path string) {
	parts := strings.Split(r.URL.Path, "/")
	paths := d.lookup("paths").(map[string]any)
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

// pointerTo returns the pointer to a part of a request's operation.
func (d *document) pointerTo(r *http.Request, parts ...string) []string {
	_, path := d.operation(r)
	return append([]string{"paths", path, strings.ToLower(r.Method)}, parts...)
}

// lookup returns a part of the document, or nil.
func (d *document) lookup(pointer ...string) (part any) {
	part = d.raw
	for _, key := range pointer {
		within, _ := part.(map[string]any)
		part = within[key]
	}
	return part
}

// check validates JSON against a schema of the document, and returns it without undeclared properties.
func (d *document) check(pointer []string, text []byte) (kept []byte, err error) {
	schema, is := d.lookup(pointer...).(map[string]any)
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
	declared, extra := d.declaredPart(schema, value)
	if len(extra) > 0 && pointer[3] == "requestBody" {
		return nil, fmt.Errorf("the document has no %q", extra)
	}
	return json.Marshal(declared)
}

// declaredPart returns a value with the properties of a schema, and the names of the others.
func (d *document) declaredPart(schema map[string]any, value any) (kept any, extra []string) {
	if reference, is := schema["$ref"].(string); is {
		return d.declaredPart(d.lookup(strings.Split(strings.TrimPrefix(reference, "#/"), "/")...).(map[string]any), value)
	}
	if either, is := schema["anyOf"].([]any); is { // nullable parts
		return d.declaredPart(either[0].(map[string]any), value)
	}
	switch value := value.(type) {
	case []any:
		if items, is := schema["items"].(map[string]any); is {
			for i := range value {
				var more []string
				value[i], more = d.declaredPart(items, value[i])
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
			value[name], more = d.declaredPart(property, of)
			extra = append(extra, more...)
		}
	}
	return value, extra
}

// A README begins with a whole worker in less than 20 lines, and the README is a page. The test runs the worker as
// printed. Only its bank comes from here.
func TestReadmeWorker(t *testing.T) {
	eachSDK(t, func(w *testEnv) {
		fence, bank, file := "```python\n", readmeBank, "worker.py"
		if w.name == "typescript" {
			fence, bank, file = "```ts\n", "const bank = { charge: async (order, key) => `charged for ${order.id}` };\n", "worker.mjs"
		}
		page, err := os.ReadFile(filepath.Join("../../sdk", w.name, "README.md"))
		require.NoError(w, err)
		code, whole := firstBlock(string(page), fence)
		if lines := strings.Count(code, "\n"); !whole || lines >= 20 || strings.Count(string(page), "\n") > 60 {
			w.Errorf("the worker has %d lines, the README %d", lines, strings.Count(string(page), "\n"))
		}
		folder, index := w.TempDir(), "../../sdk/typescript/index.js"
		if packed && w.name == "typescript" {
			folder, index = filepath.Dir(w.command[1]), "lanekeeper"
		} else if index, err = filepath.Abs(index); err != nil {
			w.Fatal(err)
		}
		code = strings.Replace(code, `from "lanekeeper"`, `from "`+index+`"`, 1)
		w.command[1] = filepath.Join(folder, file)
		require.NoError(w, os.WriteFile(w.command[1], []byte(bank+code), 0o600))
		w.worker("readme", w.base, 30)
		id := w.start("external:order", `{"id":7}`)
		pgtest.Until(w, w.db, "waiting", `select status::text from agent_executions where id = $1::uuid`, id)
		w.call("POST", "/v1/events", `{"event":"EVENT_COMPLETED","key":"shipped 7","data":"parcel 3"}`, nil)
		text := `{"paid":"charged for 7","parcel":"parcel 3"}`
		if w.name == "python" {
			text = `{"paid": "charged for 7", "parcel": "parcel 3"}`
		}
		w.checkEnd(id, "completed", text)
	})
}

// firstBlock returns the code after the first fence of a page. whole reports whether the block is closed.
func firstBlock(page, fence string) (code string, whole bool) {
	_, rest, _ := strings.Cut(page, fence)
	code, _, whole = strings.Cut(rest, "```")
	return code, whole
}

// readmeTypes declares the bank of the README.
const readmeTypes = `declare const bank: {
  charge(order: { id: number }, key: string, signal: AbortSignal): Promise<string>;
};
`

const readmeBank = `import os, sys
sys.path.insert(0, os.environ["SDK"])

class bank:
    def charge(order, key):
        return f"charged for {order['id']}"

`

// packed reports whether the workers use the packages as people install them, like in scripts/prove.
var packed = os.Getenv("AGENT_SDKS") == "packed"

// tests removes the installed packages at the end.
type tests struct{ *testing.M }

func (m tests) Run() int {
	code := m.M.Run()
	if packed {
		if folders, _ := install(); folders != nil {
			_ = os.RemoveAll(folders[""])
		}
	}
	return code
}

// install packs and installs both SDKs once: npm pack, tsc --noEmit on the types and the README, and pip install. It
// returns the folders with the installed packages.
var install = sync.OnceValues(func() (folders map[string]string, err error) {
	dir, err := os.MkdirTemp("", "lanekeeper-sdks-")
	if err != nil {
		return nil, err
	}
	run := func(at, name string, args ...string) {
		if err != nil {
			return
		}
		cmd := exec.Command(name, args...)
		cmd.Dir = at
		if out, failed := cmd.CombinedOutput(); failed != nil {
			err = &installError{strings.Join(append([]string{name}, args...), " "), string(out), failed}
		}
	}
	typescript, python := filepath.Join(dir, "typescript"), filepath.Join(dir, "python")
	for _, folder := range []string{typescript, python} {
		if err := os.Mkdir(folder, 0o755); err != nil {
			return nil, err
		}
	}
	run("../../sdk/typescript", "npm", "pack", "--pack-destination", typescript)
	run(typescript, "sh", "-c",
		"npm install --no-audit --no-fund ./lanekeeper-*.tgz typescript@5.9.3 @types/node@20.19.25")
	for name, from := range map[string]string{
		"scenario.mjs": "../../sdk/typescript/index.js", "types_test.ts": "./index.js", "tsconfig.json": `"index.d.ts", `,
	} {
		source := name
		if name != "scenario.mjs" {
			source = filepath.Join("../../sdk/typescript", name)
		}
		text, read := os.ReadFile(source)
		if read != nil {
			return nil, read
		}
		to := "lanekeeper"
		if name == "tsconfig.json" {
			to = `"readme.mts", `
		}
		changed := []byte(strings.ReplaceAll(string(text), from, to))
		if err := os.WriteFile(filepath.Join(typescript, name), changed, 0o600); err != nil {
			return nil, err
		}
	}
	page, failed := os.ReadFile("../../sdk/typescript/README.md")
	if failed != nil {
		return nil, failed
	}
	code, _ := firstBlock(string(page), "```ts\n")
	if err := os.WriteFile(filepath.Join(typescript, "readme.mts"), []byte(readmeTypes+code), 0o600); err != nil {
		return nil, err
	}
	run(typescript, "npx", "tsc", "--noEmit")
	run(".", "cp", "-r", "../../sdk/python", filepath.Join(dir, "source")) // pip builds inside the folder
	run(dir, "python3", "-m", "pip", "install", "--no-deps", "--target", python, "./source")
	return map[string]string{"": dir, "typescript": typescript, "python": python}, err
})

type installError struct {
	command, out string
	err          error
}

func (e *installError) Error() string { return e.command + ": " + e.err.Error() + "\n" + e.out }

// installed returns the folder of an installed SDK.
func installed(t *testing.T, name string) string {
	t.Helper()
	folders, err := install()
	require.NoError(t, err)
	return folders[name]
}

// Clients that generate code read the API's document. Redocly checks it where the packages are tested.
func TestDocumentIsValidOpenAPI(t *testing.T) {
	t.Parallel()
	w := newTestEnv(t, language{name: "document"})
	got, err := testkit.Do(t.Context(), http.DefaultClient, "GET", w.base+"/openapi.json", "")
	require.NoError(t, err)
	var doc struct {
		OpenAPI       string
		Servers, Tags []any
		Paths         map[string]map[string]struct{ Summary, OperationID string }
	}
	require.NoError(t, json.Unmarshal(got.Body, &doc))
	assert.Truef(t, strings.HasPrefix(doc.OpenAPI, "3.1") && len(doc.Servers) > 0 && len(doc.Tags) > 0,
		"OpenAPI %s with %d servers and %d tags", doc.OpenAPI, len(doc.Servers), len(doc.Tags))
	for path, methods := range doc.Paths {
		for method, op := range methods {
			assert.Truef(t, op.Summary != "" && op.OperationID != "", "%s %s has no summary or no id", method, path)
		}
	}
	if !packed {
		return
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "openapi.json"), got.Body, 0o600))
	lint := exec.CommandContext(t.Context(), "npx", "--yes", "@redocly/cli@2.77.0", "lint", "openapi.json",
		"--skip-rule", "operation-4xx-response") // probes respond only with 200 and 503
	lint.Dir = dir
	lint.Env = append(os.Environ(), "REDOCLY_TELEMETRY=off", "REDOCLY_SUPPRESS_UPDATE_NOTICE=true")
	out, err := lint.CombinedOutput()
	assert.Truef(t, err == nil && bytes.Contains(out, []byte("description is valid")) &&
		!bytes.Contains(out, []byte("Warning was generated")), "redocly: %v\n%s", err, out)
}
