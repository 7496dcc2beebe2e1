package engineroom

import (
	"html"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	leverForm  = regexp.MustCompile(`(?s)<form[^>]* action="/act([^"]+)"[^>]*>(.*?)</form>`)
	leverField = regexp.MustCompile(`<(?:input|textarea|select)[^>]* name="([^"]+)"`)
)

// pulls expects that every lever of a page is one that the room has, with fields that it takes, and answers with the
// routes.
func pulls(t *testing.T, body string) []string {
	t.Helper()
	mux, fields := http.NewServeMux(), map[string][]string{}
	for _, l := range levers() {
		mux.Handle(l.method+" "+l.path, http.NotFoundHandler())
		for _, f := range l.fields {
			fields[l.method+" "+l.path] = append(fields[l.method+" "+l.path], f.name)
		}
	}
	var routes []string
	for _, form := range leverForm.FindAllStringSubmatch(body, -1) {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, html.UnescapeString(form[1]), http.NoBody)
		_, pattern := mux.Handler(r)
		if pattern == "" {
			t.Errorf("there is no lever %s", form[1])
		}
		for _, name := range leverField.FindAllStringSubmatch(form[2], -1) {
			if name[1] != backField && !slices.Contains(fields[pattern], name[1]) {
				t.Errorf("%s does not take %s", pattern, name[1])
			}
		}
		routes = append(routes, strings.TrimPrefix(pattern, "POST /v1/"))
	}
	slices.Sort(routes)
	return slices.Compact(routes)
}

func TestExecutionsAndThreadsPullLeversThatThereAre(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	waiting, failed := execution(t, pool, "waiting", "flow", "greet"), execution(t, pool, "failed", "flow", "greet")
	quiet(t, pool, `update agent_executions set flow_version = 2`)
	quiet(t, pool, `insert into agent_threads (id, channel) values ('a/b:ü ?#%', 'chat')`)
	quiet(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at) values ('thread:a/b:ü ?#%', 'x', 1, now() + interval '1 hour')`)
	for path, want := range map[string]string{
		"/executions/" + waiting:            "events executions/{id}/cancel executions/{id}/fork",
		"/executions/" + failed:             "executions/{id}/fork executions/{id}/retry",
		"/threads/a%2Fb:%C3%BC%20%3F%23%25": "lanes/{lane}/break threads/{id}/messages",
	} {
		if got := strings.Join(pulls(t, shows(t, server.URL+path)), " "); got != want {
			t.Errorf("%s pulls %q, want %q", path, got, want)
		}
	}
}
