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
)

// passing is the application name of sessions that run passes.
const passing = "retention"

// waits records the waits of each session. Sessions of an engine also wait for one another, on a busy machine for long.
// Only sessions that wait for a pass, or in a queue behind one, matter here.
type waits struct {
	t    *testing.T
	mu   sync.Mutex
	seen map[uint32][]string // the sessions for which a session has waited since its last statement began
}

// hasty returns a pool whose sessions wait at most 100 ms for a lock: the server rejects longer waits with 55P03. A
// rejection fails the test if a pass held the lock, or was ahead of the session in its queue.
func hasty(t *testing.T, url string, watcher *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	w := &waits{t: t, seen: map[uint32][]string{}}
	config.ConnConfig.RuntimeParams["lock_timeout"] = "100ms"
	config.ConnConfig.RuntimeParams["application_name"] = "hasty"
	config.MaxConns = 16
	config.ConnConfig.Tracer = w
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	go func() { defer close(done); w.watch(ctx, watcher) }()
	t.Cleanup(func() { stop(); <-done })
	return pool
}

// watch reads the waiting sessions every few milliseconds.
func (w *waits) watch(ctx context.Context, db *pgxpool.Pool) {
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
				w.seen[pid] = append(w.seen[pid], name)
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

// TraceQueryStart notes the begin of a statement.
func (w *waits) TraceQueryStart(ctx context.Context, conn *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	w.begin(conn)
	return context.WithValue(ctx, statementKey{}, q.SQL)
}

// TraceQueryEnd reads the error of the query.
func (w *waits) TraceQueryEnd(ctx context.Context, conn *pgx.Conn, end pgx.TraceQueryEndData) {
	w.ended(conn, end.Err, ctx.Value(statementKey{}))
}

// TraceBatchStart notes the begin of a batch.
func (w *waits) TraceBatchStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	w.begin(conn)
	return ctx
}

// TraceBatchQuery reads the error of one query of the batch.
func (w *waits) TraceBatchQuery(_ context.Context, conn *pgx.Conn, q pgx.TraceBatchQueryData) {
	w.ended(conn, q.Err, q.SQL)
}

// TraceBatchEnd does nothing.
func (w *waits) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

func (w *waits) begin(conn *pgx.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.seen, conn.PgConn().PID())
}

func (w *waits) ended(conn *pgx.Conn, err error, sql any) {
	if !postgres.IsCode(err, "55P03") {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	of := w.seen[conn.PgConn().PID()]
	report := w.t.Logf
	if slices.Contains(of, passing) {
		report = w.t.Errorf
	}
	report("waited for a lock for longer than 100 ms, of %v: %v\n%v", of, err, sql)
}
