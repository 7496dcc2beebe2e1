package crash_test

import (
	"cmp"
	"encoding/json"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/bills"
)

const (
	adminToken = "a-long-random-text-for-tests"
	chatKey    = "a-visitors-long-random-text"
	hookSecret = "a-long-random-text-of-the-shop"
)

// talkYAML declares the workspace for conversations and webhooks.
const talkYAML = bills.ShopYAML + `
kind: automation
name: ship
cron: "0 0 29 2 *"
skill: look
max_attempts: 1
---
kind: webhook
name: shop
scheme: bearer
secrets: ["${SHOP_SECRET}"]
actions:
  - event: EVENT_COMPLETED
    key: "order-{body.id}"
  - prompt: "See to purchase {body.id}."
  - automation: ship
`

// newChatTestEnv creates a test environment for visitors, admins and webhooks.
func newChatTestEnv(t testing.TB) *testEnv {
	t.Helper()
	s := newIdleTestEnv(t, pgtest.URL(t), talkYAML)
	s.model.Handle(s.chatModelReply)
	s.extraEnviron = []string{"AGENT_CHAT_KEY=" + chatKey, "AGENT_CHAT_RATE=100000", "SHOP_SECRET=" + hookSecret}
	return s
}

// chatModelReply is the model of a conversation. Its output depends only on its input: on the user's last message, and
// the number of replies to it.
func (s *testEnv) chatModelReply(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
	s.modelBlocker.Load().enter()
	words, turn := modeltest.Turn(req)
	orders := strings.Contains(words, "order")
	switch {
	case turn == 0:
		return modeltest.Text("Let me look.").AndCall("look", `{}`).AndCall("tell", `{}`)
	case turn == 1 && orders:
		return modeltest.ToolCall("order", `{"item": 1}`)
	}
	return modeltest.Text(finalReply(words))
}

// finalReply returns the model's last message of a turn.
func finalReply(words string) string {
	return "That is all about: " + strings.SplitN(words, "\n", 2)[0]
}

// message is a client's message in a thread, under an idempotency key.
type message struct {
	thread, words string
	stream        bool
}

// sendMessage sends a message to a process and reads until the answer, or the connection, has ended.
func (s *testEnv) sendMessage(a *agent, m message) testkit.Answer {
	s.t.Helper()
	return testkit.Chat(s.messageRequest(a, m), nil)
}

func (s *testEnv) messageRequest(a *agent, m message) *http.Request {
	s.t.Helper()
	body := modeltest.Arguments(map[string]any{
		"model": "agent", "stream": m.stream, "messages": []map[string]string{{"role": "user", "content": m.words}},
	})
	return s.newRequest(a, http.MethodPost, "/v1/chat/completions", chatKey, body, "X-Thread-Id", m.thread,
		"Idempotency-Key", m.thread+" "+m.words)
}

// attachAnswer requests an answer by its id.
func (s *testEnv) attachAnswer(a *agent, id, query string) testkit.Answer {
	s.t.Helper()
	return testkit.Chat(s.newRequest(a, http.MethodGet, "/v1/chat/completions/"+id+query, chatKey, ""), nil)
}

// newRequest builds a request; further words are headers.
func (s *testEnv) newRequest(a *agent, method, path, key, body string, header ...string) *http.Request {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.ctx(), method, "http://"+a.address()+path, strings.NewReader(body))
	require.NoError(s.t, err)
	r.Header.Set("Authorization", "Bearer "+key)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for pair := range slices.Chunk(header, 2) {
		r.Header.Set(pair[0], pair[1])
	}
	return r
}

// sendUntilAnswered acts like a client whose connection broke: it sends the message again under its key, and attaches
// to the answer in progress. It returns the answer.
func (s *testEnv) sendUntilAnswered(a *agent, m message) (got testkit.Answer) {
	s.t.Helper()
	eventually(s.t, "the database is there", func() bool {
		got = s.sendMessage(a, m)
		return got.Status != http.StatusServiceUnavailable
	})
	if got.Status == http.StatusConflict && got.ID != "" {
		id := got.ID
		eventually(s.t, "the answer is there", func() bool {
			return s.attachAnswer(a, id, "?stream=true").Code != "answer_restarted" // the stream ends with the turn
		})
		got = s.attachAnswer(a, id, "")
	}
	assert.Truef(s.t, got.Status == http.StatusOK && got.Complete, "no answer to %q: %+v", m.words, got)
	return got
}

