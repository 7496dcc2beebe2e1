package api_test

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
)

const (
	chatKey  = "a-long-random-key-of-the-website-4711"
	otherKey = "a-long-random-key-of-the-app-4711"
)

// echo responds with the caller and the body.
func echo(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusTeapot)
		return
	}
	visitor, _ := api.VisitorFrom(r.Context())
	fmt.Fprintf(w, "%s|%s|%d", visitor, body, r.ContentLength)
}

// withEndpoints starts the API with one endpoint of each kind.
func withEndpoints(t *testing.T, more ...api.Endpoint) *agent {
	t.Helper()
	pool := pgtest.DB(t)
	return newAgentWith(t, api.Options{
		Pool: pool, Engine: engine(t, pool), ChatKeys: map[string]string{"website": chatKey, "app": otherKey},
		Endpoints: append(more, accessEndpoints()...),
	})
}

func accessEndpoints() []api.Endpoint {
	type message struct {
		Text string `json:"text"`
	}
	h := http.HandlerFunc(echo)
	return []api.Endpoint{
		{
			Method: "POST", Path: "/v1/chat/completions", About: "Chat.", Access: api.Visitor,
			Body: message{}, Response: message{}, Headers: map[string]string{"X-Thread-Join": "A join token."},
			ResponseHeaders: map[string]string{"X-Thread-Id": "The thread."},
			Stream:          true, OpenAIErrors: true, MaxBody: 100, Idempotent: true, Handler: h,
		},
		{Method: "GET", Path: "/v1/models", About: "Models.", Access: api.Visitor, OpenAIErrors: true, Handler: h},
		{
			Method: "POST", Path: "/v1/operate", About: "Operate.", Access: api.Admin, Scope: principals.Operate,
			ContentType: "text/event-stream",
			Stream:      true, Handler: h,
		},
		{
			Method: "POST", Path: "/webhooks/{endpoint}", About: "Webhooks.", Access: api.Public, Status: 202, Handler: h,
			Errors: []int{http.StatusUnauthorized},
		},
		{
			Method: "GET", Path: "/chat/{file...}", About: "A page.", Access: api.Public, ContentType: "text/html",
			Query: map[string]string{"dark": "Colours."}, Handler: h,
		},
	}
}

// expectedAccess returns the access to a route. It deliberately repeats the routes' own declarations.
func expectedAccess(method, path string) api.Access {
	switch method + " " + path {
	case "GET /healthz", "GET /readyz", "GET /openapi.json", "POST /webhooks/endpoint", "GET /chat/file":
		return api.Public
	case "POST /v1/chat/completions", "GET /v1/models":
		return api.Visitor
	}
	return api.Admin
}

func bearer(key string) http.Header {
	h := http.Header{"Content-Type": {"application/json"}}
	if key != "" {
		h.Set("Authorization", "Bearer "+key)
	}
	return h
}

func TestUndocumentedMethodsAreRejected(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	for path, methods := range a.doc["paths"].(map[string]any) {
		allow := map[string]bool{}
		for method := range methods.(map[string]any) {
			allow[strings.ToUpper(method)] = true
			if method == "get" {
				allow["HEAD"] = true
			}
		}
		path = strings.NewReplacer("{", "", "}", "").Replace(path)
		key := token
		if strings.HasPrefix(path, "/v1/chat/") || path == "/v1/models" {
			key = chatKey
		}
		for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
			w := a.raw(method, path, "", bearer(key))
			refused := w.Code == http.StatusMethodNotAllowed
			assert.Truef(t, refused != allow[method], "%s %s: %d", method, path, w.Code)
			allowed := map[string]bool{}
			for m := range strings.SplitSeq(w.Header().Get("Allow"), ", ") {
				allowed[m] = true
			}
			assert.Truef(t, allow[method] || maps.Equal(allowed, allow) &&
				strings.Contains(w.Body.String(), w.Header().Get("Allow")),
				"%s %s: Allow is %q: %s", method, path, w.Header().Get("Allow"), w.Body)
		}
	}
}

