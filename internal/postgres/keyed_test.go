package postgres_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Another transaction holds a lock for long. All transactions of the key share one connection for their occasional
// tries, and finally give up.
func TestBlockedKeyUsesOneConnection(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	pgtest.Exec(t, db, `create table numbers as select 1 as id, 0 as n`)
	var k postgres.KeyedTx
	var at, most atomic.Int32
	add := func() error {
		return k.Do(t.Context(), db, "one", func(tx pgx.Tx) error {
			if n := at.Add(1); n > most.Load() {
				most.Store(n)
			}
			defer at.Add(-1)
			_, err := tx.Exec(t.Context(), `update numbers set n = n + 1`)
			return err
		})
	}
	keeper := pgtest.Begin(t, db)
	pgtest.Exec(t, keeper, `update numbers set n = n`)
	var group sync.WaitGroup
	for range 12 {
		group.Go(func() {
			err := add()
			assert.Truef(t, postgres.Locked(err), "the key was not locked: %v", err)
		})
	}
	group.Wait()
	require.NoError(t, keeper.Rollback(t.Context()))
	for range 12 {
		group.Go(func() {
			assert.NoError(t, add(), "afterwards")
		})
	}
	group.Wait()
	pgtest.Equal(t, db, 12, `select n from numbers`)
	assert.Equal(t, 1, most.Load())
}

// Different keys do not wait for each other. A caller whose context has ended does not wait.
func TestKeysAreIndependent(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	var k postgres.KeyedTx
	err := k.Do(t.Context(), db, "one", func(pgx.Tx) error {
		assert.NoError(t, k.Do(t.Context(), db, "other", func(pgx.Tx) error { return nil }), "another key")
		gone, leave := context.WithCancel(t.Context())
		leave()
		err := k.Do(gone, db, "one", func(pgx.Tx) error { return nil })
		assert.ErrorIs(t, err, context.Canceled)
		return nil
	})
	require.NoError(t, err)
}

// The error of a blocked write names the locked object and a transaction that may hold the lock.
func TestExplainLock(t *testing.T) {
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
	other, err := pool.Begin(t.Context())
	require.NoError(t, err)
	pgtest.Exec(t, other, `set local role pg_signal_backend`) // sees neither state nor age of the session
	open, err := postgres.OpenTransactions(t.Context(), other, "kept")
	require.NoError(t, err)
	assert.Contains(t, open, ", role ", ", its transaction is open for ? s)")
	require.NoError(t, errors.Join(other.Rollback(t.Context()), tx.Rollback(t.Context())))
	assert.NoError(t, postgres.ExplainLock(t.Context(), pool, write(), "the key", "kept"), "free again")
}
