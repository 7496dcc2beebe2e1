package engineroom

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

const (
	maxAgents       = 200
	maxVersions     = 100
	maxInstructions = 20_000 // characters
	maxAgentText    = 64 << 10
	maxAgentValue   = 600
)

// agentsPage lists the agents.
func (room *Room) agentsPage() page {
	return page{
		path: "/agents", name: "agents", navLabel: "Agents", title: "Agents",
		parts: []part{{name: "list", interval: 10 * time.Second, refreshOnActivity: true, load: room.agentsList}},
	}
}

// agentRow is an agent in the list, with cut texts.
type agentRow struct {
	Name, Model, Memory, Skills, Keys, Heartbeat, About string
	Default                                             bool
	Version                                             int
	TodayUSD                                            float64
	TodayTokens                                         int64
}

func (room *Room) agentsList(ctx context.Context, _ *pageRequest) (any, error) {
	all, err := room.Agents.List(ctx, room.Read)
	if err != nil {
		return nil, err
	}
	used, err := budgets.Today(ctx, room.Read)
	if err != nil {
		return nil, err
	}
	all, more := firstN(all, maxAgents)
	list := make([]agentRow, len(all))
	for i, a := range all {
		list[i] = agentRow{
			Name: a.Name, Model: a.Model, Memory: a.Memory, Skills: valueOf(a, "skills"), Keys: valueOf(a, "keys"),
			About:   a.Description,
			Default: a.Default, Version: a.Version, TodayUSD: budgets.AgentOf(used, a.Name).CostUSD,
			TodayTokens: budgets.AgentOf(used, a.Name).Tokens,
		}
		if a.Heartbeat != nil {
			list[i].Heartbeat = a.Heartbeat.Cron
		}
	}
	return map[string]any{"Agents": list, "More": more}, nil
}

// valueOf formats an effective value of an agent.
func valueOf(a agents.Agent, name string) string {
	values := a.Values()
	i := slices.IndexFunc(values, func(v agents.Value) bool { return v.Name == name })
	return values[max(i, 0)].Value
}

// agentPage shows one agent, in its current or another version.
func (room *Room) agentPage() page {
	return page{
		path: "/agents/{name}", name: "agent", open: room.openAgent,
		parts: []part{
			{name: "values", interval: 10 * time.Second, refreshOnActivity: true, load: room.agentValues},
			{name: "instructions", interval: 10 * time.Second, refreshOnActivity: true, load: room.agentInstructions},
			{name: "versions", interval: 10 * time.Second, refreshOnActivity: true, load: room.agentVersions},
		},
	}
}

// agentSubject is the agent of a page.
type agentSubject struct {
	name    string
	version int // 0: the current version
}

func (room *Room) openAgent(ctx context.Context, req *pageRequest) (string, error) {
	subject := agentSubject{name: req.path("name")}
	if given := req.Query.Get("version"); given != "" {
		number, err := strconv.ParseInt(given, 10, 32)
		if err != nil || number < 1 {
			return "", problem.BadParameter("version is %.40q; it is a number from 1", given)
		}
		subject.version = int(number)
	}
	a, err := room.Agents.Look(ctx, room.Read, subject.name, subject.version)
	missing, ok := errors.AsType[*agents.MissingError](err)
	switch {
	case ok && missing.Latest > 0 && missing.Version == 0:
		return "", notFound("%s; /agents/%s?version=%d shows its last version", missing, missing.Name, missing.Latest)
	case ok:
		return "", notFound("%s; the page Agents lists them", missing)
	case err != nil:
		return "", err
	}
	subject.name = a.Name
	req.Subject = subject
	return "Agent " + cut(60, a.Name), nil
}

// shownAgent reads the agent again, because another request may have changed it.
func (room *Room) shownAgent(ctx context.Context, req *pageRequest) (agents.Shown, error) {
	subject, _ := req.Subject.(agentSubject)
	agent, err := room.Agents.Show(ctx, room.Read, subject.name, subject.version)
	if errors.Is(err, agents.ErrNotFound) {
		err = notFound("the agent has been removed; the page Agents lists those in service")
	}
	return agent, err
}

func (room *Room) agentValues(ctx context.Context, req *pageRequest) (any, error) {
	agent, err := room.shownAgent(ctx, req)
	if err != nil {
		return nil, err
	}
	for i, value := range agent.Values {
		agent.Values[i].Value = cut(maxAgentValue, redact.Text(value.Value, maxAgentText))
	}
	subject, _ := req.Subject.(agentSubject)
	return map[string]any{
		"Name": agent.Name, "Default": agent.Default, "Version": agent.Version, "At": agent.CreatedAt, "Source": agent.Source,
		"Values": agent.Values, "Old": subject.version > 0 && subject.version != agent.Versions[0],
	}, nil
}

func (room *Room) agentInstructions(ctx context.Context, req *pageRequest) (any, error) {
	agent, err := room.shownAgent(ctx, req)
	if err != nil {
		return nil, err
	}
	text := strings.TrimSpace(redact.Text(agent.Instructions, maxAgentText))
	return map[string]any{"Text": cut(maxInstructions, text), "Bytes": int64(len(agent.Instructions))}, nil
}

func (room *Room) agentVersions(ctx context.Context, req *pageRequest) (any, error) {
	agent, err := room.shownAgent(ctx, req)
	if err != nil {
		return nil, err
	}
	versions, more := firstN(agent.Versions, maxVersions)
	return map[string]any{"Name": agent.Name, "Versions": versions, "Shown": agent.Version, "More": more}, nil
}
