package workspace

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// InUseError reports that an apply would remove agents that are still needed. It changes nothing.
type InUseError struct {
	Reasons []string // one for each use, with what to do
}

func (e *InUseError) Error() string { return strings.Join(e.Reasons, "\n") }

// checkRemoved wants nothing that stays to name an agent that goes, and one of the agents that stay to be the default.
func checkRemoved(ctx context.Context, tx pgx.Tx, diff Diff) error {
	var removed []string
	for _, item := range diff.Of(Remove) {
		if item.Kind == "agent" {
			removed = append(removed, item.Name)
		}
	}
	if len(removed) == 0 {
		return nil
	}
	reasons, err := actors(ctx, tx, removed)
	if err != nil {
		return err
	}
	named, err := inFlows(ctx, tx, removed)
	if err != nil {
		return err
	}
	reasons = append(reasons, named...)
	left, err := (&agents.Directory{}).List(ctx, tx)
	if err != nil {
		return err
	}
	reasons = append(reasons, delegating(left, removed)...)
	if !slices.ContainsFunc(left, func(a agents.Agent) bool { return a.Default }) {
		reasons = append(reasons, fmt.Sprintf("agent %s cannot be removed: no other agent is the default; "+
			"apply one with default: true, or remove all agents", strings.Join(removed, ", ")))
	}
	if len(reasons) > 0 {
		return &InUseError{reasons}
	}
	return nil
}

// actors are the automations and objectives in service whose agent goes. Those of the workspace itself have been
// checked by their place in the files.
func actors(ctx context.Context, db postgres.DB, removed []string) ([]string, error) {
	rows, err := db.Query(ctx, `
		select 'automation' as kind, a.name, a.agent, 'disable' as verb from agent_automations a
		 where a.agent = any (@removed) and (a.enabled or a.disabled_by <> 'admin')
		union all
		select 'objective', o.name, o.agent, case o.status when 'proposed' then 'reject' else 'pause' end from agent_objectives o
		 where o.agent = any (@removed) and o.status in ('active', 'proposed')
		 order by 1, 2`, postgres.Strict{"removed": removed})
	if err != nil {
		return nil, fmt.Errorf("find what removed agents are for: %w", err)
	}
	type use struct{ Kind, Name, Agent, Verb string }
	uses, err := pgx.CollectRows(rows, pgx.RowToStructByPos[use])
	if err != nil {
		return nil, fmt.Errorf("find what removed agents are for: %w", err)
	}
	reasons := make([]string, len(uses))
	for i, u := range uses {
		reasons[i] = fmt.Sprintf("agent %s cannot be removed: %s %q names it; agent %ss %s %q, or keep the agent",
			u.Agent, u.Kind, u.Name, u.Kind, u.Verb, u.Name)
	}
	return reasons, nil
}

// delegating are the mentions of agents that go in the delegates of agents that stay.
func delegating(left []agents.Agent, removed []string) (reasons []string) {
	for _, a := range left {
		for i, name := range a.Delegates {
			if slices.Contains(removed, name) {
				reasons = append(reasons, fmt.Sprintf("agent %s cannot be removed: agent %q names it in delegates[%d]; "+
					"apply that agent without it, or remove it, too", name, a.Name, i))
			}
		}
	}
	return reasons
}

// inFlows are the mentions of agents that go in flows that stay.
func inFlows(ctx context.Context, db postgres.DB, removed []string) (reasons []string, err error) {
	for after := ""; ; {
		page, err := flows.List(ctx, db, flows.Filter{After: after, Limit: 500})
		if err != nil {
			return nil, err
		}
		for _, f := range page {
			for path, name := range flows.Agents(f.Definition) {
				if slices.Contains(removed, name) {
					reasons = append(reasons, fmt.Sprintf("agent %s cannot be removed: flow %q names it in %s; "+
						"apply the flow with another agent, or remove it, too", name, f.Name, path))
				}
			}
			after = f.Name
		}
		if len(page) < 500 {
			slices.Sort(reasons)
			return reasons, nil
		}
	}
}
