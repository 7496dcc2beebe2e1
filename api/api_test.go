package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestNewRejectsIncompleteOptions(t *testing.T) {
	t.Parallel()
	_, err := api.New(api.Options{})
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "required"), "error is %v", err)
}

// operations lists all operations of the document, with placeholders filled.
func (a *agent) operations() (list [][2]string) {
	for path, methods := range a.doc["paths"].(map[string]any) {
		for method := range methods.(map[string]any) {
			list = append(list, [2]string{strings.ToUpper(method), strings.NewReplacer("{", "", "}", "").Replace(path)})
		}
	}
	return list
}

func TestV1AcceptsOnlyToken(t *testing.T) {
	t.Parallel()
	a := start(t)
	for name, test := range map[string]struct {
		header    string
		status    int
		challenge string
	}{
		"the token":          {"Bearer " + token, 200, ""},
		"any case of scheme": {"bearer " + token, 200, ""},
		"another":            {"Bearer " + token + "x", 401, `Bearer realm="lanekeeper", error="invalid_token"`},
		"a beginning of it":  {"Bearer " + token[:5], 401, `Bearer realm="lanekeeper", error="invalid_token"`},
		"empty":              {"Bearer ", 401, `Bearer realm="lanekeeper"`},
		"another scheme":     {"Basic " + token, 401, `Bearer realm="lanekeeper"`},
		"no scheme":          {token, 401, `Bearer realm="lanekeeper"`},
	} {
		t.Run(name, func(t *testing.T) {
			w := a.raw("GET", "/v1/traces", "", http.Header{"Authorization": {test.header}})
			assert.Equal(t, test.status, w.Code)
			assert.Equal(t, test.challenge, w.Header().Get("WWW-Authenticate"))
		})
	}
}

func TestNoTokenRejectsAll(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := &agent{t: t}
	var err error
	a.handler, err = api.New(api.Options{Pool: pool, Engine: engine(t, pool)})
	require.NoError(t, err)
	for _, header := range []string{"", "Bearer", "Bearer "} {
		a.checkProblem(a.raw("GET", "/v1/traces", "", http.Header{"Authorization": {header}}),
			http.StatusUnauthorized, "token")
	}
}

