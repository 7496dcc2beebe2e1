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

// revisionCheck is an optimistic lock: --if-revision names the expected revision.
type revisionCheck struct {
	lock     func(ctx context.Context, tx pgx.Tx, name string, revision int) error // locks it
	revision int
}

func revisionFlag(
	cmd *cobra.Command, check func(ctx context.Context, tx pgx.Tx, name string, revision int) error,
) *revisionCheck {
	b := &revisionCheck{lock: check}
	ifRevisionFlag(cmd, &b.revision, "change it only at this revision; see show")
	return b
}

// verify locks the row and fails if its revision differs from --if-revision.
func (b *revisionCheck) verify(cmd *cobra.Command, tx pgx.Tx, name string) error {
	if !cmd.Flags().Changed("if-revision") {
		return nil
	}
	if b.revision < 1 {
		return usageError("--if-revision %d: use a revision from show, 1 or more", b.revision)
	}
	return b.lock(cmd.Context(), tx, name, b.revision)
}

// staleHint adds a next step to the error of a changed revision.
func staleHint(err error, show string) error {
	if _, stale := errors.AsType[*postgres.StaleError](err); stale {
		return hint(err, "see %s, then pass its revision with --if-revision", show)
	}
	return err
}

func ifRevisionFlag(cmd *cobra.Command, into *int, about string) {
	cmd.Flags().IntVar(into, "if-revision", 0, about)
}

// revisionOf returns the flag's revision as package memory encodes it; 0 without the flag.
func revisionOf(cmd *cobra.Command, named int) (int, error) {
	switch {
	case !cmd.Flags().Changed("if-revision"):
		return 0, nil
	case named < 0:
		return 0, usageError("--if-revision %d: use a revision, or 0 for a new object", named)
	}
	return cmp.Or(named, memory.Absent), nil
}
