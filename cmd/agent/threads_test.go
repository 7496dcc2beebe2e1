package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func TestThreadCommands(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := newProgram(t, url)
	assert.Contains(t, p.must("threads", "clean"), "nothing to release")
	db := connect(t, url)
	for _, sql := range []string{
		`insert into agent_threads (id, channel, participant) values ('maria', 'chat', 'Maria')`,
		`select acquire_agent_lock('thread:maria', 'somebody', 600)`,
	} {
		pgtest.Exec(t, db, sql)
	}
	assert.Equal(t, "queued behind somebody\n", p.must("threads", "send", "maria", "a word from the office"))
	locks := p.must("threads", "locks")
	assert.Contains(t, locks, "maria", "Maria", "somebody", "active", "QUEUED", "1")
	assert.Contains(t, p.must("threads", "locks", "--stale"), "no held threads")
	assert.Contains(t, p.must("threads", "show", "maria"), "maria  chat, Maria\n", "queued")
	pgtest.Exec(t, db, `update agent_locks set expires_at = clock_timestamp() - interval '2 minutes'`)
	assert.Contains(t, p.must("threads", "locks", "--stale"), "stale")
	got := p.must("threads", "clean", "--json")
	assert.Truef(t, strings.Contains(got, `"thread_id": "maria"`) && strings.Contains(got, `"idle_seconds": 7`),
		"clean: %s", got)
	pgtest.Exec(t, db, `update agent_messages set created_at = '2026-01-02 03:04:05Z', sent_at = '2026-01-02 03:06:07Z'`)
	assert.Contains(t, p.must("threads", "show", "maria"), "1  assistant  sent  2026-01-02 03:06:07\na word from the office")
	assert.Contains(t, p.must("threads", "send", "maria", "and another"), "sent as message 2")
	got = p.must("threads", "send", "maria", "a third", "--json")
	assert.Truef(t, strings.Contains(got, `"success": true`) && strings.Contains(got, `"queued": false`), "send: %s", got)
	if got := p.run("threads", "send", "nobody", "hello"); got.code == 0 || !strings.Contains(got.err, "no such thread") {
		t.Errorf("to nobody: %+v", got)
	}
	if got := p.run("threads", "send", "maria", " "); got.code == 0 || !strings.Contains(got.err, "content") {
		t.Errorf("nothing: %+v", got)
	}
}

// Unknown callers and threads are rejected with advice.
func TestThreadsOpenInvalidKeys(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	_, err := connect(t, url).Exec(t.Context(), `insert into agent_threads (id, channel, owner_kind)
		values ('maria', 'chat', 'admin')`)
	require.NoError(t, err)
	p := newProgram(t, url,
		"AGENT_CHAT_KEY=shop=the-keys-own-secret-0123456789abcdef,site=another-secret-of-0123456789abcdef",
		"AGENT_CHAT_BROWSER_KEYS=site")
	for name, test := range map[string]struct {
		args []string
		says string
	}{
		"an unknown key": {
			[]string{"threads", "open", "maria", "--key", "shpo"},
			`there is no chat key named "shpo"; AGENT_CHAT_KEY has shop, site`,
		},
		"an unknown key of a start": {
			[]string{"executions", "start", "external:x", "--thread", "ana", "--chat-key", "shpo"},
			`there is no chat key named "shpo"`,
		},
		"a browser's key":     {[]string{"threads", "open", "maria", "--key", "site"}, "agent threads invite"},
		"an unknown endpoint": {[]string{"threads", "open", "maria", "--webhook", "nope"}, "nope"},
		"an unknown thread":   {[]string{"threads", "access", "mario"}, "agent threads ls"},
		"an unknown access": {
			[]string{"threads", "revoke", "maria", "0192a000-0000-7000-8000-000000000000"},
			"the thread has no such access; see agent threads access maria",
		},
	} {
		got := p.run(test.args...)
		assert.Truef(t, got.code != 0 && strings.Contains(got.err, test.says), "%s: %+v", name, got)
	}
	assert.Contains(t, p.must("threads", "open", "maria", "--key", "shop"), "open to key shop")
}

