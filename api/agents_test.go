package api_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"testing"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// declare makes agents the current ones.
func (a *agent) declare(all ...agents.Definition) {
	a.t.Helper()
	for _, d := range all {
		if _, err := agents.Put(a.t.Context(), a.pool, d, "workspace"); err != nil {
			a.t.Fatal(err)
		}
	}
}

func withAgents(t *testing.T) *agent {
	t.Helper()
	pool := pgtest.DB(t)
	return wired(t, api.Options{
		Pool: pool, Engine: engine(t, pool),
		Agents: &agents.Directory{Settings: agents.Settings{Name: "desk", Model: "gpt-6-luna", Limits: agents.Limits{Tokens: 60000}}},
	})
}

func TestAgentsAreListedTheDefaultFirst(t *testing.T) {
	t.Parallel()
	a := withAgents(t)
	if got := a.list("/v1/agents", "name", 5, nil); !slices.Equal(got, []string{"desk"}) {
		t.Errorf("without declared agents: %v", got)
	}
	a.declare(agents.Definition{Name: "sales", Default: true}, agents.Definition{Name: "billing"},
		agents.Definition{Name: "returns"}, agents.Definition{Name: "zebra"})
	want := []string{"sales", "billing", "returns", "zebra"}
	if got := a.list("/v1/agents", "name", 50, nil); !slices.Equal(got, want) {
		t.Errorf("one page: %v", got)
	}
	got := a.list("/v1/agents", "name", 2, func() {
		if _, err := agents.Remove(t.Context(), a.pool, "workspace", []string{"sales", "returns", "zebra"}); err != nil {
			t.Fatal(err)
		}
	})
	if !slices.Equal(got, want) {
		t.Errorf("pages between which the last agent was removed: %v", got)
	}
	var page struct {
		Items []struct {
			Model string
			Today struct {
				Scope string
			}
			Limits agents.Limits
		}
	}
	a.get("/v1/agents?limit=1", &page)
	if one := page.Items[0]; one.Model != "gpt-6-luna" || one.Limits.Tokens != 60000 {
		t.Errorf("not the effective values: %+v", one)
	}
}

func TestAnAgentIsShownWithWhereItsValuesComeFrom(t *testing.T) {
	t.Parallel()
	a := withAgents(t)
	a.declare(agents.Definition{Name: "sales", Default: true, Timezone: "Europe/Madrid", Skills: []string{}})
	a.declare(agents.Definition{Name: "sales", Default: true, Timezone: "Europe/Madrid", Instructions: "You are {{Nora}}."})
	var shown struct {
		Instructions string
		Version      int
		Versions     []int
		Values       []agents.Value
		Skills       json.RawMessage
	}
	a.get("/v1/agents/sales", &shown)
	if shown.Version != 2 || !slices.Equal(shown.Versions, []int{2, 1}) || shown.Instructions != "You are {{Nora}}." || string(shown.Skills) != "null" {
		t.Errorf("shown %+v", shown)
	}
	for _, want := range []agents.Value{
		{Name: "timezone", Value: "Europe/Madrid", From: "document"},
		{Name: "model", Value: "gpt-6-luna", From: "AGENT_MODEL"},
		{Name: "memory", Value: "shared", From: "default"},
		{Name: "limits.tokens", Value: "60000", From: "AGENT_MAX_TOKENS"},
	} {
		if !slices.Contains(shown.Values, want) {
			t.Errorf("no %+v in %+v", want, shown.Values)
		}
	}
	a.get("/v1/agents/sales?version=1", &shown)
	if shown.Version != 1 || string(shown.Skills) != "[]" {
		t.Errorf("version 1 is %+v", shown)
	}
}

func TestAnAgentThatIsNotThereIsRefusedWithWhatToDo(t *testing.T) {
	t.Parallel()
	a := withAgents(t)
	a.declare(agents.Definition{Name: "sales", Default: true}, agents.Definition{Name: "billing"})
	if _, err := agents.Remove(t.Context(), a.pool, "workspace", []string{"sales"}); err != nil {
		t.Fatal(err)
	}
	for path, words := range map[string]string{
		"/v1/agents/nobody-near":      `there is no agent "nobody-near"; GET /v1/agents lists them`,
		"/v1/agents/salse":            `there is no agent "salse", did you mean "sales"?; GET /v1/agents lists them`,
		"/v1/agents/billing":          "agent billing was removed; ?version=1 shows what it was",
		"/v1/agents/sales?version=9":  "agent sales has no version 9: the latest is 1; leave version out for it",
		"/v1/agents/%00":              "GET /v1/agents lists them",
		"/v1/agents/nobody?version=2": `there is no agent "nobody"; GET /v1/agents`,
	} {
		a.refused(a.raw("GET", path, "", asAdmin()), http.StatusNotFound, words)
	}
	a.refused(a.raw("GET", "/v1/agents/sales?version=0", "", asAdmin()), http.StatusBadRequest, "it is a number from 1")
	a.refused(a.raw("GET", "/v1/agents?cursor=x", "", asAdmin()), http.StatusBadRequest, "")
	var shown agents.Shown
	a.get("/v1/agents/billing?version=1", &shown)
}

func TestListingsAreNarrowedToAnAgent(t *testing.T) {
	t.Parallel()
	a := start(t)
	for _, agent := range []string{"sales", "billing", "sales"} {
		x, _, err := a.engine.Start(t.Context(), a.pool, executions.Spec{Flow: "beat", Surface: trace.Flow, Agent: agent})
		if err != nil {
			t.Fatal(err)
		}
		exec(t, a.pool, `insert into agent_threads (id, channel, agent) values (@id, 'chat', @agent)`, postgres.Strict{"id": x.ID, "agent": agent})
	}
	for path, field := range map[string]string{"/v1/executions": "id", "/v1/traces": "trace_id", "/v1/threads": "id"} {
		if got := a.list(path+"?agent=sales", field, 1, nil); len(got) != 2 {
			t.Errorf("%s of sales: %v", path, got)
		}
		var page struct{ Items []struct{ Agent string } }
		a.get(path+"?agent=billing", &page)
		if len(page.Items) != 1 || page.Items[0].Agent != "billing" {
			t.Errorf("%s of billing: %+v", path, page.Items)
		}
	}
}
