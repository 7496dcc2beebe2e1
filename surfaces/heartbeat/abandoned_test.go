package heartbeat_test

import (
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/automations"
)

// A heartbeat that was cancelled in the middle of an automation leaves its run claimed.
func TestAnAutomationWhoseHeartbeatWasCancelledIsTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.quiet()
	w.automation(t, automations.Definition{Name: "often", Skill: "look"})
	lost := value[string](t, w.pool, `
		insert into agent_executions (trace_id, surface, flow, status)
		values ('hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'heartbeat', 'heartbeat', 'running') returning id::text`)
	exec(t, w.pool, `update agent_executions set status = 'cancelled' where id = $1`, lost)
	a, err := automations.Get(t.Context(), w.pool, "often")
	if err != nil {
		t.Fatal(err)
	}
	if _, ok, err := automations.Claim(t.Context(), w.pool, a.ID, *a.NextRunAt, lost, ""); !ok || err != nil {
		t.Fatal(ok, err)
	}
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() { w.completed(t) })
	}
	all.Wait()
	state := func() string {
		return value[string](t, w.pool, `select status || ' ' || attempt || ' ' || coalesce(error_message, '') from agent_automation_runs`)
	}
	if got := state(); got != "error 1 its execution ended before it did, so nobody knows how far it came" {
		t.Errorf("after two heartbeats the run is %q", got)
	}
	exec(t, w.pool, `update agent_automation_runs set retry_at = clock_timestamp()`)
	w.completed(t)
	if got := state(); got != "success 2 " || w.calls.of("look") != 1 {
		t.Errorf("then it is %q, after %d calls", got, w.calls.of("look"))
	}
}