func TestBadRequestProblems(t *testing.T) {
	t.Parallel()
	a := start(t)
	for name, test := range map[string]struct {
		method, path, body string
		status             int
		words              string
	}{
		"route":               {"GET", "/v1/nothing", "", 404, "/v1/nothing"},
		"route outside":       {"GET", "/nothing", "", 404, "/nothing"},
		"trailing slash":      {"GET", "/v1/traces/", "", 404, "/v1/traces/"},
		"parameter":           {"GET", "/v1/traces?surfaec=chat", "", 400, `"surfaec"`},
		"parameter of a row":  {"GET", "/v1/traces/x?full=1", "", 400, `"full"`},
		"parameter of a post": {"POST", "/v1/lanes/x/break?force=1", "", 400, `"force"`},
		"twice":               {"GET", "/v1/traces?surface=chat&surface=flow", "", 400, "surface occurs 2 times"},
		"surface":             {"GET", "/v1/activity?surface=mail", "", 400, "surface"},
		"status of a trace":   {"GET", "/v1/traces?status=success", "", 400, "status"},
		"activity status":     {"GET", "/v1/activity?status=completed", "", 400, "status"},
		"empty":               {"GET", "/v1/executions?flow=", "", 400, "flow"},
		"too long":            {"GET", "/v1/executions?flow=" + strings.Repeat("x", 400), "", 400, "flow"},
		"NUL":                 {"GET", "/v1/activity?skill=a%00b", "", 400, "skill"},
		"not UTF-8":           {"GET", "/v1/activity?skill=%ff", "", 400, "skill"},
		"escape":              {"GET", "/v1/activity?skill=%zz", "", 400, "query"},
		"since":               {"GET", "/v1/traces?since=yesterday", "", 400, "since"},
		"until":               {"GET", "/v1/activity?until=2026-01-01", "", 400, "until"},
		"limit":               {"GET", "/v1/traces?limit=many", "", 400, "limit"},
		"no limit":            {"GET", "/v1/skills?limit=0", "", 400, "limit"},
		"large limit":         {"GET", "/v1/lanes?limit=501", "", 400, "limit"},
		"enabled":             {"GET", "/v1/skills?enabled=yes", "", 400, "enabled"},
		"trace filter":        {"GET", "/v1/executions?trace_id=zz_1", "", 400, "trace_id"},
		"cursor of traces":    {"GET", "/v1/traces?cursor=x", "", 400, "cursor"},
		"cursor of activity":  {"GET", "/v1/activity?cursor=x", "", 400, "cursor"},
		"cursor of runs":      {"GET", "/v1/executions?cursor=!", "", 400, "cursor"},
		"cursor of lanes":     {"GET", "/v1/lanes?cursor=eHg", "", 400, "cursor"},
		"forged cursor":       {"GET", "/v1/skills?cursor=c2tpbGxzCm5vIGlk", "", 400, "cursor"},
		"cursor with a NUL":   {"GET", "/v1/threads?cursor=dGhyZWFkcwoyMDI2LTAxLTAxVDAwOjAwOjAwWiBhAA", "", 400, "cursor"},
		"cursor not in UTF-8": {"GET", "/v1/lanes?cursor=bGFuZXMKMSD_", "", 400, "cursor"},
		"trace id":            {"GET", "/v1/traces/hb_nonsense", "", 400, "hb_nonsense"},
		"no such trace":       {"GET", "/v1/traces/" + string(trace.New(trace.Chat)), "", 404, "no such trace"},
		"execution id":        {"GET", "/v1/executions/42", "", 400, "42"},
		"no such execution":   {"GET", "/v1/executions/018f0000-0000-7000-8000-000000000000", "", 404, "no such execution"},
		"cancel nothing": {
			"POST", "/v1/executions/018f0000-0000-7000-8000-000000000000/cancel", `{"reason":"x"}`, 404,
			"no such execution",
		},
		"enable nothing":  {"POST", "/v1/skills/nothing/enable", `{"reason":"x"}`, 404, "not found"},
		"disable nothing": {"POST", "/v1/skills/nothing/disable", `{"reason":"x"}`, 404, "not found"},
		"NUL in a skill":  {"POST", "/v1/skills/a%00/disable", `{"reason":"x"}`, 404, "not found"},
		"break nothing":   {"POST", "/v1/lanes/nothing/break", `{"reason":"x"}`, 404, "nothing is not held"},
		"break a run":     {"POST", "/v1/lanes/execution:7/break", `{"reason":"x"}`, 404, "/v1/executions/7/cancel"},
		"NUL in a lane":   {"POST", "/v1/lanes/a%00/break", `{"reason":"x"}`, 400, "control"},
		"long lane":       {"POST", "/v1/lanes/" + strings.Repeat("x", 256) + "/break", `{"reason":"x"}`, 400, "255"},
		"unknown field":   {"POST", "/v1/lanes/x/break", `{"reason":"x","force":true}`, 400, `"force"`},
		"no reason":       {"POST", "/v1/lanes/x/break", `{}`, 400, "reason"},
		"blank reason":    {"POST", "/v1/skills/x/enable", `{"reason":" \n"}`, 400, "reason"},
		"NUL in a reason": {"POST", "/v1/skills/x/enable", `{"reason":"a\u0000"}`, 400, "reason"},
		"long reason":     {"POST", "/v1/skills/x/enable", `{"reason":"` + strings.Repeat("x", 1001) + `"}`, 400, "reason"},
		"wrong type":      {"POST", "/v1/lanes/x/break", `{"reason":7}`, 400, "reason"},
		"null":            {"POST", "/v1/lanes/x/break", `null`, 400, "object"},
		"no body":         {"POST", "/v1/lanes/x/break", "", 400, "object"},
		"cut body":        {"POST", "/v1/lanes/x/break", `{"reason":"x`, 400, "unexpected"},
		"more":            {"POST", "/v1/lanes/x/break", `{"reason":"x"} {}`, 400, "unexpected data after"},
		"too large":       {"POST", "/v1/lanes/x/break", `{"reason":"` + strings.Repeat("x", 1<<20) + `"}`, 413, "1048576"},
		"lifetime of a token": {
			"POST", "/v1/tokens", `{"principal":"x","scopes":["*"],"expires_in":"soon","reason":"x"}`, 400,
			`expires_in is "soon"`,
		},
		"NUL in a principal": {
			"POST", "/v1/tokens", `{"principal":"root\u0000","scopes":["*"],"reason":"x"}`, 404, "no such principal",
		},
		"NUL in a scope": {
			"POST", "/v1/tokens", `{"principal":"root","scopes":["work:\u0000"],"reason":"x"}`, 400, "invalid glob",
		},
		"lifetime of a join token": {
			"POST", "/v1/threads/x/join_tokens", `{"expires_in":"soon"}`, 400, `expires_in is "soon"`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			a.t = t
			a.checkProblem(a.raw(test.method, test.path, test.body, asAdmin()), test.status, test.words)
		})
	}
}

