package engineroom

import (
	"net/http"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/klauspost/compress/gzhttp"

	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// writePage writes a page.
func (room *Room) writePage(w http.ResponseWriter, r *http.Request, status int, body []byte) {
	h := w.Header()
	setSecurityHeaders(h)
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	if _, err := w.Write(body); err != nil {
		room.Logger.DebugContext(r.Context(), "page not sent", "error", err)
	}
}

// Refuse writes an error page, as plain text if its template fails.
func (room *Room) Refuse(w http.ResponseWriter, r *http.Request, err error) {
	p, unexpected := problem.Of(err)
	if unexpected {
		room.Logger.ErrorContext(r.Context(), "page not rendered", "path", problem.Path(r), "error", err)
	}
	if p.Status == http.StatusServiceUnavailable && w.Header().Get("Retry-After") == "" {
		w.Header().Set("Retry-After", "2") // an outage of the database is often short
	}
	body, err := room.execute("refusal", map[string]any{
		"Agent": room.Agent, "Problem": p, "Find": p.Status == http.StatusNotFound,
		"Text": lastSegment(r.URL.Path), "MissingScope": strings.HasSuffix(p.Type, "missing-scope"),
		"IsOverview": r.URL.Path == "/",
	})
	if err != nil {
		http.Error(w, p.Detail, p.Status)
		return
	}
	room.writePage(w, r, p.Status, body)
}

// lastSegment returns the last segment of a path, as the text of a search. It is empty if the segment is no valid text.
func lastSegment(path string) string {
	text := path[strings.LastIndexByte(path, '/')+1:]
	if len(text) > maxFilterBytes || !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
		return ""
	}
	return text
}

// LogIn writes the login page. next is the path after the login; wrong explains a rejected token, empty for none.
func (room *Room) LogIn(w http.ResponseWriter, r *http.Request, status int, next, wrong string) {
	link := ""
	if r.Method != http.MethodPost {
		link = r.URL.Query().Get("link")
	}
	body, err := room.execute("login", map[string]any{
		"Agent": room.Agent, "Next": next, "Wrong": wrong, "Link": cut(100, link), "OIDC": room.OIDC,
		"Unsent": r.URL.Query().Has("unsent"),
	})
	if err != nil {
		room.Refuse(w, r, err)
		return
	}
	room.writePage(w, r, status, body)
}

// login serves the login page.
func (room *Room) login(w http.ResponseWriter, r *http.Request) {
	room.LogIn(w, r, http.StatusOK, origin.Path(r.URL.Query().Get("next")), "")
}

// contentSecurityPolicy permits only files and connections of this server.
const contentSecurityPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; " +
	"font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"

// setSecurityHeaders sets the security headers. Only this server receives the referrer, which the redirect after an
// action needs.
func setSecurityHeaders(h http.Header) {
	h.Set("Content-Security-Policy", contentSecurityPolicy)
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Origin-Agent-Cluster", "?1")
	h.Set("Permissions-Policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()")
	h.Set("Referrer-Policy", "same-origin")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
}

// compress compresses pages and files. A page holds an admin's data beside input of the URL, so its size could reveal
// that data (BREACH). That attack needs requests of another site with the login's cookie, which is SameSite=Strict. No
// page holds a lasting secret, such as a token or a key.
var compress = newCompressor()

func newCompressor() func(http.Handler) http.Handler {
	wrap, err := gzhttp.NewWrapper(gzhttp.MinSize(1000), gzhttp.ContentTypes([]string{
		"text/html", "text/css", "text/javascript", "image/svg+xml",
	}))
	if err != nil {
		panic(err) // the arguments are constants
	}
	return func(h http.Handler) http.Handler { return wrap(h) }
}
