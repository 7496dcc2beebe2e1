package api_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/api"
)

// failure expects a refusal in OpenAI's format.
func (a *agent) failure(w *httptest.ResponseRecorder, status int, code string) {
	a.t.Helper()
	var got struct {
		Error map[string]any `json:"error"`
	}
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		a.t.Fatalf("%d %s: %v", w.Code, w.Body, err)
	}
	want := map[string]any{"message": got.Error["message"], "type": "invalid_request_error", "param": nil, "code": code}
	if diff := cmp.Diff(want, got.Error); diff != "" || w.Code != status || w.Header().Get("Content-Type") != "application/json" {
		a.t.Errorf("%d %v: %s", w.Code, w.Header(), diff)
	}
}

func TestRefusalsWhereOpenAIsClientsCallAreInItsFormat(t *testing.T) {
	t.Parallel()
	a := surfaced(t)
	const path = "/v1/chat/completions"
	a.failure(a.raw("POST", path, "{}", bearer("")), 401, "invalid_api_key")
	a.failure(a.raw("POST", path, "{}", bearer(token)), 401, "invalid_api_key")
	a.failure(a.raw("DELETE", path, "{}", bearer("")), 401, "invalid_api_key")
	a.failure(a.raw("DELETE", path, "", bearer(chatKey)), 405, "method_not_allowed")
	a.failure(a.raw("POST", path, strings.Repeat("x", 101), bearer(chatKey)), 413, "request_entity_too_large")
	form := bearer(chatKey)
	form.Set("Content-Type", "application/x-www-form-urlencoded")
	a.failure(a.raw("POST", path, "a=b", form), 415, "unsupported_media_type")
	if w := a.raw("POST", path, "", http.Header{"Authorization": {"Bearer " + chatKey}}); w.Code != 200 {
		t.Errorf("without a body there is nothing to name, but: %d %s", w.Code, w.Body)
	}
	a.failure(a.raw("POST", "/v1/embeddings", "{}", bearer(chatKey)), 404, "not_found")
	a.refused(a.raw("POST", "/v1/embeddings", "{}", bearer(token)), 404, "/v1/embeddings")
	a.refused(a.raw("POST", "/v1/embeddings", "{}", bearer("")), 401, "AGENT_ADMIN_TOKEN")
}

func TestABodyIsCompleteAndWithinItsLimit(t *testing.T) {
	t.Parallel()
	a := surfaced(t)
	if w := a.raw("POST", "/v1/chat/completions", strings.Repeat("x", 100), bearer(chatKey)); w.Body.String() != "website|"+strings.Repeat("x", 100)+"|100" {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	large := strings.Repeat("x", 1<<20)
	if w := a.raw("POST", "/webhooks/x", large, nil); w.Code != 200 {
		t.Errorf("1 MiB is refused with %d", w.Code)
	}
	a.refused(a.raw("POST", "/webhooks/x", large+"x", nil), 413, "1048576")
	if w := a.raw("POST", "/webhooks/x", "not json", http.Header{"Content-Type": {"text/plain"}}); w.Body.String() != "|not json|8" {
		t.Errorf("a raw body is %s", w.Body)
	}
}

func TestEveryAnswerHasSecurityHeaders(t *testing.T) {
	t.Parallel()
	a := surfaced(t, api.Endpoint{
		Method: "GET", Path: "/page", About: "A page.", Access: api.Public, ContentType: "text/html",
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Security-Policy", "default-src 'self'")
		}),
	})
	for _, path := range []string{"/healthz", "/v1/traces", "/v1/nothing", "/nothing", "/v1/models", "/webhooks/x", "/openapi.json"} {
		header := a.raw("GET", path, "", asAdmin()).Header()
		for name, value := range map[string]string{
			"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
			"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
		} {
			if header.Get(name) != value {
				t.Errorf("%s: %s is %q", path, name, header.Get(name))
			}
		}
		if path != "/openapi.json" && header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s: Cache-Control is %q", path, header.Get("Cache-Control"))
		}
	}
	if got := a.raw("GET", "/page", "", nil).Header().Get("Content-Security-Policy"); got != "default-src 'self'" {
		t.Errorf("a page's own policy became %q", got)
	}
}

func TestEndpointsAreDescribed(t *testing.T) {
	t.Parallel()
	a := surfaced(t)
	paths := a.doc["paths"].(map[string]any)
	op := func(path, method string) map[string]any {
		got, _ := paths[path].(map[string]any)[method].(map[string]any)
		if got == nil {
			t.Fatalf("%s %s is not described", method, path)
		}
		return got
	}
	chat := op("/v1/chat/completions", "post")
	if diff := cmp.Diff([]any{map[string]any{"visitor": []any{}}}, chat["security"]); diff != "" {
		t.Error(diff)
	}
	content := chat["responses"].(map[string]any)["200"].(map[string]any)["content"].(map[string]any)
	if content["application/json"] == nil || content["text/event-stream"] == nil {
		t.Errorf("chat answers %v", content)
	}
	if refused := chat["responses"].(map[string]any)["401"].(map[string]any)["content"].(map[string]any); refused["application/json"] == nil {
		t.Errorf("chat refuses with %v", refused)
	}
	if op("/webhooks/{endpoint}", "post")["responses"].(map[string]any)["202"] == nil {
		t.Error("a webhook is not answered with 202")
	}
	if named := op("/chat/{file}", "get")["parameters"].([]any); len(named) != 2 {
		t.Errorf("parameters are %v", named)
	}
}
