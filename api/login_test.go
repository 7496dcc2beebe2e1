package api_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	houseproblem "github.com/lanekeeper/lanekeeper/internal/problem"
)

// shownPages say what they were asked to show.
type shownPages struct{}

func (shownPages) LogIn(w http.ResponseWriter, _ *http.Request, status int, next, wrong string) {
	w.WriteHeader(status)
	fmt.Fprintf(w, "login page|%s|%s", next, wrong)
}

func (shownPages) Refuse(w http.ResponseWriter, _ *http.Request, err error) {
	told, _ := houseproblem.Of(err)
	w.WriteHeader(told.Status)
	fmt.Fprintf(w, "error page|%s", told.Detail)
}

// paged is the API with pages of each kind.
func paged(t *testing.T) *agent {
	t.Helper()
	pool := pgtest.DB(t)
	h := http.HandlerFunc(echo)
	row := func(method, path string, access api.Access) api.Endpoint {
		return api.Endpoint{Method: method, Path: path, About: "A page.", Access: access, Page: true, Handler: h}
	}
	live := row("GET", "/live/lanes", api.Admin)
	live.Stream, live.ContentType = true, "text/event-stream"
	live.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		until, has := r.Context().Deadline()
		fmt.Fprintf(w, "%v %v", has, time.Until(until) > 11*time.Hour)
	})
	return wired(t, api.Options{
		Pool: pool, Engine: engine(t, pool), ChatKeys: map[string]string{"website": chatKey}, Pages: shownPages{},
		Endpoints: append([]api.Endpoint{
			row("GET", "/login", api.Public), row("GET", "/{$}", api.Admin), row("GET", "/lanes", api.Admin), row("GET", "/lanes/{id}", api.Admin),
			row("GET", "/lanes/new", api.Admin), row("POST", "/act/v1/lanes/{lane}/break", api.Admin), live,
		}, kinds()...),
	})
}

func form(values ...string) (body string, header http.Header) {
	v := url.Values{}
	for i := 0; i < len(values); i += 2 {
		v.Set(values[i], values[i+1])
	}
	return v.Encode(), http.Header{"Content-Type": {"application/x-www-form-urlencoded"}}
}

// logIn is the cookie of a login.
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

func with1(c *http.Cookie, more ...string) http.Header {
	h := http.Header{"Cookie": {c.Name + "=" + c.Value}, "Content-Type": {"application/json"}}
	for i := 0; i < len(more); i += 2 {
		h.Set(more[i], more[i+1])
	}
	return h
}

func TestALoginIsACookieInThePlaceOfTheToken(t *testing.T) {
	t.Parallel()
	a := paged(t)
	body, header := form("token", " "+token+"\n", "next", "/lanes?x=1")
	header.Set("X-Forwarded-Proto", "https")
	w := a.raw("POST", "/login", body, header)
	set := w.Header().Get("Set-Cookie")
	if w.Code != http.StatusSeeOther || w.Header().Get("Location") != "/lanes?x=1" {
		t.Errorf("login: %d to %s", w.Code, w.Header().Get("Location"))
	}
	for _, word := range []string{"lanekeeper_session=", "Path=/", "HttpOnly", "SameSite=Strict", "Secure", "Max-Age=43200"} {
		if !strings.Contains(set, word) {
			t.Errorf("%s is not in %s", word, set)
		}
	}
	c := a.logIn()
	if c.Secure {
		t.Error("the cookie of a login without TLS would never come back")
	}
	for path, want := range map[string]int{"/v1/lanes": 200, "/lanes": 200, "/v1/models": 401} {
		if w := a.raw("GET", path, "", with1(c)); w.Code != want {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
	if w := a.raw("POST", "/v1/skills/none/enable", `{"reason":"x"}`, with1(c)); w.Code != http.StatusNotFound {
		t.Errorf("a lever: %d %s", w.Code, w.Body)
	}
	if w := a.raw("GET", "/v1/lanes", "", with1(c, "Authorization", "Bearer wrong")); w.Code != http.StatusUnauthorized {
		t.Errorf("a wrong token with a good cookie: %d", w.Code)
	}
	if w := a.raw("GET", "/login?next=/lanes", "", with1(c)); w.Code != http.StatusSeeOther || w.Header().Get("Location") != "/lanes" {
		t.Errorf("the login page for who is logged in: %d %s", w.Code, w.Body)
	}
	if w := a.raw("GET", "/live/lanes", "", with1(c)); w.Body.String() != "true true" {
		t.Errorf("a stream of a login ends with it, but: %s", w.Body)
	}
	if w := a.raw("GET", "/live/lanes", "", asAdmin()); w.Body.String() != "false false" {
		t.Errorf("a stream of the token: %s", w.Body)
	}
	out := a.raw("POST", "/logout", "", nil)
	if out.Code != http.StatusSeeOther || out.Header().Get("Location") != "/login" || !strings.Contains(out.Header().Get("Set-Cookie"), "Max-Age=0") {
		t.Errorf("logout: %d %v", out.Code, out.Header())
	}
}

// An admin whose cookie is old, because the token is another now or the login has ended, is shown the login and logs
// in: nothing is held against the address.
func TestAnOldCookieCostsNothing(t *testing.T) {
	t.Parallel()
	for name, secret := range map[string]string{"strong token": token, "weak token": "correct-horse-17"} {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.DB(t)
			h, err := api.New(api.Options{
				Pool: pool, Engine: engine(t, pool), AdminToken: secret, Pages: shownPages{}, Endpoints: []api.Endpoint{
					{Method: "GET", Path: "/login", About: "A page.", Access: api.Public, Page: true, Handler: http.HandlerFunc(echo)},
					{Method: "GET", Path: "/lanes", About: "A page.", Access: api.Admin, Page: true, Handler: http.HandlerFunc(echo)},
				},
			})
			if err != nil {
				t.Fatal(err)
			}
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
			a.raw("POST", "/logout", "", with1(ended))
			for name, old := range map[string]*http.Cookie{"another token": {Name: ended.Name, Value: "A." + ended.Value}, "ended": ended} {
				for range 50 {
					if w := a.raw("GET", "/v1/lanes", "", with1(old)); w.Code != http.StatusUnauthorized {
						t.Fatalf("%s: %d %s", name, w.Code, w.Body)
					}
				}
				w := a.raw("GET", "/lanes", "", with1(old))
				if w.Code != http.StatusSeeOther || w.Header().Get("Location") != "/login?next=%2Flanes" || !clears(w, old) {
					t.Errorf("%s: a page: %d %v", name, w.Code, w.Header())
				}
				if w := a.raw("GET", "/login", "", with1(old)); w.Code != http.StatusOK || !clears(w, old) {
					t.Errorf("%s: the login page: %d %v", name, w.Code, w.Header())
				}
				if w := a.raw("GET", "/v1/lanes", "", with1(login(old))); w.Code != http.StatusOK {
					t.Errorf("%s: after another login: %d %s", name, w.Code, w.Body)
				}
			}
		})
	}
}