// accessByPath lists the callers of a path prefix; the longest prefix applies. An unlisted path fails the test.
var accessByPath = map[string][]string{
	"/healthz": allCallers, "/readyz": allCallers, "/metrics": allCallers, "/openapi.json": allCallers,
	"/chat": allCallers, "/webhooks/": allCallers, "/channels/": allCallers,
	"/v1/": {"admin"}, "/mcp": {"admin"},
	"/v1/chat/": {"visitor"}, "/v1/models": {"visitor"}, "/v1/files": {"visitor"}, "/v1/responses": {"visitor"},
	"/v1/conversations/": {"visitor"},
}

var allCallers = []string{"nobody", "wrong", "visitor", "admin"}

func callersOf(path string) []string {
	longest := ""
	for prefix := range accessByPath {
		if strings.HasPrefix(path, prefix) && len(prefix) > len(longest) {
			longest = prefix
		}
	}
	return accessByPath[longest]
}

func TestAccessOfRunningProgram(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t), token, "AGENT_CHAT_KEY=visitors-key-of-this-test", "AGENT_LISTEN=127.0.0.1:0",
		"AGENT_LOG_LEVEL=info",
		"AGENT_TRUSTED_PROXIES=127.0.0.1")
	s := p.start("serve")
	base := "http://" + s.find(t, `listen=http://(\S+)`)
	_, admin, _ := strings.Cut(token, "=")
	keys := map[string]string{"nobody": "", "wrong": admin[1:], "visitor": "visitors-key-of-this-test", "admin": admin}
	_, text := testkit.Get(t, base+"/openapi.json")
	var document struct {
		Paths map[string]map[string]any `json:"paths"`
	}
	err := json.Unmarshal([]byte(text), &document)
	require.Truef(t, err == nil && len(document.Paths) >= 30, "%d paths, %v", len(document.Paths), err)
	tries := 0
	for path, methods := range document.Paths {
		allowed := callersOf(path)
		assert.Truef(t, allowed != nil, "accessByPath does not list %s", path)
		for method := range methods {
			for who, key := range keys {
				tries++ // each request has its own address: the server slows down wrong keys from one address
				address := fmt.Sprintf("192.0.%d.%d", tries/256, tries%256)
				status := call(t, strings.ToUpper(method), base+strings.NewReplacer("{", "", "}", "").Replace(path), key, address)
				entered := status != http.StatusUnauthorized
				assert.Truef(t, entered == slices.Contains(allowed, who), "%s %s as %s: status %d", method, path, who, status)
			}
		}
	}
}

func TestOpenAPIOfEndpoints(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info")
	s := p.start("serve")
	_, text := testkit.Get(t, "http://"+s.find(t, `listen=http://(\S+)`)+"/openapi.json")
	type body struct {
		Required bool `json:"required"`
		Content  map[string]struct {
			Schema struct {
				Ref string `json:"$ref"`
			} `json:"schema"`
		} `json:"content"`
	}
	var document struct {
		Paths map[string]map[string]struct {
			Parameters []struct {
				Name string `json:"name"`
			} `json:"parameters"`
			RequestBody body            `json:"requestBody"`
			Responses   map[string]body `json:"responses"`
		} `json:"paths"`
	}
	require.NoError(t, json.Unmarshal([]byte(text), &document))
	for answer, want := range map[[3]string]string{
		{"/webhooks/{endpoint}", "post", "202"}:                "webhook_Response",
		{"/webhooks/{endpoint}", "post", "200"}:                "webhook_Response",
		{"/v1/webhooks/deliveries/{id}", "get", "200"}:         "webhook_Shown",
		{"/v1/webhooks/deliveries/{id}/replay", "post", "202"}: "webhook_Replayed",
		{"/v1/operate", "post", "200"}:                         "operate_Answer",
		{"/v1/operate", "post", "202"}:                         "operate_Answer",
	} {
		got := document.Paths[answer[0]][answer[1]].Responses[answer[2]].Content["application/json"].Schema.Ref
		assert.Equal(t, "#/components/schemas/"+want, got, answer)
	}
	_, streams := document.Paths["/v1/operate"]["post"].Responses["200"].Content["text/event-stream"]
	assert.True(t, streams, "operate has no stream")
	replay := document.Paths["/v1/webhooks/deliveries/{id}/replay"]["post"].RequestBody
	assert.Equal(t, "#/components/schemas/webhook_ReplayRequest", replay.Content["application/json"].Schema.Ref)
	assert.Truef(t, !replay.Required, "the body of a replay is required")
	assert.Truef(t, document.Paths["/v1/chat/completions/{id}"]["get"].Responses["202"].Content != nil, "no 202")
	for path, want := range map[string]string{
		"/v1/chat/completions/{id}": "[{id} {X-Visitor-Token} {include_activity} {include_usage} {stream}]",
		"/v1/responses/{id}":        "[{id} {X-Visitor-Token} {stream}]",
	} {
		assert.Equal(t, want, fmt.Sprint(document.Paths[path]["get"].Parameters), path)
	}
}

