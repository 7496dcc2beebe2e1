package postgres

import (
	"context"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Seal records whether code used the database under a sealed context.
type Seal struct{ tried atomic.Bool }

// Tried reports a refused connection or statement.
func (s *Seal) Tried() bool { return s.tried.Load() }

type sealKey struct{}

// WithoutDatabase returns a sealed context. Under this context or its children, the pools of [Open] acquire no
// connection and send no statement. A use fails as under a cancelled context, and the seal records it.
func WithoutDatabase(ctx context.Context) (context.Context, *Seal) {
	s := &Seal{}
	return context.WithValue(ctx, sealKey{}, s), s
}

// Unsealed returns an unsealed context, for a read of immutable data.
func Unsealed(ctx context.Context) context.Context {
	if _, sealed := ctx.Value(sealKey{}).(*Seal); !sealed {
		return ctx
	}
	return context.WithValue(ctx, sealKey{}, (*Seal)(nil))
}

// IsSealed reports whether a context is sealed. Do not share work under a sealed context with unsealed callers.
func IsSealed(ctx context.Context) bool {
	s, _ := ctx.Value(sealKey{}).(*Seal)
	return s != nil
}

// guard is the tracer of every connection. It enforces seals, observes refused writes and explains refused texts.
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
