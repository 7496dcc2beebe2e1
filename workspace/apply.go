package workspace

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// errRollback ends the transaction of a [Plan].
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

// PruneAll is an [Options.Prune] that removes every row it gets.
func PruneAll(Item) bool { return true }

// Plan reports the effects of an [Apply]. It applies in a transaction and rolls back, so it cannot run on a replica.
func Plan(ctx context.Context, db postgres.Beginner, w Workspace, o Options) (Diff, error) {
	var diff Diff
	warnings, err := checkNamedDatabases(ctx, db, w, o, leaveLedgers)
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
	diff.Warnings = slices.Concat(warnings, diff.Warnings, gateWarnings(refused))
	return diff, nil
}

// Apply makes the database match w in one transaction and records the change. Before it, Apply creates missing tables
// agent_effects on the named databases of writing skills. Wrong references are [Problems]: a missing skill, invalid
// arguments, a missing flow. Removal of an agent, skill or flow in use, or of the last default agent, is an
// [InUseError].
func Apply(ctx context.Context, db postgres.Beginner, w Workspace, o Options) (Diff, error) {
	var diff Diff
	warnings, err := checkNamedDatabases(ctx, db, w, o, createLedgers)
	if err != nil {
		return Diff{}, wrap("apply workspace", err)
	}
	var refused []evals.Refusal
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		var err error
		if diff, refused, err = applyGated(ctx, tx, w, o); err != nil || diff.Empty() {
			return err
		}
		return recordApply(ctx, tx, diff, refused, o.Gate)
	})
	if err != nil {
		return Diff{}, wrap("apply workspace", err)
	}
	diff.Warnings = slices.Concat(warnings, diff.Warnings, gateWarnings(refused))
	return diff, nil
}

// recordApply records the activity of an apply, unless a gate refuses it.
func recordApply(ctx context.Context, tx pgx.Tx, diff Diff, refused []evals.Refusal, gate *Gate) error {
	input := map[string]any{"changed": names(diff.changed()), "pruned": names(diff.Of(Remove))}
	act := activity.Act{Name: "apply_workspace", Input: input}
	if len(refused) > 0 {
		if !gate.Ignore {
			return &evals.GateError{Refusals: refused}
		}
		act.Reason, input["without_evals"] = "without evals: "+gate.Reason, refusedSuites(refused)
	}
	_, err := activity.Record(ctx, tx, act, func(pgx.Tx, string) (any, error) {
		return map[string][]Item{"items": diff.changed()}, nil
	})
	return err
}

// wrap prefixes err with what. It returns [Problems] unchanged, because they name their position.
func wrap(what string, err error) error {
	if problems, ok := errors.AsType[Problems](err); ok {
		return problems
	}
	return fmt.Errorf("%s: %w", what, err)
}

// Lock serialises applies until the end of tx. If tx is READ COMMITTED, later statements see the previous apply. If tx
// has a lock_timeout, Lock replaces it by 30 seconds while it waits, because an apply takes longer than a usual lock.
func Lock(ctx context.Context, tx pgx.Tx) error {
	var timeout string
	err := tx.QueryRow(ctx, `select current_setting('lock_timeout')`).Scan(&timeout)
	if err == nil && timeout != "0" {
		_, err = tx.Exec(ctx, `set local lock_timeout = '30s'`)
	}
	if err == nil {
		_, err = tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('lanekeeper workspace', 0))`)
	}
	if postgres.Locked(err) {
		return errors.New("another apply is under way; try again")
	}
	if err == nil {
		_, err = tx.Exec(ctx, `select set_config('lock_timeout', @timeout, true)`, postgres.Strict{"timeout": timeout})
	}
	if err != nil {
		return fmt.Errorf("lock workspace: %w", err)
	}
	return nil
}

// applyAll applies all kinds and checks their references. The caller holds [Lock].
func applyAll(ctx context.Context, tx pgx.Tx, w Workspace, o Options) (Diff, error) {
	diff := Diff{Items: []Item{}}
	before, err := (&agents.Directory{}).List(ctx, tx)
	if err != nil {
		return Diff{}, err
	}
	for _, t := range kindTables(w, o) {
		items, err := t.apply(ctx, tx, o)
		if err != nil {
			return Diff{}, err
		}
		diff.Items = append(diff.Items, items...)
	}
	var problems Problems
	for _, check := range []func(context.Context, pgx.Tx, Workspace) error{
		checkQueries, checkFlows, checkAgents, checkTargets, checkEvals, checkCalls,
	} {
		err := check(ctx, tx, w)
		found, ok := errors.AsType[Problems](err)
		if err != nil && !ok {
			return Diff{}, err
		}
		problems = append(problems, found...)
	}
	if err := problems.err(); err != nil {
		return Diff{}, err
	}
	if err := checkRemoved(ctx, tx, diff); err != nil {
		return Diff{}, err
	}
	if diff.Warnings, err = agentWarnings(ctx, tx, before); err != nil {
		return Diff{}, err
	}
	if w.AfterApply == nil {
		return diff, nil
	}
	return diff, w.AfterApply(ctx, tx)
}
