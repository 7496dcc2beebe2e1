package engineroom

import (
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// apiCall is a call of the API.
type apiCall struct {
	method, path, body, kind string
	header                   http.Header
}

// pulled serves the room over an API that answers as status and body say, and keeps what it was asked.
func pulled(t *testing.T, answer http.HandlerFunc) (*[]apiCall, *httptest.Server, *http.Client) {
	t.Helper()
	var calls []apiCall
	routes := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		calls = append(calls, apiCall{r.Method, r.URL.EscapedPath(), string(body), r.Header.Get("Content-Type"), r.Header})
		answer(w, r)
	})
	room, err := New(Options{Pool: pgtest.DB(t), Agent: "agent", API: func() http.Handler { return routes }, Key: []byte("k")})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		mux.Handle(r.Method+" "+r.Path, r.Handler)
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	stay := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return &calls, server, stay
}

// send posts a form.
func post(t *testing.T, client *http.Client, address string, form url.Values, header http.Header) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, address, strings.NewReader(form.Encode()))
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(req.Header, header)
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return resp
}

// after is the page that is shown after a lever was pulled, with the message, and what it says on the next look.
func after(t *testing.T, client *http.Client, server *httptest.Server, resp *http.Response) (first, second string) {
	t.Helper()
	look := func(cookies []*http.Cookie) (string, []*http.Cookie) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/lanes", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range cookies {
			if c.MaxAge >= 0 {
				req.AddCookie(c)
			}
		}
		got, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer got.Body.Close()
		text, err := io.ReadAll(got.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(text), got.Cookies()
	}
	first, cookies := look(resp.Cookies())
	second, _ = look(cookies)
	return first, second
}

func TestALeverCallsTheRouteAndComesBack(t *testing.T) {
	t.Parallel()
	calls, server, client := pulled(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Trace-Id", "op_1")
		w.WriteHeader(http.StatusCreated)
	})
	form := url.Values{"reason": {"it <b>hangs</b>\r\nagain"}, "back": {"/lanes?status=held"}}
	header := http.Header{"Authorization": {"Bearer x"}, "Cookie": {"lanekeeper_session=y"}, "Origin": {server.URL}, "Sec-Fetch-Site": {"same-origin"}}
	resp := post(t, client, server.URL+"/act/v1/lanes/a%2F%2Fb%20c/break", form, header)
	if resp.StatusCode != http.StatusSeeOther || resp.Header.Get("Location") != "/lanes?status=held" {
		t.Errorf("status %d, to %s", resp.StatusCode, resp.Header.Get("Location"))
	}
	got := (*calls)[0]
	want := apiCall{method: "POST", path: "/v1/lanes/a%2F%2Fb%20c/break", body: `{"reason":"it \u003cb\u003ehangs\u003c/b\u003e\nagain"}`, kind: "application/json"}
	sent := got.header
	got.header = nil
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(apiCall{})); diff != "" {
		t.Error(diff)
	}
	if sent.Get("Authorization") != "Bearer x" || sent.Get("Cookie") != "lanekeeper_session=y" || sent.Get("Sec-Fetch-Site") != "" {
		t.Errorf("the route is called as %v", sent)
	}
	first, second := after(t, client, server, resp)
	if !strings.Contains(first, `role="status"`) || !strings.Contains(first, "Lane a//b c was taken from its holder.") || !strings.Contains(first, `<a href="/traces/op_1">`) {
		t.Errorf("the page does not say what came of it:\n%s", first)
	}
	if strings.Contains(second, "was taken") {
		t.Error("the message is shown twice")
	}
}

func TestWhatARouteRefusesIsTold(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		answer http.HandlerFunc
		says   string
	}{
		"a problem": {func(w http.ResponseWriter, r *http.Request) {
			problem.Write(w, r, problem.New(409, "the holder is <b>busy</b>"), "", nil)
		}, "the holder is &lt;b&gt;busy&lt;/b&gt;"},
		"no problem": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }, "It did not work: status 500."},
		"a long one": {func(w http.ResponseWriter, r *http.Request) {
			problem.Write(w, r, problem.New(400, "%s", strings.Repeat("€", 5000)), "", nil)
		}, "€€€…"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, server, client := pulled(t, test.answer)
			resp := post(t, client, server.URL+"/act/v1/skills/x/disable", url.Values{"reason": {"r"}}, http.Header{"Referer": {server.URL + "/skills/x?y=1"}})
			if resp.StatusCode != http.StatusSeeOther || resp.Header.Get("Location") != "/skills/x?y=1" {
				t.Errorf("status %d, to %s", resp.StatusCode, resp.Header.Get("Location"))
			}
			if first, _ := after(t, client, server, resp); !strings.Contains(first, test.says) || !strings.Contains(first, `role="alert"`) {
				t.Errorf("the page does not say %s:\n%s", test.says, first)
			}
		})
	}
}

