package api_test

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	houseproblem "github.com/lanekeeper/lanekeeper/internal/problem"
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
			Body: message{}, Response: message{},
			Stream: true, OpenAIErrors: true, MaxBody: 100, Idempotent: true, Handler: h,
		},
		{Method: "GET", Path: "/v1/models", About: "Models.", Access: api.Visitor, OpenAIErrors: true, Handler: h},
		{
			Method: "POST", Path: "/v1/operate", About: "Operate.", Access: api.Admin, Scope: principals.Operate,
			ContentType: "text/event-stream",
			Stream:      true, Handler: h,
		},
		{Method: "POST", Path: "/webhooks/{endpoint}", About: "Webhooks.", Access: api.Public, Status: 202, Handler: h},
		{
			Method: "GET", Path: "/chat/{file...}", About: "A page.", Access: api.Public, ContentType: "text/html",
			Query: map[string]string{"dark": "Colours."}, Handler: h,
		},
	}
}

// expectedAccess lists the access of each route. A missing route fails the test below.
func expectedAccess() map[string]api.Access {
	all := map[string]api.Access{
		"POST /v1/chat/completions": api.Visitor, "GET /v1/models": api.Visitor,
	}
	for _, name := range []string{
		"GET /healthz", "GET /readyz", "GET /openapi.json", "POST /webhooks/endpoint", "GET /chat/file",
	} {
		all[name] = api.Public
	}
	for _, name := range []string{
		"GET /v1/agents", "GET /v1/agents/name",
		"GET /v1/traces", "GET /v1/traces/id", "GET /v1/traces/id/why", "GET /v1/traces/id/prompts", "GET /v1/activity",
		"GET /v1/activity/spend", "GET /v1/activity/slowest", "GET /v1/activity/failing", "GET /v1/activity/audit",
		"GET /v1/executions", "GET /v1/executions/id",
		"POST /v1/executions/id/fork", "POST /v1/executions/id/retry", "POST /v1/executions/id/replay",
		"POST /v1/executions/bulk",
		"GET /v1/monitor/status", "GET /v1/monitor/waiting", "GET /v1/monitor/stuck",
		"GET /v1/monitor/verdict", "POST /v1/monitor/acknowledge",
		"GET /v1/flows", "GET /v1/flows/name", "GET /v1/schemas/flow", "GET /v1/requests", "GET /v1/requests/id",
		"GET /v1/documents", "POST /v1/documents", "GET /v1/documents/id", "GET /v1/documents/id/content",
		"DELETE /v1/documents/id",
		"GET /v1/executions/id/events", "POST /v1/executions/id/cancel", "GET /v1/lanes", "POST /v1/lanes/lane/break",
		"GET /v1/skills", "POST /v1/skills/name/enable", "POST /v1/skills/name/disable", "GET /v1/approvals",
		"GET /v1/approvals/id", "POST /v1/approvals/id", "POST /v1/events", "GET /v1/objectives", "GET /v1/objectives/id",
		"POST /v1/objectives/id/accept", "POST /v1/objectives/id/reject",
		"POST /v1/objectives/id/pause", "POST /v1/objectives/id/resume", "POST /v1/memory/id/forget",
		"GET /v1/memory/entries/category/key", "PUT /v1/memory/entries/category/key",
		"DELETE /v1/memory/entries/category/key",
		"GET /v1/skills/name", "GET /v1/memory/conflicts", "POST /v1/memory/conflicts/id/decide", "GET /v1/automations",
		"GET /v1/automations/id",
		"POST /v1/automations/id/enable", "POST /v1/automations/id/disable", "POST /v1/automations/id/accept",
		"POST /v1/automations/id/run", "GET /v1/memory", "GET /v1/threads", "POST /v1/threads",
		"POST /v1/threads/id/messages", "PATCH /v1/threads/id",
		"POST /v1/threads/id/join_tokens", "POST /v1/threads/id/participants", "GET /v1/threads/id/access",
		"DELETE /v1/threads/id/access/access_id",
		"GET /v1/threads/id", "POST /v1/operate", "POST /v1/executions", "POST /v1/executions/id/lock",
		"PUT /v1/executions/id/lock/lock_id",
		"DELETE /v1/executions/id/lock/lock_id", "POST /v1/executions/id/lock/lock_id", "PUT /v1/locks", "POST /v1/locks",
		"POST /v1/executions/id/checkpoints",
		"GET /v1/webhooks/targets", "POST /v1/webhooks/targets/id/enable", "POST /v1/webhooks/targets/id/disable",
		"POST /v1/webhooks/endpoints/id/enable", "POST /v1/webhooks/endpoints/id/disable",
		"POST /v1/webhooks/outbox/id/resend",
		"POST /v1/automations/runs/id/redrive", "GET /v1/pause", "POST /v1/pause", "POST /v1/resume",
		"GET /v1/retention", "PUT /v1/retention", "GET /v1/me", "GET /v1/principals", "POST /v1/principals",
		"GET /v1/principals/id", "PATCH /v1/principals/id", "POST /v1/principals/id/identities",
		"DELETE /v1/principals/id/identities", "POST /v1/principals/id/login_links", "GET /v1/tokens", "POST /v1/tokens",
		"POST /v1/tokens/id/revoke", "GET /v1/sessions", "POST /v1/sessions/id/revoke",
		"GET /v1/channels", "GET /v1/channels/senders", "POST /v1/channels/pair", "POST /v1/channels/id/unpair",
		"POST /v1/channels/id/enable", "POST /v1/channels/id/disable",
		"GET /v1/evals", "GET /v1/evals/runs", "POST /v1/evals/runs", "GET /v1/evals/runs/id", "GET /v1/evals/labels",
		"POST /v1/evals/labels",
	} {
		all[name] = api.Admin
	}
	return all
}

