package postgres

import (
	"context"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Seal says whether something was asked of the database under a sealed context.
type Seal struct{ tried atomic.Bool }

// Tried reports whether a connection or a statement was refused.
func (s *Seal) Tried() bool { return s.tried.Load() }

type sealKey struct{}

// Sealed is a context under which no pool of [Open] lends a connection and no statement is sent: what tries
// fails as if the context had been cancelled, and the seal notes it. Contexts derived from it are sealed too.
func Sealed(ctx context.Context) (context.Context, *Seal) {
	s := &Seal{}
	return context.WithValue(ctx, sealKey{}, s), s
}

// Unsealed lifts the seal for one read, of what never changes once it is written.
func Unsealed(ctx context.Context) context.Context {
	if _, sealed := ctx.Value(sealKey{}).(*Seal); !sealed {
		return ctx
	}
	return context.WithValue(ctx, sealKey{}, (*Seal)(nil))
}

// IsSealed reports whether a context is sealed: what is asked under it must not be passed to anybody who is not.
func IsSealed(ctx context.Context) bool {
	s, _ := ctx.Value(sealKey{}).(*Seal)
	return s != nil
}

// guard keeps seals. It is the tracer of every connection, and so knows where they lead.
type guard struct {
	moved   *moved
	refused *refusals
	pooled  bool // a pooler is in between
}

// note looks at the answer to a statement.
func (g guard) note(err error) {
	g.moved.note(err)
	g.refused.note(err)
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

// TraceQueryStart refuses a statement on a connection that was lent before.
func (g guard) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return g.check(ctx)
}

// TraceQueryEnd notes a write that was refused.
func (g guard) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	g.note(data.Err)
}

// TraceBatchStart refuses a batch.
func (g guard) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return g.check(ctx)
}

// TraceBatchQuery notes a write that was refused.
func (g guard) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	g.note(data.Err)
}

// TraceBatchEnd notes a write that was refused.
func (g guard) TraceBatchEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchEndData) {
	g.note(data.Err)
}
