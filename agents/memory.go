package agents

import (
	"context"
	"errors"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrNoMemory reports an agent whose document says memory: none.
var ErrNoMemory = errors.New("the agent has no memory (memory: none)")

type actingKey struct{}

// With says in the context which agent, in which version, acts.
func With(ctx context.Context, a Agent) context.Context {
	return context.WithValue(ctx, actingKey{}, a)
}

// ActingMemory names the memory of the agent that acts: that of the context ([With]), or else of the name on the
// execution's row. [ErrNoMemory] when it has none.
func (d *Directory) ActingMemory(ctx context.Context, db postgres.DB, name string) (string, error) {
	a, known := ctx.Value(actingKey{}).(Agent)
	if !known {
		var err error
		if a, err = d.Acting(ctx, db, name); err != nil {
			return "", err
		}
	}
	return a.MemoryOwner()
}

// MemoryOf names the memory of an agent that a person names; the shared one for "". What a removed agent keeps for
// itself can still be looked at. [ErrNotFound] when there was never such an agent, [ErrNoMemory] when it has none.
func (d *Directory) MemoryOf(ctx context.Context, db postgres.DB, name string) (string, error) {
	if name == "" {
		return "", nil
	}
	a, err := d.Find(ctx, db, name)
	if errors.Is(err, ErrNotFound) {
		versions, gone := Versions(ctx, db, name)
		if gone != nil {
			return "", gone
		}
		a, err = d.Version(ctx, db, name, versions[0])
	}
	if err != nil {
		return "", err
	}
	return a.MemoryOwner()
}
