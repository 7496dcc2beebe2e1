package workspace

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// flowTable applies flow documents. Old versions stay, because running executions use them.
func flowTable(w Workspace) kindApplier {
	return kindTable[flows.Definition, flowRow]{
		kind: "flow", documents: w.Flows, name: func(d flows.Definition) string { return d.Name },
		get:      getFlow,
		put:      withTx(flows.Put),
		notFound: flows.ErrNotFound, remove: flows.Remove,
		declared: []string{"description", "input", "variables", "channel", "target", "actions", "version", "source"},
	}
}

// flowRow is a flow in a diff, with its actions as text.
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

func getFlow(ctx context.Context, db postgres.DB, name string) (flowRow, error) {
	f, err := flows.Get(ctx, db, name)
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

// checkFlows requires names different from Go flows, and existing child flows and skills, in the transaction's state.
// It returns [Problems].
func checkFlows(ctx context.Context, tx pgx.Tx, w Workspace) error {
	if len(w.Flows) == 0 {
		return nil
	}
	names, err := flowNames(ctx, tx)
	if err != nil {
		return err
	}
	existing, err := agentNames(ctx, tx)
	if err != nil {
		return err
	}
	callable, err := skillNames(ctx, tx)
	if err != nil {
		return err
	}
	known := append(names, w.GoFlows...)
	var problems Problems
	for _, document := range w.Flows {
		w.checkFlowAgents(document, existing, &problems)
		if name := document.Definition.Name; slices.Contains(w.GoFlows, name) || slices.Contains(w.Reserved, name) {
			problems.add(document.position("name"), "name: %q is a flow of the program itself; choose another name", name)
		}
		checkNames(document, flows.Triggers(document.Definition), known, unknownFlow, &problems)
		checkNames(document, flows.Skills(document.Definition), callable, unknownSkill, &problems)
	}
	return problems.err()
}

// checkFlowAgents requires the agents of a flow to exist, and its name to differ from all agents.
func (w Workspace) checkFlowAgents(document Document[flows.Definition], existing []string, problems *Problems) {
	own := document.Definition.Name
	declares := func(d Document[agents.Definition]) bool { return d.Definition.Name == own }
	// checkAgents reports an agent of this workspace with the name of a flow.
	if slices.Contains(existing, own) && !slices.ContainsFunc(w.Agents, declares) {
		problems.add(document.position("name"),
			"name: %q is the name of an agent; agents and flows share one namespace", own)
	}
	checkNames(document, flows.Agents(document.Definition), existing, unknownAgent, problems)
}

// checkNames reports unknown names of a document, each at its path.
func checkNames[T any](
	document Document[T], named map[string]string, known []string, unknown func(name string, known []string) string,
	problems *Problems,
) {
	for _, path := range slices.Sorted(maps.Keys(named)) {
		if name := named[path]; !slices.Contains(known, name) {
			problems.add(document.position(path), "%s: %s", path, unknown(name, known))
		}
	}
}

func unknownAgent(name string, known []string) string { return unknownName("agent", name, name, known) }

func unknownSkill(name string, known []string) string {
	return fmt.Sprintf("there is no skill %q%s", name, suggestion(name, known))
}

// flowNames lists the current flows in the database, which a page of flows.List bounds.
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

// unknownFlow returns the message about an unknown flow. It names the known flows, except those that only the program
// starts.
func unknownFlow(name string, known []string) string {
	if executions.IsExternal(name) {
		return fmt.Sprintf("%.100q is not external or external:NAME, with a NAME of letters, digits and ._- that begins "+
			"with a letter or digit", name)
	}
	if suggestion(name, known) != "" {
		return unknownName("flow", name, name, known)
	}
	others := slices.DeleteFunc(slices.Clone(known), executions.IsReserved)
	return unknownName("flow", name, name, others) + "; a flow in Go is known while a program that registers it runs"
}