func TestWrongMethodChecksStrictestAccess(t *testing.T) {
	t.Parallel()
	h := http.HandlerFunc(echo)
	a := withEndpoints(t,
		api.Endpoint{Method: "GET", Path: "/v1/mixed", About: "Read.", Access: api.Public, Handler: h},
		api.Endpoint{
			Method: "POST", Path: "/v1/mixed", About: "Write.", Access: api.Admin, Scope: principals.Operate, Handler: h,
		},
		api.Endpoint{Method: "PUT", Path: "/v1/mixed", About: "Write.", Access: api.Visitor, Handler: h})
	for key, status := range map[string]int{"": 401, chatKey: 401, token: 405} {
		a.checkProblem(a.raw("DELETE", "/v1/mixed", "", bearer(key)), status, "")
	}
}

func TestChatKeyNames(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	for key, name := range map[string]string{chatKey: "website", otherKey: "app"} {
		w := a.raw("GET", "/v1/models", "", bearer(key))
		assert.Truef(t, w.Body.String() == name+"||0", "%s is %s", key, w.Body)
	}
	w := a.raw("POST", "/v1/operate", "x", bearer(token))
	assert.Truef(t, w.Body.String() == "|x|1", "the admin is %s", w.Body)
}

func TestNoChatKeysRejectsVisitors(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := newAgentWith(t, api.Options{Pool: pool, Engine: engine(t, pool), Endpoints: accessEndpoints()})
	for _, key := range []string{"", chatKey, token} {
		assert.Equal(t, http.StatusUnauthorized, a.raw("GET", "/v1/models", "", bearer(key)).Code, key)
	}
}

func TestEqualKeysAreRejected(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := engine(t, pool)
	for name, test := range map[string]struct {
		keys  map[string]string
		words string
	}{
		"empty":           {map[string]string{"a": ""}, "empty"},
		"blank":           {map[string]string{"a": " "}, "empty"},
		"the admin token": {map[string]string{"a": token}, "admin token"},
		"twice":           {map[string]string{"a": "x", "b": "x"}, "are equal"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := api.New(api.Options{Pool: pool, Engine: e, AdminToken: token, ChatKeys: test.keys})
			assert.Truef(t, err != nil && strings.Contains(err.Error(), test.words) && !strings.Contains(err.Error(), token),
				"error is %v", err)
		})
	}
}

func TestForeignOriginsAreRejectedExceptWebhooks(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	for _, op := range a.operations() {
		if op[0] != "POST" {
			continue
		}
		key := token
		if expectedAccess(op[0], op[1]) == api.Visitor {
			key = chatKey
		}
		for _, sent := range []http.Header{{"Sec-Fetch-Site": {"cross-site"}}, {"Origin": {"https://evil.example"}}} {
			header := bearer(key)
			maps.Copy(header, sent)
			w := a.raw(op[0], op[1], "{}", header)
			if refused := w.Code == http.StatusForbidden; refused != !strings.HasPrefix(op[1], "/webhooks/") {
				t.Errorf("%s %s with %v: %d %s", op[0], op[1], sent, w.Code, w.Body)
			}
		}
		header := bearer(key)
		header.Set("Sec-Fetch-Site", "same-origin")
		w := a.raw(op[0], op[1], "{}", header)
		assert.Truef(t, w.Code != http.StatusForbidden, "%s %s from its own page: %s", op[0], op[1], w.Body)
	}
}

func TestInvalidEndpointIsRejected(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := engine(t, pool)
	ok := api.Endpoint{Method: "GET", Path: "/x", About: "X.", Access: api.Public, Handler: http.HandlerFunc(echo)}
	for name, test := range map[string]struct {
		change func(*api.Endpoint)
		words  string
	}{
		"no access":             {func(e *api.Endpoint) { e.Access = 0 }, "access is required"},
		"no handler":            {func(e *api.Endpoint) { e.Handler = nil }, "handler"},
		"no description":        {func(e *api.Endpoint) { e.About = "" }, "description"},
		"no method":             {func(e *api.Endpoint) { e.Method = "" }, "method"},
		"public and idempotent": {func(e *api.Endpoint) { e.Idempotent = true }, "strangers"},
		"bad pattern":           {func(e *api.Endpoint) { e.Path = "/{" }, "/{"},
		"taken":                 {func(e *api.Endpoint) { e.Path = "/healthz" }, "/healthz"},
	} {
		t.Run(name, func(t *testing.T) {
			bad := ok
			test.change(&bad)
			_, err := api.New(api.Options{Pool: pool, Engine: e, Endpoints: slices.Concat([]api.Endpoint{bad})})
			assert.ErrorContains(t, err, test.words)
		})
	}
}

