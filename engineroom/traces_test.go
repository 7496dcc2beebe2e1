package engineroom

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// began inserts a run that began so many minutes ago and, unless it is running, ended three seconds later.
func began(t *testing.T, pool *pgxpool.Pool, surface trace.Surface, status string, minutes int) trace.ID {
	t.Helper()
	id := trace.New(surface)
	sql(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, created_at, started_at)
		select lanekeeper.agent_uuid7(at), @id, @surface, 'beat', 'running', at, at
		  from (select clock_timestamp() - @minutes::int * interval '1 minute' as at) x`,
		postgres.Strict{"id": string(id), "surface": string(surface), "minutes": minutes})
	if status != "running" {
		sql(t, pool, `update agent_executions set status = @status, completed_at = created_at + interval '3 s' where trace_id = @id`,
			postgres.Strict{"id": string(id), "status": status})
	}
	return id
}

func TestTracesAreRolledUp(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/traces", "Nothing has been done yet")
	id := began(t, pool, trace.Heartbeat, "completed", 5)
	sql(t, pool, `
		insert into agent_activity (trace_id, kind, skill_name, status, token_usage, cost_usd, finished_at)
		values (@id, 'model', 'model_call', 'success', '{"total_tokens": 12840}', 0.25, clock_timestamp()),
		       (@id, 'call', 'fetch', 'error', '{}', 0.5, clock_timestamp())`, postgres.Strict{"id": string(id)})
	sql(t, pool, `insert into agent_executions (trace_id, surface, flow, status, parent_id) select trace_id, 'flow', 'child', 'pending', id from agent_executions`, nil)
	body := shows(t, server.URL+"/traces", `href="/traces/`+string(id)+`"`, "heartbeat", "completed", "3 s", "12,840", "$0.7500", `href="/traces/`+string(id)+`#errors"`)
	if n := strings.Count(body, `<tr id="trace-`); n != 1 {
		t.Errorf("there are %d lines for one trace", n)
	}
}

func TestFiltersOfTracesCombine(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	old := began(t, pool, trace.Heartbeat, "failed", 3000)
	failed := began(t, pool, trace.Heartbeat, "failed", 30)
	done := began(t, pool, trace.Heartbeat, "completed", 20)
	chat := began(t, pool, trace.Chat, "failed", 10)
	all := []trace.ID{old, failed, done, chat}
	for query, want := range map[string][]trace.ID{
		"":                   {old, failed, done, chat},
		"?surface=heartbeat": {old, failed, done},
		"?status=failed":     {old, failed, chat},
		"?since=24h":         {failed, done, chat},
		"?surface=heartbeat&status=failed&since=24h": {failed},
		"?surface=webhook":                           {},
	} {
		_, body := see(t, server.URL+"/traces"+query)
		for _, id := range all {
			has, should := strings.Contains(body, `href="/traces/`+string(id)+`"`), false
			for _, w := range want {
				should = should || w == id
			}
			if has != should {
				t.Errorf("%q: trace %s is there: %t", query, id, has)
			}
		}
	}
	shows(t, server.URL+"/traces?surface=webhook", "No trace matches")
	for query, why := range map[string]string{
		"surface=fax": "surface", "status=great": "status", "since=3w": "since", "before=x": "before", "colour=red": "colour",
	} {
		turnsAway(t, server.URL+"/traces?"+query, 400, why)
	}
}

func TestTracesComeInPages(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	sql(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'), case when n % 2 = 0 then 'chat' else 'heartbeat' end, 'beat', 'pending', at
		  from (select n, clock_timestamp() - (200 - n) * interval '1 minute' as at from generate_series(1, 120) n) x`, nil)
	next, seen := "/traces?status=pending", 0
	for next != "" {
		body := shows(t, server.URL+next)
		seen += strings.Count(body, `<tr id="trace-`)
		before, _, more := strings.Cut(body, `">Older traces`)
		if next = ""; more {
			next = strings.ReplaceAll(before[strings.LastIndex(before, `"`)+1:], "&amp;", "&")
			if !strings.Contains(next, "status=pending") {
				t.Fatalf("the next page %s forgot the filter", next)
			}
		}
	}
	if seen != 120 {
		t.Errorf("the pages have %d traces", seen)
	}
}

func TestNoTableIsReadWholeForATrace(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	sql(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow, status, created_at, wait_number)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'), case n % 5 when 0 then 'chat' else 'heartbeat' end, 'beat', 'pending', at, 1
		  from (select n, clock_timestamp() - n * interval '1 minute' as at from generate_series(1, 4000) n) x`, nil)
	sql(t, pool, `
		insert into agent_activity (id, trace_id, execution_id, kind, skill_name, status, created_at, finished_at, duration_ms)
		select lanekeeper.agent_uuid7(e.created_at), e.trace_id, e.id, 'call', 'skill', case n when 6 then 'error' else 'success' end, e.created_at, e.created_at, 1
		  from agent_executions e, generate_series(1, 6) n`, nil)
	sql(t, pool, `
		insert into agent_approvals (trace_id, execution_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		select e.trace_id, e.id, 'skill', 1, '{}', e.id::text, clock_timestamp() from agent_executions e`, nil)
	sql(t, pool, `alter table agent_checkpoints disable trigger agent_checkpoints_fence`, nil)
	sql(t, pool, `
		insert into agent_checkpoints (execution_id, step, claim, output)
		select e.id, 'wait', 0, '{"event": "EVENT_COMPLETED", "timed_out": false}' from agent_executions e`, nil)
	analyse(t, pool, "agent_executions", "agent_activity", "agent_approvals", "agent_checkpoints", "agent_activity_open", "agent_events")
	rows, err := pool.Query(t.Context(), `select distinct tableoid::regclass::text from agent_activity`)
	if err != nil {
		t.Fatal(err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	tables = append(tables, "agent_executions", "agent_approvals", "agent_checkpoints")
	one := "/traces/hb_" + strings.Repeat("0", 24) + "42"
	var row string
	if err := pool.QueryRow(t.Context(), `select id::text from agent_activity where trace_id = 'hb_00000000000000000000000042' limit 1`).Scan(&row); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{
		"/traces", "/traces?surface=chat", "/traces?status=pending&since=1h", "/traces?status=failed", one, one + "?view=tree", one + "?view=table",
		one + "?view=table&after=" + row, one + "?row=" + row,
	} {
		indexed(t, pool, path, tables...)
	}
}