// threadLines returns a thread in the admin's view, each message before its answer.
func (s *testEnv) threadLines(a *agent, thread string) (lines []string) {
	s.t.Helper()
	response, err := http.DefaultClient.Do(s.newRequest(a, http.MethodGet, "/v1/threads/"+thread, adminToken, ""))
	require.NoError(s.t, err)
	defer func() { _ = response.Body.Close() }()
	type line struct {
		Role, Content string
		Seq, Turn     int64
	}
	var page struct {
		Messages []line
	}
	require.NoError(s.t, json.NewDecoder(response.Body).Decode(&page))
	slices.Reverse(page.Messages)
	for i, m := range page.Messages {
		assert.Truef(s.t, m.Seq == int64(i+1), "message %d of thread %s has place %d", i+1, thread, m.Seq)
	}
	slices.SortStableFunc(page.Messages, func(a, b line) int { return cmp.Compare(a.Turn, b.Turn) })
	for _, m := range page.Messages {
		lines = append(lines, m.Role+": "+m.Content)
	}
	return lines
}

// checkSettled checks the final state after any fault: no finished call was repeated, nothing is left open, and each
// execution has ended once.
func (s *testEnv) checkSettled(before snapshot) {
	s.t.Helper()
	eventually(s.t, "everything has ended, and nothing is held", func() bool {
		open := pgtest.Value[int](s.t, s.db, `select count(*) from agent_executions where completed_at is null`)
		return open+pgtest.Value[int](s.t, s.db, leftovers["lanes held"]) == 0
	})
	after := s.takeSnapshot()
	for key := range after.modelCalls {
		_, logged := after.rows[key]
		assert.Truef(s.t, logged, "the model was asked under key %q, which the log does not know", key)
	}
	for key := range after.skillCalls {
		_, logged := after.rows[key]
		assert.Truef(s.t, logged, "a call went out under key %q, which the log does not know", key)
	}
	for key, now := range after.rows {
		s.checkCall(before.rows[key], now, before.calls(key), after.calls(key))
	}
	for what, sql := range leftovers {
		assert.Equal(s.t, 0, pgtest.Value[int](s.t, s.db, sql), what, "want none")
	}
	for what, sql := range map[string]string{
		"executions without an end": `select count(*) from agent_executions where status <> 'completed'
			or result_type <> 'success'`,
		"ends not told just once": `
			select count(*) from agent_executions x
			 where (select count(*) from agent_events e where e.event = 'AGENT_COMPLETED' and e.key = x.id::text) <> 1`,
		"drafts": `select count(*) from agent_message_drafts`,
	} {
		assert.Equal(s.t, 0, pgtest.Value[int](s.t, s.db, sql), what, "want none")
	}
}

// checkThread checks a thread: it has each message once, in order. One answer follows it, the same that its client got.
func (s *testEnv) checkThread(a *agent, thread string, answers map[string]testkit.Answer, words ...string) {
	s.t.Helper()
	got := s.threadLines(a, thread)
	if len(got) != 2*len(words) {
		s.t.Errorf("the thread is %q, want %d messages with their answers", got, len(words))
		return
	}
	for i, w := range words {
		assert.Truef(s.t, got[2*i] == "user: "+w && strings.HasSuffix(got[2*i+1], finalReply(w)),
			"the thread is %q, want %q answered in place %d", got, w, i)
		if heard, ok := answers[w]; ok && "assistant: "+heard.Text != got[2*i+1] {
			s.t.Errorf("the client got %q, the thread has %q", heard.Text, got[2*i+1])
		}
	}
}

// startUntilKilled starts a server that dies at a boundary, and waits until it is ready.
func (s *testEnv) startUntilKilled(from *regexp.Regexp, n int, action proxyAction) (*agent, *counter) {
	s.t.Helper()
	c := &counter{first: from}
	a := s.startWithFaultIn(c, n, action, "serve")
	a.AwaitOutput("msg=serving")
	eventually(s.t, "the process takes work", func() bool {
		return pgtest.Value[bool](s.t, s.db, `select exists (select from agent_workers where expires_at > clock_timestamp())`)
	})
	return a, c
}

// killAndSnapshot kills the process, if it still runs, and ends its leases. It returns a snapshot of the state that the
// process left.
func (s *testEnv) killAndSnapshot(a *agent) snapshot {
	s.t.Helper()
	a.Kill()
	s.waitSessionsEnd()
	before := s.takeSnapshot()
	s.expireLeases()
	return before
}