func TestALeverSendsOnlyWhatItTakes(t *testing.T) {
	t.Parallel()
	calls, server, client := pulled(t, func(http.ResponseWriter, *http.Request) {})
	for _, name := range []string{"/act/v1/executions", "/act/v1/locks", "/act/v1/nothing", "/act/v1/skills/x/delete"} {
		if resp := post(t, client, server.URL+name, url.Values{}, nil); resp.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %d", name, resp.StatusCode)
		}
	}
	for name, test := range map[string]struct {
		form url.Values
		says string
	}{
		"unknown field": {url.Values{"reason": {"r"}, "admin": {"1"}}, `a field &#34;admin&#34;, which this lever does not take`},
		"no JSON":       {url.Values{"input": {"{"}}, "input is not JSON"},
		"no flag":       {url.Values{"latest": {"maybe"}}, "latest is &#34;maybe&#34;; it can be true or false"},
	} {
		resp := post(t, client, server.URL+"/act/v1/executions/1/fork", test.form, nil)
		if first, _ := after(t, client, server, resp); !strings.Contains(first, test.says) {
			t.Errorf("%s: the page does not say %s", name, test.says)
		}
	}
	if len(*calls) > 0 {
		t.Errorf("the API was called: %+v", *calls)
	}
	for back, want := range map[string]string{"https://evil.example/": "/", "//evil.example": "/", "/lanes": "/lanes"} {
		resp := post(t, client, server.URL+"/act/v1/executions/1/retry", url.Values{"back": {back}}, nil)
		if got := resp.Header.Get("Location"); got != want {
			t.Errorf("back to %s is %s", back, got)
		}
	}
	resp := post(t, client, server.URL+"/act/v1/executions/1/retry", nil, http.Header{"Referer": {"https://evil.example/lanes"}})
	if got := resp.Header.Get("Location"); got != "/" {
		t.Errorf("a referrer elsewhere leads to %s", got)
	}
}

func TestFieldsHaveTypes(t *testing.T) {
	t.Parallel()
	l := lever{fields: []field{{"t", asText}, {"l", asList}, {"f", asFlag}, {"n", asNumber}, {"j", asJSON}}}
	for name, test := range map[string]struct {
		form url.Values
		want string // JSON, or what is wrong
	}{
		"all":           {url.Values{"t": {"x"}, "l": {"a\r\nb", " c "}, "f": {"on"}, "n": {"1.5"}, "j": {`{"a":[1]}`}}, `{"f":true,"j":{"a":[1]},"l":["a","b","c"],"n":1.5,"t":"x"}`},
		"left empty":    {url.Values{"t": {" "}, "l": {"", "\n"}, "f": {""}, "n": {""}, "j": {""}}, `{}`},
		"last wins":     {url.Values{"f": {"false", "true"}}, `{"f":true}`},
		"not a number":  {url.Values{"n": {"1e"}}, "n is"},
		"NaN":           {url.Values{"n": {"NaN"}}, "n is"},
		"hexadecimal":   {url.Values{"n": {"0x10"}}, "n is"},
		"text for JSON": {url.Values{"j": {"hello"}}, "j is not JSON"},
	} {
		body, err := l.body(test.form)
		if err != nil {
			body = []byte(err.Error())
		}
		if !strings.HasPrefix(string(body), test.want) || err == nil && string(body) != test.want {
			t.Errorf("%s: %s", name, body)
		}
	}
}

func TestAMessageThatThisAgentDidNotSignIsNotShown(t *testing.T) {
	t.Parallel()
	_, server, client := pulled(t, func(http.ResponseWriter, *http.Request) {})
	resp := post(t, client, server.URL+"/act/v1/executions/1/retry", nil, nil)
	c := resp.Cookies()[0]
	if !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.MaxAge <= 0 || c.MaxAge > 60 {
		t.Errorf("cookie %+v", c)
	}
	room := &Room{Options: Options{Key: []byte("k")}}
	if f := room.readFlash(c.Value); f == nil || f.Text != "A new execution does again what failed." {
		t.Errorf("another process of the agent reads %+v", f)
	}
	parts := strings.Split(c.Value, ".")
	for name, value := range map[string]string{
		"changed": parts[0] + ".eyJ0IjoiZXZpbCJ9." + parts[2], "longer": "zzzzzzz." + parts[1] + "." + parts[2], "empty": "", "unsigned": parts[0] + "." + parts[1],
	} {
		if f := room.readFlash(value); f != nil {
			t.Errorf("%s: %+v", name, f)
		}
	}
	old := "1." + parts[1]
	if f := room.readFlash(old + "." + room.sign(old)); f != nil {
		t.Errorf("a message of 1970 is shown: %+v", f)
	}
	if f := (&Room{Options: Options{Key: []byte("other")}}).readFlash(c.Value); f != nil {
		t.Errorf("another agent reads %+v", f)
	}
}

