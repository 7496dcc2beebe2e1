package engineroom

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// putAgent makes a definition the current one of its agent.
func putAgent(t *testing.T, pool *pgxpool.Pool, d agents.Definition) {
	t.Helper()
	_, err := agents.Put(t.Context(), pool, d)
	require.NoError(t, err)
}

// openRoomWith serves the room with settings.
func openRoomWith(t *testing.T, settings agents.Settings) (*pgxpool.Pool, *httptest.Server) {
	t.Helper()
	pool := pgtest.DB(t)
	room, err := New(Options{Pool: pool, Agent: settings.Name, Agents: &agents.Directory{Settings: settings}})
	require.NoError(t, err)
	server := serveRoom(t, room)
	return pool, server
}

func TestAgentShowsEffectiveValues(t *testing.T) {
	t.Parallel()
	pool, server := openRoomWith(t, agents.Settings{
		Name: "house", Model: "gpt-6-luna",
		Limits: agents.Limits{Tokens: 60000},
	})
	wantTexts(t, server.URL+"/agents", `href="/agents/house"`, "gpt-6-luna", "default")
	wantTexts(t, server.URL+"/agents/house", "It has no declaration in a workspace", "AGENT_MODEL",
		"None. Only the rules", "agent apply DIR")
	secret := "Bearer Zq81xLm0Kk77Zq81xLm0Kk77"
	putAgent(t, pool, agents.Definition{Name: "sales", Default: true, Instructions: "You are Nora."})
	putAgent(t, pool, agents.Definition{
		Name: "sales", Default: true, Timezone: "Europe/Madrid", Greeting: "Hola <b>",
		Instructions: "You are {{Nora}} <script>alert(1)</script> \u202eevil. " + secret,
	})
	putAgent(t, pool, agents.Definition{Name: "billing", Memory: "own", Description: "Invoices."})
	wantTexts(t, server.URL+"/agents", `href="/agents/sales"`, "Invoices.", `href="/executions?agent=billing"`,
		`href="/threads?agent=sales"`)
	body := wantTexts(t, server.URL+"/agents/sales", "Europe/Madrid", "document", "60000",
		"AGENT_MAX_TOKENS", "Hola &lt;b&gt;",
		"You are {{Nora}} &lt;script&gt;", `href="/agents/sales?version=1"`, "Version 2")
	assert.True(t, !strings.Contains(body, "<script>alert") && !strings.Contains(body, "Zq81xLm0Kk77") &&
		!strings.Contains(body, "\u202e"), "the instructions are shown as they are written")
	wantTexts(t, server.URL+"/agents/sales?version=1", "You are Nora.", "This is version 1", "To the current version")
	wantError(t, server.URL+"/agents/salse", http.StatusNotFound, "did you mean")
	wantError(t, server.URL+"/agents/sales?version=7", http.StatusNotFound, "the latest is 2")
	wantError(t, server.URL+"/agents/sales?version=x", http.StatusBadRequest, "a number from 1")
	_, err := agents.Remove(t.Context(), pool, []string{"sales"})
	require.NoError(t, err)
	wantError(t, server.URL+"/agents/billing", http.StatusNotFound, "/agents/billing?version=1")
	wantTexts(t, server.URL+"/agents/billing?version=1", "Invoices.")
}

