package workspace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

var errRollback = errors.New("only planned")

// Options configure [Apply]. The zero value removes nothing.
type Options struct {
	// Prune reports whether to remove a row that an earlier apply declared and no file declares now. Nil keeps all.
	Prune func(Item) bool
	// Reach opens a named database, which then prepares the queries of its skills. Nil leaves the queries unchecked.
	Reach func(ctx context.Context, d databases.Database) (skills.Database, error)
	// Gate lets gating suites refuse the apply; nil for none.
	Gate *Gate
}

// Gate sets how an apply treats evals that refuse it. Refusals are an [evals.GateError], unless the apply ignores
// refusals.
type Gate struct {
	Installation evals.Installation
	Ignore       bool   // apply despite refusals, with warnings
	Reason       string // why the apply ignores refusals, for the audit log
}

// All is an [Options.Prune] that removes every undeclared row.
func All(Item) bool { return true }

// Plan reports the effects of an [Apply]. It rolls back, but needs a writable database.
func Plan(ctx context.Context, db postgres.Beginner, w Workspace, o Options) (Diff, error) {
	var diff Diff
	warnings, err := checkNamed(ctx, db, w, o, false)
	if err != nil {
		return Diff{}, wrap("plan workspace", err)
	}
	var refused []evals.Refusal
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		var err error
		if diff, refused, err = applyGated(ctx, tx, w, o); err != nil {
			return err
		}
		return errRollback
	})
	if !errors.Is(err, errRollback) {
		return Diff{}, wrap("plan workspace", err)
	}
	diff.Warnings = append(warnings, gateWarnings(refused)...)
	return diff, nil
}

// Apply makes the database match w in one transaction and records the change. Wrong references are [Problems]: a
// missing skill, invalid arguments, a missing flow. Removal of an agent in use is an [InUseError].
func Apply(ctx context.Context, db postgres.Beginner, w Workspace, o Options) (Diff, error) {
	var diff Diff
	warnings, err := checkNamed(ctx, db, w, o, true)
	if err != nil {
		return Diff{}, wrap("apply workspace", err)
	}
	var refused []evals.Refusal
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		var err error
		if diff, refused, err = applyGated(ctx, tx, w, o); err != nil || diff.Empty() {
			return err
		}
		input := map[string]any{"changed": names(diff.changed()), "pruned": names(diff.Of(Remove))}
		act := activity.Act{Name: "apply_workspace", Input: input}
		if len(refused) > 0 {
			if !o.Gate.Ignore {
				return &evals.GateError{Refusals: refused}
			}
			act.Reason, input["without_evals"] = "without evals: "+o.Gate.Reason, refusedSuites(refused)
		}
		_, err = activity.Record(ctx, tx, act, func(pgx.Tx, string) (any, error) {
			return map[string][]Item{"items": diff.changed()}, nil
		})
		return err
	})
	if err != nil {
		return Diff{}, wrap("apply workspace", err)
	}
	diff.Warnings = append(warnings, gateWarnings(refused)...)
	return diff, nil
}

// wrap wraps an error in what. It returns [Problems] unchanged, because they name their position.
func wrap(what string, err error) error {
	if problems, ok := errors.AsType[Problems](err); ok {
		return problems
	}
	return fmt.Errorf("%s: %w", what, err)
}

