package pgtest

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

// QueryRecorder records the queries of a pool, with their arguments. It is safe for concurrent use.
type QueryRecorder struct {
	mu      sync.Mutex
	queries []pgx.TraceQueryStartData
}

// Recorded opens another pool of a database, which a recorder observes. It closes the pool at the end of the test.
func Recorded(tb testing.TB, pool *pgxpool.Pool) (*pgxpool.Pool, *QueryRecorder) {
	tb.Helper()
	config, recorder := pool.Config(), &QueryRecorder{}
	config.ConnConfig.Tracer = recorder
	recorded, err := pgxpool.NewWithConfig(tb.Context(), config)
	require.NoError(tb, err)
	tb.Cleanup(recorded.Close)
	return recorded, recorder
}

// Queries returns the queries so far, in their order.
func (r *QueryRecorder) Queries() []pgx.TraceQueryStartData {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.queries)
}

// TraceQueryStart implements [pgx.QueryTracer].
func (r *QueryRecorder) TraceQueryStart(
	ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData,
) context.Context {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queries = append(r.queries, data)
	return ctx
}

// TraceQueryEnd implements [pgx.QueryTracer].
func (*QueryRecorder) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