func TestListsFilterByAgent(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for _, agent := range []string{"sales", "billing"} {
		rows.Quiet(t, pool, `
			insert into agent_executions (trace_id, surface, flow, agent, status, started_at, completed_at)
			values (lanekeeper.agent_trace_id('fl'), 'flow', 'flow-of-' || $1::text, $1::text, 'completed', now(), now())`, agent)
		rows.Quiet(t, pool, `
			insert into agent_executions (trace_id, surface, flow, agent, status, waiting_for, waiting_key, waiting_until,
			  waiting_step)
			values (lanekeeper.agent_trace_id('fl'), 'flow', 'wait-of-' || $1::text, $1::text, 'waiting', 'event', $1::text,
			  now() + interval '1 hour', 's')`, agent)
		rows.Quiet(t, pool, `insert into agent_threads (id, channel, agent, participant)
			values ('talk-' || $1::text, 'chat', $1::text, 'Ana')`, agent)
	}
	for path, prefix := range map[string]string{
		"/executions": "flow-of-", "/executions?view=waiting": "wait-of-", "/threads": "talk-", "/traces": "flow-of-",
		"/executions?flow=flow-of-billing": "flow-of-",
	} {
		wantTexts(t, server.URL+path, prefix+"billing", ">billing<")
		filtered := path + map[bool]string{true: "&", false: "?"}[strings.Contains(path, "?")] + "agent=billing"
		body := wantTexts(t, server.URL+filtered, prefix+"billing", `name="agent" value="billing"`)
		assert.Truef(t, !strings.Contains(body[strings.Index(body, `id="list"`):], prefix+"sales"),
			"%s lists the work of another agent", filtered)
	}
	wantTexts(t, server.URL+"/threads?agent=nobody", "No thread matches")
	wantTexts(t, server.URL+"/executions?agent=nobody", "No execution matches")
	wantTexts(t, server.URL+"/traces?agent=nobody", "No trace matches")
}

// insertAutomation inserts an automation with a schedule.
func insertAutomation(t *testing.T, pool *pgxpool.Pool, name string) string {
	t.Helper()
	return insert(t, pool, `
		insert into agent_automations (name, cron, skill_name, next_run_at, source)
		values ($1, '0 3 * * *', 'fetch', '2030-01-01 03:00+00', 'workspace') returning id::text`, name)
}

// insertAutomationRun inserts a run of an automation.
func insertAutomationRun(t *testing.T, pool *pgxpool.Pool, automation, status string) string {
	t.Helper()
	return insert(t, pool, `
		insert into agent_automation_runs (automation_id, cause, scheduled_for, status, trace_id, error_message)
		values ($1::uuid, 'manual', clock_timestamp(), $2::text, 'fl_00000000000000000000000001', case
		  when $2 = 'dead' then 'no route to host' end)
		returning id::text`, automation, status)
}

func TestAutomationsShowScheduleAndRuns(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/automations", "No automation yet", "no open proposal", "No run has used up its attempts")
	id := insertAutomation(t, pool, "nightly")
	insertAutomationRun(t, pool, id, "success")
	dead := insertAutomationRun(t, pool, id, "dead")
	insert(t, pool, `update agent_automations set enabled = false, disabled_by = 'self_heal', disabled_reason = 'fetch fails',
		paused_for = 'fetch'
		where id = $1::uuid returning name`, insertAutomation(t, pool, "weekly"))
	body := wantTexts(t, server.URL+"/automations", "2030-01-01 03:00", "2030-01-02 03:00",
		"2030-01-03 03:00", "no route to host",
		"by self_heal", "fetch fails", "paused", `action="/act/v1/automations/runs/`+dead+`/redrive"`)
	assert.True(t, !strings.Contains(body, "2030-01-04"), "the page shows more than three planned runs")
	body = wantTexts(t, server.URL+"/automations?state=enabled", "nightly")
	assert.True(t, !strings.Contains(body, "weekly"), "a paused automation is listed as enabled")
	wantError(t, server.URL+"/automations?state=asleep", 400, "it can be enabled, disabled")
	wantError(t, server.URL+"/automations?before=x", 400, "no place in this list")
}

