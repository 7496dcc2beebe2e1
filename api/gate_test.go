package api_test

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

const (
	chatKey  = "a-long-random-key-of-the-website-4711"
	otherKey = "a-long-random-key-of-the-app-4711"
)

// echo answers with who called and what was sent.
func echo(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusTeapot)
		return
	}
	visitor, _ := api.VisitorFrom(r.Context())
	fmt.Fprintf(w, "%s|%s|%d", visitor, body, r.ContentLength)
}

// surfaced is the API with one endpoint of each kind.
func surfaced(t *testing.T, more ...api.Endpoint) *agent {
	t.Helper()
	pool := pgtest.DB(t)
	return wired(t, api.Options{
		Pool: pool, Engine: engine(t, pool), ChatKeys: map[string]string{"website": chatKey, "app": otherKey},
		Endpoints: append(more, kinds()...),
	})
}

func kinds() []api.Endpoint {
	type message struct {
		Text string `json:"text"`
	}
	h := http.HandlerFunc(echo)
	return []api.Endpoint{
		{
			Method: "POST", Path: "/v1/chat/completions", About: "Chat.", Access: api.Visitor, Body: message{}, Answer: message{},
			Stream: true, OpenAIErrors: true, MaxBody: 100, Idempotent: true, Handler: h,
		},
		{Method: "GET", Path: "/v1/models", About: "Models.", Access: api.Visitor, OpenAIErrors: true, Handler: h},
		{Method: "POST", Path: "/v1/operate", About: "Operate.", Access: api.Admin, ContentType: "text/event-stream", Stream: true, Handler: h},
		{Method: "POST", Path: "/webhooks/{endpoint}", About: "Webhooks.", Access: api.Public, Status: 202, Handler: h},
		{Method: "GET", Path: "/chat/{file...}", About: "A page.", Access: api.Public, ContentType: "text/html", Query: map[string]string{"dark": "Colours."}, Handler: h},
	}
}

// whoMay says who may call each route. A route that is not here fails the test below: decide it, then add it.
func whoMay() map[string]api.Access {
	all := map[string]api.Access{
		"POST /v1/chat/completions": api.Visitor, "GET /v1/models": api.Visitor,
	}
	for _, name := range []string{
		"GET /healthz", "GET /readyz", "GET /openapi.json", "POST /webhooks/endpoint", "GET /chat/file",
	} {
		all[name] = api.Public
	}
	for _, name := range []string{
		"GET /v1/agents", "GET /v1/agents/name",
		"GET /v1/traces", "GET /v1/traces/id", "GET /v1/traces/id/why", "GET /v1/traces/id/prompts", "GET /v1/activity",
		"GET /v1/activity/spend", "GET /v1/activity/slowest", "GET /v1/activity/failing", "GET /v1/activity/audit", "GET /v1/executions", "GET /v1/executions/id",
		"POST /v1/executions/id/fork", "POST /v1/executions/id/retry", "POST /v1/executions/id/replay",
		"GET /v1/monitor/status", "GET /v1/monitor/waiting", "GET /v1/monitor/stuck",
		"GET /v1/flows", "GET /v1/flows/name", "GET /v1/schemas/flow", "GET /v1/requests", "GET /v1/requests/id",
		"GET /v1/documents", "POST /v1/documents", "GET /v1/documents/id", "GET /v1/documents/id/content", "DELETE /v1/documents/id",
		"GET /v1/executions/id/events", "POST /v1/executions/id/cancel", "GET /v1/lanes", "POST /v1/lanes/lane/break",
		"GET /v1/skills", "POST /v1/skills/name/enable", "POST /v1/skills/name/disable", "GET /v1/approvals",
		"GET /v1/approvals/id", "POST /v1/approvals/id", "POST /v1/events", "GET /v1/objectives", "GET /v1/objectives/id",
		"POST /v1/objectives/id/accept", "POST /v1/objectives/id/reject",
		"POST /v1/objectives/id/pause", "POST /v1/objectives/id/resume", "POST /v1/memory/id/forget", "GET /v1/memory/entries/category/key", "PUT /v1/memory/entries/category/key", "DELETE /v1/memory/entries/category/key",
		"GET /v1/skills/name", "GET /v1/memory/conflicts", "POST /v1/memory/conflicts/id/decide", "GET /v1/automations", "GET /v1/automations/id",
		"POST /v1/automations/id/enable", "POST /v1/automations/id/disable", "POST /v1/automations/id/accept", "POST /v1/automations/id/run", "GET /v1/memory", "GET /v1/threads", "POST /v1/threads", "POST /v1/threads/id/messages",
		"POST /v1/threads/id/join_tokens", "POST /v1/threads/id/participants", "GET /v1/threads/id/access", "DELETE /v1/threads/id/access/access_id",
		"GET /v1/threads/id", "POST /v1/operate", "POST /v1/executions", "POST /v1/executions/id/lock", "PUT /v1/executions/id/lock/lock_id",
		"DELETE /v1/executions/id/lock/lock_id", "PUT /v1/locks", "POST /v1/executions/id/checkpoints",
		"GET /v1/webhooks/targets", "POST /v1/webhooks/targets/id/enable", "POST /v1/webhooks/targets/id/disable",
		"POST /v1/webhooks/endpoints/id/enable", "POST /v1/webhooks/endpoints/id/disable", "POST /v1/webhooks/outbox/id/resend",
		"POST /v1/automations/runs/id/redrive", "GET /v1/pause", "POST /v1/pause", "POST /v1/resume", "GET /v1/retention", "PUT /v1/retention",
	} {
		all[name] = api.Admin
	}
	return all
}

