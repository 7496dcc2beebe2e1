//go:build unix

package randomflows_test

import (
	"fmt"
	"math/rand/v2"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// forks are how many executions are forked, after everything.
const forks = 60

// recorded is a step on record, of an execution without events: a fork waits for new ones.
type recorded struct {
	ID, Step string
	Value    int
}

// refork forks executions from steps that are drawn from their records, in peace: each fork comes to what its
// execution came to, and its replay to what it has on record.
func (w *world) refork(r *rand.Rand) {
	w.t.Helper()
	ctx := w.t.Context()
	steps := pgtest.Rows[recorded](w.t, w.pool, `
		select x.id::text, c.step, (x.result #>> '{}')::int from agent_executions x
		  join agent_checkpoints c on c.execution_id = x.id
		 where not exists (select from agent_executions y join agent_events v on v.consumed_by = y.id
		   and v.event = 'EVENT_COMPLETED'
		                    where y.trace_id = x.trace_id)
		 order by x.id, c.step`)
	require.True(w.t, len(steps) > 0, "no steps to fork from")
	for range forks {
		s := steps[r.IntN(len(steps))]
		fork, err := w.engine.Fork(ctx, w.pool, executions.ForkSpec{ID: s.ID, From: s.Step})
		if err != nil {
			w.t.Errorf("fork of %s from %s: %v", s.ID, s.Step, err)
			continue
		}
		pgtest.Exec(w.t, w.pool, `insert into proof.forks values ($1, $2, $3)`, fork.ID, s.Step, s.Value)
	}
	w.settle(patience)
	for _, found := range pgtest.Column[string](w.t, w.pool, wrongForks) {
		w.t.Error(found)
	}
	for _, id := range pgtest.Column[string](w.t, w.pool, `select id::text from proof.forks`) {
		assert.Equal(w.t, "", w.replay(id))
	}
}

// wrongForks are those that came to something else.
const wrongForks = `
	select format('the fork %s from %s is %s with %s, not completed with %s: %s %s', f.id, f.step, x.status, x.result,
	  f.value, x.failed_step, x.error_message)
	  from proof.forks f left join agent_executions x on x.id = f.id
	 where (x.status, x.result) is distinct from ('completed', to_jsonb(f.value))`

// replay says how the replay of an execution differs from its record; empty when it does not.
func (w *world) replay(id string) string {
	got, err := w.engine.Replay(w.t.Context(), id)
	switch {
	case err != nil:
		return fmt.Sprintf("the replay of %s: %v", id, err)
	case !got.Equal:
		return fmt.Sprintf("the replay of %s: %+v", id, got.Divergence)
	}
	return ""
}
