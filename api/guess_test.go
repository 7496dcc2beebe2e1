package api_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/clientip"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// from sends a request from an address, perhaps through a proxy.
func (a *agent) from(address, forwardedFor, method, path, body string, header http.Header) *httptest.ResponseRecorder {
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

// ways are how a secret is presented, and the answer to a right one.
func ways() map[string]struct {
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
			return a.from(address, forwardedFor, "GET", path, "", bearer(secret))
		}
	}
	return map[string]way{
		"admin token":   {with("/v1/lanes"), token, 200},
		"chat key":      {with("/v1/models"), chatKey, 200},
		"unknown route": {with("/v1/nowhere"), token, 404},
		"login": {func(a *agent, address, forwardedFor, secret string) *httptest.ResponseRecorder {
			body, header := form("token", secret)
			return a.from(address, forwardedFor, "POST", "/login", body, header)
		}, token, 303},
	}
}

func TestWrongSecretsAreSlowedDownAndLogged(t *testing.T) {
	t.Parallel()
	for name, way := range ways() {
		t.Run(name, func(t *testing.T) {
			a := paged(t)
			statuses := map[int]int{}
			for range 1500 {
				w := way.send(a, "192.0.2.1", "", "sesame-sesame")
				statuses[w.Code]++
				if w.Code == http.StatusTooManyRequests && w.Header().Get("Retry-After") == "" {
					t.Fatal("it is not said how long to wait")
				}
			}
			if statuses[401] < 5 || statuses[401] > 20 || statuses[401]+statuses[429] != 1500 {
				t.Errorf("the answers are %v", statuses)
			}
			lines := strings.Count(a.log.String(), "wrong credential")
			if lines < 1 || lines > 10 || strings.Contains(a.log.String(), "sesame") || strings.Contains(a.log.String(), way.right) {
				t.Errorf("%d lines, or one with a secret:\n%s", lines, a.log)
			}
			for _, address := range []string{"192.0.2.1", "192.0.2.2"} { // the first has to wait; but this secret cannot be guessed
				if w := way.send(a, address, "", way.right); w.Code != way.enters {
					t.Errorf("the right one from %s: %d %s", address, w.Code, w.Body)
				}
			}
		})
	}
}

func TestAWeakSecretIsNotAnsweredWhereOthersGuess(t *testing.T) {
	t.Parallel()
	a := paged(t)
	body, header := form("token", "guess")
	for range 6 {
		a.from("192.0.2.1", "", "POST", "/login", body, header)
	}
	if w := a.from("192.0.2.1", "", "POST", "/login", body, header); w.Code != 429 || !strings.Contains(w.Body.String(), "login page|/|Too many wrong tokens") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

func TestBehindATrustedProxyNobodyIsSlowedDownByOthers(t *testing.T) {
	t.Parallel()
	for name, way := range ways() {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.DB(t)
			trusted := clientip.Trusted{netip.MustParsePrefix("10.0.0.0/8")}
			a := wired(t, api.Options{
				Pool: pool, Engine: engine(t, pool), ChatKeys: map[string]string{"website": chatKey}, Pages: shownPages{}, Endpoints: kinds(),
				Proxies: trusted,
			})
			for range 20 {
				way.send(a, "10.0.0.1", "198.51.100.1", "wrong")
			}
			for from, want := range map[string]int{"198.51.100.1": 429, "198.51.100.2": 401, "198.51.100.1, 198.51.100.3": 401, "": 401} {
				if w := way.send(a, "10.0.0.1", from, "wrong"); w.Code != want {
					t.Errorf("from %q: %d, want %d", from, w.Code, want)
				}
			}
			if w := way.send(a, "192.0.2.9", "198.51.100.1", "wrong"); w.Code != 401 {
				t.Errorf("a stranger who claims the address: %d", w.Code)
			}
		})
	}
}

func TestALogoutEndsTheLoginEverywhere(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	started, ended := make(chan struct{}), make(chan struct{})
	live := api.Endpoint{
		Method: "GET", Path: "/live/lanes", About: "Live.", Access: api.Admin, Page: true, Stream: true, ContentType: "text/event-stream",
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
	o := api.Options{Pool: pool, Engine: engine(t, pool), Pages: shownPages{}, Endpoints: []api.Endpoint{live}, Listener: listener}
	a, other := wired(t, o), wired(t, o)
	c, kept := a.logIn(), a.logIn()
	if w := other.raw("GET", "/v1/lanes", "", with1(c)); w.Code != 200 {
		t.Fatalf("before the logout: %d", w.Code)
	}
	streamed := make(chan struct{})
	go func() {
		defer close(streamed)
		other.raw("GET", "/live/lanes", "", with1(c))
	}()
	<-started
	out := a.raw("POST", "/logout", "", with1(c))
	if out.Code != http.StatusSeeOther || !strings.Contains(out.Header().Get("Set-Cookie"), "Max-Age=0") {
		t.Fatalf("logout: %d %v", out.Code, out.Header())
	}
	select {
	case <-ended:
		<-streamed
	case <-time.After(patience):
		t.Fatal("the stream of the login goes on")
	}
	for name, p := range map[string]*agent{"here": a, "elsewhere": other} {
		if w := p.raw("GET", "/v1/lanes", "", with1(c)); w.Code != http.StatusUnauthorized {
			t.Errorf("%s after the logout: %d", name, w.Code)
		}
		if w := p.raw("GET", "/v1/lanes", "", with1(kept)); w.Code != 200 {
			t.Errorf("%s another login: %d", name, w.Code)
		}
	}
	exec(t, pool, `update agent_logouts set expires_at = clock_timestamp() - interval '1 second'`)
	a.raw("POST", "/logout", "", with1(kept))
	a.raw("POST", "/logout", "", with1(kept)) // once more, as from another tab
	a.raw("POST", "/logout", "", with1(&http.Cookie{Name: c.Name, Value: "somebody.99999999999.else"}))
	if n := value[int](t, pool, `select count(*) from agent_logouts`); n != 1 {
		t.Errorf("%d logouts are kept; the one that is over has to be forgotten, and a stranger's never written", n)
	}
}

func TestALogoutThatCannotBeKeptIsNotOne(t *testing.T) {
	t.Parallel()
	a := paged(t)
	c := a.logIn()
	exec(t, a.pool, `alter table agent_logouts rename to away`)
	for _, ask := range [][2]string{{"POST", "/logout"}, {"GET", "/v1/lanes"}, {"GET", "/lanes"}} {
		if w := a.raw(ask[0], ask[1], "", with1(c)); w.Code < 500 || w.Header().Get("Set-Cookie") != "" {
			t.Errorf("%s: %d %v", ask, w.Code, w.Header())
		}
	}
}

func TestAgentsOnOneHostKeepTheirLogins(t *testing.T) {
	t.Parallel()
	a := paged(t)
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
		if !names[name] {
			t.Errorf("there is no cookie %s: %v", name, names)
		}
	}
}