func bearer(key string) http.Header {
	h := http.Header{"Content-Type": {"application/json"}}
	if key != "" {
		h.Set("Authorization", "Bearer "+key)
	}
	return h
}

func TestRouteAccess(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	table := expectedAccess()
	for _, op := range a.operations() {
		name := op[0] + " " + op[1]
		access, known := table[name]
		if !known {
			t.Errorf("%s has no access rule", name)
			continue
		}
		delete(table, name)
		for who, test := range map[string]struct {
			key    string
			enters map[api.Access]bool
		}{
			"nobody":   {"", map[api.Access]bool{api.Public: true}},
			"wrong":    {"guessed", map[api.Access]bool{api.Public: true}},
			"visitor":  {chatKey, map[api.Access]bool{api.Public: true, api.Visitor: true}},
			"admin":    {token, map[api.Access]bool{api.Public: true, api.Admin: true}},
			"beheaded": {token[1:], map[api.Access]bool{api.Public: true}},
		} {
			w := a.raw(op[0], op[1], "{}", bearer(test.key))
			assert.Equal(t, test.enters[access], w.Code != http.StatusUnauthorized &&
				w.Code != http.StatusTooManyRequests, name, who, w.Code)
			assert.Truef(t, w.Code != http.StatusMethodNotAllowed && !strings.Contains(w.Body.String(), "no route"),
				"%s is documented and is not there: %d %s", name, w.Code, w.Body)
		}
	}
	for name := range table {
		t.Errorf("%s is not a route", name)
	}
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
			assert.Truef(t, allow[method] || maps.Equal(allowed, allow),
				"%s %s: Allow is %q", method, path, w.Header().Get("Allow"))
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
		if expectedAccess()[op[0]+" "+op[1]] == api.Visitor {
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
	for range 6 {
		a.sendFrom("192.0.2.1", "", "POST", "/login", body, header)
	}
	w := a.sendFrom("192.0.2.1", "", "POST", "/login", body, header)
	assert.Truef(t, w.Code == 429 && strings.Contains(w.Body.String(), "login page|/|Too many wrong tokens"),
		"%d %s", w.Code, w.Body)
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
			for range 20 {
				way.send(a, "10.0.0.1", "198.51.100.1", "wrong")
			}
			for from, want := range map[string]int{
				"198.51.100.1": 429, "198.51.100.2": 401,
				"198.51.100.1, 198.51.100.3": 401, "": 401,
			} {
				assert.Equal(t, want, way.send(a, "10.0.0.1", from, "wrong").Code, from)
			}
			assert.Equal(t, 401, way.send(a, "192.0.2.9", "198.51.100.1", "wrong").Code)
		})
	}
}

