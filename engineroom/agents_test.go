package engineroom

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// acts makes an agent the current one of its name.
func acts(t *testing.T, pool *pgxpool.Pool, d agents.Definition) {
	t.Helper()
	if _, err := agents.Put(t.Context(), pool, d, "workspace"); err != nil {
		t.Fatal(err)
	}
}

// openWith serves the room of an installation with settings.
func openWith(t *testing.T, settings agents.Settings) (*pgxpool.Pool, *httptest.Server) {
	t.Helper()
	pool := pgtest.DB(t)
	room, err := New(Options{Pool: pool, Agent: settings.Name, Agents: &agents.Directory{Settings: settings}})
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	for _, r := range room.Routes() {
		mux.Handle(r.Method+" "+r.Path, r.Handler)
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return pool, server
}

func TestAgentsAreShownWithTheirEffectiveValues(t *testing.T) {
	t.Parallel()
	pool, server := openWith(t, agents.Settings{Name: "house", Model: "gpt-6-luna", Limits: agents.Limits{Tokens: 60000}})
	shows(t, server.URL+"/agents", `href="/agents/house"`, "gpt-6-luna", "default")
	shows(t, server.URL+"/agents/house", "No workspace declares it", "AGENT_MODEL", "It has none", "agent apply DIR")
	secret := "Bearer Zq81xLm0Kk77Zq81xLm0Kk77"
	acts(t, pool, agents.Definition{Name: "sales", Default: true, Instructions: "You are Nora."})
	acts(t, pool, agents.Definition{
		Name: "sales", Default: true, Timezone: "Europe/Madrid", Greeting: "Hola <b>",
		Instructions: "You are {{Nora}} <script>alert(1)</script> \u202eevil. " + secret,
	})
	acts(t, pool, agents.Definition{Name: "billing", Memory: "own", Description: "Invoices."})
	shows(t, server.URL+"/agents", `href="/agents/sales"`, "Invoices.", `href="/executions?agent=billing"`, `href="/threads?agent=sales"`)
	body := shows(t, server.URL+"/agents/sales", "Europe/Madrid", "document", "60000", "AGENT_MAX_TOKENS", "Hola &lt;b&gt;",
		"You are {{Nora}} &lt;script&gt;", `href="/agents/sales?version=1"`, "Version 2")
	if strings.Contains(body, "<script>alert") || strings.Contains(body, "Zq81xLm0Kk77") || strings.Contains(body, "\u202e") {
		t.Error("the instructions are shown as they are written")
	}
	shows(t, server.URL+"/agents/sales?version=1", "You are Nora.", "This is version 1", "To the one in service")
	turnsAway(t, server.URL+"/agents/salse", http.StatusNotFound, "did you mean")
	turnsAway(t, server.URL+"/agents/sales?version=7", http.StatusNotFound, "the latest is 2")
	turnsAway(t, server.URL+"/agents/sales?version=x", http.StatusBadRequest, "a number from 1")
	if _, err := agents.Remove(t.Context(), pool, "workspace", []string{"sales"}); err != nil {
		t.Fatal(err)
	}
	turnsAway(t, server.URL+"/agents/billing", http.StatusNotFound, "/agents/billing?version=1")
	shows(t, server.URL+"/agents/billing?version=1", "Invoices.")
}

func TestListingsAreNarrowedToAnAgent(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	for _, agent := range []string{"sales", "billing"} {
		quiet(t, pool, `
			insert into agent_executions (trace_id, surface, flow, agent, status, started_at, completed_at)
			values (lanekeeper.agent_trace_id('fl'), 'flow', 'flow-of-' || $1::text, $1::text, 'completed', now(), now())`, agent)
		quiet(t, pool, `
			insert into agent_executions (trace_id, surface, flow, agent, status, waiting_for, waiting_key, waiting_until, waiting_step)
			values (lanekeeper.agent_trace_id('fl'), 'flow', 'wait-of-' || $1::text, $1::text, 'waiting', 'event', $1::text, now() + interval '1 hour', 's')`, agent)
		quiet(t, pool, `insert into agent_threads (id, channel, agent, participant) values ('talk-' || $1::text, 'chat', $1::text, 'Ana')`, agent)
	}
	for path, has := range map[string]string{
		"/executions": "flow-of-", "/executions?view=waiting": "wait-of-", "/threads": "talk-", "/traces": "flow-of-", "/executions?flow=flow-of-billing": "flow-of-",
	} {
		shows(t, server.URL+path, has+"billing", "<td>billing</td>")
		with := path + map[bool]string{true: "&", false: "?"}[strings.Contains(path, "?")] + "agent=billing"
		if body := shows(t, server.URL+with, has+"billing", `name="agent" value="billing"`); strings.Contains(body, has+"sales") {
			t.Errorf("%s has what another agent did", with)
		}
	}
	shows(t, server.URL+"/threads?agent=nobody", "No thread matches")
	shows(t, server.URL+"/executions?agent=nobody", "No execution matches")
	shows(t, server.URL+"/traces?agent=nobody", "No trace matches")
}
