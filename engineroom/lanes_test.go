package engineroom

import (
	"fmt"
	"html"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

func TestHeldLanesAreListed(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/lanes", "No lane is held", "Nobody waits", "No lane is lent", "Nothing is run", "No holder left anything")
	put(t, pool, `select try_acquire_agent_lock('pipeline:<b>prices</b>', 'someone else', 60)::text`)
	put(t, pool, `select try_acquire_agent_lock('other', 'another', 60)::text`)
	shows(t, server.URL+"/lanes", "pipeline:&lt;b&gt;prices&lt;/b&gt;", "someone else",
		`action="/act/v1/lanes/pipeline:%3Cb%3Eprices%3C%2Fb%3E/break"`)
	if body := shows(t, server.URL+"/lanes?lane=other", "another"); strings.Contains(body, "someone else") {
		t.Error("one lane was asked for, and another is shown")
	}
	shows(t, server.URL+"/lanes?lane=nobodys", "Nobody holds nobodys")
	turnsAway(t, server.URL+"/lanes?lane=%00", 400, "not the name of a lane")
	turnsAway(t, server.URL+"/lanes?before=x", 400, "no place in this list")
}

func TestLanesGoOnOverPages(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	put(t, pool, `select count(try_acquire_agent_lock('lane ' || lpad(n::text, 4, '0'), 'me', 60))::text from generate_series(1, 201) n`)
	first := shows(t, server.URL+"/lanes", "Further lanes", "lane 0001")
	_, link, _ := strings.Cut(first, `<p class="pager"><a href="`)
	link, _, _ = strings.Cut(link, `"`)
	if second := shows(t, server.URL+html.UnescapeString(link), "lane 0201", "First lanes"); strings.Count(second, "Release by force</summary>") != 1 {
		t.Error("the second page has more than the last lane")
	}
}

// claimedRun is an execution that a worker has claimed whose lease has some seconds left.
func claimedRun(t *testing.T, pool *pgxpool.Pool, flow string, lease int) string {
	t.Helper()
	return put(t, pool, `
		with w as (insert into agent_workers (name, expires_at) values ('host-7', clock_timestamp() + make_interval(secs => $2::int)) returning id),
		     x as (insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
		           select 'fl_00000000000000000000000001', 'flow', $1, 'running', id, 3 from w returning id)
		select id::text from x`, flow, lease)
}

func TestWaitersLoansAndClaimsAreTold(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	running, gone := claimedRun(t, pool, "onboarding", 60), claimedRun(t, pool, "orphaned", -60)
	put(t, pool, `select try_acquire_agent_lock('thread:maria', $1 || '#3', 60)::text`, running)
	put(t, pool, `
		with w as (insert into agent_lock_waiters (lane, owner, expires_at)
		           select 'thread:maria', 'waiter ' || n, clock_timestamp() + interval '1 minute' from generate_series(1, 2) n)
		insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds) values ('thread:maria', 1, $1::uuid, $2::uuid, 60) returning lane`, gone, running)
	waits := put(t, pool, `insert into agent_executions (trace_id, surface, flow, status) values ('fl_2', 'flow', 'patient', 'running') returning id::text`)
	put(t, pool, `update agent_executions set status = 'waiting', waiting_for = 'lane', waiting_key = 'thread:maria', waiting_step = 's',
		waiting_until = clock_timestamp() + interval '1 hour' where id = $1::uuid returning id::text`, waits)
	body := shows(t, server.URL+"/lanes", "waiter 1", "waiter 2", "patient", "asks again once it is free", `id="claim-`+running, `id="stale-`+gone,
		`id="loan-`+gone+`-`+running, "host-7", "lent by", `<a href="/lanes?lane=thread%3amaria#waiters">3<`)
	if strings.Index(body, "waiter 1") > strings.Index(body, "waiter 2") || strings.Index(body, "waiter 2") > strings.Index(body, "patient") {
		t.Error("the order is not that in which they are served")
	}
	if strings.Contains(body, `id="claim-`+gone) {
		t.Error("what nobody runs is said to be run")
	}
}

func TestWhatHoldersLeftBehindIsTold(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	put(t, pool, `select try_acquire_agent_lock('dropped', 'a dead one', 60)::text`)
	put(t, pool, `update agent_locks set expires_at = clock_timestamp() - interval '1 minute' returning lane`)
	shows(t, server.URL+"/lanes", "No lane is held", "a dead one", "start <code>agent serve</code>")
}

func TestHostileLanesAreText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	bad := strings.ReplaceAll(hostile, "\u0007", "")
	put(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at)
		values ($1, $1, 1, clock_timestamp() + interval '1 minute') returning lane`, bad)
	put(t, pool, `insert into agent_lock_waiters (lane, owner, expires_at) values ($1, $1 || repeat('x', 100), clock_timestamp() + interval '1 minute') returning lane`, bad)
	put(t, pool, `update agent_workers set name = $1 || repeat('x', 1000000) where id = (select claimed_by from agent_executions where id = $2::uuid) returning id::text`,
		bad, claimedRun(t, pool, bad, 60))
	harmless(t, server.URL+"/lanes")
}

func TestLanesAreFoundByAnIndex(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	put(t, pool, `
		with l as (
		  insert into agent_locks (lane, locked_by, fencing_token, expires_at, parked)
		  select 'lane ' || n, case when n % 4 = 0 then 'me' else '' end, n, now() + interval '1 hour', false from generate_series(1, 20000) n),
		w as (insert into agent_workers (name, expires_at) select 'w', now() + interval '1 hour' from generate_series(1, 20) returning id),
		x as (
		  insert into agent_executions (id, trace_id, surface, flow, status, claimed_by)
		  select lanekeeper.agent_uuid7(now() - n * interval '1 minute'), 'fl_' || n, 'flow', 'f', case when n % 500 = 0 then 'running' else 'pending' end,
		         case when n % 500 = 0 then (select id from w limit 1) end
		    from generate_series(1, 20000) n returning 1)
		select 'ok'`)
	analyse(t, pool, "agent_locks", "agent_executions", "agent_workers")
	for _, path := range []string{
		"/lanes", "/lanes?after=lane+7", "/lanes?lane=lane+8", fmt.Sprintf("/lanes?before=%s", "01890000-0000-7000-8000-000000000000"),
	} {
		bounded(t, pool, path, "agent_locks", "agent_executions")
	}
}
