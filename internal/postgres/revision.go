package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// StaleError reports a refused change: the row has another revision than the change is based on.
type StaleError struct {
	What, Name    string // such as objective, and its name
	Read, Current int    // the revision that the change is based on, and the current one
}

func (e *StaleError) Error() string {
	return fmt.Sprintf(
		"%s %.60q is at revision %d and not at %d: it was changed since; nothing was done, look at it again", e.What,
		e.Name, e.Current, e.Read)
}

// LockRevision locks the row that sql selects by @name, until the transaction ends. sql returns the row's revision.
// LockRevision returns a [*StaleError] for another revision, and missing for no row. For revision 0 it does nothing.
func LockRevision(ctx context.Context, tx pgx.Tx, what, sql, name string, revision int, missing error) error {
	if revision == 0 {
		return nil
	}
	rows, err := tx.Query(ctx, sql, Strict{"name": name})
	current, err := CollectOne(rows, err, missing, fmt.Sprintf("lock %s %q", what, name), pgx.RowTo[int])
	if err == nil && current != revision {
		err = &StaleError{what, name, revision, current}
	}
	return err
}
