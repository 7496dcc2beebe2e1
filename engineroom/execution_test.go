package engineroom

import (
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

func TestAnExecutionThatWaitsSaysForWhat(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := execution(t, pool, "waiting", "flow", "greet")
	body := shows(t, server.URL+"/executions/"+id, "Waits for event", "EVENT_COMPLETED", `name="key" value="news"`, `action="/act/v1/events"`,
		"wait for news", `action="/act/v1/executions/`+id+`/cancel"`, `action="/act/v1/executions/`+id+`/fork"`, "No step is recorded yet",
		"It holds no lane", "It has said nothing", "it has started nothing")
	if strings.Contains(body, "/retry") {
		t.Error("what has not ended can be retried")
	}
	for kind, want := range map[string]string{
		"approval": `href="/approvals/news"`, "agent": `href="/executions/news"`, "lane": `href="/lanes"`, "delay": "the clock alone",
	} {
		quiet(t, pool, `update agent_executions set waiting_for = $2 where id = $1`, id, kind)
		if body := shows(t, server.URL+"/executions/"+id, want); strings.Contains(body, "/act/v1/events") {
			t.Errorf("the end of a wait for %s can be raised by hand", kind)
		}
	}
	for _, key := range []string{"password=hunter22", "\u202eyek", strings.Repeat("k", maxEventKey+1)} { // a form would send another key
		quiet(t, pool, `update agent_executions set waiting_for = 'event', waiting_key = $2 where id = $1`, id, key)
		if body := shows(t, server.URL+"/executions/"+id); strings.Contains(body, "/act/v1/events") || strings.Contains(body, "hunter22") {
			t.Errorf("%.20q is a field of a form", key)
		}
	}
	turnsAway(t, server.URL+"/executions/01890000-0000-7000-8000-000000000000", 404, "there is no execution")
	turnsAway(t, server.URL+"/executions/nonsense", 400, "is not the id of an execution")
	turnsAway(t, server.URL+"/executions/"+id+"?before=odd", 400, "not where a page")
	turnsAway(t, server.URL+"/executions/"+id+"?colour=red", 400, "no filter")
}

func TestAnExecutionThatFailedCanBeRetried(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := execution(t, pool, "failed", "flow", "greet")
	quiet(t, pool, `update agent_executions set error_message = 'the roof is off', failed_step = 'lift' where id = $1`, id)
	body := shows(t, server.URL+"/executions/"+id, `action="/act/v1/executions/`+id+`/retry"`, "the roof is off", "Failed step", "Ended: failed")
	if strings.Contains(body, "/cancel") || strings.Contains(body, "Raise the event") {
		t.Error("what has ended can be cancelled, or waits")
	}
}

func TestTheTimelineGoesOnOverPages(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := execution(t, pool, "waiting", "flow", "greet")
	quiet(t, pool, `
		insert into agent_checkpoints (execution_id, step, claim, failed, output, created_at)
		select @id::uuid, 'step ' || n, 1 + n / 50, n = 60, case when n = 61 then '{"event": "EVENT_COMPLETED", "timed_out": false}'::jsonb
		         when n = 62 then '{"event": "EVENT_COMPLETED", "timed_out": true}'::jsonb else to_jsonb(n) end, now() - (100 - n / 2) * interval '1 second'
		  from generate_series(1, 90) n`, postgres.Strict{"id": id})
	quiet(t, pool, `update agent_executions set created_at = now() - interval '1 hour', started_at = now() - interval '1 hour', wait_number = 3 where id = $1`, id)
	path, seen := "/executions/"+id, map[string]int{}
	for pages := 0; path != ""; pages++ {
		if pages > 5 {
			t.Fatal("the pages have no end")
		}
		body := shows(t, server.URL+path, `<svg class="strip"`, `role="img"`)
		if pages == 0 {
			shows(t, server.URL+path, "Waits, for the 3rd time", "Wait ended by EVENT_COMPLETED", "Wait timed out", `class="moment-failed"`)
		}
		_, list, _ := strings.Cut(body, `<ol class="moments">`)
		list, _, _ = strings.Cut(list, "</ol>")
		seen["all"] += strings.Count(list, "Fork from here")
		if strings.Contains(body, "Under claim 2 from here on") {
			seen["claim"]++
		}
		path = strings.TrimSuffix(next(body, `<p class="pager">`), "#timeline")
		if !strings.Contains(body, "Earlier steps") {
			path = ""
			if !strings.Contains(body, "Begun: pending") {
				t.Error("the first page does not say when it was begun")
			}
		}
	}
	if seen["all"] != 90 || seen["claim"] != 1 {
		t.Errorf("seen %v", seen)
	}
	shows(t, server.URL+"/executions/"+id+"?from="+url.QueryEscape("step 7"), `name="from" value="step 7"`)
}

func TestAnExecutionShowsItsFamily(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	root, here, child, fork := execution(t, pool, "waiting", "flow", "root"), execution(t, pool, "running", "flow", "here"),
		execution(t, pool, "completed", "flow", "child"), execution(t, pool, "pending", "flow", "forked")
	quiet(t, pool, `update agent_executions set parent_id = $1 where id = $2`, root, here)
	quiet(t, pool, `update agent_executions set parent_id = $1 where id = $2`, here, child)
	quiet(t, pool, `update agent_executions set forked_from = $1, forked_step = 'pay' where id = $2`, here, fork)
	quiet(t, pool, `insert into agent_checkpoints (execution_id, step, claim, created_at) values ($1, 'before', 1, now() - interval '1 day')`, fork)
	shows(t, server.URL+"/executions/"+here, "(this one)", `id="relative-`+root, `id="relative-`+child, `id="fork-`+fork, "from step", "Started by")
	shows(t, server.URL+"/executions/"+fork, "Forked from", "before step", "taken over")
	shows(t, server.URL+"/executions", ">child</span>", ">parent</span>", ">fork</span>")
	quiet(t, pool, `insert into agent_executions (trace_id, surface, flow, status, parent_id) select 'x', 'flow', 'many', 'pending', $1 from generate_series(1, 120)`, child)
	quiet(t, pool, `insert into agent_executions (trace_id, surface, flow, status, parent_id)
		select 'x', 'flow', 'more', 'pending', id from agent_executions where flow = 'many'`)
	body := shows(t, server.URL+"/executions/"+here, "There are more below it")
	if n := strings.Count(body, `id="relative-`); n != treeMost+2 {
		t.Errorf("the tree has %d executions", n)
	}
}

func TestAnExecutionShowsWhoRunsItAndItsLanes(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id, other := execution(t, pool, "running", "flow", "external:crawler"), execution(t, pool, "running", "flow", "other")
	quiet(t, pool, `
		with w as (insert into agent_workers (name, kind, owner, lock_id, expires_at) values ('w', 'outside', 'the crawler', 'a secret of a lock', now() + interval '1 minute') returning id)
		update agent_executions set claimed_by = w.id, claim = 7, started_at = now() from w where agent_executions.id = $1`, id)
	quiet(t, pool, `insert into agent_status_changes (execution_id, n, status) values ($1, 1, 'pending'), ($1, 2, 'running')`, id)
	quiet(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at, execution_id) values
		('pipeline:prices', 'x', 1, now() + interval '1 hour', $1), ('thread:t1', 'x', 2, now() + interval '1 hour', $1), ('pipeline:lent', 'y', 3, now() + interval '1 hour', $2)`, id, other)
	quiet(t, pool, `insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds) values ('thread:t1', 1, $2, $1, 60), ('pipeline:lent', 1, $1, $2, 60)`, id, other)
	quiet(t, pool, `insert into agent_messages (thread_id, seq, turn, role, content, status, execution_id) values ('t1', 1, 1, 'assistant', 'here it is', 'sent', $1)`, id)
	body := shows(t, server.URL+"/executions/"+id, "the crawler", "number 7", "pipeline:prices", "borrowed from", "lent to", "here it is", "Became running")
	if strings.Contains(body, "a secret of a lock") {
		t.Error("the secret of a lock is shown")
	}
}

func TestValuesAreShownWithoutSecrets(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := execution(t, pool, "completed", "flow", "greet")
	quiet(t, pool, `update agent_executions set input = '{"password": "hunter22", "n": 9007199254740993}', result = '{"ok": true}' where id = $1`, id)
	body := shows(t, server.URL+"/executions/"+id, "[redacted]", "9007199254740993", "&#34;ok&#34;: true", "has values that are not shown")
	if strings.Contains(body, "hunter22") {
		t.Error("a secret is shown")
	}
	quiet(t, pool, `update agent_executions set input = '{"n": 9007199254740993}' where id = $1`, id)
	body = shows(t, server.URL+"/executions/"+id)
	if _, form, _ := strings.Cut(body, `<textarea name="input"`); !strings.Contains(form[:300], "9007199254740993") {
		t.Error("the form does not begin with the input")
	}
	for name, input := range map[string]string{
		"long": fmt.Sprintf(`{"a": %q}`, strings.Repeat("a", 9000)), "turned": "{\"a\": \"\u202e\"}", "deep": strings.Repeat("[", 1500) + strings.Repeat("]", 1500),
	} {
		quiet(t, pool, `update agent_executions set input = $2::jsonb where id = $1`, id, input)
		body = shows(t, server.URL+"/executions/"+id, "The input is not shown here")
		if len(body) > 100_000 {
			t.Errorf("%s: the page has %d bytes", name, len(body))
		}
	}
}
