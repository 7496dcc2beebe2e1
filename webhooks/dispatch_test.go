package webhooks_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/outbox"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func TestMessageIsSignedAndSentOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	receiver := newReceiver(t, respondWith(http.StatusNoContent))
	putTarget(t, pool, webhooks.TargetDefinition{URL: receiver.URL})
	startDispatcher(t, pool, []string{receiver.host(t)})
	startDispatcher(t, pool, []string{receiver.host(t)})
	const n = 100
	for i := range n {
		emitEvent(t, pool, []string{"execution.completed", "execution.failed"}[i%2])
	}
	pgtest.Until(t, pool, n, `select count(*) from agent_webhook_outbox where status = 'sent'`)
	assert.Equal(t, n, receiver.count())
	ids := map[string]bool{}
	for i := range receiver.count() {
		receiver.verify(t, i)
		ids[receiver.requests[i].Header.Get("webhook-id")] = true
	}
	assert.Equal(t, n, len(ids))
	var event struct {
		Type      string
		Timestamp time.Time
		Data      map[string]any
	}
	err := json.Unmarshal([]byte(receiver.bodies[0]), &event)
	assert.Truef(t, err == nil && strings.HasPrefix(event.Type, "execution.") &&
		time.Since(event.Timestamp) <= time.Minute && event.Data["id"] == "x", "payload %s: %v", receiver.bodies[0], err)
	pgtest.Equal(t, pool, n, `select count(*) from agent_activity where trace_id = 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE'
		and skill_name = 'webhook_send' and status = 'success'`)
	pgtest.Equal(t, pool, 0, `select count(*) from agent_activity_open`)
}

func TestResponseStatuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		handle   func(n int, w http.ResponseWriter, r *http.Request)
		want     string
		requests int // requests
	}{
		"recovers": {func(n int, w http.ResponseWriter, _ *http.Request) {
			if n < 2 {
				w.WriteHeader(http.StatusInternalServerError)
			}
		}, "sent", 3},
		"never recovers": {respondWith(http.StatusInternalServerError), "dead", 4},
		"a redirect is not followed": {func(_ int, w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}, "dead", 4},
		"gone": {respondWith(http.StatusGone), "dead", 1},
		"a broken connection": {func(n int, _ http.ResponseWriter, _ *http.Request) {
			if n == 0 {
				panic(http.ErrAbortHandler)
			}
		}, "sent", 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			receiver := newReceiver(t, c.handle)
			putTarget(t, pool, webhooks.TargetDefinition{URL: receiver.URL})
			startDispatcher(t, pool, []string{receiver.host(t)}, time.Millisecond, time.Millisecond, time.Millisecond)
			emitEvent(t, pool, "execution.completed")
			waitForStatus(t, pool, c.want)
			assert.Equal(t, c.requests, receiver.count())
			for i := range receiver.count() {
				receiver.verify(t, i)
				assert.Truef(t, receiver.requests[i].Header.Get("webhook-id") == receiver.requests[0].Header.Get("webhook-id") &&
					receiver.bodies[i] == receiver.bodies[0] && receiver.requests[i].URL.Path == "/", "attempt %d differs", i)
			}
			pgtest.Equal(t, pool, c.requests, `select count(*) from agent_activity where skill_name = 'webhook_send'`)
			got, err := webhooks.GetTarget(t.Context(), pool, "them")
			assert.Truef(t, err == nil && got.Enabled != (name == "gone"),
				"enabled %v, %s %v", got.Enabled, got.DisabledReason, err)
			assert.Truef(t, name != "recovers" || got.Failures == 0, "%d failures after a success", got.Failures)
		})
	}
}

