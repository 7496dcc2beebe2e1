package agents

import (
	"context"
	"errors"
	"fmt"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Shown is an agent with the sources of its values.
type Shown struct {
	Agent
	Values   []Value `json:"values"`
	Versions []int   `json:"versions"` // the newest first; empty for the installation's own agent
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

// Look returns the given version of an agent, also of a removed one, or for number 0 the current version. If there is
// none, it returns a [MissingError].
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

// MissingError reports a requested agent or version that does not exist. It is an [ErrNotFound].
type MissingError struct {
	Name    string
	Version int    // 0: the current one
	Latest  int    // latest version; 0 for an agent that never existed
	Near    string // an agent whose name is like it; empty: none
	Own     bool   // the installation's own agent, which has no versions
}

// Error contains no advice, because the command line and HTTP list agents differently.
func (e *MissingError) Error() string {
	switch {
	case e.Own:
		return fmt.Sprintf("agent %s has no version %d: it is not declared, so it has no versions", e.Name, e.Version)
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

// missing returns the [MissingError] for an agent or a version that does not exist.
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
		if names[i] = a.Name; a.Name == name {
			return &MissingError{Name: name, Version: number, Own: true}
		}
	}
	return &MissingError{Name: name, Near: nearest.To(name, names)}
}
