package crash_test

import (
	"net/http"
	"regexp"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// deliveryStart matches the first statement of a delivery.
var deliveryStart = regexp.MustCompile(`from agent_webhook_endpoints where name`)

// TestKillAtEveryBoundaryOfWebhook sends a delivery with three actions. It kills the process that receives and handles
// it before each of its requests, and after each took effect. The sender always sends the delivery again. Each action
// happens once.
func TestKillAtEveryBoundaryOfWebhook(t *testing.T) {
	t.Parallel()
	total := countDeliveryRequests(t, false)
	t.Logf("%d boundaries", total)
	atBoundaries(t, total, 5, map[string]proxyAction{"before": killBefore, "after": killAfter},
		func(t *testing.T, n int, how proxyAction) { killHook(t, n, how, false) })
}

// TestKillAtEveryBoundaryOfRetry does the same with a delivery whose last action fails at first. The next attempt
// repeats no earlier action, and the pause before it survives the kill.
func TestKillAtEveryBoundaryOfRetry(t *testing.T) {
	t.Parallel()
	total := countDeliveryRequests(t, true)
	t.Logf("%d boundaries", total)
	atBoundaries(t, total, 5, map[string]proxyAction{"before": killBefore, "after": killAfter},
		func(t *testing.T, n int, how proxyAction) { killHook(t, n, how, true) })
}

// sendWebhook sends the delivery and returns the status of the response, or 0 without one.
func (s *testEnv) sendWebhook(a *agent) int {
	s.t.Helper()
	r := s.newRequest(a, http.MethodPost, "/webhooks/shop", hookSecret, `{"id": 7}`, "webhook-id", "d1")
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	if err != nil {
		return 0
	}
	defer func() { _ = response.Body.Close() }()
	return response.StatusCode
}

// disableAutomation disables the automation, so that the action that starts it fails.
func (s *testEnv) disableAutomation() {
	pgtest.Exec(s.t, s.db, `update agent_automations set enabled = false, disabled_by = 'admin',
		disabled_reason = 'a pause'`)
}

// repairAutomation enables the automation, and ends the pause before the next attempt.
func (s *testEnv) repairAutomation() {
	pgtest.Exec(s.t, s.db, `update agent_automations set enabled = true, disabled_by = '', disabled_reason = ''`)
	pgtest.Exec(s.t, s.db, `update agent_executions set waiting_until = clock_timestamp() where status = 'waiting'
		and waiting_for = 'delay'`)
}

// waitDelivery waits until the delivery and its effects have ended, or the process is dead. If the delivery waits for
// its next attempt, waitDelivery starts it.
func (s *testEnv) waitDelivery(a *agent) {
	s.t.Helper()
	eventually(s.t, "the delivery is handled", func() bool {
		if pgtest.Value[bool](s.t, s.db, `select exists (select from agent_executions where status = 'waiting'
			and waiting_for = 'delay')`) {
			s.repairAutomation()
		}
		return !a.Running() || pgtest.Value[bool](s.t, s.db, `
			select count(*) = 2 and bool_and(completed_at is not null) from agent_executions where flow <> 'heartbeat'`)
	})
}

// countDeliveryRequests handles a delivery without faults and returns the number of its requests.
func countDeliveryRequests(t *testing.T, fails bool) int {
	t.Helper()
	s := newChatTestEnv(t)
	if fails {
		s.disableAutomation()
	}
	a, c := s.startUntilKilled(deliveryStart, -1, pass)
	require.Equal(t, http.StatusAccepted, s.sendWebhook(a))
	s.waitDelivery(a)
	n := c.count()
	s.checkDelivery(snapshot{}, fails)
	assert.Truef(t, n >= 40, "a delivery made %d requests; does the proxy still see them?", n)
	return n
}

func killHook(t *testing.T, n int, action proxyAction, fails bool) {
	t.Helper()
	s := newChatTestEnv(t)
	if fails {
		s.disableAutomation()
	}
	a, _ := s.startUntilKilled(deliveryStart, n, action)
	status := s.sendWebhook(a)
	if status != 0 {
		s.waitDelivery(a)
	}
	before := s.killAndSnapshot(a)
	stored := pgtest.Value[int](s.t, s.db, `select count(*) from agent_webhook_deliveries`)
	assert.Truef(t, status == 0 || stored == 1, "answered %d, and %d deliveries are stored", status, stored)
	b := s.startServer("")
	want := http.StatusAccepted - 2*stored // a repeated delivery gets 200
	assert.Equal(t, want, s.sendWebhook(b))
	s.waitDelivery(b)
	s.checkDelivery(before, fails)
}

// checkDelivery checks that each action of the delivery happened once.
func (s *testEnv) checkDelivery(before snapshot, failed bool) {
	s.t.Helper()
	s.checkSettled(before)
	attempts := 1
	if failed {
		attempts = 2
	}
	for what, sql := range map[string]string{
		"deliveries done": `select count(*) from agent_webhook_deliveries where status = 'done' and replays = 0`,
		"events raised":   `select count(*) from agent_events where event = 'EVENT_COMPLETED' and key = 'order-7'`,
		"runs":            `select count(*) from agent_automation_runs`,
		"runs done":       `select count(*) from agent_automation_runs where status = 'success' and attempt = 1`,
		"the first action": `select count(*) from agent_activity where skill_name = 'webhook_action'
			and input ->> 'action' = '1'`,
		"the second action": `select count(*) from agent_activity where skill_name = 'webhook_action'
			and input ->> 'action' = '2'`,
		"the third, done": `select count(*) from agent_activity where skill_name = 'webhook_action'
			and input ->> 'action' = '3' and status = 'success'`,
		"executions": `select count(*) - 1 from agent_executions`,
	} {
		assert.Equal(s.t, 1, pgtest.Value[int](s.t, s.db, sql), what, "want 1")
	}
	assert.Equal(s.t, attempts, pgtest.Value[int](s.t, s.db, `select attempts from agent_webhook_deliveries`), "attempts")
}