// Lock serialises applies until the end of tx. Later statements see the previous apply.
func Lock(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('lanekeeper workspace', 0))`)
	if err != nil {
		return fmt.Errorf("lock workspace: %w", err)
	}
	return nil
}

// applyAll applies all kinds and checks their references. The caller holds [Lock].
func applyAll(ctx context.Context, tx pgx.Tx, w Workspace, o Options) (Diff, error) {
	diff := Diff{Items: []Item{}}
	for _, t := range kindTables(w, o) {
		items, err := t.apply(ctx, tx, o)
		if err != nil {
			return Diff{}, err
		}
		diff.Items = append(diff.Items, items...)
	}
	if err := checkQueries(ctx, tx, w); err != nil {
		return Diff{}, err
	}
	if err := checkFlows(ctx, tx, w); err != nil {
		return Diff{}, err
	}
	if err := checkAgents(ctx, tx, w); err != nil {
		return Diff{}, err
	}
	if err := checkTargets(ctx, tx, w); err != nil {
		return Diff{}, err
	}
	if err := checkEvals(ctx, tx, w); err != nil {
		return Diff{}, err
	}
	if err := checkRemoved(ctx, tx, diff); err != nil {
		return Diff{}, err
	}
	if err := checkCalls(ctx, tx, w.Automations); err != nil || w.Also == nil {
		return diff, err
	}
	return diff, w.Also(ctx, tx)
}

// kindTable applies the documents of one kind to one table.
type kindTable[D, R any] struct {
	kind      string
	documents []Document[D]
	name      func(D) string
	get       func(ctx context.Context, db postgres.DB, name string) (R, error)
	notFound  error
	put       func(ctx context.Context, tx pgx.Tx, d D) (changed bool, err error)
	remove    func(ctx context.Context, db postgres.DB, keep []string) ([]string, error)
	declared  []string // the JSON names of the row's fields that a document decides
}

// put adapts a package's Put.
func put[D any](
	store func(context.Context, postgres.DB, D) (bool, error),
) func(context.Context, pgx.Tx, D) (bool, error) {
	return func(ctx context.Context, tx pgx.Tx, d D) (bool, error) { return store(ctx, tx, d) }
}

func (t kindTable[D, R]) apply(ctx context.Context, tx pgx.Tx, o Options) ([]Item, error) {
	var items []Item
	var problems Problems
	keep := []string{}
	for _, document := range byName(t.documents, t.name) {
		item, err := t.write(ctx, tx, document.Definition)
		if err != nil {
			return nil, err
		}
		if lost := item.overwrittenByAdmin(); len(lost) > 0 {
			problems.add(document.position("name"), "%s", item.overwriteProblem(lost))
		}
		items = append(items, item)
		keep = append(keep, item.Name)
	}
	if err := problems.err(); err != nil {
		return nil, err
	}
	undeclared, err := t.prune(ctx, tx, keep, o)
	return append(items, undeclared...), err
}

// prune removes undeclared rows, except kept ones.
func (t kindTable[D, R]) prune(ctx context.Context, tx pgx.Tx, declared []string, o Options) ([]Item, error) {
	found, err := t.undeclared(ctx, tx, declared)
	if err != nil {
		return nil, err
	}
	items := make([]Item, len(found))
	keep := slices.Clone(declared)
	for i, name := range found {
		items[i] = Item{Kind: t.kind, Name: name, Action: Remove}
		if o.Prune == nil || !o.Prune(items[i]) {
			items[i].Action = Keep
			keep = append(keep, name)
		}
	}
	if len(keep) == len(declared)+len(found) {
		return items, nil
	}
	_, err = t.remove(ctx, tx, keep)
	return items, err
}

// undeclared lists undeclared workspace rows: it removes the rows in a savepoint and rolls back.
func (t kindTable[D, R]) undeclared(ctx context.Context, tx pgx.Tx, declared []string) ([]string, error) {
	inner, err := tx.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("look for undeclared %s rows: %w", t.kind, err)
	}
	found, err := t.remove(ctx, inner, declared)
	if undone := inner.Rollback(ctx); err == nil && undone != nil {
		err = fmt.Errorf("look for undeclared %s rows: %w", t.kind, undone)
	}
	return found, err
}

// write applies one document.
func (t kindTable[D, R]) write(ctx context.Context, tx pgx.Tx, d D) (Item, error) {
	item := Item{Kind: t.kind, Name: t.name(d), Action: Unchanged}
	before, err := t.get(ctx, tx, item.Name)
	if err != nil && !errors.Is(err, t.notFound) {
		return item, err
	}
	if err != nil {
		item.Action = Create
	}
	changed, err := t.put(ctx, tx, d)
	if err != nil || !changed || item.Action == Create {
		return item, err
	}
	item.Action = Update
	after, err := t.get(ctx, tx, item.Name)
	if err != nil {
		return item, err
	}
	item.Changes, err = t.changes(before, after)
	return item, err
}

func (t kindTable[D, R]) changes(before, after R) ([]Change, error) {
	then, err := fieldsIn(before, t.declared...)
	if err != nil {
		return nil, fmt.Errorf("compare %s: %w", t.kind, err)
	}
	now, err := fieldsIn(after, t.declared...)
	if err != nil {
		return nil, fmt.Errorf("compare %s: %w", t.kind, err)
	}
	return changes(then, now), nil
}

// byName sorts documents, so all applies lock rows in the same order.
func byName[D any](documents []Document[D], name func(D) string) []Document[D] {
	return slices.SortedFunc(slices.Values(documents), func(a, b Document[D]) int {
		return strings.Compare(name(a.Definition), name(b.Definition))
	})
}

// InUseError reports agents that an apply cannot remove because they are in use.
type InUseError struct {
	Reasons []string // one for each use, with advice
}

func (e *InUseError) Error() string { return strings.Join(e.Reasons, "\n") }

// checkRemoved rejects the removal of agents in use, and of the default agent.
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
	reasons, err := agentUses(ctx, tx, removed)
	if err != nil {
		return err
	}
	named, err := flowUses(ctx, tx, removed)
	if err != nil {
		return err
	}
	reasons = append(reasons, named...)
	left, err := (&agents.Directory{}).List(ctx, tx)
	if err != nil {
		return err
	}
	reasons = append(reasons, delegateUses(left, removed)...)
	if !slices.ContainsFunc(left, func(a agents.Agent) bool { return a.Default }) {
		reasons = append(reasons, fmt.Sprintf("agent %s cannot be removed: no other agent is the default; "+
			"apply one with default: true, or remove all agents", strings.Join(removed, ", ")))
	}
	if len(reasons) > 0 {
		return &InUseError{reasons}
	}
	return nil
}

// agentUses lists automations and objectives of removed agents. checkActors has checked the workspace's own at their
// position.
func agentUses(ctx context.Context, db postgres.DB, removed []string) ([]string, error) {
	rows, err := db.Query(ctx, `
		select 'automation' as kind, a.name, a.agent, 'disable' as verb from agent_automations a
		 where a.agent = any (@removed) and (a.enabled or a.disabled_by <> 'admin')
		union all
		select 'objective', o.name, o.agent, case o.status when 'proposed' then 'reject' else 'pause' end
		  from agent_objectives o
		 where o.agent = any (@removed) and o.status in ('active', 'proposed')
		 order by 1, 2`, postgres.Strict{"removed": removed})
	type use struct{ Kind, Name, Agent, Verb string }
	uses, err := postgres.Collect(rows, err, "find uses of removed agents", pgx.RowToStructByPos[use])
	if err != nil {
		return nil, err
	}
	reasons := make([]string, len(uses))
	for i, u := range uses {
		reasons[i] = fmt.Sprintf("agent %s cannot be removed: %s %q names it; agent %ss %s %q, or keep the agent",
			u.Agent, u.Kind, u.Name, u.Kind, u.Verb, u.Name)
	}
	return reasons, nil
}

// delegateUses lists remaining agents that delegate to removed agents.
func delegateUses(left []agents.Agent, removed []string) (reasons []string) {
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
