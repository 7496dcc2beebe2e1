package browser_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
)

func TestMain(m *testing.M) { os.Exit(browser.Tests{M: m}.Run()) }

// serve starts a server that answers every path with its page.
func serve(t *testing.T, pages map[string]string) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", "default-src 'none'; img-src 'self' http://elsewhere.example")
		_, err := w.Write([]byte(pages[r.URL.Path]))
		assert.NoError(t, err)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

const page = `<!doctype html><html lang="en"><head><title>t</title><link rel="icon" href="/icon"></head><body><main><h1>A page</h1>`

func TestProblemsAreRecorded(t *testing.T) {
	t.Parallel()
	base := serve(t, map[string]string{
		"/good":    page + `<p>Well</p></main></body></html>`,
		"/inline":  page + `<script>document.title = "no"</script></main></body></html>`,
		"/foreign": page + `<img alt="x" src="http://elsewhere.example/x.png"></main></body></html>`,
	})
	for path, complaint := range map[string]string{"/inline": "Content Security Policy", "/foreign": "another host"} {
		p := browser.Open(t, browser.Look{})
		p.Go(base + path)
		p.Shows("A page")
		list := strings.Join(p.Problems(), "\n")
		assert.Truef(t, strings.Contains(list, complaint), "%s: no complaint about %s, but %q", path, complaint, list)
	}
}

func TestAxeFindsInaccessibleElements(t *testing.T) {
	t.Parallel()
	base := serve(t, map[string]string{
		"/good": page + `<p>Well</p></main></body></html>`,
		"/bad":  page + `<input></main></body></html>`,
	})
	p := browser.Open(t, browser.Look{})
	p.Go(base + "/good")
	list := p.Inaccessible()
	assert.Truef(t, len(list) == 0, "an accessible page has faults: %s", list)
	p.Go(base + "/bad")
	assert.Contains(t, strings.Join(p.Inaccessible(), "\n"), "label")
}

// A condition that holds on a partial page does not end the wait.
func TestUntilWaitsForLoadedPage(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		_, err := w.Write([]byte(page + `<a href="/next">next</a></main></body></html>`))
		assert.NoError(t, err)
	})
	mux.HandleFunc("GET /next", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, err := w.Write([]byte(page + strings.Repeat("<p>filled</p>", 1000)))
		assert.NoError(t, err)
		assert.NoError(t, http.NewResponseController(w).Flush())
		time.Sleep(500 * time.Millisecond)
		_, err = w.Write([]byte(`<p id="end">end</p></main></body></html>`))
		assert.NoError(t, err)
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL)
	p.Eval(`document.querySelector("a").click(); 1`, new(int))
	p.Until("the next page is there", `location.pathname === "/next"`)
	var ended bool
	p.Eval(`document.getElementById("end") !== null`, &ended)
	assert.Truef(t, ended, "only a part of the page was there")
}

// A live update may replace an element between its lookup and its click.
func TestClickOnReplacedElement(t *testing.T) {
	t.Parallel()
	base := serve(t, map[string]string{"/": page + `<button>one</button><input></main></body></html>`})
	p := browser.Open(t, browser.Look{})
	p.Go(base)
	p.Eval(`window.clicks = 0; document.addEventListener("mousedown", () => clicks++);
		setInterval(() => { for (const e of document.querySelectorAll("button")) e.replaceWith(e.cloneNode(true)); }, 3)`, nil)
	const n = 20
	for range n {
		p.Click("button")
	}
	var clicks int
	p.Eval(`clicks`, &clicks)
	assert.Equal(t, n, clicks)
}

func TestPagesDoNotShareCookies(t *testing.T) {
	t.Parallel()
	base := serve(t, map[string]string{"/": page + `</main></body></html>`})
	one, other := browser.Open(t, browser.Look{}), browser.Open(t, browser.Look{})
	one.Go(base)
	other.Go(base)
	one.Eval(`document.cookie = "a=1"; 1`, new(int))
	var cookie string
	other.Eval(`document.cookie`, &cookie)
	assert.Equal(t, "", cookie)
}
