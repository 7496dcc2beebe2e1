package webhook_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func TestWhilePausedDeliveriesAreKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.raises(t, "orders")
	e := w.work(t)
	if _, err := executions.PauseAll(t.Context(), w.pool, "ana", "prices look wrong"); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, patience, e.Paused, "the process knows of the pause")
	got := w.accepted(t, "orders", "msg_1", `{"id":"7"}`)
	if err := e.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	d, err := webhooks.Get(t.Context(), w.pool, got.DeliveryID)
	if err != nil || d.Status != webhooks.Received {
		t.Errorf("delivery: %s, %v", d.Status, err)
	}
	if n := value[int](t, w.pool, `select count(*) from agent_executions where claim > 0`); n != 0 {
		t.Errorf("%d were claimed", n)
	}
	if _, err := executions.ResumeAll(t.Context(), w.pool, "ana", ""); err != nil {
		t.Fatal(err)
	}
	w.until(t, got.DeliveryID, webhooks.Done)
}