func bearer(key string) http.Header {
	h := http.Header{"Content-Type": {"application/json"}}
	if key != "" {
		h.Set("Authorization", "Bearer "+key)
	}
	return h
}

func TestEveryRouteLetsInWhomItSays(t *testing.T) {
	t.Parallel()
	a := surfaced(t)
	table := whoMay()
	for _, op := range a.operations() {
		name := op[0] + " " + op[1]
		access, known := table[name]
		if !known {
			t.Errorf("nobody has said who may call %s", name)
			continue
		}
		delete(table, name)
		for who, test := range map[string]struct {
			key    string
			enters map[api.Access]bool
		}{
			"nobody":   {"", map[api.Access]bool{api.Public: true}},
			"wrong":    {"guessed", map[api.Access]bool{api.Public: true}},
			"visitor":  {chatKey, map[api.Access]bool{api.Public: true, api.Visitor: true}},
			"admin":    {token, map[api.Access]bool{api.Public: true, api.Admin: true}},
			"beheaded": {token[1:], map[api.Access]bool{api.Public: true}},
		} {
			w := a.raw(op[0], op[1], "{}", bearer(test.key))
			if entered := w.Code != http.StatusUnauthorized && w.Code != http.StatusTooManyRequests; entered != test.enters[access] {
				t.Errorf("%s as %s: status %d", name, who, w.Code)
			}
			if w.Code == http.StatusMethodNotAllowed || strings.Contains(w.Body.String(), "there is no route") {
				t.Errorf("%s is documented and is not there: %d %s", name, w.Code, w.Body)
			}
		}
	}
	for name := range table {
		t.Errorf("%s is not a route", name)
	}
}

func TestOtherMethodsThanDocumentedAreRefusedAndNamed(t *testing.T) {
	t.Parallel()
	a := surfaced(t)
	for path, methods := range a.doc["paths"].(map[string]any) {
		allow := map[string]bool{}
		for method := range methods.(map[string]any) {
			allow[strings.ToUpper(method)] = true
			if method == "get" {
				allow["HEAD"] = true
			}
		}
		path = strings.NewReplacer("{", "", "}", "").Replace(path)
		key := token
		if strings.HasPrefix(path, "/v1/chat/") || path == "/v1/models" {
			key = chatKey
		}
		for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
			w := a.raw(method, path, "", bearer(key))
			if refused := w.Code == http.StatusMethodNotAllowed; refused == allow[method] {
				t.Errorf("%s %s: %d", method, path, w.Code)
			}
			told := map[string]bool{}
			for m := range strings.SplitSeq(w.Header().Get("Allow"), ", ") {
				told[m] = true
			}
			if !allow[method] && !maps.Equal(told, allow) {
				t.Errorf("%s %s: Allow is %q", method, path, w.Header().Get("Allow"))
			}
		}
	}
}

func TestAWrongMethodIsToldToWhomMayCallTheMostGuarded(t *testing.T) {
	t.Parallel()
	h := http.HandlerFunc(echo)
	a := surfaced(t,
		api.Endpoint{Method: "GET", Path: "/v1/mixed", About: "Read.", Access: api.Public, Handler: h},
		api.Endpoint{Method: "POST", Path: "/v1/mixed", About: "Write.", Access: api.Admin, Handler: h},
		api.Endpoint{Method: "PUT", Path: "/v1/mixed", About: "Write.", Access: api.Visitor, Handler: h})
	for key, status := range map[string]int{"": 401, chatKey: 401, token: 405} {
		a.refused(a.raw("DELETE", "/v1/mixed", "", bearer(key)), status, "")
	}
}