// sendFrom sends a request from an address, optionally through a proxy.
func (a *agent) sendFrom(
	address, forwardedFor, method, path, body string, header http.Header,
) *httptest.ResponseRecorder {
	a.t.Helper()
	r := httptest.NewRequestWithContext(a.t.Context(), method, path, strings.NewReader(body))
	r.Header, r.RemoteAddr = header.Clone(), address+":4711"
	if forwardedFor != "" {
		r.Header.Set("X-Forwarded-For", forwardedFor)
	}
	w := httptest.NewRecorder()
	a.handler.ServeHTTP(w, r)
	return w
}

// guardedRequests send a secret in each possible way.
func guardedRequests() map[string]struct {
	send   func(a *agent, address, forwardedFor, secret string) *httptest.ResponseRecorder
	right  string
	enters int
} {
	type way = struct {
		send   func(a *agent, address, forwardedFor, secret string) *httptest.ResponseRecorder
		right  string
		enters int
	}
	with := func(path string) func(a *agent, address, forwardedFor, secret string) *httptest.ResponseRecorder {
		return func(a *agent, address, forwardedFor, secret string) *httptest.ResponseRecorder {
			return a.sendFrom(address, forwardedFor, "GET", path, "", bearer(secret))
		}
	}
	return map[string]way{
		"admin token":   {with("/v1/lanes"), token, 200},
		"chat key":      {with("/v1/models"), chatKey, 200},
		"unknown route": {with("/v1/nowhere"), token, 404},
		"login": {func(a *agent, address, forwardedFor, secret string) *httptest.ResponseRecorder {
			body, header := form("token", secret)
			return a.sendFrom(address, forwardedFor, "POST", "/login", body, header)
		}, token, 303},
	}
}

func TestWrongSecretsAreThrottledAndLogged(t *testing.T) {
	t.Parallel()
	for name, way := range guardedRequests() {
		t.Run(name, func(t *testing.T) {
			a := withPages(t)
			statuses := map[int]int{}
			for range 1500 {
				w := way.send(a, "192.0.2.1", "", "sesame-sesame")
				statuses[w.Code]++
				require.True(t, w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") != "",
					"the response has no Retry-After")
			}
			assert.Truef(t, statuses[401] >= 5 && statuses[401] <= 20 && statuses[401]+statuses[429] == 1500,
				"the answers are %v", statuses)
			lines := strings.Count(a.log.String(), "wrong credential")
			assert.Truef(t, lines >= 1 && lines <= 10 && !strings.Contains(a.log.String(), "sesame") &&
				!strings.Contains(a.log.String(), way.right), "%d lines, or one with a secret:\n%s", lines, a.log)
			// the address of a guess is slowed down, but this secret is too long to guess
			for _, address := range []string{"192.0.2.1", "192.0.2.2"} {
				w := way.send(a, address, "", way.right)
				assert.Truef(t, w.Code == way.enters, "the right one from %s: %d %s", address, w.Code, w.Body)
			}
		})
	}
}

func TestWeakSecretIsThrottled(t *testing.T) {
	t.Parallel()
	a := withPages(t)
	body, header := form("token", "guess")
	var w *httptest.ResponseRecorder
	pgtest.Eventually(t, func() bool {
		w = a.sendFrom("192.0.2.1", "", "POST", "/login", body, header)
		return w.Code == 429
	}, "wrong tokens are throttled")
	assert.Contains(t, w.Body.String(), "login page|/|Too many wrong tokens")
}

func TestTrustedProxyThrottlesByClient(t *testing.T) {
	t.Parallel()
	for name, way := range guardedRequests() {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.DB(t)
			trusted := clientip.Trusted{netip.MustParsePrefix("10.0.0.0/8")}
			a := newAgentWith(t, api.Options{
				Pool: pool, Engine: engine(t, pool), ChatKeys: map[string]string{"website": chatKey}, Pages: errorPages{},
				Endpoints: accessEndpoints(),
				Proxies:   trusted,
			})
			pgtest.Eventually(t, func() bool { return way.send(a, "10.0.0.1", "198.51.100.1", "wrong").Code == 429 },
				"wrong secrets are throttled")
			for _, from := range []string{"198.51.100.2", "198.51.100.1, 198.51.100.3", ""} {
				assert.Equal(t, 401, way.send(a, "10.0.0.1", from, "wrong").Code, from)
			}
			assert.Equal(t, 401, way.send(a, "192.0.2.9", "198.51.100.1", "wrong").Code)
		})
	}
}
