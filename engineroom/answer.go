package engineroom

import (
	"net/http"

	"github.com/lanekeeper/lanekeeper/internal/local"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// policy lets a page load its own files and talk to its own server, nothing else.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'self'; frame-ancestors 'none'"

// guard sets what a browser has to know about everything the room sends. The referrer is told to the room itself,
// which goes back to where a lever was pulled, and to nobody else.
func guard(h http.Header) {
	h.Set("Content-Security-Policy", policy)
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Origin-Agent-Cluster", "?1")
	h.Set("Permissions-Policy", "camera=(), geolocation=(), microphone=(), payment=(), usb=()")
	h.Set("Referrer-Policy", "same-origin")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
}

// send answers with a page.
func (room *Room) send(w http.ResponseWriter, r *http.Request, status int, body []byte) {
	h := w.Header()
	guard(h)
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	if _, err := w.Write(body); err != nil {
		room.Logger.DebugContext(r.Context(), "page not sent", "error", err)
	}
}

// Refuse answers with an error as a page.
func (room *Room) Refuse(w http.ResponseWriter, r *http.Request, err error) {
	told, news := problem.Of(err)
	if news {
		room.Logger.ErrorContext(r.Context(), "page not shown", "path", problem.Path(r), "error", err)
	}
	if told.Status == http.StatusServiceUnavailable && w.Header().Get("Retry-After") == "" {
		w.Header().Set("Retry-After", "2")
	}
	body, err := room.execute("refusal", map[string]any{"Agent": room.Agent, "Problem": told})
	if err != nil {
		http.Error(w, told.Detail, told.Status)
		return
	}
	room.send(w, r, told.Status, body)
}

// LogIn answers with the page that asks for the admin token. next is where to go then: a path of this server; wrong
// says what was wrong with the token that was given, empty when none was.
func (room *Room) LogIn(w http.ResponseWriter, r *http.Request, status int, next, wrong string) {
	body, err := room.execute("login", map[string]any{"Agent": room.Agent, "Next": next, "Wrong": wrong})
	if err != nil {
		room.Refuse(w, r, err)
		return
	}
	room.send(w, r, status, body)
}

// login serves that page to who comes without a token.
func (room *Room) login(w http.ResponseWriter, r *http.Request) {
	room.LogIn(w, r, http.StatusOK, local.Path(r.URL.Query().Get("next")), "")
}
