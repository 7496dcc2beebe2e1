package engineroom

import (
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// apiCall is a call of the API.
type apiCall struct {
	method, path, body, kind string
	header                   http.Header
}

// serveWithAPI serves the room over an API with a scripted response, and records the API calls.
func serveWithAPI(t *testing.T, answer http.HandlerFunc) (*[]apiCall, *httptest.Server, *http.Client) {
	t.Helper()
	var calls []apiCall
	routes := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		assert.NoError(t, err)
		calls = append(calls, apiCall{r.Method, r.URL.EscapedPath(), string(body), r.Header.Get("Content-Type"), r.Header})
		answer(w, r)
	})
	room := newRoom(t, Options{
		Pool: pgtest.DB(t), API: func() http.Handler { return routes },
		Key: []byte("k"),
	})
	server := serveRoom(t, room)
	noRedirect := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
	return &calls, server, noRedirect
}

// post sends a form.
func post(t *testing.T, client *http.Client, address string, form url.Values, header http.Header) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, address, strings.NewReader(form.Encode()))
	require.NoError(t, err)
	maps.Copy(req.Header, header)
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	return resp
}

// pagesAfter returns the page after an action, with its message, and the same page loaded again.
func pagesAfter(t *testing.T, client *http.Client, server *httptest.Server, resp *http.Response) (first,
	second string,
) {
	t.Helper()
	look := func(cookies []*http.Cookie) (string, []*http.Cookie) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/lanes", http.NoBody)
		require.NoError(t, err)
		for _, c := range cookies {
			if c.MaxAge >= 0 {
				req.AddCookie(c)
			}
		}
		got, err := client.Do(req)
		require.NoError(t, err)
		defer got.Body.Close()
		text, err := io.ReadAll(got.Body)
		require.NoError(t, err)
		return string(text), got.Cookies()
	}
	first, cookies := look(resp.Cookies())
	second, _ = look(cookies)
	return first, second
}

func TestActionCallsRouteAndRedirectsBack(t *testing.T) {
	t.Parallel()
	calls, server, client := serveWithAPI(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Trace-Id", "op_1")
		w.WriteHeader(http.StatusCreated)
	})
	form := url.Values{"reason": {"it <b>hangs</b>\r\nagain"}, "back": {"/lanes?status=held"}}
	header := http.Header{
		"Authorization": {"Bearer x"}, "Cookie": {"lanekeeper_session=y"}, "Origin": {server.URL},
		"Sec-Fetch-Site": {"same-origin"},
	}
	resp := post(t, client, server.URL+"/act/v1/lanes/a%2F%2Fb%20c/break", form, header)
	assert.Truef(t, resp.StatusCode == http.StatusSeeOther && resp.Header.Get("Location") == "/lanes?status=held",
		"status %d, to %s", resp.StatusCode, resp.Header.Get("Location"))
	got := (*calls)[0]
	want := apiCall{
		method: "POST", path: "/v1/lanes/a%2F%2Fb%20c/break",
		body: `{"reason":"it \u003cb\u003ehangs\u003c/b\u003e\nagain"}`, kind: "application/json",
	}
	sent := got.header
	got.header = nil
	assert.NoDiff(t, want, got, cmp.AllowUnexported(apiCall{}))
	assert.Truef(t, sent.Get("Authorization") == "Bearer x" && sent.Get("Cookie") == "lanekeeper_session=y" &&
		sent.Get("Sec-Fetch-Site") == "", "the route is called as %v", sent)
	first, second := pagesAfter(t, client, server, resp)
	assert.Truef(t, strings.Contains(first, `role="status"`) && strings.Contains(first, "Lane a//b c is released.") &&
		strings.Contains(first, `<a href="/traces/op_1">`), "the page does not show the result of the action:\n%s", first)
	assert.True(t, !strings.Contains(second, "is released"), "the message is shown twice")
}

// A reload of the page with a secret repeats its form. The API then finds the same key.
func TestFormOfSecretHasIdempotencyKey(t *testing.T) {
	t.Parallel()
	calls, server, client := serveWithAPI(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, `{"token": "lk_x"}`)
	})
	_, page := testkit.Get(t, server.URL+"/principals/root")
	keys := regexp.MustCompile(`name="once" value="(\w{20,})"`).FindStringSubmatch(page)
	require.Truef(t, len(keys) == 2, "the form has no key:\n%s", page)
	resp := post(t, client, server.URL+"/act/v1/tokens", url.Values{"once": {keys[1]}, "scopes": {"*"}}, nil)
	assert.Equal(t, http.StatusOK, resp.StatusCode)
	assert.Equal(t, keys[1], (*calls)[0].header.Get("Idempotency-Key"))
	assert.Equal(t, `{"scopes":["*"]}`, (*calls)[0].body)
}

