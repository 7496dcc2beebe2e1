package engineroom

import (
	"net/url"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

func TestFindExecutionsByLabel(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, agent, flow, status, created_at, completed_at)
		select lanekeeper.agent_uuid7(at), 'fl_' || lpad(n::text, 26, '0'), 'flow', 'sales', 'flow_' || n % 2, 'completed', at, at
		  from (select n, now() - n * interval '1 hour' as at from generate_series(1, 1200) n) x`)
	pgtest.Exec(t, pool, `
		insert into agent_execution_labels (execution_id, name, value)
		select id, case flow when 'flow_0' then 'order' else 'shop' end, 'A-1001 <b>' from agent_executions order by id limit 2`)
	body := wantTexts(t, server.URL+"/executions?label=A-1001+%3Cb%3E", ">flow_0<", ">flow_1<", "Label:")
	assert.True(t, !strings.Contains(body, "<b>"), "a label is not escaped")
	body = wantTexts(t, server.URL+"/executions?label=order%3DA-1001+%3Cb%3E&surface=flow", "flow_0")
	assert.True(t, !strings.Contains(body, ">flow_1<"), "the name of the label does not narrow")
	longest := strings.Repeat("n", 32) + "=" + strings.Repeat("\U0001F600", 200)
	wantTexts(t, server.URL+"/executions?label="+url.QueryEscape(longest), "No execution matches")
	wantTexts(t, server.URL+"/executions?label=nothing", "No execution matches")
	wantTexts(t, server.URL+"/executions?label=nothing&view=waiting", "No waiting execution matches")
	wantTexts(t, server.URL+"/find?q=A-10", "About", "flow_0", "flow_1")
	id := pgtest.Value[string](t, pool, `select execution_id::text from agent_execution_labels where name = 'order'`)
	wantTexts(t, server.URL+"/executions/"+id, "<dt>order</dt>", `href="/executions?label=order%3dA-1001%20%3cb%3e"`)
	wantTexts(t, server.URL+"/find?q=a-1001", id)
	status, body := testkit.Get(t, server.URL+"/executions?label=A-1001+%3Cb%3E&sort=took")
	assert.Truef(t, status == 200 && strings.Contains(body, "flow_0"), "sorted: %d %s", status, body)
}
