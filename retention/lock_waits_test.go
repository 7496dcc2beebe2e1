package retention_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// passAppName is the application name of sessions that run passes.
const passAppName = "retention"

// lockWaits records for which sessions each session waits. Sessions of an engine also wait for one another, and on a
// busy machine for long. The test checks only waits for a pass, direct or in a queue behind it.
type lockWaits struct {
	t        *testing.T
	mu       sync.Mutex
	blockers map[uint32][]string // names of the sessions that blocked a session during its current statement
}

// impatientPool returns a pool whose sessions wait at most 100 ms for a lock. The server ends a longer wait with the
// error 55P03. The error fails the test if a pass held the lock, or was ahead of the session in the queue.
func impatientPool(t *testing.T, url string, watcher *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	w := &lockWaits{t: t, blockers: map[uint32][]string{}}
	config.ConnConfig.RuntimeParams["lock_timeout"] = "100ms"
	config.ConnConfig.RuntimeParams["application_name"] = "hasty"
	config.MaxConns = 16
	config.ConnConfig.Tracer = w
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	testkit.Run(t, func(ctx context.Context) error {
		w.watch(ctx, watcher)
		return nil
	})
	return pool
}

// watch reads the waiting sessions every few milliseconds.
func (w *lockWaits) watch(ctx context.Context, db *pgxpool.Pool) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		rows, err := db.Query(ctx, `
			select a.pid, b.application_name from pg_stat_activity a cross join lateral unnest(pg_blocking_pids(a.pid)) p (pid)
			  join pg_stat_activity b on b.pid = p.pid
			 where a.wait_event_type = 'Lock' and a.application_name = 'hasty' and a.datname = current_database()`)
		if err == nil {
			var pid uint32
			var name string
			_, err = pgx.ForEachRow(rows, []any{&pid, &name}, func() error {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.blockers[pid] = append(w.blockers[pid], name)
				return nil
			})
		}
		assert.Truef(w.t, err == nil || ctx.Err() != nil, "watch the waiting sessions: %v", err)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

type statementKey struct{}

// TraceQueryStart implements pgx.QueryTracer. It resets the recorded waits of the session.
func (w *lockWaits) TraceQueryStart(ctx context.Context, conn *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	w.reset(conn)
	return context.WithValue(ctx, statementKey{}, q.SQL)
}

// TraceQueryEnd checks the error of the query.
func (w *lockWaits) TraceQueryEnd(ctx context.Context, conn *pgx.Conn, end pgx.TraceQueryEndData) {
	w.checkError(conn, end.Err, ctx.Value(statementKey{}))
}

// TraceBatchStart implements pgx.BatchTracer. It resets the recorded waits of the session.
func (w *lockWaits) TraceBatchStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	w.reset(conn)
	return ctx
}

// TraceBatchQuery checks the error of one query of the batch.
func (w *lockWaits) TraceBatchQuery(_ context.Context, conn *pgx.Conn, q pgx.TraceBatchQueryData) {
	w.checkError(conn, q.Err, q.SQL)
}

// TraceBatchEnd does nothing.
func (w *lockWaits) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (w *lockWaits) reset(conn *pgx.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.blockers, conn.PgConn().PID())
}

func (w *lockWaits) checkError(conn *pgx.Conn, err error, sql any) {
	if !postgres.IsCode(err, "55P03") {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	blockers := w.blockers[conn.PgConn().PID()]
	report := w.t.Logf
	if slices.Contains(blockers, passAppName) {
		report = w.t.Errorf
	}
	report("waited longer than 100 ms for a lock of %v: %v\n%v", blockers, err, sql)
}
