package skills

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// AtRevision locks a skill until the end of the transaction, so that what follows is based on what the caller has read. It is a
// [*postgres.StaleError] when the skill is at another revision of its state, and [ErrNotFound] when there is none. 0 is whatever it is at.
func AtRevision(ctx context.Context, tx pgx.Tx, name string, revision int) error {
	if revision == 0 {
		return nil
	}
	var current int
	err := tx.QueryRow(ctx, `
		select state_revision from agent_skills where name = @name for update`,
		postgres.Strict{"name": name}).Scan(&current)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("look at skill %q: %w", name, err)
	}
	return postgres.AtRevision("skill", name, revision, current)
}
