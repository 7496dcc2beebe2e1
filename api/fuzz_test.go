package api_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// storedValues are requests with $T in place of a text. "$T" in quotes is a JSON string.
var storedValues = []string{
	`POST /v1/events {"event": "EVENT_COMPLETED", "key": "$T", "data": {"a": "$T", "$T": [$T]}, "id": "$T"}`,
	`POST /v1/events {"event": "MESSAGE_RECEIVED", "key": "thread", "data": {"content": "$T"}}`,
	`POST /v1/executions {"flow": "external:$T", "input": {"$T": "$T"}, "thread_id": "$T"}`,
	`POST /v1/executions {"flow": "external:a", "input": $T}`,
	`POST /v1/executions/$X/lock {"owner": "$T", "ttl_seconds": 30}`,
	`POST /v1/executions/$X/checkpoints {"lock_id": "$L", "step": "$T", "output": {"a": "$T"}}`,
	`POST /v1/executions/$X/checkpoints {"lock_id": "$T", "step": "a", "output": $T}`,
	`PUT /v1/retention {"keep": {"$T": "$T"}, "reason": "$T"}`,
	`PUT /v1/retention {"keep": {"activity": "$T"}, "reason": "a"}`,
	`PUT /v1/locks {"lock_ids": ["$T", "$L"]}`,
	`POST /v1/executions/$X/fork {"from": "$T", "input": $T}`,
	`POST /v1/threads {"id": "$T", "participant": "$T", "owner": "$T", "target": "$T"}`,
	`POST /v1/threads {"id": "a", "participant": "$T"}`,
	`POST /v1/threads/thread/messages {"content": "$T"}`,
	`POST /v1/threads/$T/messages {"content": "a"}`,
	`POST /v1/skills/$T/disable {"reason": "$T"}`, `POST /v1/lanes/$T/break {"reason": "$T"}`,
	`POST /v1/approvals/$T {"decision": "reject", "reason": "$T"}`, `POST /v1/resume {"reason": "$T"}`,
	`GET /v1/executions?flow=$T&status=$T&trace_id=$T`, `GET /v1/activity?trace_id=$T&skill=$T&cursor=$T`,
	`GET /v1/executions?cursor=$T`,
	`GET /v1/traces/$T`, `GET /v1/traces?surface=$T&cursor=$T`, `GET /v1/threads/$T`,
	`GET /v1/memory?q=$T&category=$T`, `GET /v1/flows/$T`,
	`GET /v1/skills?q=$T`, `GET /v1/lanes?lane=$T`, `GET /v1/approvals/$T`, `GET /v1/objectives/$T`, `GET /v1/requests/$T`,
	`GET /v1/executions/$T`,
}

// FuzzRequestText sends any text to every route: NUL, invalid UTF-8, half surrogate pairs, large numbers. The server
// accepts or rejects it; it never fails with 5xx.
func FuzzRequestText(f *testing.F) {
	pool := pgtest.DB(f)
	e, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	require.NoError(f, err)
	log := &testkit.Log{}
	handler, err := api.New(api.Options{
		Pool: pool, Engine: e, AdminToken: token,
		Logger: slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	require.NoError(f, err)
	_, err = pool.Exec(f.Context(), `insert into agent_threads (id, channel, participant)
		values ('thread', 'chat', 'ana')`)
	require.NoError(f, err)
	for i := range storedValues {
		for _, text := range []string{"a", "\x00", `\u0000`, `"\ud800"`, "\xff\xfe", "1e400"} {
			f.Add(uint8(i), text)
		}
	}
	for i, text := range []string{
		"", `\ud800\u0000\udc00`, `\udc00\ud800`, "\xed\xa0\x80", `-1e-400`, "12345678901234567890123", "%00", "..", "/",
		"\u2028\ufeff", `\\`, `"`,
		strings.Repeat("x", 3000), strings.Repeat("[", 500) + strings.Repeat("]", 500), `{"a": 1, "a": 2}`,
		"hb_\x00", "\U0010ffff\u0301",
	} {
		f.Add(uint8(i), text)
		f.Add(uint8(i+len(storedValues)/2), text)
	}
	f.Fuzz(func(t *testing.T, which uint8, text string) {
		x, lock := external(t, pool, e)
		method, path, body := request(storedValues[int(which)%len(storedValues)], text, x, lock)
		var sent *strings.Reader
		if sent = strings.NewReader(body); method == http.MethodGet {
			sent = strings.NewReader("")
		}
		target, err := url.Parse(path)
		if err != nil {
			return
		}
		r := httptest.NewRequestWithContext(t.Context(), method, "/", sent)
		r.URL, r.RequestURI = target, target.RequestURI()
		maps.Copy(r.Header, asAdmin())
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		assert.Truef(t, w.Code < http.StatusInternalServerError,
			"%s %q %q: %d %s\n%s", method, path, body, w.Code, w.Body, log)
	})
}

// request inserts the text, and escapes it in a path.
func request(form, text, x, lock string) (method, path, body string) {
	method, rest, _ := strings.Cut(strings.NewReplacer("$X", x, "$L", lock).Replace(form), " ")
	path, body, _ = strings.Cut(rest, " ")
	before, query, asked := strings.Cut(path, "?")
	path = strings.ReplaceAll(before, "$T", url.PathEscape(text))
	if asked {
		path += "?" + strings.ReplaceAll(query, "$T", url.QueryEscape(text))
	}
	return method, path, strings.ReplaceAll(body, "$T", text)
}

// external starts an execution locked by an external worker.
func external(t *testing.T, pool *pgxpool.Pool, e *executions.Engine) (id, lock string) {
	t.Helper()
	x, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "external:fuzz", Surface: trace.Flow})
	require.NoError(t, err)
	got, err := e.LockRun(t.Context(), x.ID, "fuzz", 10*time.Minute)
	require.NoError(t, err)
	return x.ID, got.LockID
}

