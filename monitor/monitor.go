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

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// ErrChanged reports an acknowledgement of outdated reasons.
var ErrChanged = errors.New("the reasons have changed since; look again")

// Monitor judges an installation.
type Monitor struct {
	Agents *agents.Directory
	Limits budgets.Limits // limits of a day
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
		failures, err := ReadFailures(ctx, db)
		if err != nil {
			return c, nil, err
		}
		known = &failures
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

// acknowledgement is an acknowledged cause. Causes beyond maxAcknowledgements count as not acknowledged.
type acknowledgement struct {
	Cause, Reason, AcknowledgedBy string
}

// maxAcknowledgements bounds the acknowledgements that are read.
const maxAcknowledgements = 1000

func acknowledgements(ctx context.Context, db postgres.DB) (map[string]acknowledgement, error) {
	list, err := postgres.Rows[acknowledgement](ctx, db, "list acknowledgements", `
		select a.cause, a.reason, a.acknowledged_by from agent_acknowledgements a order by a.cause limit @limit`,
		postgres.Strict{"limit": maxAcknowledgements})
	known := map[string]acknowledgement{}
	for _, a := range list {
		known[a.Cause] = a
	}
	return known, err
}
