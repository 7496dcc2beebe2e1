package engineroom

import (
	"context"
	_ "embed"
	"fmt"
	"net/url"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/monitor"
)

// agentFilter returns the agents that the page shows.
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
	Agent string // empty for all agents
	URL   string // overview of the agent
	Here  bool
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

// verdictPart reads the strip of the page, and with several agents one strip for each.
func (room *Room) verdictPart(ctx context.Context, req *pageRequest) (any, error) {
	failures, err := room.failures(ctx, req)
	if err != nil {
		return nil, err
	}
	c, all, err := room.monitor().Condition(ctx, room.Read, &failures)
	if err != nil {
		return nil, err
	}
	total := budgetLine{Spent: "nothing"}
	closest := -2.0
	for _, b := range c.Budgets { // the limit of today that is closest to exhausted; without a limit, today's usage
		used := b.Share()
		if b.Limit <= 0 {
			used = -1
		}
		if b.Scope == "day" && used > closest {
			closest, total = used, newBudgetLine(b)
		}
	}
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
	if len(perAgent) == 1 {
		if only := perAgent[0].Spent; total.Limit == "" && only.Limit != "" {
			selected.Spent = only
		}
		perAgent = nil
	}
	first, more := firstN(perAgent, maxAgentStatuses)
	chosen := selected.Agent
	hours, err := room.hourChart(ctx, req, chosen)
	return map[string]any{
		"Head": selected, "Each": first, "More": more, "All": req.withParam("agent", ""),
		"Hours": hours,
	}, err
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

//go:embed hours.sql
var hoursSQL string

// hourRuns counts the executions of an hour.
type hourRuns struct {
	At           time.Time
	Runs, Failed int64
	Agent        string `db:"-"` // empty for all agents
}

// URL is the address of the list of the hour's executions, or of its failed executions.
func (h hourRuns) URL(failed bool) string {
	q := url.Values{"since": {apiTime(h.At)}, "until": {apiTime(h.At.Add(time.Hour))}}
	if failed {
		q.Set("failed", "1")
	}
	if h.Agent != "" {
		q.Set("agent", h.Agent)
	}
	return "/executions?" + q.Encode()
}

// hourChart is a chart of the executions of the last 24 hours.
type hourChart struct {
	Hours        []hourRuns
	Runs, Failed int64
	Many         bool // an hour has more executions than counted
}

// hourWidth is the width of an hour in the chart, and hourHeight the height of the chart.
const hourWidth, hourHeight = 20, 56

// hourChart returns the chart. A stream refreshes the chart like sums.
func (room *Room) hourChart(ctx context.Context, req *pageRequest, agent string) (hourChart, error) {
	read := func() (hourChart, error) { return room.runsByHour(ctx, agent) }
	if !req.streaming || req.cache == nil {
		return read()
	}
	return req.cache.hours.read(sumsInterval, read)
}

// runsByHour reads the chart of this hour and the 23 hours before it, for one agent, or for all agents if agent is
// empty.
func (room *Room) runsByHour(ctx context.Context, agent string) (c hourChart, err error) {
	until := time.Now().UTC().Truncate(time.Hour)
	c.Hours, err = postgres.RowsGeneric[hourRuns](ctx, room.Read, "count executions", hoursSQL, postgres.Strict{
		"since": until.Add(-23 * time.Hour), "until": until, "agent": agent, "count_limit": countLimit,
	})
	for i, h := range c.Hours {
		c.Hours[i].At, c.Hours[i].Agent = h.At.UTC(), agent
		c.Many = c.Many || h.Runs >= countLimit
		c.Runs, c.Failed = c.Runs+h.Runs, c.Failed+h.Failed
	}
	return c, err
}

// Bars are the pieces of the chart: for each hour the failed executions on top of all others.
func (c hourChart) Bars() []bar {
	highest := int64(1)
	for _, h := range c.Hours {
		highest = max(highest, h.Runs)
	}
	var list []bar
	for i, h := range c.Hours {
		base := float64(hourHeight)
		for _, piece := range []struct {
			n     int64
			class string
		}{{h.Runs - h.Failed, "bar-accent"}, {h.Failed, "bar-bad"}} {
			if piece.n <= 0 {
				continue
			}
			height := max(float64(piece.n)/float64(highest)*(hourHeight-2), 2)
			base -= height
			list = append(list, bar{
				X: formatSVG(float64(i*hourWidth + 2)), Y: formatSVG(max(base, 0)), W: formatSVG(hourWidth - 4),
				H: formatSVG(height), Class: piece.class,
			})
		}
	}
	return list
}

// Columns are the whole columns of the chart, with their tooltips.
func (c hourChart) Columns() []bar {
	list := make([]bar, len(c.Hours))
	for i, h := range c.Hours {
		list[i] = bar{
			X: formatSVG(float64(i * hourWidth)), W: formatSVG(hourWidth), H: formatSVG(hourHeight),
			Text: fmt.Sprintf("%s UTC: %s, %s failed", h.At.Format("15:04"), monitor.Counted(h.Runs, "run"),
				human.Count(h.Failed)),
		}
	}
	return list
}

// Latest are the hours, latest first.
func (c hourChart) Latest() []hourRuns {
	list := slices.Clone(c.Hours)
	slices.Reverse(list)
	return list
}

// Box is the chart's viewBox.
func (c hourChart) Box() string { return fmt.Sprintf("0 0 %d %d", 24*hourWidth, hourHeight) }
