package engineroom

import (
	"context"
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
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/threads"
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
	room, err := New(Options{
		Pool: pgtest.DB(t), Agent: "agent", API: func() http.Handler { return routes },
		Key: []byte("k"),
	})
	require.NoError(t, err)
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

// insertApproval inserts an approval of the skill drop that expires after some hours.
func insertApproval(t *testing.T, pool *pgxpool.Pool, status, arguments string, hours float64) string {
	t.Helper()
	return insert(t, pool, `
		with s as (insert into agent_skills (name, handler, trust, tool_definition)
		  values ('drop', 'builtin:drop', 'approve', '{}') on conflict (name) do nothing)
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, status, decided_by,
		  reason, decided_at, consumed_at, expires_at)
		values ('op_00000000000000000000000001', 'drop', 1, @arguments::jsonb, md5(gen_random_uuid()::text), @status,
		        case when @status in ('pending', 'expired') then '' else 'the admin' end,
		        case when @status in ('pending', 'expired') then '' else 'looks right' end,
		        case when @status not in ('pending', 'expired') then clock_timestamp() end,
		        case when @status = 'consumed' then clock_timestamp() end,
		          clock_timestamp() + make_interval(secs => @hours * 3600))
		returning id::text`, postgres.Strict{"status": status, "arguments": arguments, "hours": hours})
}

func TestApprovalTabsByState(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/approvals", "No approval is requested")
	ids := map[string]string{
		"pending":  insertApproval(t, pool, "pending", `{"n": 1}`, 5),
		"overdue":  insertApproval(t, pool, "pending", `{"n": 2}`, -1),
		"approved": insertApproval(t, pool, "approved", `{"n": 3}`, 5),
		"rejected": insertApproval(t, pool, "rejected", `{"n": 4}`, -9),
		"consumed": insertApproval(t, pool, "consumed", `{"n": 5}`, -9),
		"unused":   insertApproval(t, pool, "approved", `{"n": 6}`, -1),
		"void":     insertApproval(t, pool, "expired", `{"n": 7}`, 5),
	}
	for tab, want := range map[string]string{
		"": "pending", "?status=pending": "pending", "?status=decided": "approved rejected consumed",
		"?status=expired": "overdue unused void",
	} {
		body := wantTexts(t, server.URL+"/approvals"+tab)
		for name, id := range ids {
			shown := strings.Contains(body, `id="approval-`+id)
			assert.Truef(t, shown == strings.Contains(" "+want+" ", " "+name+" "), "%q has the %s one: %v", tab, name, shown)
		}
	}
	wantError(t, server.URL+"/approvals?status=maybe", 400, "it can be pending, decided")
	wantError(t, server.URL+"/approvals?before=yesterday", 400, "no place in this list")
}

func TestApprovalShowsExactArguments(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	first := insertApproval(t, pool, "consumed", `{"table": "a", "password": "hunter22", "n": 9007199254740993}`, 5)
	wantTexts(t, server.URL+"/approvals/"+first, "hunter22", "9007199254740993",
		"No call of this skill was approved before",
		"by the admin", "looks right")
	insertApproval(t, pool, "rejected", `{"table": "never"}`, 5)
	second := insertApproval(t, pool, "pending", `{"table": "b", "password": "hunter22", "n": 9007199254740993}`, 5)
	body := wantTexts(t, server.URL+"/approvals/"+second, `/approvals/`+first,
		`<del>− `+"  &#34;table&#34;: &#34;a&#34;</del>", `<ins>&#43; `+"  &#34;table&#34;: &#34;b&#34;</ins>",
		`action="/act/v1/approvals/`+second+`"`, `name="decision" value="approve"`, `name="decision" value="reject"`)
	assert.True(t, !strings.Contains(body, "never"), "the page compares the call with a denied call")
	wantError(t, server.URL+"/approvals/01890000-0000-7000-8000-000000000000", 404, "there is no approval")
	wantError(t, server.URL+"/approvals/nonsense", 404, "there is no approval")
}

func TestDecidedApprovalHasNoActions(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for _, id := range []string{
		insertApproval(t, pool, "rejected", `{}`, 5),
		insertApproval(t, pool, "pending", `{}`, -1),
	} {
		body := wantTexts(t, server.URL+"/approvals/"+id)
		assert.Truef(t, !strings.Contains(body, "/act/"), "the page offers a second decision:\n%s", body)
	}
	pending := insertApproval(t, pool, "pending", `{}`, 5)
	insert(t, pool, `update agent_skills set revision = 2 returning name`)
	body := wantTexts(t, server.URL+"/approvals/"+pending, "it is at revision 2 now",
		"the skill drop was changed: revision 1 is now 2")
	assert.Truef(t, !strings.Contains(body, "/act/"),
		"an approval of a skill that has changed can still be decided:\n%s", body)
}

func TestTruncatedArgumentsCannotBeApproved(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := insertApproval(t, pool, "pending", `{"text": "`+strings.Repeat("a", maxArguments)+`"}`, 5)
	wantTexts(t, server.URL+"/approvals", "Read them whole")
	body := wantTexts(t, server.URL+"/approvals/"+id, "Only the beginning", "cannot be approved here", `value="reject"`)
	assert.Truef(t, !strings.Contains(body, `value="approve"`) && len(body) <= 100_000,
		"the page has %d bytes, or offers an approval of arguments that it does not show", len(body))
}

func TestApprovalShowsOutcome(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	x := insert(t, pool, `insert into agent_executions (trace_id, surface, flow, status, result_summary)
		values ('op_00000000000000000000000001', 'operate', 'turn', 'pending', 'dropped it') returning id::text`)
	id := insertApproval(t, pool, "consumed", `{}`, 5)
	insert(t, pool, `
		with a as (insert into agent_activity (trace_id, execution_id, step, skill_name, status, output, duration_ms)
		           values ('op_00000000000000000000000001', $2::uuid, 'call 1/drop', 'drop', 'success', '{"rows": 17}', 40))
		update agent_approvals set consumed_for = $2::text || ' call 1/drop' where id = $1::uuid returning id::text`, id, x)
	wantTexts(t, server.URL+"/approvals/"+id, "was used", "/executions/"+x, "rows", "17", "40 ms")
}

const aSession = "ses_01JD3V7K8ZQ6W2M5T9X4C1B0AE"

// insertSession inserts a session with one turn.
func insertSession(t *testing.T, db interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}, said, answer, status string,
) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		if _, _, err := threads.Open(t.Context(), tx, threads.Admin,
			threads.Thread{ID: aSession, Channel: "operate", Agent: "agent", Participant: "admin"}); err != nil {
			return err
		}
		var id, trace string
		err := tx.QueryRow(t.Context(), `
			insert into agent_executions (trace_id, surface, flow, thread_id, input)
			  values (lanekeeper.agent_trace_id('op'), 'operate', 'operate', $1, jsonb_build_object('message', $2::text))
			returning id::text, trace_id`, aSession, said).Scan(&id, &trace)
		if err != nil {
			return err
		}
		for _, d := range []threads.NewMessage{
			{Role: threads.User, Content: said, Status: threads.Received},
			{Role: threads.Assistant, Content: answer, Status: threads.Sent},
		} {
			if d.Content == "" {
				continue
			}
			d.ThreadID, d.Channel, d.ExecutionID, d.TraceID = aSession, "operate", id, trace
			if _, err := threads.Post(t.Context(), tx, d); err != nil {
				return err
			}
		}
		if status == "cancelled" {
			_, err = tx.Exec(t.Context(), `select cancel_agent_execution($1, 'test', 'test')`, id)
		}
		return err
	})
	require.NoError(t, err)
}

