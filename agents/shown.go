package agents

import (
	"context"
	"errors"
	"fmt"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Shown is an agent with where each of its values comes from.
type Shown struct {
	Agent
	Values   []Value `json:"values"`
	Versions []int   `json:"versions"` // the newest first; empty for the installation's own agent
}

// MissingError reports an agent, or a version of one, that a person named and that is not there. It is an
// [ErrNotFound].
type MissingError struct {
	Name    string
	Version int    // 0: the current one was asked for
	Latest  int    // version of a removed agent, or of one that has no such version; 0: there never was such an agent
	Near    string // an agent whose name is like it; empty: none
}

// Error says what is missing, without advice: how to see what there is differs between a terminal and HTTP.
func (e *MissingError) Error() string {
	switch {
	case e.Latest == 0 && e.Near != "":
		return fmt.Sprintf("there is no agent %.100q, did you mean %q?", e.Name, e.Near)
	case e.Latest == 0:
		return fmt.Sprintf("there is no agent %.100q", e.Name)
	case e.Version > 0:
		return fmt.Sprintf("agent %s has no version %d: the latest is %d", e.Name, e.Version, e.Latest)
	}
	return fmt.Sprintf("agent %s was removed", e.Name)
}

// Is reports the error as an [ErrNotFound].
func (e *MissingError) Is(target error) bool { return target == ErrNotFound }

// Look returns an agent that a person names: its version in service for 0, or one of its versions, of a removed agent
// too. What is not there is a [MissingError].
func (d *Directory) Look(ctx context.Context, db postgres.DB, name string, number int) (Agent, error) {
	find := func() (Agent, error) { return d.Find(ctx, db, name) }
	if number > 0 {
		find = func() (Agent, error) { return d.Version(ctx, db, name, number) }
	}
	a, err := find()
	if errors.Is(err, ErrNotFound) {
		err = d.missing(ctx, db, name, number)
	}
	return a, err
}

// Show is [Directory.Look] with the values and versions of the agent.
func (d *Directory) Show(ctx context.Context, db postgres.DB, name string, number int) (Shown, error) {
	a, err := d.Look(ctx, db, name, number)
	if err != nil {
		return Shown{}, err
	}
	shown := Shown{Agent: a, Values: a.Values(), Versions: []int{}}
	if a.Declared() {
		shown.Versions, err = Versions(ctx, db, a.Name)
	}
	return shown, err
}

// missing says why an agent is not there.
func (d *Directory) missing(ctx context.Context, db postgres.DB, name string, number int) error {
	versions, err := Versions(ctx, db, name)
	if err == nil {
		return &MissingError{Name: name, Version: number, Latest: versions[0]}
	}
	if !errors.Is(err, ErrNotFound) {
		return err
	}
	all, err := d.List(ctx, db)
	if err != nil {
		return err
	}
	names := make([]string, len(all))
	for i, a := range all {
		names[i] = a.Name
	}
	return &MissingError{Name: name, Near: nearest.To(name, names)}
}
