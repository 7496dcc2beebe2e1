package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
)

func TestMain(m *testing.M) {
	time.Local = time.FixedZone("elsewhere", 2*60*60) // so that a missing conversion to UTC shows
	pgtest.Main(leaks.Tests{M: m})
}

const (
	token = "a-long-random-token-of-the-admin-4711"
)

// agent is the API on its own database. It checks every response against the OpenAPI document.
type agent struct {
	t       *testing.T
	pool    *pgxpool.Pool
	engine  *executions.Engine
	handler http.Handler
	log     *testkit.Log
	doc     map[string]any
	schemas *jsonschema.Compiler
}

func start(t *testing.T) *agent {
	t.Helper()
	pool := pgtest.DB(t)
	return newAgent(t, pool, engine(t, pool))
}

// newAgent starts the API. Pool and engine may belong to different databases.
func newAgent(t *testing.T, pool *pgxpool.Pool, e *executions.Engine) *agent {
	t.Helper()
	return newAgentWith(t, api.Options{Pool: pool, Engine: e})
}

// newAgentWith starts the API with options; it adds token and log.
func newAgentWith(t *testing.T, o api.Options) *agent {
	t.Helper()
	a := &agent{t: t, pool: o.Pool, engine: o.Engine, log: &testkit.Log{}}
	o.AdminToken = token
	o.Logger = slog.New(slog.NewTextHandler(a.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var err error
	a.handler, err = api.New(o)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(a.raw("GET", "/openapi.json", "", nil).Body.Bytes(), &a.doc))
	a.schemas = jsonschema.NewCompiler()
	a.schemas.AssertFormat()
	require.NoError(t, a.schemas.AddResource("openapi.json", a.doc))
	return a
}

// engine returns an engine that does not run.
func engine(t *testing.T, pool *pgxpool.Pool) *executions.Engine {
	t.Helper()
	e, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	require.NoError(t, err)
	return e
}

// raw sends a request without changes.
func (a *agent) raw(method, path, body string, header http.Header) *httptest.ResponseRecorder {
	a.t.Helper()
	return a.send(a.t.Context(), method, path, body, header)
}

func (a *agent) send(ctx context.Context, method, path, body string, header http.Header) *httptest.ResponseRecorder {
	a.t.Helper()
	var reader io.Reader
	if body != "" {
		reader = strings.NewReader(body)
	}
	r := httptest.NewRequestWithContext(ctx, method, path, reader)
	maps.Copy(r.Header, header)
	w := httptest.NewRecorder()
	a.handler.ServeHTTP(w, r)
	assert.Truef(a.t, !strings.Contains(w.Body.String(), `+02:00"`),
		"%s %s: a time is not in UTC: %s", method, path, w.Body)
	return w
}

func asAdmin() http.Header {
	return http.Header{"Authorization": {"Bearer " + token}, "Content-Type": {"application/json"}}
}

// get expects 200 and decodes the response.
func (a *agent) get(path string, into any) http.Header {
	a.t.Helper()
	return a.checkResponse(a.raw("GET", path, "", asAdmin()), "GET", path, http.StatusOK, into)
}

// post expects 200 and decodes the response.
func (a *agent) post(path, body string, into any) http.Header {
	a.t.Helper()
	return a.checkResponse(a.raw("POST", path, body, asAdmin()), "POST", path, http.StatusOK, into)
}

type problem struct {
	Type, Title, Detail, Holder string
	Status                      int
	TraceID                     string `json:"trace_id"`
}

// checkProblem expects a problem with a status and words in its detail.
func (a *agent) checkProblem(w *httptest.ResponseRecorder, status int, words string) problem {
	a.t.Helper()
	var p problem
	require.NoError(a.t, json.Unmarshal(w.Body.Bytes(), &p), "status", w.Code, "body", w.Body)
	assert.Truef(a.t, w.Code == status && p.Status == status && p.Type != "" && p.Title != "" &&
		strings.Contains(p.Detail, words), "got %d %+v, want %d with %q", w.Code, p, status, words)
	assert.Equal(a.t, "application/problem+json", w.Header().Get("Content-Type"))
	return p
}

// checkResponse checks a response's status, schema and type, and decodes it.
func (a *agent) checkResponse(w *httptest.ResponseRecorder, method, path string, status int, into any) http.Header {
	a.t.Helper()
	require.Truef(a.t, w.Code == status && w.Header().Get("Content-Type") == "application/json",
		"%s %s: %d %s", method, path, w.Code, w.Body)
	a.checkSchema(method, path, status, w.Body.Bytes())
	require.NoError(a.t, json.Unmarshal(w.Body.Bytes(), into))
	return w.Header()
}

// checkSchema checks a response against the document.
func (a *agent) checkSchema(method, path string, status int, body []byte) {
	a.t.Helper()
	path, _, _ = strings.Cut(path, "?")
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	require.NoError(a.t, err)
	paths := a.doc["paths"].(map[string]any)
	_, exact := paths[path] // executions/bulk, which executions/{id} matches too
	for template := range paths {
		if exact && template != path {
			continue
		}
		form := regexp.MustCompile("^" + regexp.MustCompile(`\{\w+\}`).ReplaceAllString(template, "[^/]+") + "$")
		if !form.MatchString(path) {
			continue
		}
		pointer := strings.ReplaceAll(strings.ReplaceAll(template, "/", "~1"), "{", "%7B")
		schema, err := a.schemas.Compile("openapi.json#/paths/" + strings.ReplaceAll(pointer, "}", "%7D") + "/" +
			strings.ToLower(method) +
			"/responses/" + strconv.Itoa(status) + "/content/application~1json/schema")
		require.NoError(a.t, err)
		assert.NoError(a.t, schema.Validate(value), method, path, "is not as documented")
		return
	}
	a.t.Errorf("%s is not documented", path)
}
