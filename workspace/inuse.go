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

// InUseError reports agents, skills and flows that an apply cannot remove: they are in use, or no default agent would
// remain.
type InUseError struct {
	Reasons []string // one for each use or missing default, with advice
}

func (e *InUseError) Error() string { return strings.Join(e.Reasons, "\n") }

// checkRemoved rejects the removal of agents, skills and flows in use, and a removal that leaves no default agent.
func checkRemoved(ctx context.Context, tx pgx.Tx, diff Diff) error {
	reasons, err := uses(ctx, tx, names(diff.Of(Remove)))
	if err != nil {
		return err
	}
	var removed []string
	for _, item := range diff.Of(Remove) {
		if item.Kind == "agent" {
			removed = append(removed, item.Name)
		}
	}
	if len(removed) == 0 {
		if len(reasons) > 0 {
			return &InUseError{reasons}
		}
		return nil
	}
	flowReasons, err := flowUses(ctx, tx, removed)
	if err != nil {
		return err
	}
	reasons = append(reasons, flowReasons...)
	remaining, err := (&agents.Directory{}).List(ctx, tx)
	if err != nil {
		return err
	}
	reasons = append(reasons, delegateUses(remaining, removed)...)
	if !slices.ContainsFunc(remaining, func(a agents.Agent) bool { return a.Default }) {
		reasons = append(reasons, fmt.Sprintf("agent %s cannot be removed: no other agent is the default; "+
			"apply one with default: true, or remove all agents", strings.Join(removed, ", ")))
	}
	if len(reasons) > 0 {
		return &InUseError{reasons}
	}
	return nil
}

// uses lists automations and objectives that name a removed object. removed has entries like "skill one". checkActors
// and checkCalls report uses inside the workspace, with their position in the file.
func uses(ctx context.Context, db postgres.DB, removed []string) ([]string, error) {
	rows, err := db.Query(ctx, `
		select 'automation' as kind, a.name, u.kind, u.name, 'disable' as verb
		  from agent_automations a,
		       lateral (values ('agent', a.agent), ('skill', a.skill_name), ('flow', a.flow)) u (kind, name)
		 where u.kind || ' ' || u.name = any (@removed)
		   and (a.enabled or a.paused_for <> '' or a.disabled_by = 'proposal') -- those that automations.Disable ends
		union all
		select 'objective', o.name, 'agent', o.agent,
		       case o.status
		         when 'proposed' then 'reject'
		         else 'pause'
		       end
		  from agent_objectives o
		 where 'agent ' || o.agent = any (@removed) and o.status in ('active', 'proposed')
		 order by 1, 2, 3`, postgres.Strict{"removed": removed})
	type use struct{ Kind, Name, Removed, RemovedName, Verb string }
	list, err := postgres.Collect(rows, err, "find uses of removed objects", pgx.RowToStructByPos[use])
	if err != nil {
		return nil, err
	}
	reasons := make([]string, len(list))
	for i, u := range list {
		reasons[i] = fmt.Sprintf("%s %s cannot be removed: %s %q names it; run `agent %ss %s %q`, or keep the %s",
			u.Removed, u.RemovedName, u.Kind, u.Name, u.Kind, u.Verb, u.Name, u.Removed)
	}
	return reasons, nil
}

// delegateUses lists remaining agents that delegate to removed agents.
func delegateUses(remaining []agents.Agent, removed []string) (reasons []string) {
	for _, a := range remaining {
		for i, name := range a.Delegates {
			if slices.Contains(removed, name) {
				reasons = append(reasons, fmt.Sprintf("agent %s cannot be removed: agent %q names it in delegates[%d]; "+
					"apply that agent without it, or remove it, too", name, a.Name, i))
			}
		}
	}
	return reasons
}

// flowUses lists remaining flows that name removed agents.
func flowUses(ctx context.Context, db postgres.DB, removed []string) (reasons []string, err error) {
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