// hostileValues are JSON values that PostgreSQL or Go may not accept.
var hostileValues = []string{
	`"\u0000"`, `"a\u0000b"`, `"\ud800"`, `"\udc00\ud800"`, "\"\xff\xfe\"", `"\u2028\ufeff"`, `1e400`, `-1e308`,
	`123456789012345678901234567890`, `null`,
	`{"\u0000": "\u0000"}`, `["\u0000"]`, `[[[[]]]]`, `""`, `"` + strings.Repeat("x", 5000) + `"`,
}

var pathParameter = regexp.MustCompile(`\{[^}]*\}`)

// TestNoInputIsServerError puts each hostile value into each key, value and parameter of each route.
func TestNoInputIsServerError(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := newAgent(t, pool, engine(t, pool))
	asked := 0
	paths := a.doc["paths"].(map[string]any)
	for _, path := range slices.Sorted(maps.Keys(paths)) {
		for method, described := range paths[path].(map[string]any) {
			operation, _ := described.(map[string]any)
			if operation == nil || path == "/openapi.json" || strings.HasSuffix(path, "/events") && method == "get" {
				continue
			}
			for _, value := range hostileValues {
				for _, body := range a.bodies(operation, value) {
					a.checkNoServerError(operation, strings.ToUpper(method), path, "a", "", body)
					asked++
				}
				var text string
				if json.Unmarshal([]byte(value), &text) != nil {
					text = value
				}
				if pathParameter.MatchString(path) {
					a.checkNoServerError(operation, strings.ToUpper(method), path, text, "", a.bodies(operation, `"a"`)[0])
					asked++
				}
				for _, name := range parameters(operation) {
					a.checkNoServerError(operation, strings.ToUpper(method), path, "a", name+"="+url.QueryEscape(text), "")
					asked++
				}
			}
		}
	}
	assert.Truef(t, asked >= 1000, "only %d requests were made", asked)
}

// checkNoServerError checks that the response to a request is documented and is no 5xx.
func (a *agent) checkNoServerError(operation map[string]any, method, path, segment, query, body string) {
	a.t.Helper()
	target := &url.URL{Path: pathParameter.ReplaceAllLiteralString(path, segment), RawQuery: query}
	r := httptest.NewRequestWithContext(a.t.Context(), method, "/", strings.NewReader(body))
	r.URL, r.RequestURI = target, target.RequestURI()
	maps.Copy(r.Header, asAdmin())
	w := httptest.NewRecorder()
	a.handler.ServeHTTP(w, r)
	assert.Truef(a.t, w.Code < http.StatusInternalServerError || w.Code == http.StatusServiceUnavailable,
		"%s %q ?%s %.300q: %d %s", method, target.Path, query, body, w.Code, w.Body)
	cleaned := w.Code == http.StatusTemporaryRedirect // ServeMux redirects a path with an empty segment
	assert.Truef(a.t, cleaned || isDocumented(operation, w.Code), "%s %q ?%s %.300q: %d is not documented", method,
		target.Path, query, body, w.Code)
}

// isDocumented reports whether an operation has the status among its responses.
func isDocumented(operation map[string]any, status int) bool {
	responses, _ := operation["responses"].(map[string]any)
	return responses[strconv.Itoa(status)] != nil || responses["default"] != nil
}

// parameters returns the names of an operation's query parameters.
func parameters(operation map[string]any) (names []string) {
	list, _ := operation["parameters"].([]any)
	for _, one := range list {
		if p, _ := one.(map[string]any); p["in"] == "query" {
			names = append(names, p["name"].(string))
		}
	}
	return names
}

// bodies returns a body for each place of the value, with harmless values elsewhere; one empty text for no body.
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
		f := &bodyFiller{a: a, at: at, value: value}
		body := f.fill(schema, 0)
		all = append(all, body)
		if f.places <= at+1 {
			return all
		}
	}
}

// bodyFiller writes a document of a schema with the value in one place.
type bodyFiller struct {
	a          *agent
	at, places int
	value      string
}

func (f *bodyFiller) atTarget() bool {
	f.places++
	return f.places-1 == f.at
}

func (f *bodyFiller) fill(schema map[string]any, depth int) string {
	if ref, ok := schema["$ref"].(string); ok {
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
		if f.atTarget() && strings.HasPrefix(f.value, `"`) {
			key = f.value
		}
		return "{" + key + ": " + f.fill(more, depth+1) + "}"
	case f.atTarget():
		return f.value
	}
	if items, ok := schema["items"].(map[string]any); ok {
		return "[" + f.fill(items, depth+1) + "]"
	}
	if values, ok := schema["enum"].([]any); ok {
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