func TestOperateShowsSession(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	_, body := testkit.Get(t, server.URL+"/operate")
	assert.Contains(t, body, "No message yet", "Lane operate: free", "No session yet", `action="/act/v1/operate"`,
		"operate.js")
	assert.True(t, !strings.Contains(body, `name="agent"`), "the page offers a choice of agent, but there is one agent")
	putAgent(t, pool, agents.Definition{Name: "sales", Default: true})
	putAgent(t, pool, agents.Definition{Name: "billing"})
	wantTexts(t, server.URL+"/operate",
		`<select name="agent" id="agent"><option value="sales">sales</option><option value="billing">`)
	hostile := "<script>alert(1)</script>\u202eevil " + strings.Repeat("x", 1<<16)
	insertSession(t, pool, "what did you do? <b>", hostile, "cancelled")
	insertSession(t, pool, "and now?", "", "pending")
	status, body := testkit.Get(t, server.URL+"/operate?session="+aSession)
	for _, want := range []string{
		"what did you do? &lt;b&gt;", "&lt;script&gt;alert(1)", "⟨U+202E⟩evil", "characters in all",
		"A turn is running", `data-execution="`,
		"belongs to the agent sales", `value="` + aSession + `"`, `href="/operate?session=` + aSession + `"`,
	} {
		if status != 200 || !strings.Contains(body, want) {
			_, who, _ := strings.Cut(body, `<p id="who">`)
			t.Errorf("status %d, %q is missing; who acts: %.300s", status, want, who)
		}
	}
	assert.Truef(t, !strings.Contains(body, "<script>alert") && len(body) <= 100_000,
		"the page has %d bytes, or text that is not escaped", len(body))
	pgtest.Exec(t, pool, `select try_acquire_agent_lock('operate', 'somebody else', 60)`)
	_, body = testkit.Get(t, server.URL+"/operate")
	assert.True(t, strings.Contains(body, "somebody else") && !strings.Contains(body, "Lane operate: free"),
		"the holder is missing")
	for _, bad := range []string{"?session=%00", "?sesion=x", "?session=" + strings.Repeat("x", 400)} {
		status, _ := testkit.Get(t, server.URL+"/operate"+bad)
		assert.Equal(t, 400, status, bad, "status")
	}
	status, body = testkit.Get(t, server.URL+"/operate?session=unknown")
	assert.Truef(t, status == 200 && strings.Contains(body, "No message yet"),
		"status of a session without messages: %d", status)
}