func TestRetryAfterBlocksTarget(t *testing.T) {
	t.Parallel()
	for code, pause := range map[int]string{
		http.StatusTooManyRequests: "7200", http.StatusServiceUnavailable: "7200", http.StatusBadGateway: "9999999999",
		http.StatusGatewayTimeout: time.Now().Add(2 * time.Hour).UTC().Format(http.TimeFormat),
	} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			receiver := newReceiver(t, func(n int, w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Retry-After", pause)
				w.WriteHeader(code)
			})
			putTarget(t, pool, webhooks.TargetDefinition{URL: receiver.URL})
			startDispatcher(t, pool, []string{receiver.host(t)}, time.Millisecond)
			emitEvent(t, pool, "execution.completed")
			pgtest.Until(t, pool, true, `select http_status > 0 from agent_webhook_outbox`)
			emitEvent(t, pool, "execution.failed")
			for what, sql := range map[string]string{
				"the message waits": `select next_attempt_at > clock_timestamp() + interval '1 hour' from agent_webhook_outbox
					where attempts = 1`,
				"the target is blocked": `select blocked_until > clock_timestamp() + interval '1 hour' from agent_webhook_targets`,
				"nothing else is due":   `select count(*) = 1 from agent_webhook_outbox where attempts = 0`,
			} {
				assert.Truef(t, pgtest.Value[bool](t, pool, sql), "not so: %s", what)
			}
		})
	}
}

func TestPrivateAddressIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	inside := newReceiver(t, respondWith(http.StatusOK))
	putTarget(t, pool, webhooks.TargetDefinition{URL: inside.URL + "/?token=abc123"})
	startDispatcher(t, pool, nil, time.Millisecond)
	emitEvent(t, pool, "execution.completed")
	waitForStatus(t, pool, "dead")
	assert.Equal(t, 0, inside.count())
	got := pgtest.Value[string](t, pool, `select last_error from agent_webhook_outbox`)
	assert.Truef(t, strings.Contains(got, "AGENT_ALLOW_PRIVATE_HTTP") && !strings.Contains(got, "abc123"), "error %q", got)
	pgtest.Equal(t, pool, "refused", `select distinct error_class from agent_activity where skill_name = 'webhook_send'`)
}