func TestAutomationActionsByState(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertAutomation(t, pool, "on/off")
	insert(t, pool, `
		insert into agent_automations (name, trigger, event, prompt, enabled, disabled_by, proposed_by, source)
		values ('idea', 'event', 'hired', 'say hello', false, 'proposal', 'agent', 'agent') returning name`)
	actions := func(url string) string {
		var all []string
		for _, after := range strings.Split(wantTexts(t, url), `action="/act/v1/automations/`)[1:] {
			path, _, _ := strings.Cut(after, `"`)
			all = append(all, path)
		}
		return strings.Join(all, " ")
	}
	assert.Equal(t, "on%2Foff/run on%2Foff/disable", actions(server.URL+"/automations/on%2Foff"))
	assert.Equal(t, "idea/accept idea/disable", actions(server.URL+"/automations/idea"))
	assert.Equal(t, "idea/accept idea/disable", actions(server.URL+"/automations"))
	insert(t, pool,
		`update agent_automations set enabled = false, disabled_by = 'admin' where name = 'on/off' returning name`)
	assert.Equal(t, "on%2Foff/run on%2Foff/enable", actions(server.URL+"/automations/on%2Foff"))
	wantError(t, server.URL+"/automations/nothing", 404, "there is no automation")
}

// insertDelivery inserts a delivery to the endpoint shop.
func insertDelivery(t *testing.T, pool *pgxpool.Pool, status, body string) string {
	t.Helper()
	return insert(t, pool, `
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, headers, body,
		  body_sha256, outcome)
		values ('shop', gen_random_uuid()::text, 'wh_00000000000000000000000001', 'wh_00000000000000000000000001', $1,
		  '{"X-Github-Event": ["issues"], "Authorization": ["Bearer sk-abcdefghijklmnopqrstuvwxyz"]}', convert_to($2, 'UTF8'),
		  'x', '{"1": {"event": "EVENT_COMPLETED", "key": "order-7"}}')
		returning id::text`, status, body)
}

// insertOutgoing inserts a message to a target.
func insertOutgoing(t *testing.T, pool *pgxpool.Pool, target, status string) string {
	t.Helper()
	return insert(t, pool, `
		with t as (insert into agent_webhook_targets (name, url, secrets, events)
		  values ($1, 'https://ops.example', '{"${S}"}', '{"*"}')
		           on conflict (name) do update set url = excluded.url returning id)
		insert into agent_webhook_outbox (target_id, event, payload, trace_id, status, attempts, http_status, last_error)
		select id, 'execution.failed', '{"type": "execution.failed", "data": {"id": "x"}}', 'wh_1', $2, 9, 503,
		       'it answered 503' from t
		returning id::text`, target, status)
}

func TestListDeliveries(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/deliveries", "No delivery yet", "No request had a bad signature", "No target exists")
	done, dead := insertDelivery(t, pool, "done", `{}`), insertDelivery(t, pool, "dead", `{}`)
	insert(t, pool, `insert into agent_activity (trace_id, skill_name, status, input, error_message)
		values ('wh_1', 'webhook_refused', 'error', '{"endpoint": "shop", "count": 3}', 'the signature is wrong')
		returning id::text`)
	insertOutgoing(t, pool, "ops", "pending")
	insertOutgoing(t, pool, "ops", "dead")
	body := wantTexts(t, server.URL+"/deliveries", "issues", "/deliveries/"+done, "/deliveries/"+dead,
		"the signature is wrong",
		"/outgoing?target=ops&amp;status=pending", `action="/act/v1/webhooks/targets/ops/disable"`)
	assert.True(t, !strings.Contains(body, "Nothing matches"), "the list is shown as empty")
	body = wantTexts(t, server.URL+"/deliveries?endpoint=shop&status=dead", dead)
	assert.True(t, !strings.Contains(body, done), "the state does not narrow the list down")
	wantTexts(t, server.URL+"/deliveries?endpoint=other", "Nothing matches")
	wantError(t, server.URL+"/deliveries?status=lost", 400, "it can be received, running")
	wantError(t, server.URL+"/deliveries?endpoint=%3Cb%3E", 400, "is not a valid name")
	wantError(t, server.URL+"/deliveries?before=x", 400, "no place in this list")
}

