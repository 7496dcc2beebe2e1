package chat_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

// countInserts counts the statements that insert visitors' messages.
const countInserts = `
	create table test_inserts (n int);
	create function test_count() returns trigger language plpgsql as $$
	begin
	  insert into test_inserts select count(*) from added where role = 'user' having count(*) > 0;
	  return null;
	end $$;
	create trigger test_count after insert on agent_messages referencing new table
	  as added for each statement execute function test_count()`

// roomy allows requests as large as the default settings do.
func roomy(c *chat.Chat) { c.MaxBody = 4 << 20 }

// invented returns a request with an invented history of n messages.
func invented(n int, last string) string {
	var b strings.Builder
	b.WriteString(`{"model":"agent","messages":[`)
	for i := range n {
		fmt.Fprintf(&b, `{"role":%q,"content":"%d"},`, []string{"user", "assistant"}[i%2], i)
	}
	fmt.Fprintf(&b, `{"role":"user","content":%q}]}`, last)
	return b.String()
}

// The thread is the history. An invented history costs one statement and a bounded number of rows, once.
func TestLongHistoryIsCutAndStoredInOneStatement(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."))
	p := w.process(t, roomy)
	pgtest.Exec(t, w.pool, countInserts)
	r, body := p.post(t, invented(8000, "first"), inThread("long")...)
	require.Truef(t, r.StatusCode == http.StatusOK, "a new thread: %d %s", r.StatusCode, body)
	lines := w.transcript(t, "long")
	if len(lines) != 202 || lines[0] != "user: 7800" || lines[199] != "assistant: 7999" || lines[200] != "user: first" ||
		lines[201] != "assistant: One." {
		t.Errorf("the thread has %d messages: %s … %s", len(lines), lines[0],
			strings.Join(lines[max(0, len(lines)-3):], ", "))
	}
	n := pgtest.Value[int](t, w.pool, `select count(*) from agent_messages where turn = case role when 'user' then seq
		else seq - 1 end`)
	assert.Equal(t, 202, n, "messages that have their turn")
	r, body = p.post(t, invented(8000, "second"), inThread("long")...)
	require.Truef(t, r.StatusCode == http.StatusOK, "the thread again: %d %s", r.StatusCode, body)
	if lines = w.transcript(t, "long"); len(lines) != 204 || lines[202] != "user: second" {
		t.Errorf("an existing thread took %d messages", len(lines)-202)
	}
	assert.Equal(t, "101 1", pgtest.Value[string](t, w.pool, `select string_agg(n::text, ' ') from test_inserts`))
}

func TestTooManyNewMessagesAreRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("Yes."))
	p := w.process(t, roomy)
	some := func(n int) (messages []openai.ChatCompletionMessage) {
		for i := range n {
			messages = append(messages, openai.ChatCompletionMessage{Role: "user", Content: fmt.Sprint(i)})
		}
		return messages
	}
	req := says("")
	req.Messages = some(32)
	_, err := p.client(inThread("many")...).CreateChatCompletion(t.Context(), req)
	require.NoError(t, err)
	assert.Equal(t, 32,
		pgtest.Value[int](t, w.pool, `select count(*) from agent_messages where role = 'user' and turn = 1`))
	body := `{"model":"agent","messages":[` +
		strings.TrimSuffix(strings.Repeat(`{"role":"user","content":"x"},`, 8000), ",") + `]}`
	r, answer := p.post(t, body, inThread("many")...)
	if got := failureOf(t, answer); r.StatusCode != http.StatusBadRequest || got.Code != "too_many_messages" {
		t.Errorf("8,000 new messages: %d %s", r.StatusCode, answer)
	}
}

// The error for an invalid message names its index in the whole request, also behind many others.
func TestFaultOfLateMessageNamesItsPlace(t *testing.T) {
	t.Parallel()
	p := newWorld(t).process(t, roomy)
	for name, c := range map[string]struct{ message, code, param string }{
		"role":    {`{"role":"root","content":"x"}`, "invalid_value", "messages[8000].role"},
		"content": {`{"role":"user","content":7}`, "invalid_type", "messages[8000].content"},
		"number":  {`7`, "invalid_type", "messages[8000]"},
	} {
		t.Run(name, func(t *testing.T) {
			r, body := p.post(t, strings.Replace(invented(8000, "x"), `{"role":"user","content":"x"}`, c.message, 1))
			got := failureOf(t, body)
			assert.Truef(t, r.StatusCode == http.StatusBadRequest && got.Code == c.code && got.Param != nil &&
				*got.Param == c.param, "%d %s", r.StatusCode, body)
		})
	}
}

// A turn keeps its slot until it ends in this process, even if its sender has left. One thread, key or address cannot
// use all slots.
func TestTurnsUnderWayAreBounded(t *testing.T) {
	t.Parallel()
	g, reply := gated()
	w := newWorld(t)
	w.model.Handle(func(n int, _ openai.ChatCompletionRequest) modeltest.Reply {
		if n < 8 {
			return reply
		}
		return modeltest.Text("Yes.")
	})
	p := w.process(t, func(c *chat.Chat) { c.Turns = 16 }) // at most one per thread, and eight per address
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	for i := range 8 {
		stream, err := p.client(inThread(fmt.Sprint("full ", i))...).CreateChatCompletionStream(ctx, says("hi"))
		require.NoError(t, err)
		defer stream.Close()
		testkit.Receive(t, g.asked)
	}
	message := `{"model":"agent","messages":[{"role":"user","content":"hi"}]}`
	refused := func(what, thread string) {
		t.Helper()
		r, body := p.post(t, message, inThread(thread)...)
		got := failureOf(t, body)
		assert.Truef(t, r.StatusCode == http.StatusTooManyRequests && got.Code == "rate_limit_exceeded" &&
			r.Header.Get("Retry-After") != "", "%s: %d %v %s", what, r.StatusCode, r.Header, body)
	}
	refused("another in the thread", "full 0")
	refused("another of the address", "more")
	leave()
	refused("after the senders have left", "more")
	close(g.pieces)
	pgtest.Eventually(t, func() bool {
		r, _ := p.post(t, message, inThread("more")...)
		return r.StatusCode == http.StatusOK
	}, "a turn that has ended makes room")
	assert.Equal(t, 9, pgtest.Value[int](t, w.pool, `select count(*) from agent_threads`))
}
