package runner_test

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestWhilePausedTimesAreSkippedAndEventsAreKept(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.put(t, automations.Definition{Name: "before", Cron: "*/5 * * * *"})
	w.put(t, automations.Definition{Name: "during", Cron: "*/5 * * * *"})
	w.put(t, automations.Definition{Name: "event", Event: "E"})
	pgtest.Exec(t, w.pool, `update agent_automations set next_run_at = clock_timestamp() - interval '1 hour'
		where name = 'before'`)
	_, err := executions.PauseAll(t.Context(), w.pool, "ana", "prices look wrong")
	require.NoError(t, err)
	pgtest.Exec(t, w.pool, `update agent_automations set next_run_at = clock_timestamp() where name = 'during'`)
	const turn = "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE"
	pgtest.Exec(t, w.pool, `select * from raise_agent_event('E', 'k', '{}', 'e1', $1)`, turn)
	r, _ := w.process(t)
	w.until(t, "due 1, skipped 1")
	for range 3 {
		n, err := r.Dispatch(t.Context())
		require.Truef(t, n == 0 && err == nil, "started %d, %v", n, err)
	}
	if got := w.states(t); got != "due 1, skipped 1" || w.count() != 0 {
		t.Errorf("%s, %d calls", got, w.count())
	}
	said := pgtest.Value[string](t, w.pool, `
		select count(*) || ' ' || min(a.input ->> 'automation') || ' ' || min(a.output #>> '{}') from agent_activity a
		  join agent_automation_runs r on r.trace_id = a.trace_id where a.skill_name = 'run_automation'
		    and a.status = 'skipped'`)
	assert.Truef(t, strings.HasPrefix(said, "1 during autonomous work is paused since ") &&
		strings.HasSuffix(said, "by ana: prices look wrong"), "recorded: %s", said)
	next := pgtest.Value[string](t, w.pool, `select string_agg(name || ' ' || (next_run_at > clock_timestamp())::text, ', '
		order by name) from agent_automations where trigger = 'cron'`)
	assert.Equal(t, "before false, during true", next)
	_, err = executions.ResumeAll(t.Context(), w.pool, "ana", "")
	require.NoError(t, err)
	w.until(t, "skipped 1, success 1")
	// Nobody waits for what an event of an admin's turn causes, so the next pause holds it back too.
	assert.Equal(t, "flow "+turn, pgtest.Value[string](t, w.pool, `select surface || ' ' || trace_id from agent_executions
		where flow = 'automation'`), "it ran as")
}
