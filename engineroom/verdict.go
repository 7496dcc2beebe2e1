package engineroom

import (
	"context"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// agentFilter returns a function that reports whether the page shows the work of an agent.
func (room *Room) agentFilter(ctx context.Context, req *pageRequest) (func(name string) bool, error) {
	name, err := room.selectedAgent(ctx, req)
	if name == "" || err != nil {
		return func(string) bool { return true }, err
	}
	all, err := room.Agents.List(ctx, room.Read)
	return func(other string) bool { return agents.Acting(all, other).Name == name }, err
}

// selectedAgent returns the name of the selected agent; empty for all agents.
func (room *Room) selectedAgent(ctx context.Context, req *pageRequest) (string, error) {
	name := req.Query.Get("agent")
	if name == "" {
		return "", nil
	}
	all, err := room.Agents.List(ctx, room.Read)
	if len(all) == 1 || !slices.ContainsFunc(all, func(a agents.Agent) bool { return a.Name == name }) {
		return "", err
	}
	return name, err
}

// agentStatus is the status line of one agent, or of all agents together.
type agentStatus struct {
	monitor.Verdict
	Agent string        // empty for all agents
	URL   string        // overview of the agent
	Here  bool          // the page shows this agent
	Beat  *monitor.Beat // the agent's newest heartbeat, or the newest of all
	Next  *time.Time
	Spent budgetLine
}

// Overdue reports whether the next heartbeat is in the past.
func (s agentStatus) Overdue() bool { return s.Next != nil && s.Next.Before(time.Now()) }

// monitor returns the monitor of the installation.
func (room *Room) monitor() monitor.Monitor {
	return monitor.Monitor{Agents: room.Agents, Limits: room.Limits}
}

// verdictPart reads the status of the selected agent, or of all agents together, and with several agents the status of
// each.
func (room *Room) verdictPart(ctx context.Context, req *pageRequest) (any, error) {
	failures, err := room.failures(ctx, req)
	if err != nil {
		return nil, err
	}
	c, all, err := room.monitor().Condition(ctx, room.Read, &failures)
	if err != nil {
		return nil, err
	}
	total := tightestBudget(c.Budgets)
	selected := newAgentStatus(c, nil, all, total)
	selected.URL = req.withParam("agent", "")
	var perAgent []agentStatus
	for _, a := range all {
		one := newAgentStatus(c, &a, all, newBudgetLine(c.AgentBudgets[a.Name]))
		one.URL, one.Here = req.withParam("agent", a.Name), len(all) > 1 && req.Query.Get("agent") == a.Name
		if perAgent = append(perAgent, one); one.Here {
			selected = one
		}
	}
	if len(perAgent) == 1 { // the only agent's limit is that of the installation
		if only := perAgent[0].Spent; total.Limit == "" && only.Limit != "" {
			selected.Spent = only
		}
		perAgent = nil
	}
	first, more := firstN(perAgent, maxAgentStatuses)
	hours, err := room.hourChart(ctx, req, selected.Agent)
	return map[string]any{
		"Head": selected, "Each": first, "More": more, "All": req.withParam("agent", ""), "Hours": hours,
	}, err
}

// tightestBudget returns the limit of today that is closest to exhausted, or today's usage if there is no limit.
func tightestBudget(list []monitor.Budget) budgetLine {
	tightest := budgetLine{Spent: "nothing"}
	const unlimited, none = -1.0, -2.0 // less than any share
	highest := none
	for _, b := range list {
		used := b.Share()
		if b.Limit <= 0 {
			used = unlimited
		}
		if b.Scope == "day" && used > highest {
			highest, tightest = used, newBudgetLine(b)
		}
	}
	return tightest
}

// maxAgentStatuses bounds the agents on the overview.
const maxAgentStatuses = 20

// newAgentStatus returns the status line of an agent, or of all agents if agent is nil.
func newAgentStatus(c monitor.Condition, agent *agents.Agent, all []agents.Agent, spent budgetLine) agentStatus {
	s := agentStatus{Verdict: c.Judge(agent, all), Spent: spent}
	isShown := func(string) bool { return true }
	if agent != nil {
		s.Agent = agent.Name
		isShown = func(name string) bool { return agents.Acting(all, name).Name == agent.Name }
	}
	for _, b := range c.BeatsOf(isShown) {
		if s.Next == nil || b.NextRunAt.Before(*s.Next) {
			s.Next = &b.NextRunAt
		}
		if b.EndedAt != nil && (s.Beat == nil || b.EndedAt.After(*s.Beat.EndedAt)) {
			b.Result = cut(160, redact.Text(b.Result, maxValue))
			b.Problem = cut(160, redact.Text(b.Problem, maxValue))
			s.Beat = &b
		}
	}
	return s
}