func TestBodyRequiresJSONContentType(t *testing.T) {
	t.Parallel()
	a := start(t)
	for kind, status := range map[string]int{
		"": 415, "text/plain": 415, "application/x-www-form-urlencoded": 415, "application/json; charset=utf-8": 404,
	} {
		header := asAdmin()
		header.Set("Content-Type", kind)
		a.checkProblem(a.raw("POST", "/v1/lanes/x/break", `{"reason":"x"}`, header), status, "")
	}
}

func TestRequestIsLogged(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.raw("GET", "/v1/nothing?secret=1", "", asAdmin())
	got := a.log.String()
	assert.Contains(t, got, "level=DEBUG msg=request", "path=/v1/nothing", "status=404", "duration=")
	assert.Truef(t, !strings.Contains(got, token) && !strings.Contains(got, "secret"), "the log says too much: %s", got)
}

func TestInternalErrorHidesCause(t *testing.T) {
	t.Parallel()
	a := start(t)
	pgtest.Exec(t, a.pool, `alter view agent_locks_live rename to gone`)
	w := a.raw("GET", "/v1/lanes", "", asAdmin())
	a.checkProblem(w, http.StatusInternalServerError, "the log has the cause")
	assert.Truef(t, !strings.Contains(w.Body.String(), "agent_locks_live"), "the client gets %s", w.Body)
	assert.Truef(t, strings.Contains(a.log.String(), `agent_locks_live`), "the log does not have the cause: %s", a.log)
}

func TestSlowDatabaseIsUnavailable(t *testing.T) {
	t.Parallel()
	a := start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	w := a.send(ctx, "GET", "/v1/lanes", "", asAdmin())
	a.checkProblem(w, http.StatusServiceUnavailable, "database")
	assert.True(t, w.Header().Get("Retry-After") != "", "no Retry-After")
}

// lock_timeout and a role's settings end a statement like statement_timeout.
func TestLockTimeoutIsUnavailable(t *testing.T) {
	t.Parallel()
	a := start(t)
	database := pgtest.Value[string](t, a.pool, `select quote_ident(current_database())`)
	pgtest.Exec(t, a.pool, `alter database `+database+` set lock_timeout = '50ms'`)
	a.pool.Reset()
	tx, err := a.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	pgtest.Exec(t, tx, `lock table agent_memory in access exclusive mode`)
	a.checkProblem(a.raw("GET", "/v1/memory", "", asAdmin()), http.StatusServiceUnavailable, "database")
}

func TestOpenAPIDocumentIsComplete(t *testing.T) {
	t.Parallel()
	a := start(t)
	assert.Equal(t, "3.1.0", a.doc["openapi"])
	for _, op := range []string{
		"GET /healthz", "GET /readyz", "GET /v1/traces", "GET /v1/traces/id", "GET /v1/traces/id/why", "GET /v1/activity",
		"GET /v1/executions",
		"GET /v1/executions/id", "POST /v1/executions/id/cancel", "GET /v1/lanes", "POST /v1/lanes/lane/break",
		"GET /v1/skills",
		"POST /v1/skills/name/enable", "POST /v1/skills/name/disable",
	} {
		found := false
		for _, have := range a.operations() {
			found = found || have[0]+" "+have[1] == op
		}
		assert.Truef(t, found, "%s is not in it", op)
	}
	seen := map[string]bool{}
	for path, methods := range a.doc["paths"].(map[string]any) {
		for method, op := range methods.(map[string]any) {
			id := op.(map[string]any)["operationId"].(string)
			assert.Truef(t, !seen[id], "operationId %s of %s %s is not unique", id, method, path)
			seen[id] = true
		}
	}
	text, err := json.Marshal(a.doc)
	require.NoError(t, err)
	components := a.doc["components"].(map[string]any)["schemas"].(map[string]any)
	for _, piece := range strings.Split(string(text), `"#/components/schemas/`)[1:] {
		name, _, _ := strings.Cut(piece, `"`)
		_, known := components[name]
		assert.Truef(t, known, "%s is referred to and not described", name)
	}
}