// clears reports whether an answer takes a cookie away.
func clears(w *httptest.ResponseRecorder, c *http.Cookie) bool {
	set := w.Result().Cookies()
	return len(set) == 1 && set[0].Name == c.Name && set[0].MaxAge < 0
}

func TestACookieThatIsNotOursOrIsOverIsRefused(t *testing.T) {
	t.Parallel()
	a := paged(t)
	good := a.logIn()
	at := strings.LastIndexByte(good.Value, '.')
	said, signature := good.Value[:at], good.Value[at+1:]
	for name, value := range map[string]string{
		"empty": "", "longer": said + "9." + signature, "unsigned": said, "unsigned, with a dot": said + ".", "other signature": said + "." + strings.Repeat("A", len(signature)),
		"beheaded": good.Value[1:], "trimmed": good.Value[:len(good.Value)-1], "token": token,
	} {
		if w := a.raw("GET", "/v1/lanes", "", with1(&http.Cookie{Name: good.Name, Value: value})); w.Code != http.StatusUnauthorized {
			t.Errorf("%s: %d", name, w.Code)
		}
	}
	pool := a.pool
	again, err := api.New(api.Options{Pool: pool, Engine: engine(t, pool), AdminToken: token, Pages: shownPages{}})
	if err != nil {
		t.Fatal(err)
	}
	rotated, err := api.New(api.Options{Pool: pool, Engine: engine(t, pool), AdminToken: token + "2", Pages: shownPages{}})
	if err != nil {
		t.Fatal(err)
	}
	none, err := api.New(api.Options{Pool: pool, Engine: engine(t, pool), Pages: shownPages{}})
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		handler http.Handler
		status  int
	}{"another process": {again, 200}, "another token": {rotated, 401}, "no token": {none, 401}} {
		other := &agent{t: t, handler: test.handler}
		if w := other.raw("GET", "/v1/lanes", "", with1(good)); w.Code != test.status {
			t.Errorf("%s: %d", name, w.Code)
		}
	}
	other := &agent{t: t, handler: none}
	body, header := form("token", "")
	if w := other.raw("POST", "/login", body, header); w.Code != http.StatusUnauthorized {
		t.Errorf("an empty token where none is configured: %d", w.Code)
	}
}

