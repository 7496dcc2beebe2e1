package postgres_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestNothingIsAskedUnderASeal(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	sealed, seal := postgres.Sealed(t.Context())
	assert.True(t, !seal.Tried(), "tried before anything was")
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	batch := &pgx.Batch{}
	batch.Queue(`select 1`)
	for what, err := range map[string]error{
		"exec":       only(pool.Exec(sealed, `select 1`)),
		"row":        pool.QueryRow(context.WithoutCancel(sealed), `select 1`).Scan(new(int)),
		"tx":         only(pool.Begin(sealed)),
		"batch":      pool.SendBatch(sealed, batch).Close(),
		"lent":       only(conn.Exec(sealed, `select 1`)),
		"lent batch": conn.SendBatch(sealed, batch).Close(),
	} {
		assert.ErrorIs(t, err, context.Canceled, what)
	}
	assert.True(t, seal.Tried(), "the seal has noted nothing")
	assert.NoError(t, pool.QueryRow(postgres.Unsealed(sealed), `select 1`).Scan(new(int)), "unsealed")
	assert.NoError(t, pool.Ping(t.Context()), "the pool after it")
}

func only[T any](_ T, err error) error { return err }
