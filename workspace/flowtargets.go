package workspace

import (
	"context"
	"fmt"
	"strings"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// checkTargets wants the flows that skills, automations and webhooks start to exist: in the workspace or beside it (the rows are
// as they are about to be), in Go code, or with workers outside. It returns [Problems].
func checkTargets(ctx context.Context, db postgres.DB, w Workspace) error {
	targets := w.flowTargets()
	if len(targets) == 0 {
		return nil
	}
	names, err := flowNames(ctx, db)
	if err != nil {
		return err
	}
	known := append(names, w.GoFlows...)
	there := make(map[string]bool, len(known))
	for _, name := range known {
		there[name] = true
	}
	var problems Problems
	for _, t := range targets {
		if !there[t.flow] && !executions.IsExternal(t.flow) {
			problems.add(t.at, "%s: %s", t.path, unknown("flow", t.flow, t.flow, known))
		}
	}
	return problems.err()
}

// flowTarget is a place in a file that names a flow.
type flowTarget struct {
	at         Position
	path, flow string
}

func (w Workspace) flowTargets() (all []flowTarget) {
	for _, d := range w.Skills {
		kind, name, _ := strings.Cut(strings.TrimSpace(d.Definition.Handler), ":")
		if kind == "flow" {
			all = append(all, flowTarget{d.place("handler"), "handler", strings.TrimSpace(name)})
		}
	}
	for _, d := range w.Automations {
		if d.Definition.Flow != "" {
			all = append(all, flowTarget{d.place("flow"), "flow", d.Definition.Flow})
		}
	}
	for _, d := range w.Webhooks {
		for i, action := range d.Definition.Actions {
			if path := fmt.Sprintf("actions[%d].flow", i); action.Flow != "" {
				all = append(all, flowTarget{d.place(path), path, action.Flow})
			}
		}
	}
	return all
}
