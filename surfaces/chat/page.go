package chat

import (
	"embed"
	"mime"
	"net/http"
	"path"
)

//go:embed page
var pageFiles embed.FS

// pagePolicy lets the page load its own files and talk to its own server, nothing else.
const pagePolicy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; " +
	"form-action 'none'; frame-ancestors 'none'"

// PageHandler serves a small chat page: GET /chat, and its files at GET /chat/{file}. It has no secrets: the page
// asks for the chat key, or takes it from the URL's fragment (#key=…), and keeps it for as long as the tab is open.
func (c *Chat) PageHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("file")
		if name == "" {
			name = "index.html"
		}
		text, err := pageFiles.ReadFile("page/" + name)
		if err != nil {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", mime.TypeByExtension(path.Ext(name)))
		w.Header().Set("Content-Security-Policy", pagePolicy)
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Referrer-Policy", "no-referrer")
		w.Header().Set("Cache-Control", "no-cache")
		if _, err := w.Write(text); err != nil {
			c.Logger.DebugContext(r.Context(), "page not sent", "error", err)
		}
	})
}
