package skills_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/skills"
)

const testSecret = "s3cr3t-value"

func env(name string) string {
	return map[string]string{"TOKEN": testSecret, "EVIL": "a\r\nX-Evil: 1", "VERSION": "2"}[name]
}

func startServer(t *testing.T, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s
}

func invokeHTTP(t *testing.T, d skills.Definition, args string) (json.RawMessage, error) {
	t.Helper()
	d.Name = "h"
	require.NoError(t, skills.Validate(d))
	r := registry(t, skills.Options{AllowPrivate: []string{"127.0.0.1"}, Getenv: env})
	return r.Invoke(t.Context(), skills.Call{Skill: row(t, d), Args: json.RawMessage(args), IdempotencyKey: "key-1"})
}

func echo(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]string{
		"request": r.Method + " " + r.RequestURI, "body": string(body), "key": r.Header.Get("Idempotency-Key"),
		"type": r.Header.Get("Content-Type"),
	})
}

func TestHTTPArguments(t *testing.T) {
	t.Parallel()
	server := startServer(t, echo)
	anything := map[string]any{}
	tests := map[string]struct {
		handler string
		config  map[string]any
		args    string
		request string
		body    string
	}{
		"query": {
			"GET %s/find?q={q}&fixed=1&opt={opt}", nil, `{"q": "a b&c=d#", "n": 2}`,
			"GET /find?q=a+b%26c%3Dd%23&fixed=1&n=2", "",
		},
		"semicolon":  {"GET %s/find?a=1;b&q={q}", nil, `{"q": "x"}`, "GET /find?a=1;b&q=x", ""},
		"semicolons": {"GET %s/find?a=1;b&q={q}", nil, `{"q": "x", "n": 2}`, "GET /find?a=1;b&q=x&n=2", ""},
		"path":       {"GET %s/item/{q}/x", nil, `{"q": "a/../b?c"}`, "GET /item/a%2F..%2Fb%3Fc/x", ""},
		"delete":     {"DELETE %s/item/{q}", nil, `{"q": "7"}`, "DELETE /item/7", ""},
		"body": {
			"POST %s/item/{q}", nil, `{"q": "7", "n": 2.50, "opt": [1, "x"]}`, "POST /item/7",
			`{"n":2.50,"opt":[1,"x"]}`,
		},
		"body template": {
			"PUT %s/x",
			map[string]any{"body": map[string]any{
				"text": "q is {q}", "n": "{n}", "gone": "{opt}",
				"list": []any{"{n}", "{opt}", 1},
			}},
			`{"q": "Q", "n": 2}`, "PUT /x", `{"list":[2,1],"n":2,"text":"q is Q"}`,
		},
		"no template code": {
			"PUT %s/x",
			map[string]any{"body": map[string]any{"q": "{q}", "n": "{n}{opt}"}},
			`{"q": "{n} ${env:TOKEN}", "n": 1, "opt": ""}`, "PUT /x", `{"n":"1","q":"{n} ${env:TOKEN}"}`,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			raw, err := invokeHTTP(t, skills.Definition{
				Handler: "http:" + fmt.Sprintf(test.handler, server.URL), Config: test.config,
				Parameters: object(map[string]any{"q": anything, "n": anything, "opt": anything}),
			}, test.args)
			var got map[string]string
			require.Truef(t, err == nil && json.Unmarshal(raw, &got) == nil, "%s, %v", raw, err)
			want := map[string]string{"request": test.request, "body": test.body, "key": "key-1", "type": got["type"]}
			assert.NoDiff(t, want, got)
		})
	}
}

func TestHTTPRejectsParentPath(t *testing.T) {
	t.Parallel()
	server := startServer(t, echo)
	for args, want := range map[string]string{
		`{"q": ".."}`: `argument q: ".." cannot be part of a path`, `{"q": "."}`: `argument q: "." cannot be part of a path`,
		`{"q": ""}`: `argument q: "" cannot be part of a path`, `{}`: "argument q is missing; the path of the URL needs it",
	} {
		_, err := invokeHTTP(t, skills.Definition{
			Handler: "http:GET " + server.URL + "/a/{q}/b", Parameters: object(map[string]any{"q": map[string]any{}}),
		}, args)
		assert.Truef(t, errorClass(err) == skills.ClassRefused && strings.HasSuffix(err.Error(), want), "%s: %v", args, err)
	}
}

