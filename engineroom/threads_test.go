package engineroom

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
)

func TestThreadsAreListed(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/threads", "Nobody has spoken with the agent yet")
	shows(t, server.URL+"/threads?view=held", "No thread is held")
	shows(t, server.URL+"/threads?view=queue", "No message stands in a queue")
	x := execution(t, pool, "running", "chat", "chat")
	quiet(t, pool, `
		insert into agent_threads (id, channel, owner, participant, next_seq) values ('a/b c', 'chat', 'key1', 'Ana', 3), ('other', 'log', 'key2', 'Ben', 1)`)
	quiet(t, pool, `insert into agent_messages (thread_id, seq, turn, role, content, status) values ('a/b c', 1, 1, 'user', 'a question', 'received'),
		('a/b c', 2, 1, 'assistant', 'an answer', 'sent'), ('a/b c', null, null, 'assistant', 'later', 'queued')`)
	quiet(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id) values ('thread:a/b c', 'x', 1, now() + interval '1 hour', $1)`, x)
	for query, want := range map[string]string{
		"": "Ana Ben", "?channel=log": "Ben", "?owner=key1": "Ana", "?owner=key1&channel=log": "", "?view=held": "Ana", "?view=queue": "Ana",
	} {
		body := shows(t, server.URL+"/threads"+query)
		for _, name := range []string{"Ana", "Ben"} {
			if has := strings.Contains(body, "<td>"+name+"</td>"); has != strings.Contains(want, name) {
				t.Errorf("%q lists %s: %v", query, name, has)
			}
		}
	}
	shows(t, server.URL+"/threads", `href="/threads/a%2Fb%20c"`, "an answer", `aria-label="1 queued`, `href="/executions/`+x)
	turnsAway(t, server.URL+"/threads?channel=odd", 400, "chat, webhook, log")
	turnsAway(t, server.URL+"/threads?view=odd", 400, "held, queue")
	turnsAway(t, server.URL+"/threads?view=held&owner=x", 400, "leave other filters out")
	turnsAway(t, server.URL+"/threads?before=odd", 400, "not where a page")
}

func TestThreadsGoOnOverPages(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	quiet(t, pool, `insert into agent_threads (id, channel, owner, updated_at) select 'thread ' || n, 'chat', 'o', now() - n / 3 * interval '1 minute' from generate_series(1, 120) n`)
	for _, path := range []string{"/threads", "/threads?owner=o&channel=chat"} {
		seen := map[string]bool{}
		for pages := 0; path != "" && pages < 5; pages++ {
			body := shows(t, server.URL+path)
			for _, row := range strings.Split(body, `href="/threads/thread%20`)[1:] {
				id, _, _ := strings.Cut(row, `"`)
				seen[id] = true
			}
			path = next(body, `<p class="pager">`)
		}
		if len(seen) != 120 {
			t.Errorf("the pages have %d threads", len(seen))
		}
	}
}

func TestAConversationIsShown(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	x := execution(t, pool, "running", "chat", "chat")
	quiet(t, pool, `insert into agent_threads (id, channel, owner, participant, next_seq, summary, summary_through) values ('a/b', 'chat', 'key1', 'Ana', 121, 'of prices', 3)`)
	address := server.URL + "/threads/" + url.PathEscape("a/b")
	shows(t, address, "Thread with Ana", "Nothing was said yet", "Nothing waits for its turn", "nobody: whoever speaks next takes it", "of prices")
	quiet(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, status, trace_id)
		select 'a/b', n, n - (n + 1) % 2, case n % 2 when 1 then 'user' else 'assistant' end, 'words ' || n || '.', case n % 2 when 1 then 'received' else 'sent' end, 'ch_1'
		  from generate_series(1, 121) n`)
	quiet(t, pool, `insert into agent_messages (thread_id, role, content, status, execution_id, error_message) values
		('a/b', 'assistant', 'first in line', 'queued', $1, null), ('a/b', 'assistant', 'second in line', 'queued', $1, null), ('a/b', 'assistant', 'never mind', 'withdrawn', $1, 'taken back')`, x)
	quiet(t, pool, `update agent_executions set thread_id = 'a/b' where id = $1`, x)
	quiet(t, pool, `insert into agent_message_drafts (execution_id, claim, content) values ($1, 1, 'I am just')`, x)
	quiet(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id) values ('thread:a/b', 'x', 1, now() + interval '1 hour', $1)`, x)
	body := shows(t, address, "words 121.", "words 72.", "place 1 in the line", "place 2 in the line", "never mind", "taken back", "I am just",
		`action="/act/v1/threads/a%2Fb/messages"`, `action="/act/v1/lanes/thread:a%2Fb/break"`, `href="/executions/`+x, "bubble-user", "600 s without")
	if strings.Contains(body, "words 71.") || strings.Index(body, "words 72.") > strings.Index(body, "words 121.") {
		t.Error("a page is longer than it may be, or in the wrong order")
	}
	body = shows(t, server.URL+strings.TrimSuffix(next(body, `<p class="pager">`), "#conversation"), "words 71.", "words 22.", "Latest messages", "Older messages")
	if strings.Contains(body, "words 72.") || strings.Contains(body, "words 21.") {
		t.Error("pages overlap")
	}
	turnsAway(t, server.URL+"/threads/unknown", 404, "there is no thread")
	turnsAway(t, server.URL+"/threads/"+strings.Repeat("x", 300), 400, "1 to 200 printable")
	turnsAway(t, address+"?before=odd", 400, "not where a page")
}

