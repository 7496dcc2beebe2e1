package engineroom

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

func TestListHeldLanes(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/lanes", "No lane is held", "No execution waits for a lane", "No lane is lent",
		"No execution is running", "No lane is stale")
	insert(t, pool, `select try_acquire_agent_lock('pipeline:<b>prices</b>', 'someone else', 60)::text`)
	insert(t, pool, `select try_acquire_agent_lock('other', 'another', 60)::text`)
	wantTexts(t, server.URL+"/lanes", "pipeline:&lt;b&gt;prices&lt;/b&gt;", "someone else",
		`action="/act/v1/lanes/pipeline:%3Cb%3Eprices%3C%2Fb%3E/break"`)
	trace := "hb_00000000000000000000000001"
	insert(t, pool, `select try_acquire_agent_lock('traced', $1, 600)::text`, trace)
	wantTexts(t, server.URL+"/lanes?lane=traced", `href="/traces/`+trace+`"`)
	body := wantTexts(t, server.URL+"/lanes?lane=other", "another")
	assert.True(t, !strings.Contains(body, "someone else"), "the page shows another lane than the requested one")
	wantTexts(t, server.URL+"/lanes?lane=nobodys", "No owner holds nobodys")
	wantError(t, server.URL+"/lanes?lane=%00", 400, "not the name of a lane")
	wantError(t, server.URL+"/lanes?before=x", 400, "no place in this list")
}

func TestLaneOfThreadShowsQueuedMessages(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insert(t, pool, `insert into agent_threads (id, channel) values ('maria', 'chat') returning id`)
	insert(t, pool, `select try_acquire_agent_lock('thread:maria', 'somebody', 600)::text`)
	insert(t, pool, `select queued::text from lanekeeper.send_agent_message('maria', null, null, 'hello')`)
	wantTexts(t, server.URL+"/lanes", `<a href="/threads/maria">1 queued message</a>`)
}

// A lane appears on an open page whose filter it matches.
func TestLiveLanesFindNewLanes(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	page := openStream(t, server.URL+"/live/lanes?lane=webhook", "")
	page.waitFor("No owner holds webhook")
	insert(t, pool, `select try_acquire_agent_lock('webhook:github:7', 'someone', 600)::text`)
	page.waitFor("held by someone")
}

// insertClaimedRun inserts a claimed execution. The lease of its worker has some seconds left.
func insertClaimedRun(t *testing.T, pool *pgxpool.Pool, flow string, lease int) string {
	t.Helper()
	return insert(t, pool, `
		with w as (insert into agent_workers (name, expires_at)
		  values ('host-7', clock_timestamp() + make_interval(secs => $2::int)) returning id),
		     x as (insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
		           select 'fl_00000000000000000000000001', 'flow', $1, 'running', id, 3 from w returning id)
		select id::text from x`, flow, lease)
}

func TestLanesShowWaitersLoansAndClaims(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	running, expired := insertClaimedRun(t, pool, "onboarding", 60), insertClaimedRun(t, pool, "orphaned", -60)
	insert(t, pool, `select try_acquire_agent_lock('thread:maria', $1 || '#3', 60)::text`, running)
	insert(t, pool, `
		with w as (insert into agent_lock_waiters (lane, owner, expires_at)
		           select 'thread:maria', 'waiter ' || n, clock_timestamp() + interval '1 minute'
		             from generate_series(1, 2) n)
		insert into agent_lock_loans (lane, depth, lender, borrower, ttl_seconds)
		  values ('thread:maria', 1, $1::uuid, $2::uuid, 60) returning lane`, expired, running)
	waits := insert(t, pool, `insert into agent_executions (trace_id, surface, flow, status)
		values ('fl_2', 'flow', 'patient', 'running') returning id::text`)
	insert(t, pool, `update agent_executions set status = 'waiting', waiting_for = 'lane', waiting_key = 'thread:maria',
		waiting_step = 's',
		waiting_until = clock_timestamp() + interval '1 hour' where id = $1::uuid returning id::text`, waits)
	body := wantTexts(t, server.URL+"/lanes", "waiter 1", "waiter 2", "patient", "retries when the lane is free",
		`id="claim-`+running, `id="stale-`+expired,
		`id="loan-`+expired+`-`+running, "host-7", "lent by", `<a href="/lanes?lane=thread%3amaria#waiters">3<`)
	assert.True(t, strings.Index(body, "waiter 1") <= strings.Index(body, "waiter 2") &&
		strings.Index(body, "waiter 2") <= strings.Index(body, "patient"), "the waiters are not in the order of the queue")
	assert.True(t, !strings.Contains(body, `id="claim-`+expired),
		"the page shows a claim of an execution that no worker runs")
}

func TestLanesShowExpiredLeases(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insert(t, pool, `select try_acquire_agent_lock('dropped', 'a dead one', 60)::text`)
	insert(t, pool, `update agent_locks set expires_at = clock_timestamp() - interval '1 minute' returning lane`)
	wantTexts(t, server.URL+"/lanes", "No lane is held", "a dead one", "start <code>agent serve</code>")
}
