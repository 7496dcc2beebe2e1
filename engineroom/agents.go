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
	mostAgents        = 200
	mostVersions      = 100
	mostInstructions  = 20_000 // characters
	agentTextBytes    = 64 << 10
	agentValueLetters = 600
)

// agentsPage lists the agents.
func (room *Room) agentsPage() page {
	return page{
		path: "/agents", name: "agents", nav: "Agents", title: "Agents",
		parts: []part{{name: "list", every: 10 * time.Second, refreshOnActivity: true, load: room.agentsList}},
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

func (room *Room) agentsList(ctx context.Context, _ *visit) (any, error) {
	all, err := room.Agents.List(ctx, room.Read)
	if err != nil {
		return nil, err
	}
	used, err := budgets.Today(ctx, room.Read)
	if err != nil {
		return nil, err
	}
	all, more := onPage(all, mostAgents)
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
			{name: "values", every: 10 * time.Second, refreshOnActivity: true, load: room.agentValues},
			{name: "instructions", every: 10 * time.Second, refreshOnActivity: true, load: room.agentInstructions},
			{name: "versions", every: 10 * time.Second, refreshOnActivity: true, load: room.agentVersions},
		},
	}
}

// agentVisit is the agent of a page.
type agentVisit struct {
	name    string
	version int // 0: the current version
}

func (room *Room) openAgent(ctx context.Context, v *visit) (string, error) {
	asked := agentVisit{name: v.path("name")}
	if given := v.Query.Get("version"); given != "" {
		number, err := strconv.ParseInt(given, 10, 32)
		if err != nil || number < 1 {
			return "", problem.BadParameter("version is %.40q; it is a number from 1", given)
		}
		asked.version = int(number)
	}
	a, err := room.Agents.Look(ctx, room.Read, asked.name, asked.version)
	gone, ok := errors.AsType[*agents.MissingError](err)
	switch {
	case ok && gone.Latest > 0 && gone.Version == 0:
		return "", missing("%s; /agents/%s?version=%d shows its last version", gone, gone.Name, gone.Latest)
	case ok:
		return "", missing("%s; the page Agents lists them", gone)
	case err != nil:
		return "", err
	}
	asked.name = a.Name
	v.About = asked
	return "Agent " + cut(60, a.Name), nil
}

// shownAgent reads the agent again, because another request may have changed it.
func (room *Room) shownAgent(ctx context.Context, v *visit) (agents.Shown, error) {
	asked, _ := v.About.(agentVisit)
	shown, err := room.Agents.Show(ctx, room.Read, asked.name, asked.version)
	if errors.Is(err, agents.ErrNotFound) {
		err = missing("the agent has been removed; the page Agents lists those in service")
	}
	return shown, err
}

func (room *Room) agentValues(ctx context.Context, v *visit) (any, error) {
	shown, err := room.shownAgent(ctx, v)
	if err != nil {
		return nil, err
	}
	for i, value := range shown.Values {
		shown.Values[i].Value = cut(agentValueLetters, redact.Text(value.Value, agentTextBytes))
	}
	asked, _ := v.About.(agentVisit)
	return map[string]any{
		"Name": shown.Name, "Default": shown.Default, "Version": shown.Version, "At": shown.CreatedAt, "Source": shown.Source,
		"Values": shown.Values, "Old": asked.version > 0 && asked.version != shown.Versions[0],
	}, nil
}

func (room *Room) agentInstructions(ctx context.Context, v *visit) (any, error) {
	shown, err := room.shownAgent(ctx, v)
	if err != nil {
		return nil, err
	}
	text := strings.TrimSpace(redact.Text(shown.Instructions, agentTextBytes))
	return map[string]any{"Text": cut(mostInstructions, text), "Bytes": int64(len(shown.Instructions))}, nil
}

func (room *Room) agentVersions(ctx context.Context, v *visit) (any, error) {
	shown, err := room.shownAgent(ctx, v)
	if err != nil {
		return nil, err
	}
	versions, more := onPage(shown.Versions, mostVersions)
	return map[string]any{"Name": shown.Name, "Versions": versions, "Shown": shown.Version, "More": more}, nil
}
