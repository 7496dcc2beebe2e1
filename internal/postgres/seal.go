package postgres

import (
	"context"
	"sync/atomic"
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