func TestLogoutRevokesCookie(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	started, ended := make(chan struct{}), make(chan struct{})
	live := api.Endpoint{
		Method: "GET", Path: "/live/lanes", About: "Live.", Access: api.Admin, Scope: principals.Operate, Page: true,
		Stream:      true,
		ContentType: "text/event-stream",
		Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			close(started)
			<-r.Context().Done()
			close(ended)
		}),
	}
	ctx, stop := context.WithCancel(t.Context())
	listener := postgres.NewListener(postgres.Dialer(pool), nil)
	done := make(chan error, 1)
	go func() { done <- listener.Run(ctx) }()
	defer func() {
		stop()
		<-done
	}()
	o := api.Options{
		Pool: pool, Engine: engine(t, pool), Pages: errorPages{}, Endpoints: []api.Endpoint{live},
		Listener: listener,
	}
	a, other := newAgentWith(t, o), newAgentWith(t, o)
	c, kept := a.logIn(), a.logIn()
	require.Equal(t, 200, other.raw("GET", "/v1/lanes", "", withCookie(c)).Code)
	streamed := make(chan struct{})
	go func() {
		defer close(streamed)
		other.raw("GET", "/live/lanes", "", withCookie(c))
	}()
	<-started
	out := a.raw("POST", "/logout", "", withCookie(c))
	require.Truef(t, out.Code == http.StatusSeeOther && strings.Contains(out.Header().Get("Set-Cookie"), "Max-Age=0"),
		"logout: %d %v", out.Code, out.Header())
	select {
	case <-ended:
		<-streamed
	case <-time.After(pgtest.Timeout):
		t.Fatal("the stream of the login did not end")
	}
	for name, p := range map[string]*agent{"here": a, "elsewhere": other} {
		assert.Equal(t, http.StatusUnauthorized, p.raw("GET", "/v1/lanes", "", withCookie(c)).Code, name)
		assert.Equal(t, 200, p.raw("GET", "/v1/lanes", "", withCookie(kept)).Code, name)
	}
	a.raw("POST", "/logout", "", withCookie(kept))
	a.raw("POST", "/logout", "", withCookie(kept)) // a second time, like from another tab
	a.raw("POST", "/logout", "", withCookie(&http.Cookie{Name: c.Name, Value: "somebody.99999999999.else"}))
	pgtest.Equal(t, pool, 2, `select count(*) from agent_sessions where revoked_at is not null`)
}

func TestLogoutFailsWithoutDatabase(t *testing.T) {
	t.Parallel()
	a := withPages(t)
	c := a.logIn()
	pgtest.Exec(t, a.pool, `alter table agent_sessions rename to away`)
	for _, ask := range [][2]string{{"POST", "/logout"}, {"GET", "/v1/lanes"}, {"GET", "/lanes"}} {
		w := a.raw(ask[0], ask[1], "", withCookie(c))
		assert.Truef(t, w.Code >= 500 && w.Header().Get("Set-Cookie") == "", "%s: %d %v", ask, w.Code, w.Header())
	}
}

func TestCookiesOfAgentsOnOneHost(t *testing.T) {
	t.Parallel()
	a := withPages(t)
	names := map[string]bool{}
	for _, host := range []string{"agent.example", "localhost:8080", "localhost:8081", "[::1]:8080"} {
		body, header := form("token", token)
		r := httptest.NewRequestWithContext(t.Context(), "POST", "http://"+host+"/login", strings.NewReader(body))
		r.Header = header
		w := httptest.NewRecorder()
		a.handler.ServeHTTP(w, r)
		for _, c := range w.Result().Cookies() {
			names[c.Name] = true
		}
	}
	for _, name := range []string{"lanekeeper_session", "lanekeeper_session_8080", "lanekeeper_session_8081"} {
		assert.Truef(t, names[name], "there is no cookie %s: %v", name, names)
	}
}

// errorPages write their arguments as the page.
type errorPages struct{}