// A model sees that an argument of the path is required. An argument with a default, or of the query, is not.
func TestHTTPRequiresArgumentsOfPath(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	text := map[string]any{"type": "string"}
	put(t, pool, skills.Definition{
		Name: "h", Handler: "http:", Config: map[string]any{"url": "https://h/{a}/{b}/{c}?d={d}"},
		Parameters: object(map[string]any{"a": text, "b": text, "c": map[string]any{"default": "x"}, "d": text, "e": text},
			"e", "b"),
	})
	pgtest.Equal(t, pool, `["e", "b", "a"]`,
		`select tool_definition -> 'parameters' ->> 'required' from agent_skills where name = 'h'`)
}

func TestHTTPResponses(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 257<<10)
	tests := map[string]struct {
		status            int
		kind, body        string
		want, class, text string
	}{
		"json":         {200, "application/json; charset=utf-8", `{"a": "\u0000"}`, `{"a":"` + "\uFFFD" + `"}`, "", ""},
		"problem json": {200, "application/vnd.x+json", `[1]`, `[1]`, "", ""},
		"text":         {200, "text/plain", "hello", `"hello"`, "", ""},
		"html":         {200, "text/html", "<p>", `"<p>"`, "", ""},
		"broken json":  {200, "application/json", `{"a`, `"{\"a"`, "", ""},
		"latin text":   {200, "text/plain; charset=ISO-8859-1", "ni\xf1o", `"niño"`, "", ""},
		"latin json":   {200, "application/json; charset=windows-1252", `{"a": "5 ` + "\x80" + `"}`, `{"a":"5 €"}`, "", ""},
		"no charset":   {200, "text/plain; charset=nonsense", "ni\xf1o", `"ni` + "\uFFFD" + `o"`, "", ""},
		"nothing":      {204, "", "", `null`, "", ""},
		"binary":       {200, "application/pdf", "%PDF", "", skills.ClassNoAnswer, "application/pdf"},
		"not found":    {404, "text/plain", "no such\nthing", "", skills.ClassHTTPStatus, "404 Not Found: no such thing"},
		"server error": {503, "text/plain", testSecret, "", skills.ClassHTTPStatus, "503"},
		"cut secret":   {500, "text/plain", strings.Repeat("x", 494) + testSecret, "", skills.ClassHTTPStatus, "[secre"},
		"not modified": {304, "", "", "", skills.ClassHTTPStatus, "304"},
		"too large":    {200, "text/plain", long, "", skills.ClassTooLarge, ""},
		"repeats secret": {200, "application/json", `{"` + testSecret + `": ["Bearer ` + testSecret +
			`", "s3cr3t\u002dvalue"]}`, `{"[secret]":["Bearer [secret]","[secret]"]}`, "", ""},
		"repeats text": {200, "text/plain", "auth: " + testSecret, `"auth: [secret]"`, "", ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			server := startServer(t, func(w http.ResponseWriter, r *http.Request) {
				assert.Equal(t, "Bearer "+testSecret, r.Header.Get("Authorization"))
				w.Header().Set("Content-Type", test.kind)
				w.WriteHeader(test.status)
				_, _ = io.WriteString(w, test.body)
			})
			got, err := invokeHTTP(t, skills.Definition{
				Handler: "http:" + server.URL,
				Config:  map[string]any{"headers": map[string]any{"Authorization": "Bearer ${env:TOKEN}"}},
			}, "")
			if string(got) != test.want || errorClass(err) != test.class {
				t.Errorf("got %s, %v of class %q", got, err, errorClass(err))
			}
			assert.Truef(t, err == nil || strings.Contains(err.Error(), test.text) &&
				!strings.Contains(err.Error(), testSecret[:5]), "got %v", err)
		})
	}
}

func TestHTTPInvalidSecrets(t *testing.T) {
	t.Parallel()
	called := false
	server := startServer(t, func(http.ResponseWriter, *http.Request) { called = true })
	for reference, want := range map[string]string{"${env:NOPE} ${env:NIX}": "NIX and NOPE", "${env:EVIL}": "line break"} {
		_, err := invokeHTTP(t, skills.Definition{
			Handler: "http:" + server.URL,
			Config:  map[string]any{"headers": map[string]any{"X-Key": reference}},
		}, "")
		wanted := skills.ClassHandler
		if strings.Contains(want, "NOPE") {
			wanted = skills.ClassConfiguration
		}
		assert.Truef(t, errorClass(err) == wanted && strings.Contains(err.Error(), want), "%s: %v", reference, err)
	}
	assert.True(t, !called, "the service was called without its secret")
}

