package webhook_test

import (
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// TestAStormIsHandledOnceEach sends every delivery twice, in disorder, to an endpoint that two processes work for, while each
// automation fails now and then.
func TestAStormIsHandledOnceEach(t *testing.T) {
	t.Parallel()
	const deliveries, senders = 200, 16
	w := newWorld(t)
	w.fail.Store(20)
	w.endpoint(t, webhooks.EndpointDefinition{Name: "storm", MaxAttempts: 20, Actions: []webhooks.Action{
		{Event: "EVENT_COMPLETED", Key: "storm-{body.n}"}, {Automation: "work"},
	}})
	w.work(t)
	w.work(t)
	next := make(chan int, 2*deliveries)
	for i := range 2 * deliveries {
		next <- (i * 7) % deliveries
	}
	close(next)
	var mu sync.Mutex
	var took []time.Duration
	codes := map[int]int{}
	var group sync.WaitGroup
	for range senders {
		group.Go(func() {
			for i := range next {
				began := time.Now()
				got := w.send(t, "storm", fmt.Sprint("msg_", i), fmt.Sprintf(`{"n":%d}`, i))
				mu.Lock()
				took = append(took, time.Since(began))
				codes[got.status]++
				mu.Unlock()
			}
		})
	}
	group.Wait()
	slices.Sort(took)
	t.Logf("acknowledged in p50 %s, p99 %s, with %d senders", took[len(took)/2], took[len(took)*99/100], senders)
	if codes[http.StatusAccepted] != deliveries || codes[http.StatusOK] != deliveries {
		t.Fatalf("answers %v", codes)
	}
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, w.pool, `select count(*) from agent_executions where flow = 'webhook' and status = 'completed'`) == deliveries
	}, "all executions have ended")
	for what, sql := range map[string]string{
		"each is done":                   `select count(*) = 200 from agent_webhook_deliveries where status = 'done' and repeats = 1`,
		"one event each":                 `select count(*) = 200 and count(distinct key) = 200 from agent_events where event = 'EVENT_COMPLETED'`,
		"one run each":                   `select count(*) = 200 from agent_memory where category = 'run'`,
		"a trace each":                   `select count(distinct trace_id) = 200 from agent_executions`,
		"each trace is complete":         `select count(*) = 200 from (select trace_id from agent_activity where skill_name = 'webhook_action' and status = 'success' group by 1 having count(*) = 2) x`,
		"the 20 failures are told":       `select count(*) = 20 from agent_activity where skill_name = 'webhook_action' and status = 'error'`,
		"nothing is left running":        `select count(*) = 0 from agent_activity where status = 'running'`,
		"no lane is held":                `select count(*) = 0 from agent_locks_live`,
		"nothing under an unknown trace": `select count(*) = 0 from agent_activity a where not exists (select from agent_executions x where x.trace_id = a.trace_id)`,
	} {
		if !value[bool](t, w.pool, sql) {
			t.Errorf("not so: %s", what)
		}
	}
}