func (errorPages) LogIn(w http.ResponseWriter, _ *http.Request, status int, next, wrong string) {
	w.WriteHeader(status)
	fmt.Fprintf(w, "login page|%s|%s", next, wrong)
}

func (errorPages) Refuse(w http.ResponseWriter, _ *http.Request, err error) {
	refusal, _ := houseproblem.Of(err)
	w.WriteHeader(refusal.Status)
	fmt.Fprintf(w, "error page|%s", refusal.Detail)
}

// scopeFor returns the scope of an endpoint in tests.
func scopeFor(access api.Access) principals.Scope {
	if access == api.Admin {
		return principals.Operate
	}
	return ""
}

// withPages starts the API with pages of each kind.
func withPages(t *testing.T) *agent {
	t.Helper()
	pool := pgtest.DB(t)
	h := http.HandlerFunc(echo)
	row := func(method, path string, access api.Access) api.Endpoint {
		return api.Endpoint{
			Method: method, Path: path, About: "A page.", Access: access, Scope: scopeFor(access), Page: true, Handler: h,
		}
	}
	live := row("GET", "/live/lanes", api.Admin)
	live.Stream, live.ContentType = true, "text/event-stream"
	live.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		until, has := r.Context().Deadline()
		fmt.Fprintf(w, "%v %v", has, time.Until(until) > 11*time.Hour)
	})
	return newAgentWith(t, api.Options{
		Pool: pool, Engine: engine(t, pool), ChatKeys: map[string]string{"website": chatKey}, Pages: errorPages{},
		Endpoints: append([]api.Endpoint{
			row("GET", "/login", api.Public), row("GET", "/{$}", api.Admin), row("GET", "/lanes", api.Admin),
			row("GET", "/lanes/{id}", api.Admin),
			row("GET", "/lanes/new", api.Admin), row("POST", "/act/v1/lanes/{lane}/break", api.Admin), live,
		}, accessEndpoints()...),
	})
}

func form(values ...string) (body string, header http.Header) {
	v := url.Values{}
	for i := 0; i < len(values); i += 2 {
		v.Set(values[i], values[i+1])
	}
	return v.Encode(), http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}
}

// logIn returns the cookie of a login.
func (a *agent) logIn() *http.Cookie {
	a.t.Helper()
	body, header := form("token", token)
	w := a.raw("POST", "/login", body, header)
	if cookies := w.Result().Cookies(); w.Code == http.StatusSeeOther && len(cookies) == 1 {
		return cookies[0]
	}
	a.t.Fatalf("login: %d %s", w.Code, w.Body)
	return nil
}

func withCookie(c *http.Cookie, more ...string) http.Header {
	h := http.Header{"Cookie": {c.Name + "=" + c.Value}, "Content-Type": {"application/json"}}
	for i := 0; i < len(more); i += 2 {
		h.Set(more[i], more[i+1])
	}
	return h
}

func TestLoginCookieReplacesToken(t *testing.T) {
	t.Parallel()
	a := withPages(t)
	body, header := form("token", " "+token+"\n", "next", "/lanes?x=1")
	header.Set("X-Forwarded-Proto", "https")
	w := a.raw("POST", "/login", body, header)
	set := w.Header().Get("Set-Cookie")
	assert.Truef(t, w.Code == http.StatusSeeOther && w.Header().Get("Location") == "/lanes?x=1",
		"login: %d to %s", w.Code, w.Header().Get("Location"))
	assert.Contains(t, set, "lanekeeper_session=", "Path=/", "HttpOnly", "SameSite=Strict", "Secure", "Max-Age=43200")
	c := a.logIn()
	assert.True(t, !c.Secure, "the cookie of a login without TLS would never come back")
	for path, want := range map[string]int{"/v1/lanes": 200, "/lanes": 200, "/v1/models": 401} {
		w := a.raw("GET", path, "", withCookie(c))
		assert.Truef(t, w.Code == want, "%s: %d %s", path, w.Code, w.Body)
	}
	w = a.raw("POST", "/v1/skills/none/enable", `{"reason":"x"}`, withCookie(c))
	assert.Truef(t, w.Code == http.StatusNotFound, "an action: %d %s", w.Code, w.Body)
	assert.Equal(t, http.StatusUnauthorized, a.raw("GET", "/v1/lanes", "",
		withCookie(c, "Authorization", "Bearer wrong")).Code)
	w = a.raw("GET", "/login?next=/lanes", "", withCookie(c))
	assert.Truef(t, w.Code == http.StatusSeeOther && w.Header().Get("Location") == "/lanes#",
		"the login page, while logged in: %d %s", w.Code, w.Body)
	w = a.raw("GET", "/live/lanes", "", withCookie(c))
	assert.Truef(t, w.Body.String() == "true true", "a stream of a login ends with it, but: %s", w.Body)
	w = a.raw("GET", "/live/lanes", "", asAdmin())
	assert.Truef(t, w.Body.String() == "false false", "a stream of the token: %s", w.Body)
	out := a.raw("POST", "/logout", "", nil)
	assert.Truef(t, out.Code == http.StatusSeeOther && out.Header().Get("Location") == "/login" &&
		strings.Contains(out.Header().Get("Set-Cookie"), "Max-Age=0"), "logout: %d %v", out.Code, out.Header())
}

