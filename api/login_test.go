package api_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	houseproblem "github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
)

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
	c := a.logIn(token)
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
	w = a.raw("GET", "/login?link=other", "", withCookie(c))
	assert.Equal(t, http.StatusOK, w.Code, "the link of another principal, while logged in")
	w = a.raw("GET", "/live/lanes", "", withCookie(c))
	assert.Truef(t, w.Body.String() == "true true", "a stream of a login ends with it, but: %s", w.Body)
	w = a.raw("GET", "/live/lanes", "", asAdmin())
	assert.Truef(t, w.Body.String() == "false false", "a stream of the token: %s", w.Body)
	_, expiring := a.key(principals.User, principals.Admin, time.Hour, "*")
	w = a.raw("GET", "/live/lanes", "", bearer(expiring))
	assert.Truef(t, w.Body.String() == "true false", "a stream of an expiring token: %s", w.Body)
	out := a.raw("POST", "/logout", "", nil)
	assert.Truef(t, out.Code == http.StatusSeeOther && out.Header().Get("Location") == "/login" &&
		strings.Contains(out.Header().Get("Set-Cookie"), "Max-Age=0"), "logout: %d %v", out.Code, out.Header())
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
			access, ok := errors.AsType[*principals.AccessEnded](context.Cause(r.Context()))
			assert.Truef(t, ok && access.Reason == "the session of root was revoked", "the stream ended with %v", access)
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
	c, kept := a.logIn(token), a.logIn(token)
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
	c := a.logIn(token)
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
			ended := a.logIn(secret)
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
				w = a.raw("GET", "/v1/lanes", "", withCookie(a.logIn(secret, old)))
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
	good := a.logIn(token)
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
	c := a.logIn(token)
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
	c := a.logIn(token)
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
		"action":                 {"POST", act, from("http://example.com/lanes?x"), 303, "/login?next=%2Flanes%3Fx&unsent=1"},
		"action elsewhere":       {"POST", act, from("http://evil.example/lanes"), 303, "/login?unsent=1"},
		"action of no page":      {"POST", act, nil, 303, "/login?unsent=1"},
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

// logIn logs in with a secret, in a browser that has old cookies, and returns the cookie.
func (a *agent) logIn(secret string, old ...*http.Cookie) *http.Cookie {
	a.t.Helper()
	body, header := form("token", secret)
	for _, c := range old {
		header.Set("Cookie", c.Name+"="+c.Value)
	}
	w := a.raw("POST", "/login", body, header)
	if cookies := w.Result().Cookies(); w.Code == http.StatusSeeOther && len(cookies) == 1 {
		return cookies[0]
	}
	a.t.Fatalf("login: %d %s", w.Code, w.Body)
	return nil
}

func form(values ...string) (body string, header http.Header) {
	v := url.Values{}
	for i := 0; i < len(values); i += 2 {
		v.Set(values[i], values[i+1])
	}
	return v.Encode(), http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}
}

func withCookie(c *http.Cookie, more ...string) http.Header {
	h := http.Header{"Cookie": {c.Name + "=" + c.Value}, "Content-Type": {"application/json"}}
	for i := 0; i < len(more); i += 2 {
		h.Set(more[i], more[i+1])
	}
	return h
}