func TestDeliveryShowsBodyAndOutcome(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	id := insertDelivery(t, pool, "dead", `{"order": 7, "password": "hunter22"}`)
	insert(t, pool, `
		with kept as (insert into agent_webhook_conflicts (delivery, body, body_sha256)
		  values ($1, convert_to('{"order": 8}', 'UTF8'), 'y'))
		update agent_webhook_deliveries set repeats = 3, conflicts = 2 where id = $1 returning id::text`, id)
	wantTexts(t, server.URL+"/deliveries", "2 with another body")
	wantTexts(t, server.URL+"/deliveries/"+id, "2 with another body", "Other bodies under the same id",
		"&#34;order&#34;: 8")
	body := wantTexts(t, server.URL+"/deliveries/"+id, "order-7", "&#34;order&#34;: 7",
		`action="/act/v1/webhooks/deliveries/`+id+`/replay"`,
		`name="replays" value="0"`)
	for _, secret := range []string{"hunter22", "sk-abcdefghijklmnopqrstuvwxyz"} {
		assert.Truef(t, !strings.Contains(body, secret), "the page has %s", secret)
	}
	rows.Quiet(t, pool, `update agent_webhook_deliveries set repeats = 1, body = convert_to($2, 'UTF8') where id = $1`, id,
		"x"+strings.Repeat("é", 600_000))
	body = wantTexts(t, server.URL+"/deliveries/"+id, "The first 65 kB of it")
	assert.True(t, !strings.Contains(body, "\ufffd"), "a character is cut in two")
	wantTexts(t, server.URL+"/deliveries/"+id, "then 1 more time (duplicates are not handled)")
	wantTexts(t, server.URL+"/deliveries", "received 1 more time<")
	rows.Quiet(t, pool, `update agent_webhook_deliveries set repeats = 2 where id = $1`, id)
	wantTexts(t, server.URL+"/deliveries/"+id, "then 2 more times (duplicates are not handled)")
	body = wantTexts(t, server.URL+"/deliveries/"+insertDelivery(t, pool, "running", `{}`))
	assert.True(t, !strings.Contains(body, "/act/"), "the page offers a replay of a delivery in progress")
	wantError(t, server.URL+"/deliveries/nothing", 404, "there is no delivery")
	wantError(t, server.URL+"/deliveries/01890000-0000-7000-8000-000000000000", 404, "there is no delivery")
}

func TestListOutgoingMessages(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/outgoing", "No message has failed")
	wantTexts(t, server.URL+"/outgoing?status=pending", "No message is pending")
	dead, pending := insertOutgoing(t, pool, "ops", "dead"), insertOutgoing(t, pool, "ops", "pending")
	action := `action="/act/v1/webhooks/outbox/` + dead + `/resend"`
	body := wantTexts(t, server.URL+"/outgoing?target=ops", action, "it answered 503")
	assert.True(t, !strings.Contains(body, pending), "a queued message is listed as given up")
	wantTexts(t, server.URL+"/outgoing?status=pending", "/outgoing/"+pending)
	wantTexts(t, server.URL+"/outgoing/"+dead, action, "&#34;type&#34;: &#34;execution.failed&#34;")
	wantError(t, server.URL+"/outgoing?status=sent", 400, "it can be dead, pending")
	wantError(t, server.URL+"/outgoing/x", 404, "there is no outgoing delivery")
}

func TestListHeldLanes(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/lanes", "No lane is held", "No execution waits for a lane", "No lane is lent",
		"No execution is running", "No lane is stale")
	insert(t, pool, `select try_acquire_agent_lock('pipeline:<b>prices</b>', 'someone else', 60)::text`)
	insert(t, pool, `select try_acquire_agent_lock('other', 'another', 60)::text`)
	wantTexts(t, server.URL+"/lanes", "pipeline:&lt;b&gt;prices&lt;/b&gt;", "someone else",
		`action="/act/v1/lanes/pipeline:%3Cb%3Eprices%3C%2Fb%3E/break"`)
	body := wantTexts(t, server.URL+"/lanes?lane=other", "another")
	assert.True(t, !strings.Contains(body, "someone else"), "the page shows another lane than the requested one")
	wantTexts(t, server.URL+"/lanes?lane=nobodys", "No owner holds nobodys")
	wantError(t, server.URL+"/lanes?lane=%00", 400, "not the name of a lane")
	wantError(t, server.URL+"/lanes?before=x", 400, "no place in this list")
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