// An expired cookie leads to the login page and does not slow down the address.
func TestOldCookieIsNotThrottled(t *testing.T) {
	t.Parallel()
	for name, secret := range map[string]string{"strong token": token, "weak token": "correct-horse-17"} {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.DB(t)
			h, err := api.New(api.Options{
				Pool: pool, Engine: engine(t, pool), AdminToken: secret, Pages: errorPages{}, Endpoints: []api.Endpoint{
					{Method: "GET", Path: "/login", About: "A page.", Access: api.Public, Page: true, Handler: http.HandlerFunc(echo)},
					{
						Method: "GET", Path: "/lanes", About: "A page.", Access: api.Admin, Scope: principals.Operate, Page: true,
						Handler: http.HandlerFunc(echo),
					},
				},
			})
			require.NoError(t, err)
			a := &agent{t: t, pool: pool, handler: h}
			login := func(more ...*http.Cookie) *http.Cookie {
				body, header := form("token", secret)
				for _, c := range more {
					header.Set("Cookie", c.Name+"="+c.Value)
				}
				w := a.raw("POST", "/login", body, header)
				if cookies := w.Result().Cookies(); w.Code == http.StatusSeeOther && len(cookies) == 1 {
					return cookies[0]
				}
				t.Fatalf("login: %d %s", w.Code, w.Body)
				return nil
			}
			ended := login()
			a.raw("POST", "/logout", "", withCookie(ended))
			for name, old := range map[string]*http.Cookie{
				"another token": {Name: ended.Name, Value: "A." + ended.Value},
				"ended":         ended,
			} {
				for range 50 {
					w := a.raw("GET", "/v1/lanes", "", withCookie(old))
					require.Truef(t, w.Code == http.StatusUnauthorized, "%s: %d %s", name, w.Code, w.Body)
				}
				w := a.raw("GET", "/lanes", "", withCookie(old))
				assert.Truef(t, w.Code == http.StatusSeeOther && w.Header().Get("Location") == "/login?next=%2Flanes" &&
					clearsCookie(w, old), "%s: a page: %d %v", name, w.Code, w.Header())
				if w := a.raw("GET", "/login", "", withCookie(old)); w.Code != http.StatusOK || !clearsCookie(w, old) {
					t.Errorf("%s: the login page: %d %v", name, w.Code, w.Header())
				}
				w = a.raw("GET", "/v1/lanes", "", withCookie(login(old)))
				assert.Truef(t, w.Code == http.StatusOK, "%s: after another login: %d %s", name, w.Code, w.Body)
			}
		})
	}
}

func clearsCookie(w *httptest.ResponseRecorder, c *http.Cookie) bool {
	set := w.Result().Cookies()
	return len(set) == 1 && set[0].Name == c.Name && set[0].MaxAge < 0
}

