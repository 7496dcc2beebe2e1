package engineroom

import (
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// Any part of an id finds it, even from the middle of a byte.
func TestPartOfIDFindsExecutionAndTrace(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := &Room{Options: Options{Read: replica.Primary(pool)}}
	const id, trace = "01a2f0c3-7b1d-7e58-8096-4a5b6c7d8e9f", "fl_01J8052XG1XHJAZ95GX5TCNBAZ"
	rows.Quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, flow) values
		  ($1, '`+trace+`', 'flow', 'wanted'),
		  ('01a2f0c3-7b1d-7e58-8096-4a5b6c7d8e90', 'fl_01J8052XG1XHJAZ95GX5TCNBAY', 'flow', 'other')`, id)
	digits := strings.ReplaceAll(id, "-", "")
	find := func(text string) (runs, traces []string) {
		f, _ := fragmentOf(text)
		runs, err := room.matchUUIDs(t.Context(), "agent_executions", f, 5)
		require.NoError(t, err)
		traces, err = room.matchTraces(t.Context(), f, runs, 5)
		require.NoError(t, err)
		return runs, traces
	}
	for at := range 20 {
		for _, text := range []string{digits[at : at+5], digits[at : at+6], "01a2…" + digits[27:]} {
			runs, traces := find(text)
			assert.Truef(t, slices.Contains(runs, id) && slices.Contains(traces, trace),
				"%q finds the executions %v and the traces %v", text, runs, traces)
		}
		if text := trace[3+at : 8+at]; strings.ContainsAny(text, "0123456789") {
			_, traces := find(text)
			assert.Truef(t, slices.Contains(traces, trace), "%q finds the traces %v", text, traces)
		}
	}
	for _, text := range []string{"d8e9f", "7d8e9f", "01a2…8e9f"} { // the ids differ in the last digit
		runs, _ := find(text)
		assert.Truef(t, slices.Equal(runs, []string{id}), "%q finds the executions %v", text, runs)
	}
}
