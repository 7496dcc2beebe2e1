package agents

import (
	"context"
	"errors"
	"fmt"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrNoMemory reports an agent with memory: none.
var ErrNoMemory = errors.New("the agent has no memory (memory: none)")

// The memories that an agent can have.
const (
	MemoryShared = "shared" // the default: one memory for all agents with this setting
	MemoryOwn    = "own"    // no other agent reads or writes it; its name identifies it
	MemoryNone   = "none"
)

// MemoryOwner returns the owner of the agent's memory; empty for the shared one. It returns [ErrNoMemory] without a
// memory.
func (a Agent) MemoryOwner() (string, error) {
	switch a.Memory {
	case MemoryOwn:
		return a.Name, nil
	case MemoryNone:
		return "", fmt.Errorf("use memory of agent %s: %w", a.Name, ErrNoMemory)
	}
	return "", nil
}

type actingKey struct{}

// With sets the acting agent in the context.
func With(ctx context.Context, a Agent) context.Context {
	return context.WithValue(ctx, actingKey{}, a)
}

// ActingMemory returns the owner of the acting agent's memory. The agent is that of the context ([With]), or else the
// one with the name on the execution's row. It returns [ErrNoMemory] for an agent without memory.
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

// MemoryOf returns the owner of a named agent's memory, even of a removed agent; the shared one for "". It returns
// [ErrNotFound] for an unknown agent, and [ErrNoMemory] for an agent without memory.
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
