package postgres

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// guard is the tracer of the connections that [Open] configures. It enforces seals, observes refused writes and
// explains refused texts.
type guard struct {
	resetter *failoverResetter
	refused  *refusals
	pooled   bool // through a pooler
}

// observe handles the error of a statement.
func (g guard) observe(err error) {
	g.resetter.observe(err)
	g.refused.observe(err)
	explainText(err)
}

func (guard) check(ctx context.Context) context.Context {
	s, _ := ctx.Value(sealKey{}).(*Seal)
	if s == nil {
		return ctx
	}
	s.tried.Store(true)
	ended, end := context.WithCancel(ctx)
	end()
	return ended
}

// refusedWrite is a write that failed for a reason that needs an operator.
type refusedWrite struct {
	at  time.Time
	err error
}

// refusals has the last refused write of a pool and its reserved pools.
type refusals struct{ last atomic.Pointer[refusedWrite] }

// observe records a refused write.
func (r *refusals) observe(err error) {
	if r != nil && err != nil && IsCode(err, codeDiskFull, codeReadOnly, codeNoIDs) {
		r.last.Store(&refusedWrite{time.Now(), err})
	}
}

// LastRefusal returns the last refusal of a write and its time; nil for none. Its reasons are a full disk, a read-only
// server and exhausted transaction ids. pool comes from [Open] or [Reserve]. A pool and its reserved pools share the
// record.
func LastRefusal(pool *pgxpool.Pool) (at time.Time, err error) {
	g, ok := pool.Config().ConnConfig.Tracer.(guard)
	if !ok || g.refused == nil {
		return time.Time{}, nil
	}
	last := g.refused.last.Load()
	if last == nil {
		return time.Time{}, nil
	}
	return last.at, last.err
}

// failoverResetter resets a pool whose server has become read-only. After a failover, the old primary may run on as a
// standby, where every write of an old connection fails. New connections find the new primary.
type failoverResetter struct {
	pool atomic.Pointer[pgxpool.Pool]
	last atomic.Int64 // time of the last reset, in Unix nanoseconds
}

// resetPause is the shortest time between two resets of a pool.
const resetPause = time.Second

// observe resets the pool after a refused write. Acquired connections close on their release.
func (m *failoverResetter) observe(err error) {
	if m == nil || err == nil || !IsCode(err, codeReadOnly) {
		return
	}
	now, last := time.Now().UnixNano(), m.last.Load()
	if pool := m.pool.Load(); pool != nil && now-last > int64(resetPause) && m.last.CompareAndSwap(last, now) {
		pool.Reset()
	}
}

// TraceAcquireStart refuses a connection.
func (g guard) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool,
	_ pgxpool.TraceAcquireStartData,
) context.Context {
	return g.check(ctx)
}

// TraceAcquireEnd does nothing.
func (guard) TraceAcquireEnd(context.Context, *pgxpool.Pool, pgxpool.TraceAcquireEndData) {}

// TraceQueryStart refuses a statement on an acquired connection.
func (g guard) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return g.check(ctx)
}

// TraceQueryEnd observes the error.
func (g guard) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	g.observe(data.Err)
}

// TraceBatchStart refuses a batch.
func (g guard) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return g.check(ctx)
}

// TraceBatchQuery observes the error.
func (g guard) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	g.observe(data.Err)
}

// TraceBatchEnd observes the error.
func (g guard) TraceBatchEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchEndData) {
	g.observe(data.Err)
}
