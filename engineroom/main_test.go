package engineroom

import (
	"cmp"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/leaks"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/principals"
)

func TestMain(m *testing.M) {
	pgtest.AtOnce(3)
	pgtest.Main(leaks.Tests{M: browser.Tests{M: m}})
}

// newRoom returns a room with options. The default name of its agent is agent.
func newRoom(t *testing.T, o Options) *Room {
	t.Helper()
	o.Agent = cmp.Or(o.Agent, "agent")
	room, err := New(o)
	require.NoError(t, err)
	return room
}

// openRoom serves the room on its own database, without a login.
func openRoom(t *testing.T) (*pgxpool.Pool, *httptest.Server) {
	t.Helper()
	pool := pgtest.DB(t)
	return pool, serveRoom(t, newRoom(t, Options{
		Pool: pool, Unforkable: func() map[string]string { return map[string]string{"turn": "say it again"} },
	}))
}

// muxOf routes the requests of a room.
func muxOf(room *Room) *http.ServeMux {
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		mux.Handle(r.Method+" "+r.Path, r.Handler)
	}
	return mux
}

// serveRoom serves a room until the test ends.
func serveRoom(t *testing.T, room *Room) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(muxOf(room))
	t.Cleanup(server.Close)
	return server
}

// serveAs serves a room until the test ends. caller returns the name and the role of a request; it has all scopes.
func serveAs(t *testing.T, pool *pgxpool.Pool, caller func(*http.Request) (string, principals.Role)) string {
	t.Helper()
	mux := muxOf(newRoom(t, Options{Pool: pool}))
	return testkit.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name, role := caller(r)
		c := &principals.Caller{Principal: principals.Principal{Name: name, Role: role}, Scopes: []string{principals.All}}
		mux.ServeHTTP(w, r.WithContext(principals.WithCaller(r.Context(), c, "session")))
	}))
}

// hostile is text of an attacker.
const hostile = "<script>alert(1)</script>\u202egnihtemos\u0007 \"'><img src=x onerror=alert(2)>"

// insert inserts rows and returns the id from the statement.
func insert(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) string {
	t.Helper()
	return pgtest.Value[string](t, pool, sql, args...)
}

// wantTexts checks that a page contains the texts.
func wantTexts(t *testing.T, url string, texts ...string) string {
	t.Helper()
	status, body := testkit.Get(t, url)
	require.Truef(t, status == 200, "%s: status %d\n%s", url, status, body)
	for _, text := range texts {
		assert.Truef(t, strings.Contains(body, text), "%s does not say %q:\n%s", url, text, body)
	}
	assert.Truef(t, !strings.Contains(body, "This could not be read"), "%s has a part that could not be read:\n%s", url,
		body)
	return body
}

// wantEscaped checks that a page shows hostile as text only, and only the beginning of a long text.
func wantEscaped(t *testing.T, url string) {
	t.Helper()
	body := wantTexts(t, url)
	for _, bad := range []string{"<script>alert", "<img src=x", "\u202e", "\u0007"} {
		assert.Truef(t, !strings.Contains(body, bad), "%s has %q in it", url, bad)
	}
	assert.Truef(t, len(body) <= 400_000, "%s has %d bytes", url, len(body))
}

// wantError checks that an address is rejected.
func wantError(t *testing.T, url string, want int, why string) {
	t.Helper()
	if status, body := testkit.Get(t, url); status != want || !strings.Contains(body, why) {
		t.Errorf("%s: status %d, want %d because of %q:\n%s", url, status, want, why, body)
	}
}
