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

// listedAgent is an agent in a listing.
type listedAgent struct {
	agents.Agent
	Today daybudgets.Standing `json:"today"` // what it has used since midnight UTC
}

// naming is who acts.
func (s *server) naming() []route {
	return []route{
		{
			method: "GET", path: "/v1/agents", answer: page[listedAgent]{}, handle: s.listAgents, params: listing(),
			about: "Agents in service, the default first, then by name: effective values, and what each has used today.",
		}, {
			method: "GET", path: "/v1/agents/{name}", answer: agents.Shown{}, handle: s.getAgent,
			about: "One agent: effective values, where each comes from (document, a setting or default), and its versions.",
			params: []param{{
				name: "version", about: "This version, of a removed agent too; the one in service when left out",
				format: "integer", check: checkVersion,
			}},
		},
	}
}

func checkVersion(value string) error {
	if n, err := strconv.ParseInt(value, 10, 32); err != nil || n < 1 {
		return fmt.Errorf("is %q; it is a number from 1", value)
	}
	return nil
}

func (s *server) listAgents(r request) (answer, error) {
	after, err := unseal("agents", r.query["cursor"])
	if err != nil {
		return answer{}, err
	}
	all, err := s.agents.List(r.Context(), s.pool)
	if err != nil {
		return answer{}, err
	}
	used, err := daybudgets.Today(r.Context(), s.pool)
	if err != nil {
		return answer{}, err
	}
	all = slices.DeleteFunc(all, func(a agents.Agent) bool { return agentKey(a) <= after })
	next := ""
	if limit := r.query.limit(); len(all) > limit {
		all = all[:limit]
		next = seal("agents", agentKey(all[limit-1]))
	}
	listed := make([]listedAgent, len(all))
	for i, a := range all {
		listed[i] = listedAgent{Agent: a, Today: daybudgets.AgentOf(used, a.Name)}
	}
	return answer{body: pageOf(listed, next)}, nil
}

// agentKey sorts as agents are listed: the default first, then by name.
func agentKey(a agents.Agent) string {
	if a.Default {
		return "0 " + a.Name
	}
	return "1 " + a.Name
}

func (s *server) getAgent(r request) (answer, error) {
	name := r.PathValue("name")
	if !storable(name) {
		return answer{}, problem.New(http.StatusNotFound, "there is no agent of this name; GET /v1/agents lists them")
	}
	version := 0
	if r.query["version"] != "" {
		var err error
		if version, err = strconv.Atoi(r.query["version"]); err != nil {
			return answer{}, badParameter("parameter version %s", err)
		}
	}
	shown, err := s.agents.Show(r.Context(), s.pool, name, version)
	missing, ok := errors.AsType[*agents.MissingError](err)
	switch {
	case ok && missing.Latest == 0:
		return answer{}, problem.New(http.StatusNotFound, "%s; GET /v1/agents lists them", missing)
	case ok && missing.Version > 0:
		return answer{}, problem.New(http.StatusNotFound, "%s; leave version out for it", missing)
	case ok:
		return answer{}, problem.New(http.StatusNotFound, "%s; ?version=%d shows what it was", missing, missing.Latest)
	}
	return answer{body: shown}, err
}