func TestEachChatKeyHasItsName(t *testing.T) {
	t.Parallel()
	a := surfaced(t)
	for key, name := range map[string]string{chatKey: "website", otherKey: "app"} {
		if w := a.raw("GET", "/v1/models", "", bearer(key)); w.Body.String() != name+"||0" {
			t.Errorf("%s is %s", key, w.Body)
		}
	}
	if w := a.raw("POST", "/v1/operate", "x", bearer(token)); w.Body.String() != "|x|1" {
		t.Errorf("the admin is %s", w.Body)
	}
}

func TestWithoutChatKeysNoVisitorEnters(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := wired(t, api.Options{Pool: pool, Engine: engine(t, pool), Endpoints: kinds()})
	for _, key := range []string{"", chatKey, token} {
		if w := a.raw("GET", "/v1/models", "", bearer(key)); w.Code != http.StatusUnauthorized {
			t.Errorf("%q: %d", key, w.Code)
		}
	}
}

func TestKeysThatMakeNoDifferenceAreRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := engine(t, pool)
	for name, test := range map[string]struct {
		keys  map[string]string
		words string
	}{
		"empty":           {map[string]string{"a": ""}, "empty"},
		"blank":           {map[string]string{"a": " "}, "empty"},
		"the admin token": {map[string]string{"a": token}, "admin token"},
		"twice":           {map[string]string{"a": "x", "b": "x"}, "the same"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := api.New(api.Options{Pool: pool, Engine: e, AdminToken: token, ChatKeys: test.keys})
			if err == nil || !strings.Contains(err.Error(), test.words) || strings.Contains(err.Error(), token) {
				t.Errorf("error is %v", err)
			}
		})
	}
}

func TestOtherOriginsAreRefusedExceptAtWebhooks(t *testing.T) {
	t.Parallel()
	a := surfaced(t)
	for _, op := range a.operations() {
		if op[0] != "POST" {
			continue
		}
		key := token
		if whoMay()[op[0]+" "+op[1]] == api.Visitor {
			key = chatKey
		}
		for _, sent := range []http.Header{{"Sec-Fetch-Site": {"cross-site"}}, {"Origin": {"https://evil.example"}}} {
			header := bearer(key)
			maps.Copy(header, sent)
			w := a.raw(op[0], op[1], "{}", header)
			if refused := w.Code == http.StatusForbidden; refused != !strings.HasPrefix(op[1], "/webhooks/") {
				t.Errorf("%s %s with %v: %d %s", op[0], op[1], sent, w.Code, w.Body)
			}
		}
		header := bearer(key)
		header.Set("Sec-Fetch-Site", "same-origin")
		if w := a.raw(op[0], op[1], "{}", header); w.Code == http.StatusForbidden {
			t.Errorf("%s %s from its own page: %s", op[0], op[1], w.Body)
		}
	}
}

func TestAnEndpointThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e := engine(t, pool)
	ok := api.Endpoint{Method: "GET", Path: "/x", About: "X.", Access: api.Public, Handler: http.HandlerFunc(echo)}
	for name, test := range map[string]struct {
		change func(*api.Endpoint)
		words  string
	}{
		"no access":             {func(e *api.Endpoint) { e.Access = 0 }, "who may call"},
		"no handler":            {func(e *api.Endpoint) { e.Handler = nil }, "handler"},
		"no description":        {func(e *api.Endpoint) { e.About = "" }, "description"},
		"no method":             {func(e *api.Endpoint) { e.Method = "" }, "method"},
		"public and idempotent": {func(e *api.Endpoint) { e.Idempotent = true }, "strangers"},
		"bad pattern":           {func(e *api.Endpoint) { e.Path = "/{" }, "/{"},
		"taken":                 {func(e *api.Endpoint) { e.Path = "/healthz" }, "/healthz"},
	} {
		t.Run(name, func(t *testing.T) {
			bad := ok
			test.change(&bad)
			_, err := api.New(api.Options{Pool: pool, Engine: e, Endpoints: slices.Concat([]api.Endpoint{bad})})
			if err == nil || !strings.Contains(err.Error(), test.words) {
				t.Errorf("error is %v", err)
			}
		})
	}
}
