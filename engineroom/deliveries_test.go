package engineroom

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// delivered is a delivery to the endpoint shop.
func delivered(t *testing.T, pool *pgxpool.Pool, status, body string) string {
	t.Helper()
	return put(t, pool, `
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, headers, body, body_sha256, outcome)
		values ('shop', gen_random_uuid()::text, 'wh_00000000000000000000000001', 'wh_00000000000000000000000001', $1,
		        '{"X-Github-Event": ["issues"], "Authorization": ["Bearer sk-abcdefghijklmnopqrstuvwxyz"]}', convert_to($2, 'UTF8'), 'x',
		        '{"1": {"event": "EVENT_COMPLETED", "key": "order-7"}}')
		returning id::text`, status, body)
}

// undelivered is a message to the target of a name.
func undelivered(t *testing.T, pool *pgxpool.Pool, target, status string) string {
	t.Helper()
	return put(t, pool, `
		with t as (insert into agent_webhook_targets (name, url, secrets, events) values ($1, 'https://ops.example', '{"${S}"}', '{"*"}')
		           on conflict (name) do update set url = excluded.url returning id)
		insert into agent_webhook_outbox (target_id, event, payload, trace_id, status, attempts, http_status, last_error)
		select id, 'execution.failed', '{"type": "execution.failed", "data": {"id": "x"}}', 'wh_1', $2, 9, 503, 'it answered 503' from t
		returning id::text`, target, status)
}

func TestDeliveriesAreListedAndNarrowedDown(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/deliveries", "Nothing came yet", "No request with a bad signature", "Nobody is told")
	done, dead := delivered(t, pool, "done", `{}`), delivered(t, pool, "dead", `{}`)
	put(t, pool, `insert into agent_activity (trace_id, skill_name, status, input, error_message)
		values ('wh_1', 'webhook_refused', 'error', '{"endpoint": "shop", "count": 3}', 'the signature is wrong') returning id::text`)
	undelivered(t, pool, "ops", "pending")
	undelivered(t, pool, "ops", "dead")
	body := shows(t, server.URL+"/deliveries", "issues", "/deliveries/"+done, "/deliveries/"+dead, "the signature is wrong",
		"/outgoing?target=ops&amp;status=pending", `action="/act/v1/webhooks/targets/ops/disable"`)
	if strings.Contains(body, "Nothing matches") {
		t.Error("the list says that it is empty")
	}
	if body := shows(t, server.URL+"/deliveries?endpoint=shop&status=dead", dead); strings.Contains(body, done) {
		t.Error("the state does not narrow the list down")
	}
	shows(t, server.URL+"/deliveries?endpoint=other", "Nothing matches")
	turnsAway(t, server.URL+"/deliveries?status=lost", 400, "it can be received, running")
	turnsAway(t, server.URL+"/deliveries?endpoint=%3Cb%3E", 400, "cannot be the name")
	turnsAway(t, server.URL+"/deliveries?before=x", 400, "no place in this list")
}

func TestADeliveryShowsWhatCameAndWhatItLedTo(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	id := delivered(t, pool, "dead", `{"order": 7, "password": "hunter22"}`)
	put(t, pool, `
		with kept as (insert into agent_webhook_conflicts (delivery, body, body_sha256) values ($1, convert_to('{"order": 8}', 'UTF8'), 'y'))
		update agent_webhook_deliveries set repeats = 3, conflicts = 2 where id = $1 returning id::text`, id)
	shows(t, server.URL+"/deliveries", "2 with another body")
	shows(t, server.URL+"/deliveries/"+id, "2 with another body", "Other bodies under the same id", "&#34;order&#34;: 8")
	body := shows(t, server.URL+"/deliveries/"+id, "order-7", "&#34;order&#34;: 7", `action="/act/v1/webhooks/deliveries/`+id+`/replay"`,
		`name="replays" value="0"`)
	for _, secret := range []string{"hunter22", "sk-abcdefghijklmnopqrstuvwxyz"} {
		if strings.Contains(body, secret) {
			t.Errorf("the page has %s", secret)
		}
	}
	quiet(t, pool, `update agent_webhook_deliveries set repeats = 1 where id = $1`, id)
	shows(t, server.URL+"/deliveries/"+id, "and 1 more time, which was not handled")
	shows(t, server.URL+"/deliveries", "came 1 more time<")
	quiet(t, pool, `update agent_webhook_deliveries set repeats = 2 where id = $1`, id)
	shows(t, server.URL+"/deliveries/"+id, "and 2 more times, which were not handled")
	if body := shows(t, server.URL+"/deliveries/"+delivered(t, pool, "running", `{}`)); strings.Contains(body, "/act/") {
		t.Error("what is being handled can be replayed")
	}
	turnsAway(t, server.URL+"/deliveries/nothing", 404, "there is no delivery")
	turnsAway(t, server.URL+"/deliveries/01890000-0000-7000-8000-000000000000", 404, "there is no delivery")
}

