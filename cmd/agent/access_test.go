package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// who may call the routes of the running program, by the beginning of their path; the longest counts. What is not
// listed is nobody's, and fails the test.
var access = map[string][]string{
	"/healthz": everybody, "/readyz": everybody, "/metrics": everybody, "/openapi.json": everybody, "/chat": everybody, "/webhooks/": everybody,
	"/v1/": {"admin"}, "/mcp": {"admin"},
	"/v1/chat/": {"visitor"}, "/v1/models": {"visitor"}, "/v1/files": {"visitor"}, "/v1/responses": {"visitor"},
}

var everybody = []string{"nobody", "wrong", "visitor", "admin"}

// mayCall finds the row of a path.
func mayCall(path string) []string {
	longest := ""
	for prefix := range access {
		if strings.HasPrefix(path, prefix) && len(prefix) > len(longest) {
			longest = prefix
		}
	}
	return access[longest]
}

func TestWhoMayCallWhatOfTheRunningProgram(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t), token, "AGENT_CHAT_KEY=visitors-key-of-this-test", "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info",
		"AGENT_TRUSTED_PROXIES=127.0.0.1")
	s := p.start("serve")
	base := "http://" + s.find(t, `listen=http://(\S+)`)
	_, admin, _ := strings.Cut(token, "=")
	keys := map[string]string{"nobody": "", "wrong": admin[1:], "visitor": "visitors-key-of-this-test", "admin": admin}
	_, text := get(t, base+"/openapi.json")
	var document struct {
		Paths map[string]map[string]any `json:"paths"`
	}
	if err := json.Unmarshal([]byte(text), &document); err != nil || len(document.Paths) < 30 {
		t.Fatalf("%d paths, %v", len(document.Paths), err)
	}
	tries := 0
	for path, methods := range document.Paths {
		allowed := mayCall(path)
		if allowed == nil {
			t.Errorf("nobody has said who may call %s", path)
		}
		for method := range methods {
			for who, key := range keys {
				tries++ // each from an address of its own: wrong tries from one are slowed down
				address := fmt.Sprintf("192.0.%d.%d", tries/256, tries%256)
				status := call(t, strings.ToUpper(method), base+strings.NewReplacer("{", "", "}", "").Replace(path), key, address)
				if entered := status != http.StatusUnauthorized; entered != slices.Contains(allowed, who) {
					t.Errorf("%s %s as %s: status %d", method, path, who, status)
				}
			}
		}
	}
}

func TestTheDocumentSaysWhatWebhooksAreAnswered(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info")
	s := p.start("serve")
	_, text := get(t, "http://"+s.find(t, `listen=http://(\S+)`)+"/openapi.json")
	var document struct {
		Paths map[string]map[string]struct {
			Responses map[string]struct {
				Content map[string]struct {
					Schema struct {
						Ref string `json:"$ref"`
					} `json:"schema"`
				} `json:"content"`
			} `json:"responses"`
		} `json:"paths"`
	}
	if err := json.Unmarshal([]byte(text), &document); err != nil {
		t.Fatal(err)
	}
	for answer, want := range map[[3]string]string{
		{"/webhooks/{endpoint}", "post", "202"}:                "webhook_Receipt",
		{"/webhooks/{endpoint}", "post", "200"}:                "webhook_Receipt",
		{"/v1/webhooks/deliveries/{id}", "get", "200"}:         "webhook_Shown",
		{"/v1/webhooks/deliveries/{id}/replay", "post", "202"}: "webhook_Replayed",
	} {
		got := document.Paths[answer[0]][answer[1]].Responses[answer[2]].Content["application/json"].Schema.Ref
		if got != "#/components/schemas/"+want {
			t.Errorf("%v is described by %q", answer, got)
		}
	}
}

// call sends a request that no route can do anything with, for a client behind a proxy, and returns the status.
func call(t *testing.T, method, url, key, address string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(`{"no such field": 1}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Forwarded-For", address)
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	got, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer got.Body.Close()
	if !strings.HasPrefix(got.Header.Get("Content-Type"), "text/event-stream") { // one of those does not end
		if _, err := io.Copy(io.Discard, got.Body); err != nil {
			t.Fatal(err)
		}
	}
	return got.StatusCode
}
