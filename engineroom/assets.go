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
)

//go:embed assets
var assetFiles embed.FS

// fingerprints are the digests of the embedded files by name, and one over them and the templates under "".
var fingerprints = takeFingerprints()

func takeFingerprints() map[string]string {
	all, every := map[string]string{}, sha256.New()
	for _, files := range []embed.FS{assetFiles, templateFiles} {
		err := fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			text, err := files.ReadFile(name)
			if err != nil {
				return err
			}
			all[path.Base(name)] = short8(text)
			every.Write(text)
			return nil
		})
		if err != nil {
			return map[string]string{} // embedded files can be read; without digests they are only asked for again
		}
	}
	all[""] = base64.RawURLEncoding.EncodeToString(every.Sum(nil)[:6])
	return all
}

// short8 is a digest of eight characters.
func short8(text []byte) string {
	sum := sha256.Sum256(text)
	return base64.RawURLEncoding.EncodeToString(sum[:6])
}

// build names the state of templates and files that this process has.
func build() string { return fingerprints[""] }

// assetURL is where one of the embedded files is, in just this state.
func assetURL(name string) (string, error) {
	if _, has := fingerprints[name]; !has {
		return "", fmt.Errorf("there is no file assets/%s", name)
	}
	return "/assets/" + name + "?v=" + fingerprints[name], nil
}

// asset serves one of the embedded files. Asked for by its digest it may be kept for ever.
func (room *Room) asset(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("file")
	text, err := assetFiles.ReadFile("assets/" + name)
	if err != nil {
		http.NotFound(w, r)
		return
	}
	h, tag := w.Header(), `"`+fingerprints[name]+`"`
	guard(h)
	h.Set("ETag", tag)
	h.Set("Cache-Control", "public, no-cache")
	if r.URL.Query().Get("v") == fingerprints[name] || path.Ext(name) == ".woff2" { // a font has its version in its name
		h.Set("Cache-Control", "public, max-age=31536000, immutable")
	}
	if r.Header.Get("If-None-Match") == tag {
		w.WriteHeader(http.StatusNotModified)
		return
	}
	h.Set("Content-Type", cmp.Or(mime.TypeByExtension(path.Ext(name)), "font/woff2"))
	if _, err := w.Write(text); err != nil {
		room.Logger.DebugContext(r.Context(), "file not sent", "error", err)
	}
}
