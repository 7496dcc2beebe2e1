package monitor

import (
	"context"
	"strings"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Budget is the usage of a limit of today (UTC), in one unit.
type Budget struct {
	Scope    string  `json:"scope"` // day, surface chat, agent sales
	Unit     string  `json:"unit"`  // usd or tokens
	Spent    float64 `json:"spent"`
	Unknown  float64 `json:"unknown"`  // the part of Spent that no provider reported
	Reserved float64 `json:"reserved"` // reserved for running calls
	Limit    float64 `json:"limit"`    // 0 for none
}

// Share returns the spent part of the limit, or 0 without a limit.
func (b Budget) Share() float64 {
	if b.Limit <= 0 {
		return 0
	}
	return b.Spent / b.Limit
}

// Text formats an amount in the unit of the budget.
func (b Budget) Text(amount float64) string {
	if b.Unit == "usd" {
		return human.Money(amount)
	}
	return human.Counted(int64(amount), "token")
}

// Over reports whether the limit is spent.
func (b Budget) Over() bool { return b.Limit > 0 && b.Spent >= b.Limit }

// budgetsOf returns the budgets of the day and of surfaces, and the day's usage if the day has no limit.
func (m Monitor) budgetsOf(used []budgets.Standing) (list []Budget) {
	standing := map[string]budgets.Standing{}
	for _, s := range used {
		// day:2026-11-21 or day:2026-11-21:chat
		_, day, _ := strings.Cut(s.Scope, ":")
		_, surface, _ := strings.Cut(day, ":")
		standing[surface] = s
	}
	for _, surface := range []trace.Surface{"", trace.Heartbeat, trace.Operate, trace.Chat, trace.Webhook, trace.Flow} {
		s, limit, scope := standing[string(surface)], m.Limits.Surface[surface], "surface "+string(surface)
		if surface == "" {
			limit, scope = m.Limits.Day, "day"
		}
		if limit.USD > 0 || surface == "" && s.CostUSD+s.ReservedUSD > 0 {
			list = append(list, Budget{scope, "usd", s.CostUSD, s.UnknownUSD, s.ReservedUSD, limit.USD})
		}
		if limit.Tokens > 0 || surface == "" && s.Tokens+s.ReservedTokens > 0 {
			list = append(list, Budget{
				scope, "tokens", float64(s.Tokens), float64(s.UnknownTokens), float64(s.ReservedTokens), float64(limit.Tokens),
			})
		}
	}
	return list
}

// agentBudget returns the day's usage of an agent, with its limit if it has one.
func agentBudget(used []budgets.Standing, a agents.Agent) Budget {
	s := budgets.AgentOf(used, a.Name)
	b := Budget{"agent " + a.Name, "usd", s.CostUSD, s.UnknownUSD, s.ReservedUSD, a.Limits.DayUSD}
	if b.Limit == 0 && b.Spent == 0 && s.Tokens > 0 { // the model has no price
		b.Unit, b.Spent = "tokens", float64(s.Tokens)
	}
	return b
}

// Budgets reads today's budgets: of the day, of surfaces, and of agents that declare a limit.
func (m Monitor) Budgets(ctx context.Context, db postgres.DB) ([]Budget, error) {
	used, err := budgets.Today(ctx, db)
	if err != nil {
		return nil, err
	}
	all, err := m.Agents.List(ctx, db)
	if err != nil {
		return nil, err
	}
	list := m.budgetsOf(used)
	for _, a := range all {
		if a.AsDeclared().Limits.DayUSD > 0 {
			list = append(list, agentBudget(used, a))
		}
	}
	return list, nil
}
