package workspace

import (
	"context"
	"maps"
	"slices"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// evalTable applies eval documents. Old versions stay, because runs keep theirs.
func evalTable(w Workspace) kindApplier {
	return kindTable[evals.Definition, evalRow]{
		kind: "eval", documents: w.Evals, name: func(d evals.Definition) string { return d.Name },
		get:      getEval,
		put:      put(evals.Put),
		notFound: evals.ErrNotFound, remove: evals.Remove,
		declared: []string{"description", "agent", "surface", "trials", "budget", "gate", "cases", "version", "source"},
	}
}

// evalRow is a suite in a diff.
type evalRow struct {
	evals.Definition
	Version int    `json:"version"`
	Source  string `json:"source"`
}

func getEval(ctx context.Context, db postgres.DB, name string) (evalRow, error) {
	s, err := evals.Get(ctx, db, name)
	return evalRow{s.Definition, s.Version, s.Source}, err
}

// checkEvals requires the agents and skills of suites to exist, in the transaction's state. It returns [Problems].
func checkEvals(ctx context.Context, db postgres.DB, w Workspace) error {
	if len(w.Evals) == 0 {
		return nil
	}
	known, err := skillNames(ctx, db)
	if err != nil {
		return err
	}
	acting, err := agentNames(ctx, db)
	if err != nil {
		return err
	}
	var problems Problems
	for _, document := range w.Evals {
		if name := document.Definition.Agent; name != "" && !slices.Contains(acting, name) {
			problems.add(document.position("agent"), "agent: %s", unknownName("agent", name, name, acting))
		}
		named := evals.Skills(document.Definition)
		for _, path := range slices.Sorted(maps.Keys(named)) {
			if skill := named[path]; !slices.Contains(known, skill) {
				problems.add(document.position(path), "%s: there is no skill %q%s", path, skill, suggestion(skill, known))
			}
		}
	}
	return problems.err()
}