// A header may hold a short setting, which the redaction of secrets must not search in a result.
func TestHTTPKeepsShortHeaderValues(t *testing.T) {
	t.Parallel()
	server := startServer(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, `{"version":"`+r.Header.Get("X-Version")+`","total":"12.20"}`)
	})
	got, err := invokeHTTP(t, skills.Definition{
		Handler: "http:" + server.URL,
		Config:  map[string]any{"headers": map[string]any{"X-Version": "${env:VERSION}"}},
	}, "")
	require.NoError(t, err)
	assert.Equal(t, `{"total":"12.20","version":"2"}`, string(got))
}

func TestHTTPTimeoutClosesRequest(t *testing.T) {
	t.Parallel()
	for _, phase := range []string{"before the headers", "in the body"} {
		t.Run(phase, func(t *testing.T) {
			ended := make(chan struct{})
			server := startServer(t, func(w http.ResponseWriter, r *http.Request) {
				if phase == "in the body" {
					w.WriteHeader(http.StatusOK)
					_ = http.NewResponseController(w).Flush()
				}
				<-r.Context().Done()
				close(ended)
			})
			r := registry(t, skills.Options{AllowPrivate: []string{"127.0.0.0/8"}})
			s := row(t, skills.Definition{Name: "h", Handler: "http:" + server.URL})
			s.TimeoutMS = 2000
			if _, err := r.Invoke(t.Context(), skills.Call{Skill: s}); errorClass(err) != skills.ClassTimeout {
				t.Errorf("got %v of class %q", err, errorClass(err))
			}
			select {
			case <-ended:
			case <-time.After(90 * time.Second):
				t.Error("the request of the service did not end")
			}
		})
	}
}

func TestHTTPCancelIsNoFailure(t *testing.T) {
	t.Parallel()
	cause := errors.New("lane lost")
	ctx, cancel := context.WithCancelCause(t.Context())
	server := startServer(t, func(_ http.ResponseWriter, r *http.Request) {
		cancel(cause)
		<-r.Context().Done()
	})
	r := registry(t, skills.Options{AllowPrivate: []string{"127.0.0.1"}})
	_, err := r.Invoke(ctx, skills.Call{Skill: row(t, skills.Definition{Name: "h", Handler: "http:" + server.URL})})
	if !errors.Is(err, cause) || errorClass(err) != "" {
		t.Errorf("got %v of class %q", err, errorClass(err))
	}
}

func TestHTTPRedirects(t *testing.T) {
	t.Parallel()
	other := startServer(t, func(http.ResponseWriter, *http.Request) { t.Error("the other host was called") })
	var server *httptest.Server
	server = startServer(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/here":
			http.Redirect(w, r, "/end", http.StatusFound)
		case "/away":
			http.Redirect(w, r, other.URL, http.StatusFound)
		case "/loop":
			http.Redirect(w, r, server.URL+"/loop", http.StatusFound)
		default:
			_, _ = io.WriteString(w, "end")
		}
	})
	for path, want := range map[string]string{"/here": "", "/away": skills.ClassRefused, "/loop": skills.ClassRefused} {
		got, err := invokeHTTP(t, skills.Definition{Handler: "http:" + server.URL + path}, "")
		assert.Truef(t, errorClass(err) == want && (want != "" || string(got) == `"end"`), "%s: got %s, %v", path, got, err)
	}
}

// net/http follows 301, 302 and 303 with a GET, which does not write.
func TestHTTPRedirectsOfWrites(t *testing.T) {
	t.Parallel()
	server := startServer(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/end" {
			_, _ = io.WriteString(w, `"`+r.Method+`"`)
			return
		}
		status, err := strconv.Atoi(r.URL.Path[1:])
		assert.NoError(t, err)
		w.Header().Set("Location", "/end")
		w.WriteHeader(status)
	})
	for _, method := range []string{"POST", "PUT", "PATCH", "DELETE"} {
		for status, want := range map[int]string{
			301: skills.ClassNoAnswer, 302: skills.ClassNoAnswer, 303: skills.ClassNoAnswer, 307: "", 308: "",
		} {
			got, err := invokeHTTP(t, skills.Definition{Handler: fmt.Sprintf("http:%s %s/%d", method, server.URL, status)}, "")
			assert.Truef(t, errorClass(err) == want && (want != "" || string(got) == `"`+method+`"`),
				"%s %d: got %s, %v", method, status, got, err)
		}
	}
}