func TestEveryPageSaysWhatABrowserHasToKnow(t *testing.T) {
	t.Parallel()
	_, server, client := pulled(t, func(http.ResponseWriter, *http.Request) {})
	for _, address := range []string{"/lanes", "/login", "/assets/room.css", "/traces/nothing"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+address, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		h := resp.Header
		if h.Get("Content-Security-Policy") != policy || h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Cross-Origin-Opener-Policy") != "same-origin" ||
			h.Get("Cross-Origin-Resource-Policy") != "same-origin" || h.Get("Referrer-Policy") != "same-origin" {
			t.Errorf("%s: %v", address, h)
		}
	}
	if strings.Contains(policy, "unsafe") || !strings.HasPrefix(policy, "default-src 'none'") {
		t.Errorf("the policy is %s", policy)
	}
}

func TestAssetsAreKeptByTheirDigest(t *testing.T) {
	t.Parallel()
	_, server, client := pulled(t, func(http.ResponseWriter, *http.Request) {})
	address, err := assetURL("room.css")
	if err != nil {
		t.Fatal(err)
	}
	get := func(address, tag string) *http.Response {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+address, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("If-None-Match", tag)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp
	}
	if h := get(address, "").Header; h.Get("Cache-Control") != "public, max-age=31536000, immutable" || !strings.HasPrefix(h.Get("Content-Type"), "text/css") {
		t.Errorf("by digest: %v", h)
	}
	plain := get("/assets/room.css?v=other", "")
	if plain.Header.Get("Cache-Control") != "public, no-cache" {
		t.Errorf("by another digest: %v", plain.Header)
	}
	if again := get("/assets/room.css", plain.Header.Get("ETag")); again.StatusCode != http.StatusNotModified {
		t.Errorf("with its tag: %d", again.StatusCode)
	}
	if none := get("/assets/nothing.css", ""); none.StatusCode != http.StatusNotFound {
		t.Errorf("a file that is not there: %d", none.StatusCode)
	}
	if h := get("/assets/inter-5.3.0.woff2", "").Header; h.Get("Content-Type") != "font/woff2" || !strings.Contains(h.Get("Cache-Control"), "immutable") {
		t.Errorf("the font: %v", h)
	}
	if _, err := assetURL("nothing.css"); err == nil {
		t.Error("a file that is not there has an address")
	}
}

func TestTheLoginPageIsThereForEverybody(t *testing.T) {
	t.Parallel()
	_, server, _ := pulled(t, func(http.ResponseWriter, *http.Request) {})
	for next, want := range map[string]string{"/lanes?a=b": `name="next" value="/lanes?a=b"`, "//evil.example": `name="next" value="/"`} {
		if status, body := see(t, server.URL+"/login?next="+url.QueryEscape(next)); status != 200 || !strings.Contains(body, want) {
			t.Errorf("next %s: %d\n%s", next, status, body)
		}
	}
	var public []string
	room := &Room{Options: Options{}}
	room.hub = newHub(room)
	for _, r := range room.Routes() {
		if r.Public {
			public = append(public, r.Method+" "+r.Path)
		}
	}
	if diff := cmp.Diff([]string{"GET /assets/{file}", "GET /login"}, public); diff != "" {
		t.Errorf("without a login there is also: %s", diff)
	}
}

// A form whose route is missing in the table would only be found by the admin who sends it.
func TestEveryLeverOfATemplateIsInTheTable(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	for _, l := range levers() {
		mux.HandleFunc(l.method+" "+l.path, func(http.ResponseWriter, *http.Request) {})
	}
	files, err := templateFiles.ReadDir("templates")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, file := range files {
		text, err := templateFiles.ReadFile("templates/" + file.Name())
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`"Path" (?:\(printf )?"(/v1/[^"]+)"|action="/act(/v1/[^"]+)"`).FindAllStringSubmatch(string(text), -1) {
			found++
			path := regexp.MustCompile(`%s|\{\{.*?\}\}`).ReplaceAllString(m[1]+m[2], "x")
			if path == "/v1/operate" {
				continue // has a handler of its own
			}
			if _, pattern := mux.Handler(httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, http.NoBody)); pattern == "" {
				t.Errorf("%s: no lever has the route %s", file.Name(), path)
			}
		}
	}
	if found < 10 {
		t.Errorf("only %d levers were found", found)
	}
}
