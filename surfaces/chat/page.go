package chat

import (
	"cmp"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"regexp"
	"strings"

	"github.com/klauspost/compress/gzhttp"

	"github.com/lanekeeper/lanekeeper/internal/webassets"
)

//go:embed page
var pageFiles embed.FS

// embedScript is the file that other sites load. It adds the page to them as an iframe.
const embedScript = "embed.js"

// assetURL matches a reference to an asset in index.html.
var assetURL = regexp.MustCompile(`"/chat/([a-z.-]+)"`)

// pageAsset is a file of the page. Its version is a digest of its content.
type pageAsset struct {
	content []byte
	version string
}

// loadPage reads the page. In index.html each asset gets its version, so browsers may cache it for ever.
func loadPage() map[string]pageAsset {
	assets := map[string]pageAsset{}
	page, err := fs.Sub(pageFiles, "page")
	if err != nil {
		panic(err) // the files are in the binary
	}
	for _, files := range []fs.FS{page, webassets.Files} {
		err := fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			content, err := fs.ReadFile(files, name)
			sum := sha256.Sum256(content)
			assets[name] = pageAsset{content, hex.EncodeToString(sum[:6])}
			return err
		})
		if err != nil {
			panic(err) // the files are in the binary
		}
	}
	index := assets["index.html"]
	index.content = assetURL.ReplaceAllFunc(index.content, func(ref []byte) []byte {
		name := assetURL.FindSubmatch(ref)[1]
		return []byte(`"/chat/` + string(name) + `?v=` + assets[string(name)].version + `"`)
	})
	assets["index.html"] = index
	return assets
}

// PageHandler serves the chat page: GET /chat, and its files at GET /chat/{file}. The page has no secrets. It prompts
// for the chat key, or reads it from the fragment of the URL (#key=…), and keeps it until the tab is closed. Only the
// sites in EmbedOrigins may show it in a frame.
func (c *Chat) PageHandler() http.Handler {
	assets := loadPage()
	ancestors := "'none'"
	if len(c.EmbedOrigins) > 0 {
		ancestors = strings.Join(c.EmbedOrigins, " ")
	}
	policy := "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; " +
		"base-uri 'none'; form-action 'none'; frame-ancestors " + ancestors
	return gzhttp.GzipHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("file")
		name = cmp.Or(name, "index.html")
		asset, ok := assets[name]
		if !ok {
			http.NotFound(w, r)
			return
		}
		h := w.Header()
		h.Set("Content-Type", mime.TypeByExtension(path.Ext(name)))
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-cache")
		if len(c.EmbedOrigins) > 0 {
			h.Del("X-Frame-Options") // frame-ancestors replaces it
		}
		if name == embedScript {
			h.Set("Cross-Origin-Resource-Policy", "cross-origin")
		}
		if r.URL.Query().Get("v") == asset.version {
			h.Set("Cache-Control", "public, max-age=31536000, immutable")
		}
		if _, err := w.Write(asset.content); err != nil {
			c.Logger.DebugContext(r.Context(), "page not sent", "error", err)
		}
	}))
}
