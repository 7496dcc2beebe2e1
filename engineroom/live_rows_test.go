package engineroom

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// A trace of many spans continues. The viewer gets only the changed rows.
func TestLargeTraceSendsOnlyChangedRows(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	const trace = "fl_01J8052XG1XHJAZ95GX5TCNBAZ"
	pgtest.Exec(t, pool, `
		insert into agent_activity (id, trace_id, surface, skill_name, status, duration_ms, created_at, finished_at)
		select lanekeeper.agent_uuid7(at), '`+trace+`', 'flow', 'call_' || n, 'success', 100, at, at + interval '100 ms'
		  from generate_series(1, 300) n, lateral (select now() - interval '400 s' + n * interval '1 s' as at) x;
		with slow as (
		  insert into agent_activity (trace_id, surface, skill_name, status, created_at)
		  values ('`+trace+`', 'flow', 'slow_call', 'running', now() - interval '100 s') returning id, kind)
		insert into agent_activity_open (activity_id, kind) select id, kind from slow on conflict do nothing`)
	_, body := testkit.Get(t, server.URL+"/traces/"+trace)
	l := openStream(t, server.URL+"/live/traces/"+trace+"?seen="+stateOf(t, body), "")
	pgtest.Exec(t, pool, `
		insert into agent_activity (trace_id, surface, skill_name, status, duration_ms, created_at, finished_at)
		select a.trace_id, 'flow', 'late_call', 'success', 1, a.created_at + interval '1 s', a.created_at + interval '2 s'
		  from agent_activity a where a.skill_name = 'slow_call'`)
	var html string
	for !strings.Contains(html, "late_call") {
		_, html = l.nextPart()
	}
	same := strings.Count(html, "data-same")
	assert.Truef(t, same >= 250, "the update omits %d of 301 rows and has %d bytes", same, len(html))
	assert.Equal(t, 0, strings.Count(html, "call_7<"), "the update contains an unchanged row")
	assert.Truef(t, len(html)*4 <= len(body), "an update has %d bytes, the page %d", len(html), len(body))
	whole := openStream(t, server.URL+"/live/traces/"+trace, "") // a viewer without state gets all rows
	whole.waitFor("call_7<")
}