func TestOperateFormWithoutScript(t *testing.T) {
	t.Parallel()
	answers := map[string]func(w http.ResponseWriter){
		"hello": func(w http.ResponseWriter) {
			w.Header().Set("X-Trace-Id", "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
			io.WriteString(w, `{"session_id":"ses_1","ended":"answered"}`)
		},
		"busy": func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusConflict)
			io.WriteString(w, `{"detail":"lane operate is held by ana","status":409}`)
		},
		"drop it": func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusAccepted)
			io.WriteString(w, `{"session_id":"ses_2","ended":"waiting_approval"}`)
		},
		"late": func(w http.ResponseWriter) { w.WriteHeader(http.StatusUnauthorized) },
	}
	var got struct{ body, accept, cookie string }
	room, err := New(Options{Pool: pgtest.DB(t), Agent: "agent", API: func() http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			text, _ := io.ReadAll(r.Body)
			got.body, got.accept, got.cookie = string(text), r.Header.Get("Accept"), r.Header.Get("Cookie")
			for message, answer := range answers {
				if strings.Contains(got.body, `"`+message+`"`) && r.URL.Path == "/v1/operate" {
					answer(w)
				}
			}
		})
	}})
	require.NoError(t, err)
	mux := muxOf(room)
	for message, want := range map[string]struct{ to, said string }{
		"hello": {"/operate?session=ses_1", "The agent has answered."}, "busy": {"/operate?session=ses_0", "held by ana"},
		"drop it": {"/operate?session=ses_2", "waits for an approval"},
		"late":    {"/login?next=%2Foperate%3Fsession%3Dses_0", ""},
	} {
		form := url.Values{"message": {message}, "session_id": {"ses_0"}, "agent": {"billing"}}
		r := httptest.NewRequest(http.MethodPost, "/act/v1/operate", strings.NewReader(form.Encode()))
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Cookie", "lanekeeper=me")
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		assert.Truef(t, w.Code == http.StatusSeeOther && w.Header().Get("Location") == want.to,
			"%s: %d to %s", message, w.Code, w.Header().Get("Location"))
		assert.Truef(t, got.accept == "application/json" && got.cookie == "lanekeeper=me" &&
			strings.Contains(got.body, `"agent":"billing"`) && strings.Contains(got.body, `"session_id":"ses_0"`),
			"%s: sent %+v", message, got)
		text := ""
		for _, c := range w.Result().Cookies() {
			if f := room.readFlash(c.Value); c.Name == flashCookie && f != nil {
				text = f.Text
			}
		}
		assert.Truef(t, strings.Contains(text, want.said) && (want.said == "" || text != ""),
			"%s: the page will say %q", message, text)
	}
}

// A HEAD request of a stream gets its response at once. Otherwise the next request on its connection would wait for
// ever.
func TestStreamAnswersHEAD(t *testing.T) {
	t.Parallel()
	_, server := openRoom(t)
	client := &http.Client{Transport: &http.Transport{MaxConnsPerHost: 1}, Timeout: 60 * time.Second}
	t.Cleanup(client.CloseIdleConnections)
	for _, c := range []struct {
		method, path string
		status       int
	}{
		{"HEAD", "/live/operate", 200},
		{"GET", "/operate", 200},
		{"HEAD", "/live/operate?session=%00", 400},
		{"GET", "/operate", 200},
	} {
		r, err := http.NewRequestWithContext(t.Context(), c.method, server.URL+c.path, http.NoBody)
		require.NoError(t, err)
		got, err := client.Do(r)
		require.NoError(t, err, c.method, c.path)
		if _, err := io.Copy(io.Discard, got.Body); err != nil || got.Body.Close() != nil || got.StatusCode != c.status {
			t.Errorf("%s %s: status %d, %v", c.method, c.path, got.StatusCode, err)
		}
	}
}
