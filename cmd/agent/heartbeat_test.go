package main

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// A heartbeat that gives way to an admin says for whom it waits and where it goes on, and is no failure.
func TestAHeartbeatThatYieldsSaysSo(t *testing.T) {
	t.Parallel()
	for name, extra := range map[string][]string{"text": nil, "JSON": {"--json"}} {
		t.Run(name, func(t *testing.T) {
			url := pgtest.URL(t)
			db := connect(t, url)
			p := on(t, url)
			p.must("apply", caretaker)
			makeDue(t, db)
			_, err := db.Exec(t.Context(), `
				create function come() returns trigger language plpgsql as $$
				begin
					perform try_acquire_agent_lock('operate', 'an admin', 600);
					return new;
				end $$;
				create trigger come after insert on agent_activity for each row when (new.skill_name = 'self_heal') execute function come()`)
			if err != nil {
				t.Fatal(err)
			}
			got := p.run(append([]string{"heartbeat"}, extra...)...)
			const want = "the heartbeat waits for the admin, who holds the lane operate; " +
				"it goes on in a process that runs `agent serve` or `agent dev`\n"
			if got.code != 0 || got.err != want || got.out == "" {
				t.Errorf("exit %d, stderr %q, stdout:\n%s", got.code, got.err, got.out)
			}
			contains(t, p.must("executions", "ls"), "waits for lane operate")
		})
	}
}
