package api_test

import (
	"testing"
)

// A key is remembered for a day; what was made under it lives longer.
func TestAKeyMakesSomethingNewOnAnotherDay(t *testing.T) {
	t.Parallel()
	a := start(t)
	exec(t, a.pool, `insert into agent_threads (id, channel) values ('t', 'chat')`)
	for name, test := range map[string]struct {
		path, body, table string
		status            int
	}{
		"a start":   {"/v1/executions", `{"flow":"external:x"}`, "agent_executions", 201},
		"an event":  {"/v1/events", `{"event":"EVENT_COMPLETED","key":"k"}`, "agent_events", 202},
		"a message": {"/v1/threads/t/messages", `{"content":"Hello."}`, "agent_messages", 201},
	} {
		t.Run(name, func(t *testing.T) {
			a.t = t
			made := func(want int) {
				t.Helper()
				exec(t, a.pool, `delete from agent_idempotency`) // as when its process died, or when its day is over
				if w := a.keyed(test.path, test.body, token, "nightly"); w.Code != test.status {
					t.Fatalf("got %d %s", w.Code, w.Body)
				}
				if n := value[int](t, a.pool, `select count(*) from `+test.table); n != want {
					t.Errorf("%d were made, not %d", n, want)
				}
			}
			made(1)
			made(1)
			exec(t, a.pool, `update `+test.table+` set id = lanekeeper.agent_uuid7(clock_timestamp() - interval '25 hours')`)
			made(2)
			made(2)
			exec(t, a.pool, `update `+test.table+` set id = lanekeeper.agent_uuid7(clock_timestamp() - interval '23 hours') where id > lanekeeper.agent_uuid7_floor(clock_timestamp() - interval '1 hour')`)
			made(2)
		})
	}
}
