package workspace

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// checkTargets requires the flows of skills, automations and webhooks to exist: as data, in Go, or external. It
// requires the automations of webhooks to exist. It returns [Problems].
func checkTargets(ctx context.Context, tx pgx.Tx, w Workspace) error {
	problems, err := unknownAutomations(ctx, tx, w.Webhooks)
	if err != nil {
		return err
	}
	targets := w.flowTargets()
	if len(targets) == 0 {
		return problems.err()
	}
	names, err := flowNames(ctx, tx)
	if err != nil {
		return err
	}
	known := append(names, w.GoFlows...)
	exists := make(map[string]bool, len(known))
	for _, name := range known {
		exists[name] = true
	}
	for _, t := range targets {
		if !exists[t.flow] && !executions.CanClaim(t.flow) {
			problems.add(t.at, "%s: %s", t.path, unknownFlow(t.flow, known))
		}
	}
	return problems.err()
}

// unknownAutomations reports the actions of webhooks that name no automation.
func unknownAutomations(
	ctx context.Context, db postgres.DB, all []Document[webhooks.EndpointDefinition],
) (problems Problems, err error) {
	for _, d := range all {
		for i, action := range d.Definition.Actions {
			if action.Automation == "" {
				continue
			}
			_, err := automations.Get(ctx, db, action.Automation)
			if err == nil {
				continue
			}
			if !errors.Is(err, automations.ErrNotFound) {
				return nil, err
			}
			known, err := postgres.Names(ctx, db, "list automations", `select name from agent_automations limit 1000`)
			if err != nil {
				return nil, err
			}
			path := fmt.Sprintf("actions[%d].automation", i)
			problems.add(d.position(path), "%s: there is no automation %q%s", path, action.Automation,
				suggestion(action.Automation, known))
		}
	}
	return problems, nil
}

// flowTarget is a reference to a flow in a file.
type flowTarget struct {
	at         Position
	path, flow string
}

// flowTargets lists the references of skills, automations and webhooks.
func (w Workspace) flowTargets() (all []flowTarget) {
	for _, d := range w.Skills {
		kind, name, _ := strings.Cut(strings.TrimSpace(d.Definition.Handler), ":")
		if kind == "flow" {
			all = append(all, flowTarget{d.position("handler"), "handler", strings.TrimSpace(name)})
		}
	}
	for _, d := range w.Automations {
		if d.Definition.Flow != "" {
			all = append(all, flowTarget{d.position("flow"), "flow", d.Definition.Flow})
		}
	}
	for _, d := range w.Webhooks {
		for i, action := range d.Definition.Actions {
			if path := fmt.Sprintf("actions[%d].flow", i); action.Flow != "" {
				all = append(all, flowTarget{d.position(path), path, action.Flow})
			}
		}
	}
	return all
}
