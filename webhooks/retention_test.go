package webhooks_test

import (
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func TestWhatIsSettledAndOldIsDeleted(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	target(t, pool, webhooks.TargetDefinition{URL: "https://example.com"})
	exec(t, pool, `
		insert into agent_webhook_deliveries (id, endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256)
		select agent_uuid7_floor(clock_timestamp() - age.age - n * interval '1 second'), 'e', status.status || age.age, 't', 't', status.status, '', ''
		  from unnest(array[interval '1 day', interval '100 days']) age (age),
		       unnest(array['received', 'running', 'failed', 'done', 'dead']) with ordinality status (status, n)
		 where age.age > interval '2 days' or status.status = 'done'`)
	exec(t, pool, `
		insert into agent_webhook_outbox (id, target_id, event, payload, trace_id, status)
		select agent_uuid7_floor(clock_timestamp() - age), (select id from agent_webhook_targets), 'e', '{}', 't', 'sent'
		  from unnest(array[interval '1 day', interval '100 days']) age`)
	if n, err := webhooks.Prune(t.Context(), pool, 90*24*time.Hour); n != 2 || err != nil {
		t.Errorf("%d deleted, %v; want the old delivery that is done, and the old message", n, err)
	}
	if n := value[int](t, pool, `select count(*) from agent_webhook_deliveries`); n != 5 {
		t.Errorf("%d deliveries left", n)
	}
}
