package api_test

import (
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/engineroom"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
)

// scopeOfPages lists the scope of the Engine Room's pages below a path. The list is deliberately a second copy. Other
// pages need runs:read.
var scopeOfPages = map[string]string{
	"threads": "threads:read", "memory": "threads:read", "find": "threads:read", "channels": "threads:read",
	"operate": "operate", "approvals": "approvals:read", "principals": "admin", "act": "authenticated",
}

// withRoom starts an agent with the Engine Room.
func withRoom(t *testing.T) (a *agent, routes []engineroom.Route) {
	t.Helper()
	pool := pgtest.DB(t)
	room, err := engineroom.New(engineroom.Options{
		Pool: pool, Agent: "agent", API: func() http.Handler { return a.handler },
	})
	require.NoError(t, err)
	var endpoints []api.Endpoint
	for _, r := range room.Routes() {
		e := api.Endpoint{
			Method: r.Method, Path: r.Path, About: "A page.", Access: api.Admin, Page: true, Scope: r.Scope, Handler: r.Handler,
		}
		if r.Public {
			e.Access, e.Scope = api.Public, ""
		}
		if !r.Stream {
			endpoints, routes = append(endpoints, e), append(routes, r)
			continue
		}
		e.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
		endpoints, routes = append(endpoints, e), append(routes, r)
	}
	a = newAgentWith(t, api.Options{
		Pool: pool, Engine: engine(t, pool), ChatKeys: map[string]string{"website": chatKey}, Endpoints: endpoints,
	})
	return a, routes
}

// A page whose stream is refused asks by HEAD for the reason.
func TestHeadOfLivePage(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room, err := engineroom.New(engineroom.Options{Pool: pool, Agent: "agent"})
	require.NoError(t, err)
	var endpoints []api.Endpoint
	for _, r := range room.Routes() {
		if r.Stream && r.Method == "GET" {
			endpoints = append(endpoints, api.Endpoint{
				Method: r.Method, Path: r.Path, About: "A page.", Access: api.Admin, Page: true, Scope: r.Scope,
				Stream: true, ContentType: "text/event-stream", Handler: r.Handler,
			})
		}
	}
	a := newAgentWith(t, api.Options{Pool: pool, Engine: engine(t, pool), Endpoints: endpoints})
	_, err = skills.Put(t.Context(), pool, skills.Definition{Name: "s", Handler: "sql:select 1"}, "workspace")
	require.NoError(t, err)
	w := a.raw("HEAD", "/live/skills/s", "", asAdmin())
	assert.Equal(t, "200 text/event-stream", fmt.Sprint(w.Code, " ", w.Header().Get("Content-Type")))
	assert.Equal(t, http.StatusNotFound, a.raw("HEAD", "/live/skills/none", "", asAdmin()).Code)
}

var pagePlaceholder = regexp.MustCompile(`\{[^}]*\}`)

// The test opens each page, each live part and each action of the Engine Room as each caller, with and without the
// object in its path.
func TestEveryPageForEveryRole(t *testing.T) {
	t.Parallel()
	a, routes := withRoom(t)
	callers := a.callers()
	pgtest.Exec(t, a.pool, `insert into agent_threads (id, channel, owner) values ('of-others', 'chat', 'key1')`)
	tried := 0
	for _, r := range routes {
		at := pagePlaceholder.ReplaceAllString(strings.TrimSuffix(r.Path, "{$}"), "of-others")
		first, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(at, "/live"), "/"), "/")
		scope := scopeOfPages[first]
		switch {
		case r.Path == "/act/v1/operate":
			scope = "operate"
		case strings.HasPrefix(strings.TrimPrefix(at, "/live"), "/evals/from/"), // texts of a trace
			strings.Contains(r.Path, "/cases/{case}"): // texts of a trial
			scope = "threads:read"
		case scope == "":
			scope = "runs:read"
		}
		for who, secret := range callers {
			header := bearer(secret)
			header.Set("Content-Type", "application/x-www-form-urlencoded")
			w := a.raw(r.Method, at, "", header)
			may := r.Public || slices.Contains(strings.Fields(rights[scope]), who) ||
				who == "narrowed" && (scope == "runs:read" || scope == "authenticated")
			logIn := w.Code == http.StatusSeeOther && strings.HasPrefix(w.Header().Get("Location"), "/login")
			refused := w.Code == http.StatusForbidden || w.Code == http.StatusUnauthorized ||
				w.Code == http.StatusTooManyRequests || logIn
			assert.Truef(t, refused != may,
				"%s %s as %q: %d %s, and it may: %t", r.Method, at, who, w.Code, w.Header().Get("Location"), may)
			tried++
		}
	}
	assert.Truef(t, tried >= 1000, "only %d requests", tried)
}

// The server rejects the requests that the stylesheet hides from a role: its forms, and the texts of a trace.
func TestHiddenFormsAndTextsAreRejected(t *testing.T) {
	t.Parallel()
	a, _ := withRoom(t)
	callers := a.callers()
	_, err := skills.Put(t.Context(), a.pool, skills.Definition{Name: "s", Handler: "sql:select 1"}, "workspace")
	require.NoError(t, err)
	post := func(who, path string, form url.Values) {
		t.Helper()
		header := bearer(callers[who])
		header.Set("Content-Type", "application/x-www-form-urlencoded")
		a.raw("POST", path, form.Encode(), header)
	}
	reason := url.Values{"reason": {"r"}}
	for _, who := range []string{"viewer", "approver", "none", "narrowed"} {
		post(who, "/act/v1/skills/s/disable", reason)
		post(who, "/act/v1/pause", reason)
		post(who, "/act/v1/principals", url.Values{"name": {"eve"}, "kind": {"user"}, "role": {"admin"}, "reason": {"r"}})
	}
	pgtest.Equal(t, a.pool, "true 0 0", `
		select (select enabled from agent_skills where name = 's') || ' ' || (select count(*) from agent_pauses) || ' '
		    || (select count(*) from agent_principals where name = 'eve')`)
	post("operator", "/act/v1/skills/s/disable", reason)
	pgtest.Equal(t, a.pool, false, `select enabled from agent_skills where name = 's'`)
	const trace = "/traces/op_01J8052XG1XHJAZ95GX5TCNBAZ?tab=prompt"
	for _, who := range []string{"viewer", "narrowed"} {
		assert.Equal(t, http.StatusForbidden, a.raw("GET", trace, "", bearer(callers[who])).Code, who)
	}
}