func TestHostileThreadsAreText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := strings.NewReplacer("\u0007", "", "\u202e", "").Replace(hostile) // no name of a lane may hold these
	long := hostile + strings.Repeat("x", 1_000_000)
	quiet(t, pool, `insert into agent_threads (id, channel, target, owner, participant, next_seq, summary) values ($1, 'chat', $2, left($2, 1000), $2, 9, $2)`, id, long)
	quiet(t, pool, `insert into agent_messages (thread_id, seq, turn, role, content, status, error_message, target) select $1, n, n, 'user', $2, 'received', $2, $2 from generate_series(1, 8) n`, id, long)
	quiet(t, pool, `insert into agent_messages (thread_id, role, content, status) values ($1, 'assistant', $2, 'queued')`, id, long)
	harmless(t, server.URL+"/threads")
	harmless(t, server.URL+"/threads?view=queue")
	harmless(t, server.URL+"/threads/"+url.PathEscape(id))
}

func TestThreadsAreFoundByAnIndex(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	quiet(t, pool, `insert into agent_threads (id, channel, owner, participant, next_seq, summary, updated_at)
		select 'thread' || n, (array['chat', 'webhook', 'log'])[1 + n % 3], 'key' || n % 7, 'p', 11, repeat('they spoke of prices ', 20), now() - n * interval '1 minute' from generate_series(1, 8000) n`)
	quiet(t, pool, `insert into agent_messages (thread_id, seq, turn, role, content, status)
		select 'thread' || n, s, s, 'user', 'words', 'received' from generate_series(1, 4000) n, generate_series(1, 3) s`)
	quiet(t, pool, `insert into agent_messages (thread_id, role, content, status) select 'thread' || n, 'assistant', 'words', 'queued' from generate_series(1, 2000, 20) n`)
	quiet(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at) select 'thread:thread' || n, case when n % 50 = 0 then 'x' else '' end, n, now() + interval '1 hour'
		from generate_series(1, 2000) n`)
	quiet(t, pool, `insert into agent_executions (trace_id, surface, flow, status, thread_id) select 'x', 'chat', 'chat', 'completed', 'thread' || n from generate_series(1, 5000) n`)
	quiet(t, pool, `insert into agent_lock_waiters (lane, owner, expires_at) select 'thread:thread' || n, 'x', now() from generate_series(1, 2000) n`)
	tables := []string{"agent_threads", "agent_messages", "agent_locks", "agent_executions", "agent_lock_waiters"}
	analyse(t, pool, tables...)
	before := url.QueryEscape(put(t, pool, `select to_char(updated_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') || ' ' || id from agent_threads where id = 'thread500'`))
	for _, path := range []string{
		"/threads", "/threads?channel=chat", "/threads?owner=key3", "/threads?owner=key3&channel=log", "/threads?view=held", "/threads?view=queue", "/threads?before=" + before,
		"/threads/thread7", "/threads/thread21", fmt.Sprintf("/threads/thread50?before=%d-%d", 5, 5),
	} {
		indexed(t, pool, path, tables...)
	}
}
