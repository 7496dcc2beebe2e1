package engineroom

import (
	"cmp"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"fmt"
	"io/fs"
	"mime"
	"net/http"
	"path"

	"github.com/lanekeeper/lanekeeper/internal/webassets"
)

//go:embed assets
var assetFiles embed.FS

// asset serves an embedded file. A response to the versioned URL is immutable.
func (room *Room) asset(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("file")
	text, err := assetFiles.ReadFile("assets/" + name)
	if err != nil {
		text, err = webassets.Files.ReadFile(name)
	}
	if err != nil {
		http.NotFound(w, r)
		return
	}
	h, tag := w.Header(), `"`+fingerprints[name]+`"`
	setSecurityHeaders(h)
	h.Set("ETag", tag)
	h.Set("Cache-Control", "public, no-cache")
	if r.URL.Query().Get("v") == fingerprints[name] || path.Ext(name) == ".woff2" { // a font's name has its version
		h.Set("Cache-Control", "public, max-age=31536000, immutable")
	}
	if r.Header.Get("If-None-Match") == tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	// The system's table of MIME types may lack fonts.
	h.Set("Content-Type", cmp.Or(mime.TypeByExtension(path.Ext(name)), "font/woff2"))
	if _, err := w.Write(text); err != nil {
		room.Logger.DebugContext(r.Context(), "file not sent", "error", err)
	}
}

// assetURL returns the versioned URL of an embedded file.
func assetURL(name string) (string, error) {
	if _, ok := fingerprints[name]; !ok {
		return "", fmt.Errorf("there is no file assets/%s", name)
	}
	return "/assets/" + name + "?v=" + fingerprints[name], nil
}

// fingerprints has the digests of the embedded files by name, and under "" a digest of all files and templates.
var fingerprints = computeFingerprints()

func computeFingerprints() map[string]string {
	digests, whole := map[string]string{}, sha256.New()
	for _, files := range []embed.FS{assetFiles, templateFiles, webassets.Files} {
		err := fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			text, err := files.ReadFile(name)
			if err != nil {
				return err
			}
			digests[path.Base(name)] = shortDigest(text)
			whole.Write(text)
			return nil
		})
		if err != nil {
			panic(err) // embedded files are readable
		}
	}
	digests[""] = base64.RawURLEncoding.EncodeToString(whole.Sum(nil)[:6])
	return digests
}

// shortDigest is a digest of eight characters.
func shortDigest(text []byte) string {
	sum := sha256.Sum256(text)
	return base64.RawURLEncoding.EncodeToString(sum[:6])
}

// build identifies the templates and files of this process.
func build() string { return fingerprints[""] }