// failure expects an error in OpenAI's format.
func (a *agent) failure(w *httptest.ResponseRecorder, status int, code string) {
	a.t.Helper()
	var got struct {
		Error map[string]any `json:"error"`
	}
	require.NoError(a.t, json.Unmarshal(w.Body.Bytes(), &got), w.Code, w.Body)
	want := map[string]any{"message": got.Error["message"], "type": "invalid_request_error", "param": nil, "code": code}
	diff := cmp.Diff(want, got.Error)
	assert.Truef(a.t, diff == "" && w.Code == status && w.Header().Get("Content-Type") == "application/json",
		"%d %v: %s", w.Code, w.Header(), diff)
}

func TestOpenAIErrorFormat(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	const path = "/v1/chat/completions"
	a.failure(a.raw("POST", path, "{}", bearer("")), 401, "invalid_api_key")
	a.failure(a.raw("POST", path, "{}", bearer(token)), 401, "invalid_api_key")
	a.failure(a.raw("DELETE", path, "{}", bearer("")), 401, "invalid_api_key")
	a.failure(a.raw("DELETE", path, "", bearer(chatKey)), 405, "method_not_allowed")
	a.failure(a.raw("POST", path, strings.Repeat("x", 101), bearer(chatKey)), 413, "request_entity_too_large")
	form := bearer(chatKey)
	form.Set("Content-Type", "application/x-www-form-urlencoded")
	a.failure(a.raw("POST", path, "a=b", form), 415, "unsupported_media_type")
	w := a.raw("POST", path, "", http.Header{"Authorization": {"Bearer " + chatKey}})
	assert.Truef(t, w.Code == 200, "without a body there is nothing to name, but: %d %s", w.Code, w.Body)
	a.failure(a.raw("POST", "/v1/embeddings", "{}", bearer(chatKey)), 404, "not_found")
	a.checkProblem(a.raw("POST", "/v1/embeddings", "{}", bearer(token)), 404, "/v1/embeddings")
	a.checkProblem(a.raw("POST", "/v1/embeddings", "{}", bearer("")), 401, "AGENT_ADMIN_TOKEN")
}

func TestBodyLimit(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	body := strings.Repeat("x", 100)
	w := a.raw("POST", "/v1/chat/completions", body, bearer(chatKey))
	assert.Truef(t, w.Body.String() == "website|"+body+"|100", "%d %s", w.Code, w.Body)
	large := strings.Repeat("x", 1<<20)
	assert.Equal(t, 200, a.raw("POST", "/webhooks/x", large, nil).Code)
	a.checkProblem(a.raw("POST", "/webhooks/x", large+"x", nil), 413, "1048576")
	plain := http.Header{"Content-Type": {"text/plain"}}
	w = a.raw("POST", "/webhooks/x", "not json", plain)
	assert.Truef(t, w.Body.String() == "|not json|8", "a raw body is %s", w.Body)
}

func TestSecurityHeaders(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t, api.Endpoint{
		Method: "GET", Path: "/page", About: "A page.", Access: api.Public, ContentType: "text/html",
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Security-Policy", "default-src 'self'")
		}),
	})
	for _, path := range []string{
		"/healthz", "/v1/traces", "/v1/nothing", "/nothing", "/v1/models",
		"/webhooks/x", "/openapi.json",
	} {
		header := a.raw("GET", path, "", asAdmin()).Header()
		for name, value := range map[string]string{
			"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
			"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
		} {
			assert.Equal(t, value, header.Get(name), path, name)
		}
		assert.Truef(t, path == "/openapi.json" || header.Get("Cache-Control") == "no-store",
			"%s: Cache-Control is %q", path, header.Get("Cache-Control"))
	}
	assert.Equal(t, "default-src 'self'", a.raw("GET", "/page", "", nil).Header().Get("Content-Security-Policy"))
}