func TestWithACookieOtherOriginsMayNotEvenRead(t *testing.T) {
	t.Parallel()
	a := paged(t)
	c := a.logIn()
	link := []string{"Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}
	for name, test := range map[string]struct {
		method, path string
		header       []string
		status       int
	}{
		"own page reads":         {"GET", "/v1/lanes", []string{"Sec-Fetch-Site", "same-origin"}, 200},
		"address bar":            {"GET", "/lanes", []string{"Sec-Fetch-Site", "none"}, 200},
		"same site reads":        {"GET", "/v1/lanes", []string{"Sec-Fetch-Site", "same-site"}, 403},
		"other site reads":       {"GET", "/v1/lanes", []string{"Sec-Fetch-Site", "cross-site"}, 403},
		"old browser reads":      {"GET", "/v1/lanes", []string{"Origin", "http://evil.example"}, 403},
		"old browser, own":       {"GET", "/v1/lanes", []string{"Origin", "http://example.com"}, 200},
		"link to a page":         {"GET", "/lanes", append([]string{"Sec-Fetch-Site", "same-site"}, link...), 200},
		"link to the API":        {"GET", "/v1/lanes", append([]string{"Sec-Fetch-Site", "same-site"}, link...), 403},
		"frame of a page":        {"GET", "/lanes", []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "iframe"}, 403},
		"stream":                 {"GET", "/live/lanes", append([]string{"Sec-Fetch-Site", "same-site"}, link...), 403},
		"form on another site":   {"POST", "/act/v1/lanes/x/break", append([]string{"Sec-Fetch-Site", "same-site"}, link...), 403},
		"old browser, form":      {"POST", "/act/v1/lanes/x/break", []string{"Origin", "http://evil.example"}, 403},
		"form of our own":        {"POST", "/act/v1/lanes/x/break", []string{"Sec-Fetch-Site", "same-origin", "Origin", "http://example.com"}, 200},
		"login from other sites": {"POST", "/login", []string{"Sec-Fetch-Site", "cross-site"}, 403},
	} {
		if w := a.raw(test.method, test.path, "", with1(c, test.header...)); w.Code != test.status {
			t.Errorf("%s: %d %s, want %d", name, w.Code, w.Body, test.status)
		}
	}
	w := a.raw("GET", "/v1/lanes", "", with1(c))
	if h := w.Header(); h.Get("Cross-Origin-Resource-Policy") != "same-origin" || !strings.Contains(h.Get("Vary"), "Cookie") || h.Get("Cache-Control") != "no-store" {
		t.Errorf("headers are %v", h)
	}
}

func TestPagesAreRefusedWithPages(t *testing.T) {
	t.Parallel()
	a := paged(t)
	c := a.logIn()
	browser := http.Header{"Accept": {"text/html,*/*"}}
	for name, test := range map[string]struct {
		method, path string
		header       http.Header
		status       int
		says         string // in the body or the Location
	}{
		"page":                   {"GET", "/lanes?x=%2F", nil, 303, "/login?next=%2Flanes%3Fx%3D%252F"},
		"head":                   {"HEAD", "/lanes", nil, 303, "/login?next=%2Flanes"},
		"overview":               {"GET", "/", nil, 303, "/login"},
		"lever":                  {"POST", "/act/v1/lanes/x/break", nil, 401, "error page|nobody is logged in"},
		"stream":                 {"GET", "/live/lanes", nil, 401, "AGENT_ADMIN_TOKEN"},
		"wrong method":           {"DELETE", "/lanes", with1(c), 405, "error page|"},
		"wrong method of a case": {"DELETE", "/lanes/new", with1(c), 405, "error page|"},
		"a case":                 {"GET", "/lanes/new", with1(c), 200, ""},
		"no such page":           {"GET", "/nowhere", browser, 404, "error page|there is no page /nowhere"},
		"no such route":          {"GET", "/nowhere", nil, 404, "there is no route"},
		"no such route in v1":    {"GET", "/v1/nowhere", browser, 401, "AGENT_ADMIN_TOKEN"},
		"login is no place":      {"GET", "/login", nil, 200, ""},
	} {
		w := a.raw(test.method, test.path, "", test.header)
		if w.Code != test.status || !strings.Contains(w.Header().Get("Location")+w.Body.String(), test.says) {
			t.Errorf("%s: %d %q %s", name, w.Code, w.Header().Get("Location"), w.Body)
		}
	}
	for path := range a.doc["paths"].(map[string]any) {
		if strings.HasPrefix(path, "/l") || path == "/" {
			t.Errorf("page %s is in the document", path)
		}
	}
}

func TestALoginGoesNowhereElse(t *testing.T) {
	t.Parallel()
	a := paged(t)
	for next, want := range map[string]string{
		"//evil.example": "/", "https://evil.example": "/", "/login?next=/x": "/", "/logout": "/", "/\\evil.example": "/", "/skills/a%2Fb": "/skills/a%2Fb",
	} {
		body, header := form("token", token, "next", next)
		if w := a.raw("POST", "/login", body, header); w.Header().Get("Location") != want {
			t.Errorf("%s leads to %s", next, w.Header().Get("Location"))
		}
	}
	if w := a.raw("POST", "/login", `{"token":"`+token+`"}`, http.Header{"Content-Type": {"application/json"}}); w.Code != http.StatusUnsupportedMediaType {
		t.Errorf("JSON: %d", w.Code)
	}
}
