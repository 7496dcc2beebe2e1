package chat_test

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
	"github.com/lanekeeper/lanekeeper/surfaces/chat"
)

type listedItems struct {
	Data []struct {
		ID, Role, Status string
		Content          []struct{ Type, Text string }
	}
	FirstID string `json:"first_id"`
	LastID  string `json:"last_id"`
	HasMore bool   `json:"has_more"`
}

func (l listedItems) texts() (all []string) {
	for _, item := range l.Data {
		all = append(all, item.Role+" "+item.Status+": "+item.Content[0].Text)
	}
	return all
}

func (p *process) listItems(t *testing.T, path string, headers ...string) (list listedItems) {
	t.Helper()
	r, body := p.get(t, path, headers...)
	err := json.Unmarshal([]byte(body), &list)
	require.Truef(t, err == nil && r.StatusCode == http.StatusOK, "GET %s: %d %s", path, r.StatusCode, body)
	return list
}

// The answer ends while the list waits for the table of the unfinished answers.
func TestConversationListsAnAnswerThatEndsMeanwhile(t *testing.T) {
	t.Parallel()
	w := newWorld(t, modeltest.Text("One."))
	p := w.process(t)
	p.answerTo(t, "maria", "1")
	thread := w.idOf(t, "maria")
	x := rows.Execution(t, w.pool, "waiting", "chat", chat.Flow)
	rows.Quiet(t, w.pool, `update agent_executions set thread_id = $1 where id = $2`, thread, x)
	tx := pgtest.Begin(t, w.pool)
	pgtest.Exec(t, tx, `lock table agent_message_drafts in access exclusive mode`)
	listed := make(chan int, 1)
	go func() {
		list := p.listItems(t, "/v1/conversations/maria/items")
		listed <- len(list.Data)
	}()
	pgtest.AwaitBlocked(t, w.pool, 1, "agent_message_drafts")
	pgtest.Exec(t, tx, `set local session_replication_role = replica`)
	pgtest.Exec(t, tx, `update agent_executions set status = 'completed', waiting_for = null, waiting_key = null,
		waiting_until = null, waiting_step = null, completed_at = clock_timestamp() where id = $1`, x)
	pgtest.Exec(t, tx, `insert into agent_messages (thread_id, seq, turn, role, content, channel, status, execution_id)
		values ($1, 3, 1, 'assistant', 'Two.', 'chat', 'sent', $2)`, thread, x)
	require.NoError(t, tx.Commit(t.Context()))
	assert.Equal(t, 3, <-listed, "the message, its answer and the other answer")
}

func TestConversationListsItsItems(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."), held("Three is", " long.", release))
	p := w.process(t)
	p.answerTo(t, "maria", "1")
	p.answerTo(t, "maria", "2")
	all := p.listItems(t, "/v1/conversations/maria/items?order=asc")
	got := all.texts()
	assert.Truef(t, slices.Equal(got, []string{
		"user completed: 1", "assistant completed: One.",
		"user completed: 2", "assistant completed: Two.",
	}), "ascending: %q", got)
	var pages []string
	for after := ""; ; {
		list := p.listItems(t, "/v1/conversations/maria/items?limit=3&after="+after)
		pages = append(pages, list.texts()...)
		if after = list.LastID; !list.HasMore {
			break
		}
	}
	assert.Truef(t, slices.Equal(pages, []string{
		"assistant completed: Two.", "user completed: 2", "assistant completed: One.",
		"user completed: 1",
	}), "by pages: %q", pages)

	third := says("3")
	third.Stream = true
	stream, err := p.client(inThread("maria")...).CreateChatCompletionStream(t.Context(), third)
	require.NoError(t, err)
	defer stream.Close()
	var active listedItems
	pgtest.Eventually(t, func() bool {
		active = p.listItems(t, "/v1/conversations/maria/items?limit=2")
		return active.Data[0].Status == "in_progress" && active.Data[0].Content[0].Text == "Three is"
	}, "the unfinished answer is listed")
	id := strings.TrimPrefix(active.Data[0].ID, "msg_")
	close(release)
	r, body := p.get(t, "/v1/chat/completions/chatcmpl-"+id+"?stream=true")
	assert.Truef(t, r.StatusCode == http.StatusOK && strings.Contains(body, "long."), "attach: %d %s", r.StatusCode, body)

	for path, status := range map[string]int{
		"/v1/conversations/ana/items":                              http.StatusNotFound,
		"/v1/conversations/maria/items?limit=101":                  http.StatusBadRequest,
		"/v1/conversations/maria/items?order=up":                   http.StatusBadRequest,
		"/v1/conversations/maria/items?after=msg_x":                http.StatusBadRequest,
		"/v1/conversations/maria/items?after=" + active.Data[0].ID: http.StatusBadRequest,
		"/v1/conversations/" + strings.Repeat("x", 300) + "/items": http.StatusBadRequest,
	} {
		r, body := p.get(t, path)
		assert.Truef(t, r.StatusCode == status, "GET %s: %d %s, want %d", path, r.StatusCode, body, status)
	}
	r, body = p.get(t, "/v1/conversations/maria/items", "X-Visitor-Token", "vis_"+strings.Repeat("a", 43))
	assert.Truef(t, r.StatusCode == http.StatusNotFound, "another visitor: %d %s", r.StatusCode, body)
}

// countingLink counts the bytes that the database sends.
type countingLink struct {
	client, server net.Conn
	sent           *atomic.Int64
}

func (l countingLink) Upstream() { _, _ = io.Copy(l.server, l.client) }

func (l countingLink) Downstream() { _, _ = io.Copy(l, l.server) }

func (l countingLink) Write(b []byte) (int, error) {
	l.sent.Add(int64(len(b)))
	return l.client.Write(b)
}

func TestConversationListsImagesWithoutTheirBytes(t *testing.T) {
	t.Parallel()
	const size = 1 << 20
	w := newWorld(t, modeltest.Text("A dot."))
	var sent atomic.Int64
	proxy := pgproxy.Listen(t, w.pool.Config().ConnString(), func(client, server net.Conn) pgproxy.Link {
		return countingLink{client, server, &sent}
	})
	front := pgtest.Pool(t, proxy.URL(""), postgres.Options{MaxConns: 4})
	p := w.process(t, func(c *chat.Chat) { c.Front, c.MaxBody = front, 4*size })
	r, body := p.post(t, shows("Look.", pixel(strings.Repeat("x", size)), picture), inThread("s")...)
	require.Equal(t, http.StatusOK, r.StatusCode, body)
	before := sent.Load()
	_, body = p.get(t, "/v1/conversations/s/items")
	assert.Contains(t, body, `"type":"input_file","filename":"image"`, picture)
	n := sent.Load() - before
	assert.Truef(t, n > 0 && n < size, "the database sent %d bytes", n)
}
