package postgres_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A write that a lock holds up says what is held, and which transaction may hold it.
func TestALockIsExplained(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `create table kept (key text primary key)`)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	pgtest.Exec(t, tx, `insert into kept values ('key')`)
	k := postgres.KeyedTx{Slots: make(chan struct{}, 1)}
	write := func() error {
		return k.Do(t.Context(), pool, "key", func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), `insert into kept values ('key') on conflict do nothing`)
			return err
		})
	}
	err = postgres.ExplainLock(t.Context(), pool, write(), "the key", "kept")
	if locked, is := errors.AsType[*postgres.LockedError](err); !is || !postgres.Locked(err) ||
		!strings.HasPrefix(locked.Error(), "the key is in use by another transaction of the database; it may be session ") {
		t.Errorf("held: %v", err)
	}
	require.NoError(t, tx.Rollback(t.Context()))
	assert.NoError(t, postgres.ExplainLock(t.Context(), pool, write(), "the key", "kept"), "free again")
}
