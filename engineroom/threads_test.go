package engineroom

import (
	"net/url"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

func TestListThreads(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/threads", "No conversation yet")
	wantTexts(t, server.URL+"/threads?view=held", "No thread is held")
	wantTexts(t, server.URL+"/threads?view=queue", "No message is queued")
	x := rows.Execution(t, pool, "running", "chat", "chat")
	rows.Quiet(t, pool, `
		insert into agent_threads (id, channel, owner, participant, next_seq) values ('a/b c', 'chat', 'key1', 'Ana', 3),
		  ('other', 'log', 'key2', 'Ben', 1), ('session', 'operate', '', 'Cleo', 1)`)
	rows.Quiet(t, pool, `insert into agent_messages (thread_id, seq, turn, role, content, status)
		values ('a/b c', 1, 1, 'user', 'a question', 'received'),
		('a/b c', 2, 1, 'assistant', 'an answer', 'sent'), ('a/b c', null, null, 'assistant', 'later', 'queued')`)
	rows.Quiet(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id)
		values ('thread:a/b c', 'x', 1, now() + interval '1 hour', $1)`, x)
	for query, want := range map[string]string{
		"": "Ana Ben Cleo", "?channel=log": "Ben", "?owner=key1": "Ana", "?owner=key1&channel=log": "", "?view=held": "Ana",
		"?view=queue": "Ana", "?channel=operate": "Cleo",
	} {
		body := wantTexts(t, server.URL+"/threads"+query)
		for _, name := range []string{"Ana", "Ben", "Cleo"} {
			shown := strings.Contains(body, "with "+name+"<")
			assert.Truef(t, shown == strings.Contains(want, name), "%q lists %s: %v", query, name, shown)
		}
	}
	wantTexts(t, server.URL+"/threads", `href="/threads/a%2Fb%20c"`, "an answer", `aria-label="1 queued`,
		`href="/executions/`+x)
	wantError(t, server.URL+"/threads?channel=odd", 400, "chat, webhook, log, operate")
	wantError(t, server.URL+"/threads?view=odd", 400, "held, queue")
	wantError(t, server.URL+"/threads?view=held&owner=x", 400, "leave other filters out")
	wantError(t, server.URL+"/threads?before=odd", 400, "not a cursor of this listing")
}

func TestThreadShowsConversation(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	x := rows.Execution(t, pool, "running", "chat", "chat")
	rows.Quiet(t, pool, `insert into agent_threads (id, channel, owner, participant, next_seq, summary, summary_through)
		values ('a/b', 'chat', 'key1', 'Ana', 121, 'of prices', 3)`)
	address := server.URL + "/threads/" + url.PathEscape("a/b")
	wantTexts(t, address, "Thread with Ana", "No messages yet", "No message is queued",
		"nobody; the next speaker takes it", "of prices")
	rows.Quiet(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, status, trace_id)
		select 'a/b', n, n - (n + 1) % 2, case n % 2 when 1 then 'user' else 'assistant' end, 'words ' || n || '.', case n % 2
		  when 1 then 'received' else 'sent' end, 'ch_1'
		  from generate_series(1, 121) n`)
	rows.Quiet(t, pool, `insert into agent_messages (thread_id, role, content, status, execution_id, error_message) values
		('a/b', 'assistant', 'first in line', 'queued', $1, null), ('a/b', 'assistant', 'second in line', 'queued', $1, null),
		('a/b', 'assistant', 'never mind', 'withdrawn', $1, 'taken back')`, x)
	rows.Quiet(t, pool, `update agent_executions set thread_id = 'a/b' where id = $1`, x)
	rows.Quiet(t, pool, `insert into agent_message_drafts (execution_id, claim, content) values ($1, 1, 'I am just')`, x)
	rows.Quiet(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id)
		values ('thread:a/b', 'x', 1, now() + interval '1 hour', $1)`, x)
	body := wantTexts(t, address, "words 121.", "words 72.", "place 1 in the queue", "place 2 in the queue", "never mind",
		"taken back", "I am just",
		`action="/act/v1/threads/a%2Fb/messages"`, `action="/act/v1/lanes/thread:a%2Fb/break"`, `href="/executions/`+x,
		"bubble-user", "10 min without")
	if strings.Contains(body, "words 71.") || strings.Index(body, "words 72.") > strings.Index(body, "words 121.") {
		t.Error("the page is too long, or its order is wrong")
	}
	body = wantTexts(t, server.URL+strings.TrimSuffix(nextLink(body, `<p class="pager">`), "#conversation"), "words 71.",
		"words 22.", "Latest messages", "Older messages")
	assert.True(t, !strings.Contains(body, "words 72.") && !strings.Contains(body, "words 21."), "pages overlap")
	wantError(t, server.URL+"/threads/unknown", 404, "there is no thread")
	wantError(t, server.URL+"/threads/"+strings.Repeat("x", 300), 400, "1 to 200 printable")
	wantError(t, address+"?before=odd", 400, "not a cursor of this listing")
}
