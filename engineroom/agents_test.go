package engineroom

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// putAgent makes a definition the current one of its agent.
func putAgent(t *testing.T, pool *pgxpool.Pool, d agents.Definition) {
	t.Helper()
	_, err := agents.Put(t.Context(), pool, d)
	require.NoError(t, err)
}

// openRoomWith serves the room with settings.
func openRoomWith(t *testing.T, settings agents.Settings) (*pgxpool.Pool, *httptest.Server) {
	t.Helper()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool, Agent: settings.Name, Agents: &agents.Directory{Settings: settings}})
	server := serveRoom(t, room)
	return pool, server
}

func TestAgentShowsEffectiveValues(t *testing.T) {
	t.Parallel()
	pool, server := openRoomWith(t, agents.Settings{
		Name: "house", Model: "gpt-6-luna",
		Limits: agents.Limits{Tokens: 60000},
	})
	wantTexts(t, server.URL+"/agents", `href="/agents/house"`, "gpt-6-luna", "default")
	wantTexts(t, server.URL+"/agents/house", "It has no declaration in a workspace", "AGENT_MODEL",
		"None. Only the rules", "agent apply DIR")
	secret := "Bearer Zq81xLm0Kk77Zq81xLm0Kk77"
	putAgent(t, pool, agents.Definition{Name: "sales", Default: true, Instructions: "You are Nora."})
	putAgent(t, pool, agents.Definition{
		Name: "sales", Default: true, Timezone: "Europe/Madrid", Greeting: "Hola <b>",
		Instructions: "You are {{Nora}} <script>alert(1)</script> \u202eevil. " + secret,
	})
	putAgent(t, pool, agents.Definition{Name: "billing", Memory: "own", Description: "Invoices."})
	wantTexts(t, server.URL+"/agents", `href="/agents/sales"`, "Invoices.", `href="/executions?agent=billing"`,
		`href="/threads?agent=sales"`)
	body := wantTexts(t, server.URL+"/agents/sales", "Europe/Madrid", "document", "60000",
		"AGENT_MAX_TOKENS", "Hola &lt;b&gt;",
		"You are {{Nora}} &lt;script&gt;", `href="/agents/sales?version=1"`, "Version 2")
	assert.True(t, !strings.Contains(body, "<script>alert") && !strings.Contains(body, "Zq81xLm0Kk77") &&
		!strings.Contains(body, "\u202e"), "the instructions are shown as they are written")
	wantTexts(t, server.URL+"/agents/sales?version=1", "You are Nora.", "This is version 1", "To the current version")
	wantError(t, server.URL+"/agents/salse", http.StatusNotFound, "did you mean")
	wantError(t, server.URL+"/agents/sales?version=7", http.StatusNotFound, "the latest is 2")
	wantError(t, server.URL+"/agents/sales?version=x", http.StatusBadRequest, "a number from 1")
	_, err := agents.Remove(t.Context(), pool, []string{"sales"})
	require.NoError(t, err)
	wantError(t, server.URL+"/agents/billing", http.StatusNotFound, "/agents/billing?version=1")
	wantTexts(t, server.URL+"/agents/billing?version=1", "Invoices.")
}

func TestListsFilterByAgent(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	for _, agent := range []string{"sales", "billing"} {
		rows.Quiet(t, pool, `
			insert into agent_executions (trace_id, surface, flow, agent, status, started_at, completed_at)
			values (lanekeeper.agent_trace_id('fl'), 'flow', 'flow-of-' || $1::text, $1::text, 'completed', now(), now())`, agent)
		rows.Quiet(t, pool, `
			insert into agent_executions (trace_id, surface, flow, agent, status, waiting_for, waiting_key, waiting_until,
			  waiting_step)
			values (lanekeeper.agent_trace_id('fl'), 'flow', 'wait-of-' || $1::text, $1::text, 'waiting', 'event', $1::text,
			  now() + interval '1 hour', 's')`, agent)
		rows.Quiet(t, pool, `insert into agent_threads (id, channel, agent, participant)
			values ('talk-' || $1::text, 'chat', $1::text, 'Ana')`, agent)
	}
	for path, prefix := range map[string]string{
		"/executions": "flow-of-", "/executions?view=waiting": "wait-of-", "/threads": "talk-", "/traces": "flow-of-",
		"/executions?flow=flow-of-billing": "flow-of-",
	} {
		wantTexts(t, server.URL+path, prefix+"billing", ">billing<")
		filtered := path + map[bool]string{true: "&", false: "?"}[strings.Contains(path, "?")] + "agent=billing"
		body := wantTexts(t, server.URL+filtered, prefix+"billing", `name="agent" value="billing"`)
		assert.Truef(t, !strings.Contains(body[strings.Index(body, `id="list"`):], prefix+"sales"),
			"%s lists the work of another agent", filtered)
	}
	wantTexts(t, server.URL+"/threads?agent=nobody", "No thread matches")
	wantTexts(t, server.URL+"/executions?agent=nobody", "No execution matches")
	wantTexts(t, server.URL+"/traces?agent=nobody", "No trace matches")
}