func TestInvalidCookieIsRejected(t *testing.T) {
	t.Parallel()
	a := withPages(t)
	good := a.logIn()
	for name, value := range map[string]string{
		"empty": "", "longer": good.Value + "A", "another": strings.Repeat("A", len(good.Value)),
		"beheaded": good.Value[1:], "trimmed": good.Value[:len(good.Value)-1], "token": token,
		"lower case": strings.ToLower(good.Value),
	} {
		assert.Equal(t, http.StatusUnauthorized, a.raw("GET", "/v1/lanes", "",
			withCookie(&http.Cookie{Name: good.Name, Value: value})).Code, name)
	}
	pool := a.pool
	again, err := api.New(api.Options{Pool: pool, Engine: engine(t, pool), AdminToken: token, Pages: errorPages{}})
	require.NoError(t, err)
	rotated, err := api.New(api.Options{Pool: pool, Engine: engine(t, pool), AdminToken: token + "2", Pages: errorPages{}})
	require.NoError(t, err)
	none, err := api.New(api.Options{Pool: pool, Engine: engine(t, pool), Pages: errorPages{}})
	require.NoError(t, err)
	for name, test := range map[string]struct {
		handler http.Handler
		status  int
	}{"another process": {again, 200}, "another token": {rotated, 401}, "no token": {none, 401}} {
		other := &agent{t: t, handler: test.handler}
		assert.Equal(t, test.status, other.raw("GET", "/v1/lanes", "", withCookie(good)).Code, name)
	}
	other := &agent{t: t, handler: none}
	body, header := form("token", "")
	assert.Equal(t, http.StatusUnauthorized, other.raw("POST", "/login", body, header).Code)
}

