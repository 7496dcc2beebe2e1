package automations

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// AtRevision locks an automation until the end of the transaction, so that what follows is based on what the caller has read. It is a
// [*postgres.StaleError] when the automation is at another revision, and [ErrNotFound] when there is none. 0 is whatever it is at.
func AtRevision(ctx context.Context, tx pgx.Tx, name string, revision int) error {
	if revision == 0 {
		return nil
	}
	var current int
	err := tx.QueryRow(ctx, `
		select revision from agent_automations where name = @name or id::text = @name
		 order by id::text = @name desc limit 1 for update`,
		postgres.Strict{"name": name}).Scan(&current)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("look at automation %q: %w", name, err)
	}
	return postgres.AtRevision("automation", name, revision, current)
}