func TestFailingTargetIsDisabled(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	recovered := make(chan struct{})
	receiver := newReceiver(t, func(_ int, w http.ResponseWriter, _ *http.Request) {
		select {
		case <-recovered:
		default:
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	putTarget(t, pool, webhooks.TargetDefinition{URL: receiver.URL, MaxFailures: 3})
	startDispatcher(t, pool, []string{receiver.host(t)}, time.Millisecond, time.Millisecond, time.Hour)
	emitEvent(t, pool, "execution.completed")
	pgtest.Until(t, pool, 3, `select failures from agent_webhook_targets`)
	require.True(t, pgtest.Value[bool](t, pool, `select enabled from agent_webhook_targets`),
		"the target was disabled at once: a restart of the receiver must not do that")
	pgtest.Exec(t, pool, `update agent_webhook_targets set failing_since = clock_timestamp() - interval '25 hours'`)
	emitEvent(t, pool, "execution.failed")
	pgtest.Until(t, pool, false, `select enabled from agent_webhook_targets`)
	got, err := webhooks.GetTarget(t.Context(), pool, "them")
	assert.Truef(t, err == nil && got.DisabledBy == "webhooks" &&
		strings.Contains(got.DisabledReason, "attempts failed in a row") && got.Pending == 2, "%+v, %v", got, err)
	pgtest.Equal(t, pool, 0, `select lanekeeper.emit_agent_webhook('execution.failed', '', '{}')`)
	close(recovered)
	pgtest.Exec(t, pool, `update agent_webhook_outbox set next_attempt_at = clock_timestamp()`)
	changed, err := webhooks.SetTarget(t.Context(), pool, "them", true, "admin", "")
	require.True(t, changed && err == nil, changed, err)
	pgtest.Until(t, pool, 2, `select count(*) from agent_webhook_outbox where status = 'sent'`)
}

// A dispatcher that dies during an attempt leaves an open activity, and a message that is due when its lease ends.
func TestLostAttemptKeepsWebhookID(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	receiver := newReceiver(t, respondWith(http.StatusOK))
	putTarget(t, pool, webhooks.TargetDefinition{URL: receiver.URL})
	emitEvent(t, pool, "execution.completed")
	pgtest.Exec(t, pool, `
		with lost as (
		  insert into agent_activity (trace_id, skill_name, status)
		    values ('hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'webhook_send', 'running') returning id),
		open as (insert into agent_activity_open (activity_id, kind) select id, 'call' from lost)
		update agent_webhook_outbox set attempts = 1, leased = true, next_attempt_at = clock_timestamp() + interval '300 ms',
		                                activity_id = (select id from lost)`)
	id := pgtest.Value[string](t, pool, `select id::text from agent_webhook_outbox`)
	startDispatcher(t, pool, []string{receiver.host(t)})
	waitForStatus(t, pool, "sent")
	if receiver.count() != 1 || receiver.requests[0].Header.Get("webhook-id") != id {
		t.Errorf("%d requests", receiver.count())
	}
	pgtest.Equal(t, pool, "unknown success", `select string_agg(status, ' ' order by created_at) from agent_activity
		where skill_name = 'webhook_send'`)
	if pgtest.Value[bool](t, pool, `select finished_at < created_at + interval '300 ms' from agent_webhook_outbox`) {
		t.Error("the message was sent again before the lease had ended")
	}
}

// One transaction opens or closes both the activity and the message of an attempt. If the database fails between them,
// no activity stays open.
func TestInterruptedAttemptLeavesNoOpenActivity(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ when, how string }{
		"before the request": {"update of activity_id on agent_webhook_outbox for each row when (new.activity_id is not " +
			"null)", `raise 'away'`},
		"after the request": {"update on agent_activity for each row", `perform pg_terminate_backend(pg_backend_pid())`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			pgtest.Exec(t, pool, `create sequence interruptions`)
			pgtest.Exec(t, pool, `
				create function interrupt() returns trigger language plpgsql as $$
				begin
				  if nextval('interruptions') = 1 then `+c.how+`; end if;
				  return new;
				end $$`)
			pgtest.Exec(t, pool, `create trigger interrupt before `+c.when+` execute function interrupt()`)
			receiver := newReceiver(t, respondWith(http.StatusNoContent))
			putTarget(t, pool, webhooks.TargetDefinition{URL: receiver.URL})
			startDispatcher(t, pool, []string{receiver.host(t)})
			emitEvent(t, pool, "execution.completed")
			pgtest.Until(t, pool, true, `select is_called from interruptions`)
			pgtest.Exec(t, pool, `update agent_webhook_outbox set next_attempt_at = clock_timestamp() where status = 'pending'
				and activity_id is null`)
			waitForStatus(t, pool, "sent")
			assert.Equal(t, 1, receiver.count())
			pgtest.Equal(t, pool, 0, `select count(*) from agent_activity_open`)
			pgtest.Equal(t, pool, 0, `select count(*) from agent_activity where skill_name = 'webhook_send'
				and status <> 'success'`)
		})
	}
}

func TestSlowTargetDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	release := make(chan struct{})
	slow := newReceiver(t, func(int, http.ResponseWriter, *http.Request) { <-release })
	defer close(release)
	quick := newReceiver(t, respondWith(http.StatusOK))
	putTarget(t, pool, webhooks.TargetDefinition{Name: "slow", URL: slow.URL})
	putTarget(t, pool, webhooks.TargetDefinition{Name: "quick", URL: quick.URL})
	for range 40 {
		emitEvent(t, pool, "execution.completed")
	}
	startDispatcher(t, pool, []string{slow.host(t)})
	pgtest.Eventually(t, func() bool { return quick.count() == 40 }, "the quick target has received all messages")
	if slow.count() > 4 {
		t.Errorf("%d requests at once to the slow one", slow.count())
	}
}

