package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// These are the chat keys and the secret of the webhooks.
const (
	siteKey = "site-0123456789abcdef0123456789abcdef"
	shopKey = "shop-0123456789abcdef0123456789abcdef"
	webKey  = "web-0123456789abcdef0123456789abcdef"
	hookKey = "hook-0123456789abcdef0123456789abcdef"
)

// salary is the secret. No stranger may read it.
const salary = "the salary is 4711"

// strangersYAML has flows that send the secret and wait. Its endpoints open threads, and answer in the threads that a
// sender names.
const strangersYAML = `
kind: flow
name: offer
actions:
  - {actionType: send_message, parameters: {message: "the salary is 4711"}}
  - {actionType: wait_for_response}
  - {actionType: send_message, parameters: {message: "offer accepted"}}
---
kind: flow
name: other
actions:
  - {actionType: send_message, parameters: {message: "other was here"}}
---
kind: flow
name: inviting
actions:
  - {actionType: send_message, parameters: {message: "the salary is 4711"}}
  - {actionType: open_thread}
  - {actionType: set, parameters: {variables: {link: "https://example.com/chat#join={{joinToken}}"}}}
  - {actionType: wait_for_response}
  - {actionType: send_message, parameters: {message: "welcome"}}
---
kind: webhook
name: hire
scheme: bearer
secrets: ["${HOOK_SECRET}"]
actions:
  - {when: {body.do: begin}, flow: offer, thread: "{body.thread}"}
  - {when: {body.do: answer}, resume: response, key: "{body.thread}"}
---
kind: webhook
name: apply
scheme: bearer
secrets: ["${HOOK_SECRET}"]
max_attempts: 1
actions:
  - {when: {body.do: begin}, flow: other, thread: "{body.thread}"}
  - {when: {body.do: answer}, resume: response, key: "{body.thread}"}
`

// strangerTest is a serving agent with all kinds of callers.
type strangerTest struct {
	t    *testing.T
	base string
	db   *pgxpool.Pool
}

func newStrangerTest(t *testing.T) *strangerTest {
	t.Helper()
	model := modeltest.New(t)
	model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply { // repeats all that it was sent
		var all []string
		for _, m := range req.Messages {
			if m.Role != openai.ChatMessageRoleSystem {
				all = append(all, m.Content)
			}
		}
		return modeltest.Text(strings.Join(all, " | "))
	})
	url := pgtest.URL(t)
	p := newProgram(t, url, token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info", "OPENAI_API_KEY=sk-test",
		"AGENT_MODEL=gpt-4o-mini", "OPENAI_BASE_URL="+model.URL(),
		"AGENT_CHAT_KEY=site="+siteKey+",shop="+shopKey+",web="+webKey, "AGENT_CHAT_BROWSER_KEYS=web",
		"AGENT_CHAT_RATE=100000", "HOOK_SECRET="+hookKey)
	dir := t.TempDir()
	testkit.WriteFile(t, filepath.Join(dir, "all.yaml"), strangersYAML)
	p.must("apply", dir)
	s := p.start("serve")
	return &strangerTest{t, s.find(t, `msg=serving listen=(\S+)`), connect(t, url)}
}

type httpResult struct {
	status int
	header http.Header
	body   string
}

