package workspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// checkLimit is how long a named database may take to answer an apply.
const checkLimit = 15 * time.Second

// reached is a named database of a workspace.
type reached struct {
	databases.Database
	on  skills.Database
	err error // why it is not reached
}

// checkNamed reaches the named databases that the workspace declares or its skills use, and has each prepare the
// queries of its skills. A database that cannot be reached now is a warning; a setting that is missing or wrong is one
// of the [Problems]. With prepare it makes the ledger of effects where a skill writes.
func checkNamed(
	ctx context.Context, db postgres.DB, w Workspace, o Options, prepare bool,
) (warnings []string, err error) {
	all, problems, err := w.reachDatabases(ctx, db, o)
	if err != nil {
		return nil, err
	}
	for _, d := range all {
		if d.err != nil {
			warnings = append(warnings, fmt.Sprintf("%s; its queries were not checked", d.err))
		}
	}
	for _, document := range w.Skills {
		name, ok := skills.SQLDatabase(document.Definition)
		on, known := all[name]
		if !ok || name == "" || !known {
			continue
		}
		if skills.SQLWrites(document.Definition) && on.Access != databases.AccessWrite {
			problems.add(document.place("config.writes"), "config.writes: database %s has access: read", name)
		}
		if on.on.Pool == nil {
			continue
		}
		found, err := checkOn(ctx, on.on, document, prepare)
		if err != nil {
			return nil, fmt.Errorf("check skill %s on database %s: %w", document.Definition.Name, name, err)
		}
		problems = append(problems, found...)
	}
	return warnings, problems.err()
}

// reachDatabases opens what the workspace declares, and what its skills use of what is declared beside it.
func (w Workspace) reachDatabases(
	ctx context.Context, db postgres.DB, o Options,
) (map[string]reached, Problems, error) {
	var problems Problems
	all := make(map[string]reached)
	reach := func(d databases.Database, at Position, path string) {
		got := reached{Database: d}
		if o.Reach != nil {
			limited, cancel := context.WithTimeout(ctx, checkLimit)
			defer cancel()
			if got.on, got.err = o.Reach(limited, d); got.err != nil && !skills.Unreachable(got.err) {
				problems.add(at, "%s: %s", path, got.err)
				got.err = nil
			}
		}
		all[d.Name] = got
	}
	for _, document := range w.Databases {
		d := document.Definition
		reach(databases.Database{
			Name: d.Name, URLEnv: d.URLEnv, Access: cmp.Or(d.Access, databases.AccessRead), Role: d.Role,
		}, document.place("url_env"), "url_env")
	}
	for _, document := range w.Skills {
		name, ok := skills.SQLDatabase(document.Definition)
		if _, known := all[name]; known || !ok || name == "" {
			continue
		}
		d, err := databases.Get(ctx, db, name)
		switch {
		case errors.Is(err, databases.ErrNotFound):
			known := make([]string, 0, len(all))
			for name := range all {
				known = append(known, name)
			}
			problems.add(document.place("config.database"), "config.database: there is no database %q%s; "+
				"declare it as kind: database", name, hint(name, known))
		case err != nil:
			return nil, nil, err
		default:
			reach(d, document.place("config.database"), "config.database")
		}
	}
	return all, problems, nil
}

// checkOn has a named database prepare the query of a skill.
func checkOn(
	ctx context.Context, on skills.Database, document Document[skills.Definition], prepare bool,
) (Problems, error) {
	if prepare && on.Writes && skills.SQLWrites(document.Definition) {
		if err := skills.PrepareEffects(ctx, on); err != nil {
			var problems Problems
			problems.add(document.place("config.writes"), "config.writes: make the table agent_effects: %s", err)
			return problems, nil
		}
	}
	var problems Problems
	err := postgres.InTx(ctx, on.Pool, func(tx pgx.Tx) (err error) {
		problems, err = checkQuery(ctx, tx, document, on.Role)
		return err
	})
	return problems, err
}

// checkQueries has the agent's own database prepare the queries of the skills that run on it.
func checkQueries(ctx context.Context, tx pgx.Tx, w Workspace) error {
	var problems Problems
	for _, document := range w.Skills {
		if database, ok := skills.SQLDatabase(document.Definition); !ok || database != "" {
			continue
		}
		found, err := checkQuery(ctx, tx, document, "")
		if err != nil {
			return fmt.Errorf("check skill %s: %w", document.Definition.Name, err)
		}
		problems = append(problems, found...)
	}
	return problems.err()
}

// checkQuery has the server prepare the query of a skill, and places what is wrong in the file.
func checkQuery(ctx context.Context, tx pgx.Tx, document Document[skills.Definition], role string) (Problems, error) {
	err := skills.CheckSQL(ctx, tx, document.Definition, role)
	wrong, ok := errors.AsType[*skills.SQLError](err)
	if !ok {
		return nil, err
	}
	at := document.place(wrong.Field)
	if document.source.node != nil && wrong.Offset >= 0 {
		at = document.source.within(wrong.Field, wrong.Offset)
	}
	return Problems{{Position: at, Message: "sql: " + wrong.Message}}, nil
}
