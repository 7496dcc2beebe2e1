package api

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/lanekeeper/lanekeeper/agents"
	daybudgets "github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

func (s *server) agentRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/agents", response: page[listedAgent]{}, handle: s.listAgents, params: listParams(),
			about: "Enabled agents, the default first, then by name: effective values and today's usage.",
		}, {
			method: "GET", path: "/v1/agents/{name}", response: agents.Shown{}, handle: s.getAgent,
			about: "One agent: effective values with their sources (document, setting or default), and its versions.",
			params: []param{{
				name: "version", about: "A version, also of a removed agent; default the current one",
				format: "integer", check: checkVersion,
			}},
		},
	}
}

type listedAgent struct {
	agents.Agent
	Today daybudgets.Standing `json:"today" doc:"usage since midnight UTC"`
}

func (s *server) listAgents(r request) (response, error) {
	after, err := decodeCursor("agents", r.query["cursor"])
	if err != nil {
		return response{}, err
	}
	all, err := s.agents.List(r.Context(), s.pool)
	if err != nil {
		return response{}, err
	}
	used, err := daybudgets.Today(r.Context(), s.pool)
	if err != nil {
		return response{}, err
	}
	all = slices.DeleteFunc(all, func(a agents.Agent) bool { return agentKey(a) <= after })
	next := ""
	if limit := r.query.limit(); len(all) > limit {
		all = all[:limit]
		next = encodeCursor("agents", agentKey(all[limit-1]))
	}
	listed := make([]listedAgent, len(all))
	for i, a := range all {
		listed[i] = listedAgent{Agent: a, Today: daybudgets.AgentOf(used, a.Name)}
	}
	return response{body: pageOf(listed, next)}, nil
}

// agentKey returns a sort key: the default agent first, then by name.
func agentKey(a agents.Agent) string {
	if a.Default {
		return "0 " + a.Name
	}
	return "1 " + a.Name
}

func (s *server) getAgent(r request) (response, error) {
	name := r.PathValue("name")
	if !isPrintableText(name) {
		return response{}, problem.New(http.StatusNotFound, "no agent of this name; see GET /v1/agents")
	}
	version, _ := strconv.Atoi(r.query["version"]) // checkVersion has checked it; 0 without one
	shown, err := s.agents.Show(r.Context(), s.pool, name, version)
	missing, ok := errors.AsType[*agents.MissingError](err)
	switch {
	case ok && missing.Latest == 0:
		return response{}, problem.New(http.StatusNotFound, "%s; see GET /v1/agents", missing)
	case ok:
		return response{}, problem.New(http.StatusNotFound, "%s; ?version=%d shows its last version", missing, missing.Latest)
	}
	return response{body: shown}, err
}

func checkVersion(value string) error {
	if n, err := strconv.ParseInt(value, 10, 32); err != nil || n < 1 {
		return fmt.Errorf("is %q; use a number from 1", value)
	}
	return nil
}