func TestActionShowsErrorOfRoute(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		answer http.HandlerFunc
		says   string
	}{
		"a problem": {func(w http.ResponseWriter, r *http.Request) {
			problem.Write(w, r, problem.New(409, "the holder is <b>busy</b>"), "", nil)
		}, "the holder is &lt;b&gt;busy&lt;/b&gt;"},
		"no problem": {
			func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) },
			"The action failed with status 500.",
		},
		"a long one": {func(w http.ResponseWriter, r *http.Request) {
			problem.Write(w, r, problem.New(400, "%s", strings.Repeat("€", 5000)), "", nil)
		}, "€€€…"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, server, client := serveWithAPI(t, test.answer)
			resp := post(t, client, server.URL+"/act/v1/skills/x/disable", url.Values{"reason": {"r"}},
				http.Header{"Referer": {server.URL + "/skills/x?y=1"}})
			assert.Truef(t, resp.StatusCode == http.StatusSeeOther && resp.Header.Get("Location") == "/skills/x?y=1",
				"status %d, to %s", resp.StatusCode, resp.Header.Get("Location"))
			first, _ := pagesAfter(t, client, server, resp)
			assert.Truef(t, strings.Contains(first, test.says) && strings.Contains(first, `role="alert"`),
				"the page does not say %s:\n%s", test.says, first)
		})
	}
}

func TestActionRejectsUnknownFields(t *testing.T) {
	t.Parallel()
	calls, server, client := serveWithAPI(t, func(http.ResponseWriter, *http.Request) {})
	for _, name := range []string{"/act/v1/threads", "/act/v1/locks", "/act/v1/nothing", "/act/v1/skills/x/delete"} {
		assert.Equal(t, http.StatusNotFound, post(t, client, server.URL+name, url.Values{}, nil).StatusCode, name)
	}
	for name, test := range map[string]struct {
		form url.Values
		says string
	}{
		"unknown field": {
			url.Values{"reason": {"r"}, "admin": {"1"}},
			`a field &#34;admin&#34;, which this action does not accept`,
		},
		"no JSON": {url.Values{"input": {"{"}}, "input is not JSON"},
		"no flag": {url.Values{"latest": {"maybe"}}, "latest is &#34;maybe&#34;; it can be true or false"},
	} {
		resp := post(t, client, server.URL+"/act/v1/executions/1/fork", test.form, nil)
		first, _ := pagesAfter(t, client, server, resp)
		assert.Truef(t, strings.Contains(first, test.says), "%s: the page does not say %s", name, test.says)
	}
	assert.Truef(t, len(*calls) == 0, "the API got calls: %+v", *calls)
	for back, want := range map[string]string{"https://evil.example/": "/", "//evil.example": "/", "/lanes": "/lanes"} {
		resp := post(t, client, server.URL+"/act/v1/executions/1/retry", url.Values{"back": {back}}, nil)
		assert.Equal(t, want, resp.Header.Get("Location"), "back to", back)
	}
	resp := post(t, client, server.URL+"/act/v1/executions/1/retry", nil,
		http.Header{"Referer": {"https://evil.example/lanes"}})
	assert.Equal(t, "/", resp.Header.Get("Location"))
}

func TestActionFieldTypes(t *testing.T) {
	t.Parallel()
	a := action{fields: []field{{"t", asText}, {"l", asList}, {"f", asFlag}, {"n", asNumber}, {"j", asJSON}}}
	for name, test := range map[string]struct {
		form url.Values
		want string // JSON, or the error
	}{
		"all": {
			url.Values{"t": {"x"}, "l": {"a\r\nb", " c "}, "f": {"on"}, "n": {"1.5"}, "j": {`{"a":[1]}`}},
			`{"f":true,"j":{"a":[1]},"l":["a","b","c"],"n":1.5,"t":"x"}`,
		},
		"left empty":    {url.Values{"t": {" "}, "l": {"", "\n"}, "f": {""}, "n": {""}, "j": {""}}, `{}`},
		"last wins":     {url.Values{"f": {"false", "true"}}, `{"f":true}`},
		"not a number":  {url.Values{"n": {"1e"}}, "n is"},
		"NaN":           {url.Values{"n": {"NaN"}}, "n is"},
		"hexadecimal":   {url.Values{"n": {"0x10"}}, "n is"},
		"text for JSON": {url.Values{"j": {"hello"}}, "j is not JSON"},
	} {
		body, err := a.body(test.form)
		if err != nil {
			body = []byte(err.Error())
		}
		assert.Truef(t, strings.HasPrefix(string(body), test.want) && (err != nil || string(body) == test.want),
			"%s: %s", name, body)
	}
}

