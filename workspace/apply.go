package workspace

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

var errRollback = errors.New("only planned")

// Options configure [Apply]. The zero value removes nothing.
type Options struct {
	// Prune reports whether to remove a row that an earlier apply declared and no file declares now. Nil keeps all.
	Prune func(Item) bool
	// OpenDatabase opens a named database, so the queries of its skills can be prepared. Nil leaves them unchecked.
	OpenDatabase func(ctx context.Context, d databases.Database) (skills.Database, error)
	// Gate checks the results of gating suites; nil skips the check.
	Gate *Gate
}

// Gate sets how an apply treats gating suites that refuse it. [Apply] returns an [evals.GateError]; with Ignore, it
// returns a warning for each refusal.
type Gate struct {
	Installation evals.Installation
	Ignore       bool   // apply despite refusals, with warnings
	Reason       string // why the apply ignores refusals, for the audit log
}

// PruneAll is an [Options.Prune] that removes every undeclared row.
func PruneAll(Item) bool { return true }

// Plan reports the effects of an [Apply]. It applies in a transaction and rolls back, so it cannot run on a replica.
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
// missing skill, invalid arguments, a missing flow. Removal of an agent in use, or of the last
// default agent, is an [InUseError].
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

// wrap prefixes err with what. It returns [Problems] unchanged, because they name their position.
func wrap(what string, err error) error {
	if problems, ok := errors.AsType[Problems](err); ok {
		return problems
	}
	return fmt.Errorf("%s: %w", what, err)
}

// Lock serialises applies until the end of tx. If tx is READ COMMITTED, later statements see the previous apply.
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
	if err := checkCalls(ctx, tx, w.Automations); err != nil {
		return Diff{}, err
	}
	if w.AfterApply == nil {
		return diff, nil
	}
	return diff, w.AfterApply(ctx, tx)
}
