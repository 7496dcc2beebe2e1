package engineroom

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func TestEveryPageSetsSecurityHeaders(t *testing.T) {
	t.Parallel()
	_, server, client := serveWithAPI(t, func(http.ResponseWriter, *http.Request) {})
	for _, address := range []string{"/lanes", "/login", "/assets/room.css", "/traces/nothing"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+address, http.NoBody)
		require.NoError(t, err)
		resp, err := client.Do(req)
		require.NoError(t, err)
		resp.Body.Close()
		h := resp.Header
		assert.Truef(t, h.Get("Content-Security-Policy") == contentSecurityPolicy &&
			h.Get("X-Content-Type-Options") == "nosniff" &&
			h.Get("Cross-Origin-Opener-Policy") == "same-origin" && h.Get("Cross-Origin-Resource-Policy") == "same-origin" &&
			h.Get("Referrer-Policy") == "same-origin", "%s: %v", address, h)
	}
	assert.Truef(t, !strings.Contains(contentSecurityPolicy, "unsafe") &&
		strings.HasPrefix(contentSecurityPolicy, "default-src 'none'"),
		"the policy is %s", contentSecurityPolicy)
}

func TestAssetsAreCachedByDigest(t *testing.T) {
	t.Parallel()
	_, server, client := serveWithAPI(t, func(http.ResponseWriter, *http.Request) {})
	address, err := assetURL("room.css")
	require.NoError(t, err)
	get := func(address, tag string) *http.Response {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+address, http.NoBody)
		require.NoError(t, err)
		req.Header.Set("If-None-Match", tag)
		resp, err := client.Do(req)
		require.NoError(t, err)
		resp.Body.Close()
		return resp
	}
	h := get(address, "").Header
	assert.Truef(t, h.Get("Cache-Control") == "public, max-age=31536000, immutable" &&
		strings.HasPrefix(h.Get("Content-Type"), "text/css"), "headers of the address with the digest: %v", h)
	plain := get("/assets/room.css?v=other", "")
	assert.Truef(t, plain.Header.Get("Cache-Control") == "public, no-cache",
		"headers of the address with another digest: %v", plain.Header)
	assert.Equal(t, http.StatusNotModified, get("/assets/room.css", plain.Header.Get("ETag")).StatusCode,
		"status of the request with the ETag")
	assert.Equal(t, http.StatusNotFound, get("/assets/nothing.css", "").StatusCode, "status of an unknown file")
	h = get("/assets/inter-5.3.0.woff2", "").Header
	assert.Truef(t, h.Get("Content-Type") == "font/woff2" && strings.Contains(h.Get("Cache-Control"), "immutable"),
		"headers of the font: %v", h)
	_, err = assetURL("nothing.css")
	assert.Error(t, err, "an unknown file has an address")
}

func TestLoginPageIsPublic(t *testing.T) {
	t.Parallel()
	_, server, _ := serveWithAPI(t, func(http.ResponseWriter, *http.Request) {})
	for next, want := range map[string]string{
		"/lanes?a=b":     `name="next" value="/lanes?a=b"`,
		"//evil.example": `name="next" value="/"`,
		"/":              "agent principals login-link NAME",
	} {
		status, body := testkit.Get(t, server.URL+"/login?next="+url.QueryEscape(next))
		assert.Truef(t, status == 200 && strings.Contains(body, want), "next %s: %d\n%s", next, status, body)
	}
	status, body := testkit.Get(t, server.URL+"/login?next=%2Flanes&unsent=1")
	assert.Truef(t, status == 200 && strings.Contains(body, "Nothing was done"), "after a form: %d\n%s", status, body)
	var public []string
	room := &Room{Options: Options{}}
	room.hub = newHub(room)
	for _, r := range room.Routes() {
		if r.Public {
			public = append(public, r.Method+" "+r.Path)
		}
	}
	assert.NoDiff(t, []string{"GET /assets/{file}", "GET /login"}, public)
}

// The server compresses pages and files, and a browser loads a file once.
func TestPagesAreCompressedAndAssetsCached(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	ids := seedAllPages(t, pool, "It is done. See the list.")
	insertActivities(t, pool, 700)
	get := func(path, encoding, tag string) (*http.Response, []byte) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+path, nil)
		require.NoError(t, err)
		r.Header.Set("Accept-Encoding", encoding)
		r.Header.Set("If-None-Match", tag)
		resp, err := http.DefaultTransport.RoundTrip(r)
		require.NoError(t, err)
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err)
		return resp, body
	}
	for _, path := range pageAddresses(t, pool, ids) {
		resp, packed := get(path, "gzip", "")
		if resp.Header.Get("Content-Encoding") != "gzip" || !strings.Contains(resp.Header.Get("Vary"), "Accept-Encoding") {
			t.Errorf("%s: header %v", path, resp.Header)
			continue
		}
		reader, err := gzip.NewReader(strings.NewReader(string(packed)))
		require.NoError(t, err)
		whole, err := io.ReadAll(reader)
		require.NoError(t, err)
		assert.Truef(t, len(packed) <= 100_000 && len(packed)*3 <= len(whole)*2,
			"%s: %d bytes are sent for %d", path, len(packed), len(whole))
	}
	_, page := get("/", "", "")
	files := regexp.MustCompile(`"(/assets/[^"]+\?v=[^"]+)"`).FindAllStringSubmatch(string(page), -1)
	require.Truef(t, len(files) >= 6, "the page names %d files", len(files))
	for _, f := range files {
		resp, _ := get(f[1], "gzip", "")
		if resp.Header.Get("Cache-Control") != "public, max-age=31536000, immutable" {
			t.Errorf("%s: Cache-Control %q", f[1], resp.Header.Get("Cache-Control"))
		}
		again, _ := get(f[1], "gzip", resp.Header.Get("ETag"))
		assert.Truef(t, again.StatusCode == http.StatusNotModified, "%s is sent again despite its ETag: %s", f[1],
			again.Status)
	}
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/")
	p.Go(server.URL + "/lanes")
	var loaded []string
	p.Eval(`performance.getEntriesByType("resource")
		.filter(e => e.name.includes("/assets/") && e.transferSize > 0)
		.map(e => e.name)`, &loaded)
	assert.Truef(t, len(loaded) == 0, "the second page loads %q again", loaded)
}
