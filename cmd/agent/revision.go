package main

import (
	"cmp"
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
)

// ifRevisionFlag is what a change is based on.
func ifRevisionFlag(cmd *cobra.Command, into *int, about string) {
	cmd.Flags().IntVar(into, "if-revision", 0, about)
}

// revisionOf is the revision that a flag names, as package memory has it: 0 where the flag was not given.
func revisionOf(cmd *cobra.Command, named int) (int, error) {
	switch {
	case !cmd.Flags().Changed("if-revision"):
		return 0, nil
	case named < 0:
		return 0, usageError("--if-revision is %d; it can be a revision, or 0 for what must be new", named)
	}
	return cmp.Or(named, memory.Absent), nil
}

// basis is what a change to something that is there is based on.
type basis struct {
	check func(ctx context.Context, tx pgx.Tx, name string, revision int) error // locks it
	named int
}

// basisFlag lets a change be refused when somebody else made one since.
func basisFlag(cmd *cobra.Command, check func(ctx context.Context, tx pgx.Tx, name string, revision int) error) *basis {
	b := &basis{check: check}
	ifRevisionFlag(cmd, &b.named, "change it only if it is at this revision, which show says")
	return b
}

// hold refuses a change that is based on another revision, and keeps others from making one until the transaction ends.
func (b *basis) hold(cmd *cobra.Command, tx pgx.Tx, name string) error {
	if !cmd.Flags().Changed("if-revision") {
		return nil
	}
	if b.named < 1 {
		return usageError("--if-revision is %d; it is a revision that show has said, 1 or more", b.named)
	}
	return b.check(cmd.Context(), tx, name, b.named)
}

// staleHint says how to go on when somebody else has made a change.
func staleHint(err error, show string) error {
	if _, stale := errors.AsType[*postgres.StaleError](err); stale {
		return hint(err, "%s says what it is now; then name that revision with --if-revision", show)
	}
	return err
}
