package postgres_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// After a failover the old primary may live on and take no writes. Whoever still has a connection to it has to let go
// of it.
func TestAPoolLetsGoOfAServerThatTakesNoMoreWrites(t *testing.T) {
	t.Parallel()
	pool := pgtest.Empty(t)
	pgtest.Exec(t, pool, `create table kept (n int)`)
	var lent []*pgxpool.Conn
	for range 4 {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		pgtest.Exec(t, conn, `set default_transaction_read_only = on`)
		lent = append(lent, conn)
	}
	for _, conn := range lent {
		conn.Release()
	}
	_, err := pool.Exec(t.Context(), `insert into kept values (1)`)
	require.Truef(t, postgres.IsCode(err, "25006"), "a write to a server that takes none: %v", err)
	refused := 0
	pgtest.Eventually(t, time.Minute, func() bool {
		_, err := pool.Exec(t.Context(), `insert into kept values (2)`)
		if err != nil {
			refused++
		}
		return err == nil
	}, "a write by a new connection")
	assert.Truef(t, refused <= 2, "%d more writes were refused: the other connections were kept", refused)
}
