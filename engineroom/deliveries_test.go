package engineroom

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

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

func TestOutgoingMessagesOfSeveralTargetsArePaged(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	first, other := insertOutgoing(t, pool, "ops", "dead"), insertOutgoing(t, pool, "audit", "dead")
	for range maxMessages - 1 {
		insertOutgoing(t, pool, "ops", "dead")
	}
	body := wantTexts(t, server.URL+"/outgoing", "/outgoing/"+other, "before="+other)
	assert.True(t, !strings.Contains(body, "/outgoing/"+first), "the oldest of 51 messages is on the first page")
	body = wantTexts(t, server.URL+"/outgoing?before="+other, "/outgoing/"+first)
	assert.Equal(t, 1, strings.Count(body, `id="message-`))
	body = wantTexts(t, server.URL+"/outgoing?target=ops", "/outgoing/"+first)
	assert.True(t, !strings.Contains(body, "/outgoing/"+other), "a message to another target is listed")
}

func TestPendingMessagesOfAPausedTargetDoNotHideTheNext(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for range maxMessages + 1 {
		insertOutgoing(t, pool, "blocked", "pending")
		insertOutgoing(t, pool, "disabled", "pending")
	}
	next := insertOutgoing(t, pool, "ops", "pending")
	rows.Quiet(t, pool, `update agent_webhook_targets set blocked_until = clock_timestamp() + interval '2 hours'
		where name = 'blocked'`)
	rows.Quiet(t, pool, `update agent_webhook_targets set enabled = false, disabled_at = clock_timestamp(),
		disabled_by = 'x', disabled_reason = 'y' where name = 'disabled'`)
	body := wantTexts(t, server.URL+"/outgoing?status=pending", "/outgoing/"+next, "to blocked", "The list is cut.")
	assert.Equal(t, maxMessages, strings.Count(body, `id="message-`))
	assert.True(t, strings.Index(body, "/outgoing/"+next) < strings.Index(body, "to blocked"),
		"a message to a blocked target comes before one that is due")
}

func TestTheListOfMessagesSaysWhenItLacksTargets(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	const note = "The list covers 200 targets"
	insert(t, pool, `with t as (insert into agent_webhook_targets (name, url, secrets, events)
		select 'a' || n, 'https://ops.example', '{"${S}"}', '{"*"}' from generate_series(1, $1::int) n returning 1)
		select count(*)::text from t`, maxMessageTargets)
	body := wantTexts(t, server.URL+"/outgoing")
	assert.True(t, !strings.Contains(body, note), "the list of all targets says that it lacks some")
	id := insertOutgoing(t, pool, "ops", "dead")
	body = wantTexts(t, server.URL+"/outgoing", note)
	assert.True(t, !strings.Contains(body, id), "the list has the message of target 201")
	wantTexts(t, server.URL+"/outgoing?target=ops", id)
}
