package workspace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// flowRow is a flow as a diff shows it: its actions as text, so that the lines that differ are seen.
type flowRow struct {
	Description string         `json:"description"`
	Input       map[string]any `json:"input"`
	Variables   map[string]any `json:"variables"`
	Channel     string         `json:"channel"`
	Target      string         `json:"target"`
	Actions     string         `json:"actions"`
	Version     int            `json:"version"`
	Source      string         `json:"source"`
}

// flowTable is how flow documents meet their table. Every version stays, for the executions that have begun with it.
func flowTable(w Workspace) matcher {
	return table[flows.Definition, flowRow]{
		kind: "flow", documents: w.Flows, name: func(d flows.Definition) string { return d.Name },
		get: getFlow,
		put: func(ctx context.Context, tx pgx.Tx, d flows.Definition) (bool, error) {
			return flows.Put(ctx, tx, d, Source)
		},
		notFound: flows.ErrNotFound, remove: flows.Remove,
		declared: []string{"description", "input", "variables", "channel", "target", "actions", "version", "source"},
	}
}

func getFlow(ctx context.Context, tx pgx.Tx, name string) (flowRow, error) {
	f, err := flows.Get(ctx, tx, name)
	if err != nil {
		return flowRow{}, err
	}
	actions, err := json.MarshalIndent(f.Definition.Actions, "", "  ")
	if err != nil {
		return flowRow{}, fmt.Errorf("show flow %s: %w", name, err)
	}
	d := f.Definition
	return flowRow{d.Description, d.Input, d.Variables, d.Channel, d.Target, string(actions), f.Version, f.Source}, nil
}

// checkFlows wants the name of every flow to be free of those of Go code, and the flows that it starts and the skills that it
// names to exist: in the workspace or beside it (the rows are as they are about to be), or, of flows, in Go code. It returns
// [Problems].
func checkFlows(ctx context.Context, db postgres.DB, w Workspace) error {
	if len(w.Flows) == 0 {
		return nil
	}
	names, err := flowNames(ctx, db)
	if err != nil {
		return err
	}
	acting, err := agentNames(ctx, db)
	if err != nil {
		return err
	}
	known := append(names, w.GoFlows...)
	var problems Problems
	for _, document := range w.Flows {
		w.checkFlowAgents(document, acting, &problems)
		if name := document.Definition.Name; slices.Contains(w.GoFlows, name) || slices.Contains(w.Reserved, name) {
			problems.add(document.place("name"), "name: %q is a flow of the program itself; take another name", name)
		}
		started := flows.Triggers(document.Definition)
		for _, path := range slices.Sorted(maps.Keys(started)) {
			name := started[path]
			if !slices.Contains(known, name) {
				problems.add(document.place(path), "%s: %s", path, unknown("flow", name, name, known))
			}
		}
		if err := checkSkills(ctx, db, document, &problems); err != nil {
			return err
		}
	}
	return problems.err()
}

// checkFlowAgents wants the agents that a flow names to be in service, and its own name to be no agent's.
func (w Workspace) checkFlowAgents(document Document[flows.Definition], acting []string, problems *Problems) {
	own := document.Definition.Name
	declares := func(d Document[agents.Definition]) bool { return d.Definition.Name == own }
	if slices.Contains(acting, own) && !slices.ContainsFunc(w.Agents, declares) { // checkAgents says it of those
		problems.add(document.place("name"), "name: %q is the name of an agent; agents and flows share one namespace", own)
	}
	named := flows.Agents(document.Definition)
	for _, path := range slices.Sorted(maps.Keys(named)) {
		if name := named[path]; !slices.Contains(acting, name) {
			problems.add(document.place(path), "%s: %s", path, unknown("agent", name, name, acting))
		}
	}
}

// checkSkills wants the skills that a flow names to exist.
func checkSkills(ctx context.Context, db postgres.DB, document Document[flows.Definition], problems *Problems) error {
	called := flows.Skills(document.Definition)
	for _, path := range slices.Sorted(maps.Keys(called)) {
		_, err := skills.Get(ctx, db, called[path])
		if err == nil {
			continue
		}
		if !errors.Is(err, skills.ErrNotFound) {
			return err
		}
		known, err := skillNames(ctx, db)
		if err != nil {
			return err
		}
		problems.add(document.place(path), "%s: there is no skill %q%s", path, called[path], hint(called[path], known))
	}
	return nil
}

// flowNames lists the flows that may begin.
func flowNames(ctx context.Context, db postgres.DB) ([]string, error) {
	var names []string
	for {
		after := ""
		if len(names) > 0 {
			after = names[len(names)-1]
		}
		page, err := flows.List(ctx, db, flows.Filter{After: after, Limit: 500})
		if err != nil {
			return nil, err
		}
		for _, f := range page {
			names = append(names, f.Name)
		}
		if len(page) < 500 {
			return names, nil
		}
	}
}
