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

// checkLimit bounds the check of a named database.
const checkLimit = 15 * time.Second

// reachedDatabase is a named database with its connection or error.
type reachedDatabase struct {
	databases.Database
	database skills.Database
	err      error // why the connection failed
}

// checkNamed connects to the named databases in use and prepares the queries of their skills. An unreachable database
// is a warning. A missing or wrong setting is one of the [Problems]. With prepare, checkNamed creates the ledger of
// effects for writing skills.
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
			problems.add(document.position("config.writes"), "config.writes: database %s has access: read", name)
		}
		if on.database.Pool == nil {
			continue
		}
		found, err := checkOnDatabase(ctx, on.database, document, prepare)
		if err != nil {
			return nil, fmt.Errorf("check skill %s on database %s: %w", document.Definition.Name, name, err)
		}
		problems = append(problems, found...)
	}
	return warnings, problems.err()
}

// reachDatabases opens declared databases and databases that skills use.
func (w Workspace) reachDatabases(
	ctx context.Context, db postgres.DB, o Options,
) (map[string]reachedDatabase, Problems, error) {
	var problems Problems
	all := make(map[string]reachedDatabase)
	reach := func(d databases.Database, at Position, path string) {
		got := reachedDatabase{Database: d}
		if o.OpenDatabase != nil {
			limited, cancel := context.WithTimeout(ctx, checkLimit)
			defer cancel()
			if got.database, got.err = o.OpenDatabase(limited, d); got.err != nil && !skills.Unreachable(got.err) {
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
		}, document.position("url_env"), "url_env")
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
			problems.add(document.position("config.database"), "config.database: there is no database %q%s; "+
				"declare it as kind: database", name, suggestion(name, known))
		case err != nil:
			return nil, nil, err
		default:
			reach(d, document.position("config.database"), "config.database")
		}
	}
	return all, problems, nil
}

// checkOnDatabase prepares a skill's query on a named database.
func checkOnDatabase(
	ctx context.Context, on skills.Database, document Document[skills.Definition], prepare bool,
) (Problems, error) {
	if prepare && on.Writes && skills.SQLWrites(document.Definition) {
		if err := skills.PrepareEffects(ctx, on); err != nil {
			var problems Problems
			problems.add(document.position("config.writes"), "config.writes: make the table agent_effects: %s", err)
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

// checkQueries prepares the queries of skills on the agent's own database.
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

// checkQuery prepares a skill's query and positions the error in the file.
func checkQuery(ctx context.Context, tx pgx.Tx, document Document[skills.Definition], role string) (Problems, error) {
	err := skills.CheckSQL(ctx, tx, document.Definition, role)
	wrong, ok := errors.AsType[*skills.SQLError](err)
	if !ok {
		return nil, err
	}
	at := document.position(wrong.Field)
	if document.source.node != nil && wrong.Offset >= 0 {
		at = document.source.offsetPosition(wrong.Field, wrong.Offset)
	}
	return Problems{{Position: at, Message: "sql: " + wrong.Message}}, nil
}