// insertObjective inserts an objective with three steps: one done, one failed.
func insertObjective(t *testing.T, pool *pgxpool.Pool, name string) (id string) {
	t.Helper()
	id = insert(t, pool, `
		insert into agent_objectives (name, goal, last_trace_id)
		  values ($1, 'goal of ' || $1, 'hb_00000000000000000000000001') returning id::text`, name)
	insert(t, pool, `insert into agent_objective_steps (objective_id, position, title) values ($1, 1, 'collect')
		returning 'x'`, id)
	step := insert(t, pool, `select id::text from agent_objective_steps where objective_id = $1`, id)
	call := insert(t, pool, `
		insert into agent_activity (trace_id, skill_name, surface)
		  values ('hb_00000000000000000000000002', 'fetch', 'heartbeat') returning id::text`)
	insert(t, pool, `insert into agent_objective_evidence (step_id, activity_id) values ($1, $2) returning 'x'`, step,
		call)
	insert(t, pool, `
		update agent_objective_steps set status = 'done', trace_id = 'hb_00000000000000000000000002', result = 'all there'
		  where id = $1 returning 'x'`, step)
	insert(t, pool, `insert into agent_objective_steps (objective_id, position, title, status, attempts)
		values ($1, 2, 'compare', 'failed', 3) returning 'x'`, id)
	insert(t, pool,
		`insert into agent_objective_steps (objective_id, position, title) values ($1, 3, 'report') returning 'x'`, id)
	return id
}

func TestObjectiveShowsProgressAndEvidence(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/objectives", "No objective yet")
	id := insertObjective(t, pool, "grow")
	for _, path := range []string{"/", "/objectives", "/objectives?status=active"} {
		wantTexts(t, server.URL+path, "/objectives/grow", "1 of 3", "1 failed", `width="33"`)
	}
	for _, path := range []string{"/objectives/grow", "/objectives/" + id} {
		wantTexts(t, server.URL+path, "goal of grow", "collect", "all there", ">fetch</a>", "3 failed attempts",
			"gave evidence", "ended a step",
			"hb_00000000000000000000000001", "/v1/objectives/"+id+"/pause")
	}
	wantError(t, server.URL+"/objectives/none", 404, "no objective")
	wantError(t, server.URL+"/objectives/%00", 404, "not found")
	wantError(t, server.URL+"/objectives?status=fine", 400, "status")
	wantError(t, server.URL+"/objectives?before=x", 400, "before")
	wantTexts(t, server.URL+"/objectives?status=failed", "No match")
}

func TestIdleObjectiveIsStale(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertObjective(t, pool, "grow")
	assert.True(t, !strings.Contains(wantTexts(t, server.URL+"/"), ">stale<"),
		"an objective that has just changed is shown as stale")
	insert(t, pool, `update agent_objectives set due_at = clock_timestamp() - interval '4 days',
		updated_at = clock_timestamp() - interval '4 days' returning name`)
	assert.True(t, !strings.Contains(wantTexts(t, server.URL+"/"), ">stale<"),
		"an objective with a step that has just changed is shown as stale")
	pgtest.Exec(t, pool, `update agent_objective_steps set updated_at = clock_timestamp() - interval '4 days'`)
	for _, path := range []string{"/", "/objectives", "/objectives/grow"} {
		wantTexts(t, server.URL+path, ">stale<")
	}
}

