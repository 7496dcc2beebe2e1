package engineroom

import (
	"embed"
	"mime"
	"net/http"
	"path"

	"github.com/lanekeeper/lanekeeper/internal/problem"
)

//go:embed assets
var assetFiles embed.FS

// policy lets a page load its own files and talk to its own server, nothing else.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'self'; frame-ancestors 'none'"

// send answers with a page.
func (room *Room) send(w http.ResponseWriter, r *http.Request, status int, body []byte) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Security-Policy", policy)
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
	body, err := room.execute("refusal", map[string]any{"Agent": room.Agent, "Problem": told})
	if err != nil {
		http.Error(w, told.Detail, told.Status)
		return
	}
	room.send(w, r, told.Status, body)
}

// asset serves one of the embedded files.
func (room *Room) asset(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("file")
	text, err := assetFiles.ReadFile("assets/" + name)
	if err != nil {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", mime.TypeByExtension(path.Ext(name)))
	w.Header().Set("Content-Security-Policy", policy)
	w.Header().Set("Cache-Control", "no-cache")
	if _, err := w.Write(text); err != nil {
		room.Logger.DebugContext(r.Context(), "file not sent", "error", err)
	}
}