func TestEndpointsAreDocumented(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	paths := a.doc["paths"].(map[string]any)
	op := func(path, method string) map[string]any {
		got, _ := paths[path].(map[string]any)[method].(map[string]any)
		require.Truef(t, got != nil, "%s %s is not described", method, path)
		return got
	}
	chat := op("/v1/chat/completions", "post")
	assert.NoDiff(t, any([]any{map[string]any{"visitor": []any{}}}), chat["security"])
	content := chat["responses"].(map[string]any)["200"].(map[string]any)["content"].(map[string]any)
	assert.Truef(t, content["application/json"] != nil && content["text/event-stream"] != nil, "chat answers %v", content)
	unauthorized := chat["responses"].(map[string]any)["401"].(map[string]any)
	refused := unauthorized["content"].(map[string]any)
	assert.Truef(t, refused["application/json"] != nil, "chat refuses with %v", refused)
	assert.True(t, op("/webhooks/{endpoint}", "post")["responses"].(map[string]any)["202"] != nil,
		"a webhook is not answered with 202")
	for at, status := range map[[2]string]string{
		{"/v1/tokens", "post"}: "404", {"/v1/evals/labels", "post"}: "404",
		{"/v1/memory/entries/{category}/{key}", "put"}: "409", {"/v1/executions/{id}/events", "get"}: "204",
	} {
		assert.Truef(t, op(at[0], at[1])["responses"].(map[string]any)[status] != nil, "%v has no %s", at, status)
	}
	headers := func(op map[string]any) string {
		names := []string{}
		for _, p := range op["parameters"].([]any) {
			if p := p.(map[string]any); p["in"] == "header" {
				names = append(names, p["name"].(string))
			}
		}
		for status, described := range op["responses"].(map[string]any) {
			sent, _ := described.(map[string]any)["headers"].(map[string]any)
			for name := range sent {
				if status < "300" {
					names = append(names, status+" "+name)
				}
			}
		}
		slices.Sort(names)
		return strings.Join(names, ", ")
	}
	assert.Equal(t, "200 Idempotent-Replayed, 200 X-Thread-Id, 200 X-Trace-Id, Idempotency-Key, X-Thread-Join", headers(chat))
	assert.Equal(t, "201 Idempotent-Replayed, Idempotency-Key", headers(op("/v1/executions", "post")))
	assert.Equal(t, "200 X-Trace-Id, Last-Event-ID", headers(op("/v1/executions/{id}/events", "get")))
	assert.True(t, op("/webhooks/{endpoint}", "post")["responses"].(map[string]any)["401"] != nil, "a webhook has no 401")
	upload := op("/v1/documents", "post")["requestBody"].(map[string]any)["content"].(map[string]any)
	assert.Truef(t, upload["multipart/form-data"] != nil && len(upload) == 1, "an upload is %v", upload)
	named := op("/chat/{file}", "get")["parameters"].([]any)
	assert.Truef(t, len(named) == 2, "parameters are %v", named)
}

func TestOpenAPIDescribesFields(t *testing.T) {
	t.Parallel()
	a := start(t)
	components := a.doc["components"].(map[string]any)["schemas"].(map[string]any)
	for field, want := range map[string]string{
		"StartRequest.progress_seconds": "0 is no bound", "ReleaseRequest.timeout": "seconds, or text such as 24h or 7d",
		"StartRequest.on_lost":    "external: fail (default) or hand_on; other flows: resume (default) or fail",
		"LockResponse.checkpoint": "the latest; null before the first",
	} {
		component, name, _ := strings.Cut(field, ".")
		property := components[component].(map[string]any)["properties"].(map[string]any)[name].(map[string]any)
		assert.Equal(t, want, fmt.Sprint(property["description"]), field)
	}
}