func TestObjectiveActionsByState(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for status, want := range map[string]string{
		"proposed": "accept reject", "rejected": "accept", "active": "pause", "paused": "resume",
		"completed": "", "failed": "",
	} {
		id := insert(t, pool, `
			insert into agent_objectives (name, goal, status, proposed_by, decided_by) values ($1, 'g', $1, 'agent', 'admin')
			  returning id::text`, status)
		body := wantTexts(t, server.URL+"/objectives/"+status)
		for _, action := range []string{"accept", "reject", "pause", "resume"} {
			shown := strings.Contains(body, "/act/v1/objectives/"+id+"/"+action)
			assert.Truef(t, shown == strings.Contains(want, action), "%s: action %s is there: %v", status, action, shown)
		}
	}
	wantTexts(t, server.URL+"/objectives?status=proposed", "/accept", "/reject")
}

// insertMemory inserts a memory.
func insertMemory(t *testing.T, pool *pgxpool.Pool, category, key, value string) (id string) {
	t.Helper()
	return insert(t, pool, `
		insert into agent_memory (category, key, value, trace_id)
		  values ($1, $2, to_jsonb($3::text), 'hb_00000000000000000000000009') returning id::text`,
		category, key, value)
}

func TestMemoryTotalsByCategory(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/memory", "Memory is empty")
	insertMemory(t, pool, "facts", "a", "one")
	insertMemory(t, pool, "facts", "b", "two")
	insertMemory(t, pool, "lessons", "c", "three")
	insert(t, pool, `
		insert into agent_memory (id, category, key, value, created_at, updated_at)
		select lanekeeper.agent_uuid7(at), 'facts', 'old', '1', at, at
		  from (select clock_timestamp() - interval '30 days' as at) x returning key`)
	insert(t, pool, `
		insert into agent_memory (category, key, value, expires_at)
		values ('gone', 'x', '1', clock_timestamp() - interval '1 s') returning key`)
	for _, path := range []string{"/memory", "/"} {
		body := wantTexts(t, server.URL+path, `3<span class="aside-text"> in facts`, `1<span class="aside-text"> in lessons`,
			"+2 ", "+1 ")
		assert.Truef(t, !strings.Contains(body, "gone"), "%s has a category with only expired entries", path)
	}
	pgtest.Exec(t, pool, `insert into agent_memory (category, key, value) select 'many', n::text, '1'
		from generate_series(1, 1200) n`)
	wantTexts(t, server.URL+"/memory", `1,000+<span class="aside-text"> in many`, "over ")
}

func TestMemoryFiltersCombine(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for _, e := range [][3]string{
		{"facts", "price_oil", "barrel"},
		{"facts", "price%gas", "cubic"},
		{"lessons", "price_oil", "buy"},
		{"lessons", "weather", "rain barrel"},
	} {
		insertMemory(t, pool, e[0], e[1], "text "+e[2])
	}
	for query, want := range map[string]string{
		"": "weather price_oil price%25gas price_oil", "category=facts": "price%25gas price_oil",
		"prefix=price_":   "price_oil price_oil",
		"prefix=price%25": "price%25gas", "q=barrel": "weather price_oil", "q=barrel&category=facts": "price_oil",
		"q=barrel+-rain": "price_oil",
		"q=zebra":        "", "category=none": "", "prefix=x": "",
	} {
		body := wantTexts(t, server.URL+"/memory?"+query)
		var got []string
		for _, part := range strings.Split(body, `<th scope="row" class="what"><a href="/memory/`)[1:] {
			key, _, _ := strings.Cut(part, "?")
			got = append(got, key)
		}
		assert.Truef(t, strings.Join(got, " ") == want, "%q has %q, want %q", query, got, want)
	}
	wantError(t, server.URL+"/memory?before=x", 400, "before")
	wantError(t, server.URL+"/memory?q="+strings.Repeat("x", 301), 400, "q is")
}