func TestCookieRejectsForeignOrigins(t *testing.T) {
	t.Parallel()
	a := withPages(t)
	c := a.logIn()
	link := []string{"Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}
	for name, test := range map[string]struct {
		method, path string
		header       []string
		status       int
	}{
		"own page reads":    {"GET", "/v1/lanes", []string{"Sec-Fetch-Site", "same-origin"}, 200},
		"address bar":       {"GET", "/lanes", []string{"Sec-Fetch-Site", "none"}, 200},
		"same site reads":   {"GET", "/v1/lanes", []string{"Sec-Fetch-Site", "same-site"}, 403},
		"other site reads":  {"GET", "/v1/lanes", []string{"Sec-Fetch-Site", "cross-site"}, 403},
		"old browser reads": {"GET", "/v1/lanes", []string{"Origin", "http://evil.example"}, 403},
		"old browser, own":  {"GET", "/v1/lanes", []string{"Origin", "http://example.com"}, 200},
		"link to a page":    {"GET", "/lanes", append([]string{"Sec-Fetch-Site", "same-site"}, link...), 200},
		"link to the API":   {"GET", "/v1/lanes", append([]string{"Sec-Fetch-Site", "same-site"}, link...), 403},
		"frame of a page": {"GET", "/lanes", []string{
			"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate",
			"Sec-Fetch-Dest", "iframe",
		}, 403},
		"stream": {"GET", "/live/lanes", append([]string{"Sec-Fetch-Site", "same-site"}, link...), 403},
		"form on another site": {
			"POST", "/act/v1/lanes/x/break", append([]string{"Sec-Fetch-Site", "same-site"}, link...),
			403,
		},
		"old browser, form": {"POST", "/act/v1/lanes/x/break", []string{"Origin", "http://evil.example"}, 403},
		"form of our own": {
			"POST", "/act/v1/lanes/x/break",
			[]string{"Sec-Fetch-Site", "same-origin", "Origin", "http://example.com"},
			200,
		},
		"login from other sites": {"POST", "/login", []string{"Sec-Fetch-Site", "cross-site"}, 403},
	} {
		w := a.raw(test.method, test.path, "", withCookie(c, test.header...))
		assert.Truef(t, w.Code == test.status, "%s: %d %s, want %d", name, w.Code, w.Body, test.status)
	}
	w := a.raw("GET", "/v1/lanes", "", withCookie(c))
	h := w.Header()
	assert.Truef(t, h.Get("Cross-Origin-Resource-Policy") == "same-origin" && strings.Contains(h.Get("Vary"), "Cookie") &&
		h.Get("Cache-Control") == "no-store", "headers are %v", h)
}

func TestPageErrorsArePages(t *testing.T) {
	t.Parallel()
	a := withPages(t)
	c := a.logIn()
	browser, act := http.Header{"Accept": {"text/html,*/*"}}, "/act/v1/lanes/x/break"
	admin := http.Header{"Authorization": {"Bearer " + token}}
	from := func(page string) http.Header { return http.Header{"Referer": {page}} }
	for name, test := range map[string]struct {
		method, path string
		header       http.Header
		status       int
		want         string // in the body or the Location
	}{
		"page":                   {"GET", "/lanes?x=%2F", nil, 303, "/login?next=%2Flanes%3Fx%3D%252F"},
		"head":                   {"HEAD", "/lanes", nil, 303, "/login?next=%2Flanes"},
		"overview":               {"GET", "/", nil, 303, "/login"},
		"action":                 {"POST", act, from("http://example.com/lanes?x=1"), 303, "/login?next=%2Flanes%3Fx%3D1"},
		"action elsewhere":       {"POST", act, from("http://evil.example/lanes"), 303, "/login"},
		"action of no page":      {"POST", act, nil, 303, "/login"},
		"stream":                 {"GET", "/live/lanes", nil, 401, "AGENT_ADMIN_TOKEN"},
		"wrong method":           {"DELETE", "/lanes", withCookie(c), 405, "error page|"},
		"wrong method of a case": {"DELETE", "/lanes/new", withCookie(c), 405, "error page|"},
		"a case":                 {"GET", "/lanes/new", withCookie(c), 200, ""},
		"no such page":           {"GET", "/nowhere", browser, 404, "error page|no page /nowhere"},
		"no such route":          {"GET", "/nowhere", nil, 404, "no route"},
		"no such route in v1":    {"GET", "/v1/nowhere", browser, 401, "AGENT_ADMIN_TOKEN"},
		"v1":                     {"GET", "/v1", admin, 404, `"no route /v1; see`},
		"two slashes":            {"GET", "/v1//x", admin, 404, `"no route /v1//x; see`},
		"two slashes first":      {"GET", "//v1/x", nil, 401, "AGENT_ADMIN_TOKEN"},
		"two slashes of a route": {"GET", "/v1//lanes", nil, 307, "/v1/lanes"},
		"two slashes of a page":  {"GET", "/lanes//new", nil, 307, "/lanes/new"},
		"two slashes nowhere":    {"POST", "/no//where", nil, 404, `"no route /no//where; see`},
		"two slashes in a key":   {"PATCH", "/v1/memory/entries/a/b%2F%2Fc", admin, 405, "use GET, HEAD, PUT, DELETE"},
		"login is no place":      {"GET", "/login", nil, 200, ""},
	} {
		w := a.raw(test.method, test.path, "", test.header)
		place := w.Header().Get("Location")
		shown := place == test.want || place == "" && strings.Contains(w.Body.String(), test.want)
		assert.Truef(t, w.Code == test.status && shown, "%s: %d %q %s", name, w.Code, place, w.Body)
		noPage := strings.HasPrefix(test.path, "/v1") || strings.Contains(test.path, "//")
		assert.Truef(t, !noPage || !strings.HasPrefix(w.Body.String(), "<"), "%s: %s", name, w.Body)
	}
	for path := range a.doc["paths"].(map[string]any) {
		assert.Truef(t, !strings.HasPrefix(path, "/l") && path != "/", "page %s is in the document", path)
	}
}

func TestLoginRedirectStaysLocal(t *testing.T) {
	t.Parallel()
	a := withPages(t)
	for next, want := range map[string]string{
		"//evil.example": "/", "https://evil.example": "/", "/login?next=/x": "/", "/logout": "/", "/\\evil.example": "/",
		"/skills/a%2Fb": "/skills/a%2Fb",
	} {
		body, header := form("token", token, "next", next)
		assert.Equal(t, want, a.raw("POST", "/login", body, header).Header().Get("Location"), next, "leads to")
	}
	assert.Equal(t, http.StatusUnsupportedMediaType, a.raw("POST", "/login", `{"token":"`+token+`"}`,
		http.Header{"Content-Type": {"application/json"}}).Code)
}