func TestOpenAPIListsClosedSets(t *testing.T) {
	t.Parallel()
	a := start(t)
	components := a.doc["components"].(map[string]any)["schemas"].(map[string]any)
	for field, want := range map[string]string{
		"StartRequest.on_lost": "[fail hand_on resume]", "StartRequest.queue": "[background interactive]",
		"ReleaseRequest.status":      "[completed failed waiting]",
		"ReleaseRequest.waiting_for": "[agent approval delay document event response signature test]",
		"DecisionRequest.decision":   "[approve reject]", "ConflictDecision.decision": "[keep take]",
		"Wait.waiting_for":                  "[agent approval delay document event lane response signature test]",
		"ExecutionStatus.status":            "[pending running waiting completed failed timeout cancelled]",
		"executions_Execution.on_lost":      "[fail hand_on resume]",
		"executions_Execution.queue":        "[background interactive]",
		"executions_Execution.waiting_for":  "[agent approval delay document event lane response signature test]",
		"executions_WaitingRow.waiting_for": "[agent approval delay document event lane response signature test]",
		"approvals_Approval.status":         "[pending approved rejected expired consumed]",
		"SkillRow.trust":                    "[auto notify approve]",
		"ExecutionDetail.queue":             "[background interactive]",
		"activity_Row.status":               "[running success error pending_approval skipped unknown]",
		"NewPrincipal.role":                 "[none viewer operator approver admin]",
	} {
		component, name, _ := strings.Cut(field, ".")
		schema, _ := components[component].(map[string]any)
		require.Truef(t, schema != nil, "no component %s", component)
		property := schema["properties"].(map[string]any)[name].(map[string]any)
		if either, has := property["anyOf"].([]any); has { // nullable
			property = either[0].(map[string]any)
		}
		assert.Equal(t, want, fmt.Sprint(property["enum"]), field)
	}
}

// Every operation is complete: path parameters, response descriptions, valid schemas, security.
func TestOpenAPIOperationsAreComplete(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	schemes := a.doc["components"].(map[string]any)["securitySchemes"].(map[string]any)
	tags := fmt.Sprint(a.doc["tags"])
	assert.True(t, a.doc["servers"] != nil, "no server is named")
	for path, methods := range a.doc["paths"].(map[string]any) {
		for method, described := range methods.(map[string]any) {
			op := described.(map[string]any)
			at := strings.ToUpper(method) + " " + path
			var named []string
			for _, p := range op["parameters"].([]any) {
				if p := p.(map[string]any); p["in"] == "path" {
					named = append(named, "{"+p["name"].(string)+"}")
				}
			}
			want := regexp.MustCompile(`\{\w+\}`).FindAllString(path, -1)
			assert.Truef(t, slices.Equal(named, want), "%s: path parameters are %v", at, named)
			for _, alternative := range op["security"].([]any) {
				for scheme := range alternative.(map[string]any) {
					assert.Truef(t, schemes[scheme] != nil, "%s: no scheme %s", at, scheme)
				}
			}
			summary, _ := op["summary"].(string)
			assert.Truef(t, op["description"] != "" && op["operationId"] != "" && summary != "" && len(summary) <= 100,
				"%s is not described, or its summary is too long: %q", at, summary)
			tag := op["tags"].([]any)[0]
			assert.Truef(t, strings.Contains(tags, fmt.Sprintf("name:%s]", tag)), "%s: the tag %s is not declared", at, tag)
			a.answersOf(at, path, method, op["responses"].(map[string]any))
		}
	}
}

// The document lists 429 for all routes but probes, and 413 for routes with a body.
func TestOpenAPIDocumentsLimits(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	for path, methods := range a.doc["paths"].(map[string]any) {
		for method, described := range methods.(map[string]any) {
			answers := described.(map[string]any)["responses"].(map[string]any)
			full, bounded := answers["429"].(map[string]any)
			probe := path == "/healthz" || path == "/readyz"
			assert.Truef(t, bounded != probe, "%s %s: 429 is described: %t", method, path, bounded)
			headers, _ := full["headers"].(map[string]any)
			assert.Truef(t, !bounded || headers["Retry-After"] != nil, "%s %s: 429 without Retry-After", method, path)
			large, reads := answers["413"].(map[string]any)
			assert.Equal(t, method != "get", reads, method, path)
			assert.Truef(t, large["headers"] == nil, "%s %s: 413 is for good, but has headers", method, path)
		}
	}
}

// answersOf checks the responses of one operation.
func (a *agent) answersOf(at, path, method string, answers map[string]any) {
	a.t.Helper()
	escape := strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D")
	done := false
	for status, described := range answers {
		answer := described.(map[string]any)
		done = done || status[0] == '2'
		content, has := answer["content"].(map[string]any)
		assert.Truef(a.t, has == (status != "204") && has == (len(content) > 0) && answer["description"] != "",
			"%s: %s is not described", at, status)
		for kind := range content {
			pointer := "openapi.json#/paths/" + escape.Replace(path) + "/" + method + "/responses/" + status + "/content/" +
				escape.Replace(kind) + "/schema"
			_, err := a.schemas.Compile(pointer)
			assert.NoError(a.t, err, at, status)
		}
	}
	assert.Truef(a.t, done, "%s never succeeds", at)
}
