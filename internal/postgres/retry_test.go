package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestRetryOnDisconnect(t *testing.T) {
	t.Parallel()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	broken, other := fmt.Errorf("read: %w", io.ErrUnexpectedEOF), errors.New("another error")
	for name, test := range map[string]struct {
		ctx    context.Context
		errs   []error // of consecutive calls; further calls get the last one
		calls  int
		result error
	}{
		"all is well":               {t.Context(), []error{nil}, 1, nil},
		"broken once":               {t.Context(), []error{broken, nil}, 2, nil},
		"broken for good":           {t.Context(), []error{broken}, 4, broken},
		"another error":             {t.Context(), []error{other}, 1, other},
		"broken, and another error": {t.Context(), []error{broken, other}, 2, other},
		"time ran out":              {t.Context(), []error{context.DeadlineExceeded}, 1, context.DeadlineExceeded},
		"nobody waits any more":     {over, []error{broken}, 1, broken},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			calls := 0
			err := postgres.RetryOnDisconnect(test.ctx, func() error {
				calls++
				return test.errs[min(calls, len(test.errs))-1]
			})
			assert.Truef(t, calls == test.calls && errors.Is(err, test.result),
				"%d calls, %v, want %d, %v", calls, err, test.calls, test.result)
		})
	}
}

// Open waits for a server that shuts down during a connect, like for an absent one. Without ConnectWait it returns the
// error at once.
func TestOpenWaitsForRestart(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var came atomic.Int32
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // closed
			}
			came.Add(1)
			_, _ = conn.Read(make([]byte, 1024)) // reads the start, so that the close is no reset
			conn.Close()
		}
	}()
	t.Cleanup(func() {
		listener.Close()
		<-done
	})
	url := "postgres://u@" + listener.Addr().String() + "/d?sslmode=disable"
	open := func(wait time.Duration) int32 {
		before := came.Load()
		pool, err := postgres.Open(t.Context(), url, postgres.Options{ConnectWait: wait})
		if err == nil {
			pool.Close()
			t.Fatal("opened a database that is not there")
		}
		assert.Truef(t, strings.Contains(err.Error(), listener.Addr().String()),
			"the error does not name the server: %v", err)
		return came.Load() - before
	}
	once := open(0)
	again := open(2 * time.Second)
	assert.Truef(t, again >= 2*once+1, "tried with %d connections while it may wait, with %d at once", again, once)
}

// After a failover the old primary may run on and reject writes. A pool must close its connections to it.
func TestPoolResetsOnReadOnlyServer(t *testing.T) {
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
	pgtest.Eventually(t, func() bool {
		_, err := pool.Exec(t.Context(), `insert into kept values (2)`)
		if err != nil {
			refused++
		}
		return err == nil
	}, "a write by a new connection")
	assert.Truef(t, refused <= 2, "%d more writes were refused: the other connections were kept", refused)
}

func TestSealedContextUsesNoDatabase(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	sealed, seal := postgres.WithoutDatabase(t.Context())
	assert.True(t, !seal.Tried(), "tried before anything was")
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	batch := &pgx.Batch{}
	batch.Queue(`select 1`)
	for what, err := range map[string]error{
		"exec":       errOf(pool.Exec(sealed, `select 1`)),
		"row":        pool.QueryRow(context.WithoutCancel(sealed), `select 1`).Scan(new(int)),
		"tx":         errOf(pool.Begin(sealed)),
		"batch":      pool.SendBatch(sealed, batch).Close(),
		"lent":       errOf(conn.Exec(sealed, `select 1`)),
		"lent batch": conn.SendBatch(sealed, batch).Close(),
	} {
		assert.ErrorIs(t, err, context.Canceled, what)
	}
	assert.True(t, seal.Tried(), "the seal has noted nothing")
	assert.NoError(t, pool.QueryRow(postgres.Unsealed(sealed), `select 1`).Scan(new(int)), "unsealed")
	assert.NoError(t, pool.Ping(t.Context()), "the pool after it")
}

func errOf[T any](_ T, err error) error { return err }
