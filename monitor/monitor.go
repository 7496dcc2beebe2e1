// Package monitor judges whether the agent works: see [Verdict]. The overview of the Engine Room, GET
// /v1/monitor/verdict, `agent doctor` and the outgoing events verdict.changed and budget.reached share this rule.
//
// An admin acknowledges the reasons of a verdict. An acknowledged reason does not count until it changes: another root
// error, another skill, another time of the disabling. A subject that recovers and fails again counts again.
package monitor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

// ErrChanged reports an acknowledgement of outdated reasons.
var ErrChanged = errors.New("the reasons have changed since; look again")

// Monitor judges an installation.
type Monitor struct {
	Agents *agents.Directory
	Limits budgets.Limits // limits of a day
}

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

// Condition reads the agents and the condition from which verdicts are derived. known has failures that the caller has
// read already, or is nil.
func (m Monitor) Condition(
	ctx context.Context, db postgres.DB, known *Failures,
) (c Condition, all []agents.Agent, err error) {
	if c, err = readCondition(ctx, db); err != nil {
		return c, nil, err
	}
	if known == nil {
		got, err := ReadFailures(ctx, db)
		if err != nil {
			return c, nil, err
		}
		known = &got
	}
	c.Failures = *known
	if c.acknowledged, err = acknowledgements(ctx, db); err != nil {
		return c, nil, err
	}
	if all, err = m.Agents.List(ctx, db); err != nil {
		return c, nil, err
	}
	used, err := budgets.Today(ctx, db)
	if err != nil {
		return c, nil, err
	}
	c.Budgets, c.AgentBudgets, c.overBudget = m.budgetsOf(used), map[string]Budget{}, map[string]bool{}
	for _, b := range c.Budgets {
		if b.Scope == "day" && b.Over() {
			c.overBudget[""] = true
		}
	}
	for _, a := range all {
		b := agentBudget(used, a)
		if c.AgentBudgets[a.Name] = b; b.Over() {
			c.overBudget[a.Name] = true
		}
	}
	return c, all, nil
}

// Status is the verdict of all agents together and, if there are several, of each. It includes the condition behind the
// verdicts.
type Status struct {
	Verdict
	// Mark identifies the reasons in why. An acknowledgement must contain it.
	Mark       string        `json:"mark"`
	Agents     []AgentStatus `json:"agents"`
	Heartbeats []Beat        `json:"heartbeats"`
	Spend      []Budget      `json:"spend"`
	Failing    []Group       `json:"failing"`
}

// AgentStatus is the verdict of an agent.
type AgentStatus struct {
	Agent string `json:"agent"`
	Verdict
	Spend Budget `json:"spend"`
}

// Status reads the status.
func (m Monitor) Status(ctx context.Context, db postgres.DB) (Status, error) {
	c, all, err := m.Condition(ctx, db, nil)
	if err != nil {
		return Status{}, err
	}
	s := Status{
		Verdict: c.Judge(nil, all), Agents: []AgentStatus{}, Heartbeats: []Beat{}, Spend: []Budget{}, Failing: []Group{},
	}
	s.Mark = s.Verdict.Mark()
	s.Spend = append(s.Spend, c.Budgets...)
	for _, a := range all {
		s.Agents = append(s.Agents, AgentStatus{a.Name, c.Judge(&a, all), c.AgentBudgets[a.Name]})
	}
	for _, b := range c.beats {
		b.Result, b.Problem = redact.Text(b.Result, maxRedacted), redact.Text(b.Problem, maxRedacted)
		s.Heartbeats = append(s.Heartbeats, b)
	}
	for _, g := range c.Groups(func(string) bool { return true }, nil) {
		if g.Failing {
			s.Failing = append(s.Failing, g)
		}
	}
	return s, nil
}

// Acknowledge acknowledges the reasons of the current verdict, and records the act in the audit. mark is the mark of
// the verdict that the person read. It returns ErrChanged if the reasons have changed since, or if the verdict is not
// degraded.
func (m Monitor) Acknowledge(
	ctx context.Context, db postgres.Beginner, mark, reason, by string,
) (s Status, traceID string, err error) {
	input := map[string]any{}
	done, err := activity.Record(ctx, db, activity.Act{Name: "acknowledge_verdict", Reason: reason, Input: input},
		func(tx pgx.Tx, _ string) (any, error) {
			if s, err = m.Status(ctx, tx); err != nil {
				return nil, err
			}
			if s.State != Degraded || s.Mark != mark {
				return nil, ErrChanged
			}
			texts := make([]string, len(s.Why))
			for i, why := range s.Why {
				texts[i] = why.Text
			}
			input["changed"] = texts
			_, err = tx.Exec(ctx, `
				insert into agent_acknowledgements (cause, reason, acknowledged_by)
				select c, @reason, @by from unnest(@causes::text[]) c
				on conflict (cause) do update set reason = excluded.reason, acknowledged_by = excluded.acknowledged_by,
				                                  acknowledged_at = clock_timestamp()`,
				postgres.Strict{"causes": keysOf(s.Why), "reason": reason, "by": by})
			if err == nil {
				s, err = m.Status(ctx, tx)
			}
			return s.Verdict, err
		})
	if err != nil {
		return s, "", fmt.Errorf("acknowledge the verdict: %w", err)
	}
	return s, done.TraceID, nil
}

// acknowledgement is an acknowledged cause.
type acknowledgement struct {
	Cause, Reason, AcknowledgedBy string
}

func acknowledgements(ctx context.Context, db postgres.DB) (map[string]acknowledgement, error) {
	list, err := postgres.Rows[acknowledgement](ctx, db, "list acknowledgements", `
		select a.cause, a.reason, a.acknowledged_by from agent_acknowledgements a order by a.cause limit 1000`)
	known := map[string]acknowledgement{}
	for _, a := range list {
		known[a.Cause] = a
	}
	return known, err
}
