package memory

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ForgetID deletes the entry with an id and returns what it was; [ErrNotFound] when there is none, or it has
// expired. Of any number of callers at once, one deletes it.
func ForgetID(ctx context.Context, db postgres.DB, id string) (Entry, error) {
	rows, err := db.Query(ctx, `
		delete from agent_memory
		 where id = agent_uuid(@id) and (expires_at is null or expires_at > clock_timestamp())
		returning id, category, key, value, revision, trace_id, expires_at, created_at, updated_at`,
		postgres.Strict{"id": id})
	if err != nil {
		return Entry{}, fmt.Errorf("forget memory %.60q: %w", id, err)
	}
	e, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Entry])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return Entry{}, fmt.Errorf("forget memory %.60q: %w", id, err)
	}
	return e, nil
}