func (h *strangerTest) send(method, path, key, body string, headers ...string) httpResult {
	h.t.Helper()
	r, err := http.NewRequestWithContext(h.t.Context(), method, h.base+path, strings.NewReader(body))
	require.NoError(h.t, err)
	r.Header.Set("Authorization", "Bearer "+key)
	r.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	answer, err := http.DefaultClient.Do(r)
	require.NoError(h.t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	require.NoError(h.t, err)
	return httpResult{answer.StatusCode, answer.Header, string(text)}
}

// admin expects a status and decodes the response.
func (h *strangerTest) admin(method, path string, body any, want int, into any) {
	h.t.Helper()
	var content bytes.Buffer
	if body != nil {
		require.NoError(h.t, json.NewEncoder(&content).Encode(body))
	}
	got := h.send(method, path, strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="), content.String())
	require.Truef(h.t, got.status == want, "%s %s: %d %s, want %d", method, path, got.status, got.body, want)
	if into != nil {
		require.NoError(h.t, json.Unmarshal([]byte(got.body), into))
	}
}

// sendChat sends a visitor's message. Headers name the thread, the visitor token and the join token.
func (h *strangerTest) sendChat(key, words string, headers ...string) httpResult {
	h.t.Helper()
	body, err := json.Marshal(map[string]any{
		"model":    "agent",
		"messages": []map[string]string{{"role": "user", "content": words}},
	})
	require.NoError(h.t, err)
	return h.send("POST", "/v1/chat/completions", key, string(body), headers...)
}

// sendWebhook sends a webhook and waits until the agent has handled it.
func (h *strangerTest) sendWebhook(endpoint, do, thread string) {
	h.t.Helper()
	body := fmt.Sprintf(`{"do": %q, "thread": %q, "content": "I accept", "n": %d}`, do, thread,
		pgtest.Value[int](h.t, h.db, `select count(*) from agent_webhook_deliveries`))
	got := h.send("POST", "/webhooks/"+endpoint, hookKey, body)
	require.Truef(h.t, got.status == http.StatusAccepted, "webhook %s: %d %s", endpoint, got.status, got.body)
	h.waitUntil(`select not exists (select from agent_webhook_deliveries where status not in ('done', 'dead', 'ignored'))`)
}

func (h *strangerTest) waitUntil(sql string, args ...any) {
	h.t.Helper()
	pgtest.Eventually(h.t, func() bool {
		var yes bool
		err := h.db.QueryRow(h.t.Context(), sql, args...).Scan(&yes)
		return err == nil && yes
	}, sql)
}

// threadContent returns all messages of a thread.
func (h *strangerTest) threadContent(id string) string {
	h.t.Helper()
	return pgtest.Value[string](h.t, h.db, `select coalesce(string_agg(role || ': ' || content, ' | ' order by seq), '')
		from agent_messages where thread_id = $1`, id)
}

// visitorToken returns a token issued by the agent.
func (h *strangerTest) visitorToken(key string) string {
	h.t.Helper()
	got := h.sendChat(key, "hi", "X-Visitor-Token", "new")
	require.Truef(h.t, got.status == http.StatusOK && strings.HasPrefix(got.header.Get("X-Visitor-Token"), "vis_"),
		"a visitor's token: %d %q %s", got.status, got.header.Get("X-Visitor-Token"), got.body)
	return got.header.Get("X-Visitor-Token")
}

// thread is an open thread; completion is set if the owner is a visitor.
type thread struct{ id, name, completion string }

// threadStart is one way to open a thread.
type threadStart struct {
	begin   func(h *strangerTest, name string) thread
	allowed []string // the callers with access: names of chat keys, or flow
}

// startByChat returns a way to open a thread: a visitor sends the secret.
func startByChat(key string, visitor func(*strangerTest) string, named bool) func(*strangerTest, string) thread {
	return func(h *strangerTest, name string) thread {
		h.t.Helper()
		var headers []string
		if visitor != nil {
			headers = append(headers, "X-Visitor-Token", visitor(h))
		}
		if named {
			headers = append(headers, "X-Thread-Id", name)
		}
		got := h.sendChat(key, salary, headers...)
		var c openai.ChatCompletionResponse
		err := json.Unmarshal([]byte(got.body), &c)
		require.Truef(h.t, err == nil && got.status == http.StatusOK, "begin: %d %s", got.status, got.body)
		assert.Truef(h.t, !named || got.header.Get("X-Thread-Id") == name,
			"the thread is named %q, want %q", got.header.Get("X-Thread-Id"), name)
		id := pgtest.Value[string](h.t, h.db, `select thread_id from agent_executions where id = $1`,
			strings.TrimPrefix(c.ID, "chatcmpl-"))
		return thread{id, got.header.Get("X-Thread-Id"), c.ID}
	}
}

// awaitFlow waits until a flow waits in a thread, and returns the thread.
func (h *strangerTest) awaitFlow(id, name string) thread {
	h.t.Helper()
	h.waitUntil(`select exists (select from agent_executions where thread_id = $1 and status = 'waiting')`, id)
	return thread{id: id, name: name}
}

func threadStarts() map[string]threadStart {
	var first string
	visitor := func(h *strangerTest) string {
		if first == "" {
			first = h.visitorToken(webKey)
		}
		return first
	}
	adminSays := func(h *strangerTest, id string) {
		h.admin("POST", "/v1/threads/"+id+"/messages", map[string]any{"content": salary}, http.StatusCreated, nil)
	}
	return map[string]threadStart{
		"visitor":          {startByChat(webKey, visitor, true), nil},
		"visitor, unnamed": {startByChat(webKey, visitor, false), nil},
		"visitor of the page": {
			startByChat(siteKey, func(h *strangerTest) string { return h.visitorToken(siteKey) }, true),
			nil,
		},
		"key":          {startByChat(siteKey, nil, true), []string{"site"}},
		"key, unnamed": {startByChat(siteKey, nil, false), []string{"site"}},
		"flow": {func(h *strangerTest, name string) thread {
			h.admin("POST", "/v1/executions", map[string]any{"flow": "offer", "thread_id": name}, http.StatusCreated, nil)
			return h.awaitFlow(name, name)
		}, []string{"flow"}},
		"webhook": {func(h *strangerTest, name string) thread {
			h.sendWebhook("hire", "begin", name)
			return h.awaitFlow(pgtest.Value[string](h.t, h.db, `select id from agent_threads where owner_kind = 'webhook'
				and owner = 'hire' and name = $1`, name), name)
		}, nil},
		"admin": {func(h *strangerTest, name string) thread {
			h.admin("POST", "/v1/threads", map[string]any{"id": name}, http.StatusCreated, nil)
			adminSays(h, name)
			return thread{id: name, name: name}
		}, []string{"flow"}},
		"channel": {func(h *strangerTest, name string) thread {
			h.admin("POST", "/v1/threads", map[string]any{"id": name, "channel": "log"}, http.StatusCreated, nil)
			adminSays(h, name)
			return thread{id: name, name: name}
		}, []string{"flow"}},
	}
}

// strangerKeys returns the callers with a chat key.
func (h *strangerTest) strangerKeys() map[string][]string {
	return map[string][]string{
		"site":            {siteKey},
		"shop":            {shopKey},
		"another visitor": {webKey, "X-Visitor-Token", h.visitorToken(webKey)},
		"no token":        {webKey},
		"a token made up": {webKey, "X-Visitor-Token", "vis_" + strings.Repeat("A", 43)},
		"visitor of shop": {shopKey, "X-Visitor-Token", h.visitorToken(shopKey)},
	}
}

var anyTrace = regexp.MustCompile(`\b(ch|op|fl)_[0-9A-Z]{26}`)

// normalized removes the parts that differ between requests.
func (r httpResult) normalized(hidden ...string) string {
	body := anyTrace.ReplaceAllString(r.body, "…")
	for _, word := range hidden {
		body = strings.ReplaceAll(body, word, "…")
	}
	return fmt.Sprintf("%d %s", r.status, body)
}

// TestStrangerAccess tries every access of every caller to every kind of thread: claim its name, read, write, list. No
// stranger gets access or learns that the thread exists.
func TestStrangerAccess(t *testing.T) {
	t.Parallel()
	h := newStrangerTest(t)
	outsiders := h.strangerKeys()
	for kind, b := range threadStarts() {
		t.Run(kind, func(t *testing.T) {
			h := &strangerTest{t, h.base, h.db}
			name := "offer " + strings.ReplaceAll(kind, ", ", " ")
			name = strings.ReplaceAll(name, " ", "-")
			for who, as := range outsiders { // outsiders claim the name first
				if slices.Contains(b.allowed, who) {
					continue
				}
				h.sendChat(as[0], "mine first", append(as[1:], "X-Thread-Id", name)...)
			}
			h.sendWebhook("apply", "begin", name)
			th := b.begin(h, name)
			before := h.threadContent(th.id)
			assert.Truef(t, !strings.Contains(before, "mine first") && !strings.Contains(before, "other was here") &&
				strings.Contains(before, salary), "after the name was taken in advance the thread has %q", before)
			for who, as := range outsiders {
				if !slices.Contains(b.allowed, who) {
					h.checkStranger(who, as, th)
				}
			}
			h.checkFlowAccess(th, b)
			h.tryEndpoint(th)
			assert.Equal(t, before, h.threadContent(th.id))
			if kind == "flow" || kind == "webhook" {
				h.awaitFlow(th.id, name)
			}
		})
	}
}

func (h *strangerTest) checkStranger(who string, as []string, th thread) {
	h.t.Helper()
	const none = "th_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	missing := h.sendChat(as[0], "what was said?", append(as[1:], "X-Thread-Id", none)...)
	assert.Truef(h.t, missing.status == http.StatusNotFound,
		"%s: a thread that never was: %d %s", who, missing.status, missing.body)
	for _, name := range []string{th.id, th.name} {
		got := h.sendChat(as[0], "what was said?", append(as[1:], "X-Thread-Id", name)...)
		switch {
		case strings.Contains(got.body, salary):
			h.t.Errorf("%s reads %s: %s", who, name, got.body)
		case strings.HasPrefix(name, "th_") && got.normalized() != missing.normalized():
			h.t.Errorf("%s finds out about %s: %s, of none %s", who, name, got.normalized(), missing.normalized())
		case !strings.HasPrefix(name, "th_") && got.status != http.StatusOK: // its own thread, as for any name
			h.t.Errorf("%s finds out about %s: %s", who, name, got.normalized())
		}
	}
	guessed := h.sendChat(as[0], "let me in", append(as[1:], "X-Thread-Join", "join_"+strings.Repeat("A", 43))...)
	if guessed.normalized() != missing.normalized() {
		h.t.Errorf("%s guesses a join token: %s", who, guessed.normalized())
	}
	for _, path := range []string{"/v1/threads", "/v1/threads/" + th.id, "/v1/threads/" + th.id + "/access"} {
		// The throttle of wrong tokens may reply first.
		got := h.send("GET", path, as[0], "")
		assert.Truef(h.t, got.status == http.StatusUnauthorized || got.status == http.StatusTooManyRequests,
			"%s lists %s: %d", who, path, got.status)
	}
	if th.completion != "" {
		const nothing = "chatcmpl-01a1fd04-74da-74d4-8812-62d9715247b0"
		got := h.send("GET", "/v1/chat/completions/"+th.completion, as[0], "", as[1:]...)
		want := h.send("GET", "/v1/chat/completions/"+nothing, as[0], "", as[1:]...)
		if got.status != http.StatusNotFound || got.normalized(th.completion) != want.normalized(nothing) {
			h.t.Errorf("%s attaches to the answer: %s", who, got.normalized())
		}
	}
}

// checkFlowAccess starts another flow and an external worker that try to write and read in the thread.
func (h *strangerTest) checkFlowAccess(th thread, b threadStart) {
	h.t.Helper()
	if slices.Contains(b.allowed, "flow") {
		return // an admin gives it access by starting a flow in it
	}
	const none = "th_00000000000000000000000000000000"
	start := func(id string) httpResult {
		return h.send("POST", "/v1/executions", strings.TrimPrefix(token, "AGENT_ADMIN_TOKEN="),
			fmt.Sprintf(`{"flow": "other", "thread_id": %q}`, id))
	}
	got, want := start(th.id), start(none)
	if got.status != http.StatusNotFound || got.normalized() != want.normalized() {
		h.t.Errorf("another flow is started in it: %s, in none %s", got.normalized(), want.normalized())
	}
	var x struct{ ID string }
	h.admin("POST", "/v1/executions", map[string]any{"flow": "external"}, http.StatusCreated, &x)
	var lock struct {
		LockID string `json:"lock_id"`
	}
	h.admin("POST", "/v1/executions/"+x.ID+"/lock", map[string]any{"owner": "w"}, http.StatusOK, &lock)
	message := map[string]any{"content": "other was here", "execution_id": x.ID, "lock_id": lock.LockID}
	h.admin("POST", "/v1/threads/"+th.id+"/messages", message, http.StatusNotFound, nil)
	h.admin("POST", "/v1/threads/"+none+"/messages", message, http.StatusNotFound, nil)
	h.admin("DELETE", "/v1/executions/"+x.ID+"/lock/"+lock.LockID,
		map[string]any{"status": "waiting", "waiting_for": "response", "waiting_key": th.id}, http.StatusNotFound, nil)
}

// tryEndpoint sends messages for the thread to a webhook endpoint, under each of its names.
func (h *strangerTest) tryEndpoint(th thread) {
	h.t.Helper()
	for _, name := range []string{th.id, th.name} {
		h.sendWebhook("apply", "answer", name)
		h.sendWebhook("apply", "begin", name)
	}
}

// TestThreadAccess grants and revokes access in every way.
func TestThreadAccess(t *testing.T) {
	t.Parallel()
	h := newStrangerTest(t)
	h.admin("POST", "/v1/threads", map[string]any{"id": "maria"}, http.StatusCreated, nil)
	h.admin("POST", "/v1/threads/maria/messages", map[string]any{"content": salary}, http.StatusCreated, nil)

	t.Run("join token", func(t *testing.T) {
		h := &strangerTest{t, h.base, h.db}
		var token struct{ ID, Token string }
		h.admin("POST", "/v1/threads/maria/join_tokens", map[string]any{}, http.StatusCreated, &token)
		pgtest.Equal(h.t, h.db, 0, `select count(*) from agent_thread_access
			where to_jsonb(agent_thread_access)::text like '%' || $1 || '%'`, token.Token)
		visitor, another := h.visitorToken(webKey), h.visitorToken(webKey)
		got := h.sendChat(webKey, "hello", "X-Visitor-Token", visitor, "X-Thread-Join", token.Token)
		name := got.header.Get("X-Thread-Id")
		require.Truef(t, got.status == http.StatusOK && strings.Contains(got.body, salary) && name != "" && name != "maria",
			"joined: %d %q %s", got.status, name, got.body)
		again := h.sendChat(webKey, "again", "X-Visitor-Token", visitor, "X-Thread-Join", token.Token)
		assert.Truef(t, again.status == http.StatusOK && again.header.Get("X-Thread-Id") == name,
			"the same visitor, with the token again: %d %q", again.status, again.header.Get("X-Thread-Id"))
		got = h.sendChat(webKey, "me too", "X-Visitor-Token", another, "X-Thread-Join", token.Token)
		assert.Equal(t, http.StatusNotFound, got.status, "a token that is used", got.body)
		got = h.sendChat(webKey, "me too", "X-Visitor-Token", another, "X-Thread-Id", name)
		assert.Equal(t, http.StatusNotFound, got.status, "another's name of it", got.body)
		got = h.sendChat(webKey, "on", "X-Visitor-Token", visitor, "X-Thread-Id", name)
		assert.Truef(t, strings.Contains(got.body, salary), "by its name: %d %s", got.status, got.body)
		h.admin("DELETE", "/v1/threads/maria/access/"+token.ID, nil, http.StatusOK, nil)
		got = h.sendChat(webKey, "still?", "X-Visitor-Token", visitor, "X-Thread-Id", name)
		assert.Equal(t, http.StatusNotFound, got.status, "after it was revoked", got.body)
		h.admin("DELETE", "/v1/threads/maria/access/"+token.ID, nil, http.StatusNotFound, nil)
	})
	t.Run("reusable token", func(t *testing.T) {
		h := &strangerTest{t, h.base, h.db}
		var token struct{ ID, Token string }
		h.admin("POST", "/v1/threads/maria/join_tokens", map[string]any{"reusable": true}, http.StatusCreated, &token)
		for range 2 {
			visitor := h.visitorToken(webKey)
			got := h.sendChat(webKey, "hello", "X-Visitor-Token", visitor, "X-Thread-Join", token.Token, "X-Thread-Id", "job")
			assert.Truef(t, got.status == http.StatusOK && strings.Contains(got.body, salary) &&
				got.header.Get("X-Thread-Id") == "job", "joined: %d %s", got.status, got.body)
		}
		visitor := h.visitorToken(webKey)
		h.sendChat(webKey, "mine", "X-Visitor-Token", visitor, "X-Thread-Id", "job")
		got := h.sendChat(webKey, "hello", "X-Visitor-Token", visitor, "X-Thread-Join", token.Token, "X-Thread-Id", "job")
		assert.Equal(t, http.StatusConflict, got.status, "a name that is taken by another thread of the visitor's", got.body)
		exec, err := h.db.Exec(t.Context(), `update agent_thread_access set expires_at = clock_timestamp() where id = $1`,
			token.ID)
		require.True(t, err == nil && exec.RowsAffected() == 1, err)
		got = h.sendChat(shopKey, "late", "X-Thread-Join", token.Token)
		assert.Equal(t, http.StatusNotFound, got.status, "an expired token", got.body)
	})
	t.Run("named key", func(t *testing.T) {
		h := &strangerTest{t, h.base, h.db}
		h.admin("POST", "/v1/executions", map[string]any{"flow": "offer", "thread_id": "juan", "chat_key": "siet"},
			http.StatusBadRequest, nil)
		h.admin("POST", "/v1/threads/maria/participants", map[string]any{"key": "siet"}, http.StatusBadRequest, nil)
		h.admin("POST", "/v1/threads", map[string]any{"id": "juan", "owner": "siet"}, http.StatusBadRequest, nil)
		h.admin("POST", "/v1/executions", map[string]any{"flow": "offer", "thread_id": "juan", "chat_key": "site"},
			http.StatusCreated, nil)
		h.awaitFlow("juan", "juan")
		got := h.sendChat(shopKey, "accepted", "X-Thread-Id", "juan")
		assert.Truef(t, !strings.Contains(got.body, "offer accepted"), "another key: %s", got.body)
		got = h.sendChat(siteKey, "yes", "X-Thread-Id", "juan")
		assert.Truef(t, strings.Contains(got.body, "offer accepted"), "the key that was named: %d %s", got.status, got.body)
		h.sendChat(siteKey, "mine", "X-Thread-Id", "pedro")
		h.admin("POST", "/v1/executions", map[string]any{"flow": "offer", "thread_id": "pedro", "chat_key": "site"},
			http.StatusConflict, nil)
		pgtest.Equal(h.t, h.db, 0, `select count(*) from agent_threads where id = 'pedro'`)
		h.admin("POST", "/v1/threads/maria/participants", map[string]any{"key": "shop", "name": "m"}, http.StatusCreated, nil)
		got = h.sendChat(shopKey, "hello", "X-Thread-Id", "m")
		assert.Truef(t, strings.Contains(got.body, salary), "a participant: %d %s", got.status, got.body)
	})
	t.Run("flow that invites", func(t *testing.T) {
		h := &strangerTest{t, h.base, h.db}
		var x struct{ ID string }
		h.admin("POST", "/v1/executions", map[string]any{"flow": "inviting", "thread_id": "eva"}, http.StatusCreated, &x)
		h.awaitFlow("eva", "eva")
		link := pgtest.Value[string](h.t, h.db, `select variables ->> 'link' from agent_executions where id = $1`, x.ID)
		_, join, _ := strings.Cut(link, "#join=")
		got := h.sendChat(shopKey, "here I am", "X-Thread-Join", join, "X-Thread-Id", "interview")
		assert.Truef(t, strings.Contains(got.body, "welcome"), "joined the flow: %d %s", got.status, got.body)
		h.admin("POST", "/v1/executions", map[string]any{"flow": "inviting", "thread_id": "eva 2"}, http.StatusCreated, &x)
		h.awaitFlow("eva 2", "eva 2")
		link = pgtest.Value[string](h.t, h.db, `select variables ->> 'link' from agent_executions where id = $1`, x.ID)
		_, join, _ = strings.Cut(link, "#join=")
		h.admin("POST", "/v1/executions/"+x.ID+"/cancel", map[string]any{"reason": "over"}, http.StatusOK, nil)
		got = h.sendChat(shopKey, "late", "X-Thread-Join", join)
		assert.Equal(t, http.StatusNotFound, got.status, "the token of an execution that has ended", got.body)
	})
	t.Run("flow in a visitor's thread", func(t *testing.T) {
		h := &strangerTest{t, h.base, h.db}
		th := startByChat(siteKey, nil, true)(h, "support")
		h.admin("POST", "/v1/threads/"+th.id+"/participants", map[string]any{"flow": "other"}, http.StatusCreated, nil)
		h.admin("POST", "/v1/executions", map[string]any{"flow": "other", "thread_id": th.id}, http.StatusCreated, nil)
		h.waitUntil(`select exists (select from agent_messages where thread_id = $1 and content = 'other was here'
			and status = 'sent')`, th.id)
		h.admin("POST", "/v1/executions", map[string]any{"flow": "offer", "thread_id": th.id}, http.StatusNotFound, nil)
	})
	t.Run("endpoint", func(t *testing.T) {
		h := &strangerTest{t, h.base, h.db}
		h.sendWebhook("hire", "begin", "ana")
		id := pgtest.Value[string](h.t, h.db, `select id from agent_threads where owner_kind = 'webhook' and name = 'ana'`)
		h.awaitFlow(id, "ana")
		h.sendWebhook("hire", "answer", "ana")
		h.waitUntil(`select exists (select from agent_messages where thread_id = $1 and content = 'offer accepted')`, id)
		h.admin("POST", "/v1/executions", map[string]any{"flow": "offer", "thread_id": "luis"}, http.StatusCreated, nil)
		h.awaitFlow("luis", "luis")
		h.admin("POST", "/v1/threads/luis/participants", map[string]any{"webhook": "apply"}, http.StatusCreated, nil)
		h.sendWebhook("apply", "answer", "luis")
		h.waitUntil(`select exists (select from agent_messages where thread_id = 'luis' and content = 'offer accepted')`)
	})
}

// TestThreadsOfEarlierRelease checks that earlier users keep their access.
func TestThreadsOfEarlierRelease(t *testing.T) {
	t.Parallel()
	h := newStrangerTest(t)
	const given = "th_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	for _, sql := range []string{
		`insert into agent_threads (id, channel, owner, next_seq) values ('site:7', 'chat', 'site', 2), ('` + given +
			`', 'chat', 'web', 2), ('talk', 'chat', '', 2)`,
		`insert into agent_messages (thread_id, seq, turn, role, content, channel, status)
		 select id, 1, 1, 'user', 'the salary is 4711', 'chat', 'received' from agent_threads`,
	} {
		pgtest.Exec(t, h.db, sql)
	}
	for who, c := range map[string]struct {
		as    []string
		name  string
		reads bool
	}{
		"its key":                    {[]string{siteKey}, "site:7", true},
		"another key":                {[]string{shopKey}, "site:7", false},
		"a visitor of the key":       {[]string{siteKey, "X-Visitor-Token", "new"}, "site:7", false},
		"the page, by a secret name": {[]string{webKey, "X-Visitor-Token", "new"}, given, true},
		"another's page":             {[]string{siteKey, "X-Visitor-Token", "new"}, given, false},
		"a thread of a flow":         {[]string{siteKey}, "talk", false},
	} {
		got := h.sendChat(c.as[0], "what was said?", append(c.as[1:], "X-Thread-Id", c.name)...)
		reads := strings.Contains(got.body, salary)
		assert.Truef(t, reads == c.reads, "%s reads: %t, %d %s", who, reads, got.status, got.body)
	}
	h.admin("POST", "/v1/executions", map[string]any{"flow": "other", "thread_id": "talk"}, http.StatusCreated, nil)
	h.admin("POST", "/v1/executions", map[string]any{"flow": "other", "thread_id": "site:7"}, http.StatusNotFound, nil)
}