func TestOutgoingMessagesAreListedAndSentAgain(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	shows(t, server.URL+"/outgoing", "No message was given up")
	shows(t, server.URL+"/outgoing?status=pending", "Nothing is to be sent")
	dead, pending := undelivered(t, pool, "ops", "dead"), undelivered(t, pool, "ops", "pending")
	lever := `action="/act/v1/webhooks/outbox/` + dead + `/resend"`
	if body := shows(t, server.URL+"/outgoing?target=ops", lever, "it answered 503"); strings.Contains(body, pending) {
		t.Error("what is to be sent is listed as given up")
	}
	shows(t, server.URL+"/outgoing?status=pending", "/outgoing/"+pending)
	shows(t, server.URL+"/outgoing/"+dead, lever, "&#34;type&#34;: &#34;execution.failed&#34;")
	turnsAway(t, server.URL+"/outgoing?status=sent", 400, "it can be dead, pending")
	turnsAway(t, server.URL+"/outgoing/x", 404, "there is no outgoing delivery")
}

func TestHostileDeliveriesAreText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	bad := strings.ReplaceAll(hostile, "\u0007", "")
	id := delivered(t, pool, "dead", bad+strings.Repeat("é", 600_000))
	put(t, pool, `
		update agent_webhook_deliveries
		   set delivery_id = left($1, 100), error_message = $1 || repeat('x', 1000000), traceparent = $1,
		       headers = jsonb_build_object('X-Github-Event', jsonb_build_array($1::text || repeat('x', 30000)), $1, repeat('y', 30000)),
		       outcome = jsonb_build_object('1', jsonb_build_object('event', $1::text, 'text', repeat('z', 1000000)))
		 where id = $2::uuid returning id::text`, bad, id)
	harmless(t, server.URL+"/deliveries")
	harmless(t, server.URL+"/deliveries/"+id)
	message := undelivered(t, pool, "ops", "dead")
	put(t, pool, `update agent_webhook_outbox set last_error = $1 || repeat('x', 1000000), payload = jsonb_build_object($1, repeat('y', 1000000))
		where id = $2::uuid returning id::text`, bad, message)
	harmless(t, server.URL+"/outgoing")
	harmless(t, server.URL+"/outgoing/"+message)
	whole := shows(t, server.URL+"/deliveries/"+id, "The first 65.5 kB of it")
	if strings.Contains(whole, "\ufffd") {
		t.Error("a character is cut in two")
	}
}

func TestDeliveriesAreFoundByAnIndex(t *testing.T) {
	t.Parallel()
	pool, _ := open(t)
	put(t, pool, `
		with d as (
		  insert into agent_webhook_deliveries (id, endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256)
		  select lanekeeper.agent_uuid7(clock_timestamp() - n * interval '1 minute'), 'e' || n % 9, n::text, 'wh_' || n, 'wh_' || n,
		         case when n % 500 = 0 then 'ignored' when n % 700 = 0 then 'dead' else 'done' end, '{}', 'x'
		    from generate_series(1, 20000) n),
		t as (insert into agent_webhook_targets (name, url, secrets, events) values ('ops', 'https://ops.example', '{"${S}"}', '{"*"}') returning id)
		insert into agent_webhook_outbox (target_id, event, payload, trace_id, status)
		select t.id, 'execution.failed', '{}', 'wh_1', case n % 20 when 0 then 'dead' when 1 then 'pending' else 'sent' end from t, generate_series(1, 20000) n
		returning 'ok'`)
	id := delivered(t, pool, "dead", `{}`)
	analyse(t, pool, "agent_webhook_deliveries", "agent_webhook_outbox", "agent_webhook_targets")
	const before = "before=01890000-0000-7000-8000-000000000000"
	for _, path := range []string{
		"/deliveries", "/deliveries?endpoint=e3", "/deliveries?status=ignored", "/deliveries?status=dead", "/deliveries?endpoint=e3&status=ignored",
		"/deliveries?" + before, "/deliveries?endpoint=e3&" + before, "/deliveries/" + id, "/outgoing", "/outgoing?target=ops&" + before,
		"/outgoing?status=pending",
	} {
		bounded(t, pool, path, "agent_webhook_deliveries", "agent_webhook_outbox")
	}
}