func TestHTTPPrivateAddresses(t *testing.T) {
	t.Parallel()
	requests := 0
	server := startServer(t, func(http.ResponseWriter, *http.Request) { requests++ })
	u, err := url.Parse(server.URL)
	require.NoError(t, err)
	byName := "http://localhost:" + u.Port()
	tests := map[string]struct {
		url   string
		allow []string
		class string
	}{
		"nothing allowed":  {server.URL, nil, skills.ClassRefused},
		"a name for it":    {byName, nil, skills.ClassRefused},
		"another address":  {server.URL, []string{"10.0.0.0/8", "127.0.0.2"}, skills.ClassRefused},
		"another name":     {byName, []string{"localhost.example"}, skills.ClassRefused},
		"another port":     {byName, []string{"localhost:1"}, skills.ClassRefused},
		"metadata service": {"http://169.254.169.254/latest", []string{"127.0.0.1"}, skills.ClassRefused},
		"mapped to IPv6":   {"http://[::ffff:127.0.0.1]:" + u.Port(), nil, skills.ClassRefused},
		"any address":      {"http://0.0.0.0:" + u.Port(), nil, skills.ClassRefused},
		"decimal":          {"http://2130706433:" + u.Port(), nil, skills.ClassNetwork},
		"address allowed":  {server.URL, []string{"127.0.0.1"}, ""},
		"mapped allowed":   {server.URL, []string{"::ffff:127.0.0.1"}, ""},
		"range allowed":    {byName, []string{"127.0.0.0/8", "::1"}, ""},
		"name allowed":     {byName, []string{"LOCALHOST"}, ""},
		"port allowed":     {byName, []string{"localhost:" + u.Port()}, ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			requests = 0
			r := registry(t, skills.Options{AllowPrivate: test.allow})
			_, err := r.Invoke(t.Context(),
				skills.Call{Skill: row(t, skills.Definition{Name: "h", Handler: "http:" + test.url})})
			if got := errorClass(err); got != test.class && (test.class != skills.ClassNetwork || got != skills.ClassRefused) {
				t.Errorf("got %v of class %q, want %q", err, got, test.class)
			}
			assert.Equal(t, test.class == "", requests > 0, requests)
		})
	}
}

func TestNewRejectsInvalidAllowPrivate(t *testing.T) {
	t.Parallel()
	for _, entry := range []string{"", "10.0.0.0/99", "*.internal", "a b"} {
		_, err := skills.New(skills.Options{AllowPrivate: []string{entry}})
		assert.Error(t, err, entry, "was accepted")
	}
}

// net/http repeats a request with an idempotency key if a reused connection breaks.
func TestHTTPSendsRequestOnce(t *testing.T) {
	t.Parallel()
	var requests atomic.Int32
	server := startServer(t, func(w http.ResponseWriter, _ *http.Request) {
		if requests.Add(1) == 1 {
			return
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_ = conn.Close()
	})
	r := registry(t, skills.Options{AllowPrivate: []string{"127.0.0.1"}})
	call := skills.Call{
		Skill:          row(t, skills.Definition{Name: "h", Handler: "http:POST " + server.URL}),
		IdempotencyKey: "key-1",
	}
	_, err := r.Invoke(t.Context(), call)
	require.NoError(t, err)
	if _, err := r.Invoke(t.Context(), call); errorClass(err) != skills.ClassNoAnswer || requests.Load() != 2 {
		t.Errorf("%d requests for 2 calls, %v", requests.Load(), err)
	}
}

// The service received the request, so a repetition may act twice.
func TestAPostWithoutUsableAnswerMayHaveActed(t *testing.T) {
	t.Parallel()
	server := startServer(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/400", "/408", "/429", "/500", "/502", "/503", "/504":
			status, err := strconv.Atoi(r.URL.Path[1:])
			assert.NoError(t, err)
			w.WriteHeader(status)
		case "/large":
			_, _ = w.Write(make([]byte, 300<<10))
		case "/image":
			w.Header().Set("Content-Type", "image/png")
			_, _ = w.Write([]byte{1})
		case "/short":
			w.Header().Set("Content-Length", "9")
			_, _ = w.Write([]byte{1})
		default:
			panic(http.ErrAbortHandler)
		}
	})
	r := registry(t, skills.Options{AllowPrivate: []string{"127.0.0.1"}})
	for url, want := range map[string]bool{
		server.URL: true, server.URL + "/large": true, server.URL + "/image": true, server.URL + "/short": true,
		"http://127.0.0.1:1": false, server.URL + "/408": true, server.URL + "/500": true, server.URL + "/502": true,
		server.URL + "/504": true, server.URL + "/400": false, server.URL + "/429": false, server.URL + "/503": false,
	} {
		s := row(t, skills.Definition{Name: "h", Handler: "http:POST " + url})
		_, err := r.Invoke(t.Context(), skills.Call{Skill: s})
		require.Error(t, err)
		assert.Equal(t, want, slices.Contains(skills.UncertainClasses(), errorClass(err)), url, err)
	}
}
