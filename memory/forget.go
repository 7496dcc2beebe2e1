package memory

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Forget deletes an entry and reports whether there was one. revision is as that of a [Note]: an entry at another is
// left alone, and the error is a [*ConflictError]. With [Absent], an entry that is there is a conflict.
func (o Owner) Forget(ctx context.Context, db postgres.DB, category, key string, revision int) (bool, error) {
	var expired bool
	err := db.QueryRow(ctx, `
		delete from agent_memory
		 where owner = @owner and category = @category and key = @key
		   and (@if_revision = 0 or revision = @if_revision or expires_at <= clock_timestamp())
		returning coalesce(expires_at <= clock_timestamp(), false)`,
		postgres.Strict{"owner": o, "category": category, "key": key, "if_revision": revision}).Scan(&expired)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, o.stillThere(ctx, db, category, key, revision)
	}
	if err != nil {
		return false, fmt.Errorf("forget memory %q: %w", key, err)
	}
	return !expired, nil
}

// stillThere is the conflict of an entry that was to be deleted and is at another revision; nil when none is there.
func (o Owner) stillThere(ctx context.Context, db postgres.DB, category, key string, revision int) error {
	if revision == 0 {
		return nil
	}
	err := conflict(ctx, db, o, category, key, revision, nil)
	if c, ok := errors.AsType[*ConflictError](err); ok && c.Theirs == nil {
		return nil
	}
	return fmt.Errorf("forget memory %q: %w", key, err)
}

// ForgetID deletes the entry with an id and returns what it was; [ErrNotFound] when there is none, or it has
// expired. With a revision above 0, an entry at another is left alone, and the error is a [*ConflictError]. Of any
// number of callers at once, one deletes it.
func ForgetID(ctx context.Context, db postgres.DB, id string, revision int) (Entry, error) {
	rows, err := db.Query(ctx, `
		delete from agent_memory
		 where id = lanekeeper.agent_uuid(@id) and (expires_at is null or expires_at > clock_timestamp())
		   and (@if_revision = 0 or revision = @if_revision)
		returning id, owner, category, key, value, revision, trace_id, expires_at, created_at, updated_at`,
		postgres.Strict{"id": id, "if_revision": revision})
	if err != nil {
		return Entry{}, fmt.Errorf("forget memory %.60q: %w", id, err)
	}
	e, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Entry])
	if errors.Is(err, pgx.ErrNoRows) {
		if e, err = GetID(ctx, db, id); err == nil {
			err = &ConflictError{Owner: e.Owner, Category: e.Category, Key: e.Key, Read: revision, Theirs: &e}
		}
	}
	if err != nil {
		return Entry{}, fmt.Errorf("forget memory %.60q: %w", id, err)
	}
	return e, nil
}

// GetID returns the entry with an id, or [ErrNotFound].
func GetID(ctx context.Context, db postgres.DB, id string) (Entry, error) {
	rows, err := db.Query(ctx, `
		select id, owner, category, key, value, revision, trace_id, expires_at, created_at, updated_at
		  from agent_memory where id = lanekeeper.agent_uuid(@id) and (expires_at is null or expires_at > clock_timestamp())`,
		postgres.Strict{"id": id})
	if err != nil {
		return Entry{}, fmt.Errorf("get memory %.60q: %w", id, err)
	}
	e, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Entry])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return Entry{}, fmt.Errorf("get memory %.60q: %w", id, err)
	}
	return e, nil
}

// prune drops what is known about keys that are long gone, and conflicts that were decided long ago.
func prune(ctx context.Context, db postgres.DB) error {
	_, err := db.Exec(ctx, `
		with keys as (
		  delete from agent_memory_forgotten g
		   using (select o.owner, o.category, o.key from agent_memory_forgotten o
		           where o.forgotten_at < clock_timestamp() - interval '90 days' order by o.forgotten_at limit 1000
		             for update skip locked) old
		   where g.owner = old.owner and g.category = old.category and g.key = old.key)
		delete from agent_memory_conflicts c
		 using (select o.id from agent_memory_conflicts o
		         where o.status <> 'open' and o.decided_at < clock_timestamp() - interval '90 days' order by o.decided_at limit 1000
		           for update skip locked) old
		 where c.id = old.id`)
	if err != nil {
		return fmt.Errorf("prune memory: %w", err)
	}
	return nil
}