// The backlogs of other targets do not take the slots of an older message. A claim locks no other messages.
func TestOldestMessageIsClaimedFirst(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, event := range map[string]string{"busy": "execution.completed", "idle": "execution.failed"} {
		putTarget(t, pool, webhooks.TargetDefinition{Name: name, URL: "https://example.com", Events: []string{event}})
	}
	for _, event := range []string{"execution.completed", "execution.failed", "execution.completed"} {
		emitEvent(t, pool, event)
	}
	for _, want := range []string{"busy", "idle", "busy"} {
		got, err := webhooks.ClaimTarget(t.Context(), pgtest.Begin(t, pool)) // rolled back at the end of the test
		assert.Truef(t, err == nil && got == want, "claimed a message to %q, want %q; %v", got, want, err)
	}
}

func TestFullTargetIsNotDue(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	putTarget(t, pool, webhooks.TargetDefinition{URL: "https://example.com"})
	emitEvent(t, pool, "execution.completed")
	pause, err := webhooks.NextDue(t.Context(), pool, []string{})
	assert.Truef(t, err == nil && pause <= 0, "%v, %v", pause, err)
	full := pgtest.Column[string](t, pool, `select id::text from agent_webhook_targets`)
	pause, err = webhooks.NextDue(t.Context(), pool, full)
	assert.Truef(t, err == nil && pause == outbox.MaxPause, "%v, %v", pause, err)
}

func TestEventsJoinCausingTransaction(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	causes := map[string]string{
		"execution.completed": `
			with w as (insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 minute') returning id),
			     x as (insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
			           select 'op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'operate', 'operate', 'running', id, 1 from w returning id)
			select 1`,
		"approval.requested": `
			insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
			values ('op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'pay', 1, '{"iban": "secret"}', 'h',
			  clock_timestamp() + interval '1 hour')`,
		"skill.disabled": `
			insert into agent_skills (name, tool_definition, handler) values ('s', '{}', 'builtin:s');
			update agent_skills set enabled = false, disabled_by = 'admin', disabled_reason = 'why'`,
		"objective.completed": `
			insert into agent_objectives (name, goal, last_trace_id) values ('o', 'g', 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE');
			update agent_objectives set status = 'completed'`,
		"webhook.dead": `
			insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, body, body_sha256)
			values ('e', 'd', 'wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'wh_01JD3V7K8ZQ6W2M5T9X4C1B0AE', '', '');
			update agent_webhook_deliveries set status = 'dead', error_message = 'why'`,
	}
	// check causes an event in a transaction that is rolled back. Without a subscribed target, nothing is written.
	check := func(event string, wanted bool) {
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(t.Context()) }()
		for sql := range strings.SplitSeq(causes[event], ";\n") {
			pgtest.Exec(t, tx, sql)
		}
		if event == "execution.completed" {
			pgtest.Exec(t, tx, `select lanekeeper.complete_agent_execution(id, claim, 'completed', 'all well', null, null, null)
				from agent_executions`)
		}
		got := pgtest.Value[string](t, tx, `select coalesce(string_agg(event || ' ' || trace_id || ' ' || payload, ''), '')
			from agent_webhook_outbox`)
		assert.Truef(t, wanted || got == "", "%s is sent without a subscription: %s", event, got)
		assert.Truef(t, !wanted || strings.HasPrefix(got, event+" ") && strings.Contains(got, `"type": "`+event) &&
			!strings.Contains(got, "iban"), "%s: %q", event, got)
	}
	for event := range causes {
		check(event, false)
	}
	for event := range causes {
		putTarget(t, pool, webhooks.TargetDefinition{Name: "one", URL: "https://example.com", Events: []string{event}})
		for other := range causes {
			check(other, other == event)
		}
	}
	putTarget(t, pool, webhooks.TargetDefinition{Name: "one", URL: "https://example.com", Events: []string{"execution.*"}})
	check("execution.completed", true)
	check("skill.disabled", false)
	pgtest.Exec(t, pool, `select lanekeeper.emit_agent_webhook('execution.failed', '',
		jsonb_build_object('id', 1, 'text', repeat('x', 30000)))`)
	n := pgtest.Value[int](t, pool, `select octet_length(payload::text) from agent_webhook_outbox`)
	assert.Truef(t, n < 20_000, "a payload of %d bytes", n)
}