// call sends an invalid request of a client behind a proxy and returns the status.
func call(t *testing.T, method, url, key, address string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(`{"no such field": 1}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Forwarded-For", address)
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	got, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer got.Body.Close()
	if !strings.HasPrefix(got.Header.Get("Content-Type"), "text/event-stream") { // an event stream does not end
		_, err := io.Copy(io.Discard, got.Body)
		require.NoError(t, err)
	}
	return got.StatusCode
}

func TestDocumentCommands(t *testing.T) {
	t.Parallel()
	p := newProgram(t, pgtest.URL(t))
	dir := writeFolder(t, map[string]string{"orders.csv": "id,total\n1,9.50\n"})
	assert.Contains(t, p.must("documents", "ls"), "no documents; agent documents add FILE")
	var d documents.Document
	require.NoError(t, json.Unmarshal([]byte(p.must("documents", "add", filepath.Join(dir, "orders.csv"), "--json")), &d))
	assert.Contains(t, p.must("documents", "ls"), d.ID, "orders.csv", "text/csv", "16 B", "admin")
	assert.Contains(t, p.must("documents", "show", d.ID), "orders.csv", "text/csv, 16 bytes, text", d.SHA256)
	assert.Equal(t, "id,total\n1,9.50\n", p.must("documents", "get", d.ID))
	red := writeFolder(t, map[string]string{"red.txt": "\x1b[31mred\x1b[0m\n"})
	var coloured documents.Document
	p.mustJSON(&coloured, "documents", "add", filepath.Join(red, "red.txt"))
	assert.Equal(t, "\x1b[31mred\x1b[0m\n", p.must("documents", "get", coloured.ID))
	assert.Equal(t, "[31mred[0m\r\n", p.onTerminal(t, "", "documents", "get", coloured.ID))
	out := filepath.Join(dir, "out.csv")
	assert.Contains(t, p.must("documents", "get", d.ID, "-o", out), "16 bytes")
	got, err := os.ReadFile(out)
	assert.Truef(t, err == nil && string(got) == "id,total\n1,9.50\n", "%q, %v", got, err)
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"documents", "get", d.ID, "-o", out}, 1, "exists"},
		{[]string{"documents", "get", d.ID, "--json"}, 2, "name a file with -o FILE"},
		{[]string{"documents", "show", "nonsense"}, 1, `document "nonsense": no such document; see agent documents ls`},
		{[]string{"documents", "add", "nowhere.txt"}, 1, "nowhere.txt"},
		{[]string{"documents", "add", out, "--thread", "nobody"}, 1, "see agent threads ls"},
	} {
		got := p.run(c.args...)
		assert.Equal(t, c.code, got.code, c.args, got.err)
		assert.Contains(t, got.err, c.want)
	}
	assert.Contains(t, p.must("documents", "rm", d.ID), "orders.csv is deleted")
	assert.Contains(t, p.run("documents", "rm", d.ID).err, "no such document")
	assert.Contains(t, p.must("activity", "audit"), "document "+d.ID, "add_document", "delete_document")
	small := newProgram(t, pgtest.URL(t), "AGENT_DOCUMENT_MAX_BYTES=1024")
	large := filepath.Join(dir, "large")
	require.NoError(t, os.WriteFile(large, make([]byte, 1025), 0o600))
	assert.Contains(t, small.run("documents", "add", large).err, "limit is 1024 bytes", "AGENT_DOCUMENT_MAX_BYTES")
}