func TestFlashNeedsValidSignature(t *testing.T) {
	t.Parallel()
	_, server, client := serveWithAPI(t, func(http.ResponseWriter, *http.Request) {})
	resp := post(t, client, server.URL+"/act/v1/executions/1/retry", nil, nil)
	c := resp.Cookies()[0]
	assert.Truef(t, c.HttpOnly && c.SameSite == http.SameSiteStrictMode && c.MaxAge > 0 && c.MaxAge <= 60, "cookie %+v", c)
	room := &Room{Options: Options{Key: []byte("k")}}
	if f := room.readFlash(c.Value); f == nil || f.Text != "A new execution repeats the failed step." {
		t.Errorf("another process of the agent reads %+v", f)
	}
	parts := strings.Split(c.Value, ".")
	for name, value := range map[string]string{
		"changed": parts[0] + ".eyJ0IjoiZXZpbCJ9." + parts[2], "longer": "zzzzzzz." + parts[1] + "." + parts[2], "empty": "",
		"unsigned": parts[0] + "." + parts[1],
	} {
		f := room.readFlash(value)
		assert.Truef(t, f == nil, "%s: %+v", name, f)
	}
	expired := "1." + parts[1]
	f := room.readFlash(expired + "." + room.sign(expired))
	assert.Truef(t, f == nil, "a message of 1970 is shown: %+v", f)
	f = (&Room{Options: Options{Key: []byte("other")}}).readFlash(c.Value)
	assert.Truef(t, f == nil, "another agent reads %+v", f)
}

// The stylesheet hides the forms that the viewer's scopes do not cover. It has a rule for each action.
func TestStylesheetHidesFormOfEveryAction(t *testing.T) {
	t.Parallel()
	css, err := os.ReadFile("assets/room.css")
	require.NoError(t, err)
	prefixes := regexp.MustCompile(`data-may~="[a-z:]+"\]\) [^{]*?action\^?="(/act[^"]+)"`)
	var hidden []string
	for line := range strings.Lines(string(css)) {
		if prefixes.MatchString(line) {
			for _, m := range regexp.MustCompile(`action\^?="(/act[^"]+)"`).FindAllStringSubmatch(line, -1) {
				hidden = append(hidden, m[1])
			}
		}
	}
	for _, a := range actions() {
		assert.Truef(t, slices.ContainsFunc(hidden, func(h string) bool { return strings.HasPrefix("/act"+a.path, h) }),
			"no rule hides the form of %s", a.path)
	}
}

// Without this test, only an admin would find a form whose route is missing in the table.
func TestTemplatesUseOnlyListedActions(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	for _, a := range actions() {
		mux.HandleFunc("POST "+a.path, func(http.ResponseWriter, *http.Request) {})
	}
	files, err := templateFiles.ReadDir("templates")
	require.NoError(t, err)
	found := 0
	for _, file := range files {
		text, err := templateFiles.ReadFile("templates/" + file.Name())
		require.NoError(t, err)
		for _, m := range regexp.MustCompile(
			`"Path" (?:\(printf )?"(/v1/[^"]+)"|action="/act(/v1/[^"]+)"`).FindAllStringSubmatch(string(text), -1) {
			found++
			path := regexp.MustCompile(`%s|\{\{.*?\}\}`).ReplaceAllString(m[1]+m[2], "x")
			if path == "/v1/operate" {
				continue // the route has its own handler
			}
			_, pattern := mux.Handler(httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, http.NoBody))
			assert.Truef(t, pattern != "", "%s: no action has the route %s", file.Name(), path)
		}
	}
	assert.Truef(t, found >= 10, "only %d actions were found", found)
}