func TestMemoryEntryShowsWriters(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	key := "a/b c?d"
	id := insertMemory(t, pool, "facts", key, "first "+strings.Repeat("v", 50_000))
	insertMemory(t, pool, "lessons", key, "second")
	insert(t, pool, `
		insert into agent_activity (trace_id, skill_name, input)
		values ('hb_00000000000000000000000007', 'memory_write', jsonb_build_object('key', $1::text, 'category', 'facts'))
		  returning id::text`, key)
	path := server.URL + "/memory/" + url.PathEscape(key)
	body := wantTexts(t, path, "first vvv", "second", "/v1/memory/"+id+"/forget", "hb_00000000000000000000000009",
		"hb_00000000000000000000000007", "in all")
	assert.Truef(t, len(body) <= 60_000, "the page has %d bytes", len(body))
	body = wantTexts(t, path+"?category=lessons", "second")
	assert.True(t, !strings.Contains(body, "first vvv"), "the page shows the entry of the other category")
	wantError(t, server.URL+"/memory/none", 404, "no memory has the key")
	wantError(t, server.URL+"/memory/%00", 404, "not found")
}

func TestListSkillsWithHealth(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/skills", "agent apply DIR")
	wantTexts(t, server.URL+"/", "agent apply DIR")
	rows.Skill(t, pool, "fetch_price", "Fetches a price.", "", "")
	rows.Skill(t, pool, "post_tweet", "Posts.", "self-heal", "5 consecutive failures")
	rows.Calls(t, pool, "fetch_price", "success", "", 6)
	rows.Calls(t, pool, "fetch_price", "error", "no route", 2)
	for _, path := range []string{"/skills", "/"} {
		body := wantTexts(t, server.URL+path, "fetch_price", "75 %", "by self-heal", "5 consecutive failures", "120 ms")
		assert.True(t, path != "/" || strings.Index(body, "post_tweet") <= strings.Index(body, "fetch_price"),
			"disabled skills do not come first")
	}
	assert.True(t, !strings.Contains(wantTexts(t, server.URL+"/skills?state=disabled", "post_tweet",
		"/act/v1/skills/post_tweet/enable"), `id="skill-fetch_price"`), "an enabled skill is listed as disabled")
	wantTexts(t, server.URL+"/skills", `id="failing-fetch_price"`, "no route", `id="slowest-fetch_price"`)
	wantTexts(t, server.URL+"/skills?state=on+trial", "No match")
	wantTexts(t, server.URL+"/skills?skill=fetch_price", "/act/v1/skills/fetch_price/disable")
	wantError(t, server.URL+"/skills?state=broken", 400, "state is")
}

func TestSkillShowsCalls(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Skill(t, pool, "fetch_price", "Fetches a price.", "", "")
	wantTexts(t, server.URL+"/skills/fetch_price", "No call yet", "No call in this period",
		"No automation calls this skill")
	rows.Calls(t, pool, "fetch_price", "success", "", 3)
	rows.Calls(t, pool, "fetch_price", "error", "no route to host", 1)
	insert(t, pool, `insert into agent_automations (name, cron, skill_name) values ('prices', '0 * * * *', 'fetch_price')
		returning id::text`)
	wantTexts(t, server.URL+"/skills/fetch_price", "Definition, as a model sees it", "75 %", "no route to host",
		"/automations/prices",
		"/act/v1/skills/fetch_price/disable", "Calls by day, 7 days")
	wantError(t, server.URL+"/skills/nothing", 404, "there is no skill")
	wantError(t, server.URL+"/skills/%00", 404, "there is no skill")
}

func TestUnlinkRemovesLinksViewerMayNotOpen(t *testing.T) {
	t.Parallel()
	for lacks, links := range map[string]map[string]bool{
		" threads:read": {
			"/skills/prompts": true, "/flows/prompts": true, "?tab=events": true, "#main": true,
			"/threads/t": false, "/traces/x?tab=prompt": false, "/v1/traces/x/prompts": false, "/evals/runs/r/cases/c": false,
		},
		" runs:read": {"/threads/t": true, "/traces/x?tab=prompt": false, "?tab=prompt": true},
	} {
		req := &pageRequest{missingScopes: lacks, mayReadThreads: !strings.Contains(lacks, "threads:read")}
		for link, wanted := range links {
			tag := `<a class="x" href="` + link + `">x</a>`
			assert.Equal(t, wanted, string(req.unlink([]byte(tag))) == tag, link, lacks)
		}
	}
}
