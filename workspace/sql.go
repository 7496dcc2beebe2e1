package workspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// openTimeout bounds the connection to a named database.
const openTimeout = 15 * time.Second

// openedDatabase is a named database with its connection, or the error of an unreachable one.
type openedDatabase struct {
	databases.Database
	connection skills.Database // without a pool if it is not connected
	err        error
}

// ledgers says whether a check creates the missing tables agent_effects for writing skills.
type ledgers bool

const (
	leaveLedgers  ledgers = false
	createLedgers ledgers = true
)

// checkNamedDatabases connects to the named databases in use and prepares the queries of their skills. An unreachable
// database is a warning. A missing or wrong setting is one of the [Problems].
func checkNamedDatabases(
	ctx context.Context, db postgres.DB, w Workspace, o Options, l ledgers,
) (warnings []string, err error) {
	all, problems, err := w.openDatabases(ctx, db, o)
	if err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if err := all[name].err; err != nil {
			warnings = append(warnings, fmt.Sprintf("%s; its queries were not checked", err))
		}
	}
	for _, document := range w.Skills {
		name, ok := skills.SQLDatabase(document.Definition)
		database, known := all[name]
		if !ok || name == "" || !known {
			continue
		}
		if skills.SQLWrites(document.Definition) && database.Access != databases.AccessWrite {
			problems.add(document.position("config.writes"), "config.writes: database %s has access: read", name)
		}
		if database.connection.Pool == nil {
			continue
		}
		found, err := checkOnDatabase(ctx, database.connection, document, l)
		if err != nil {
			return nil, fmt.Errorf("check skill %s on database %s: %w", document.Definition.Name, name, err)
		}
		problems = append(problems, found...)
	}
	return warnings, problems.err()
}

// openDatabases opens the declared databases and those that skills use, by name. A wrong setting is a problem; only an
// unreachable database has an error.
func (w Workspace) openDatabases(
	ctx context.Context, db postgres.DB, o Options,
) (map[string]openedDatabase, Problems, error) {
	var problems Problems
	all := make(map[string]openedDatabase)
	open := func(d databases.Database, at Position, path string) {
		opened := openedDatabase{Database: d}
		if o.OpenDatabase != nil {
			openCtx, cancel := context.WithTimeout(ctx, openTimeout)
			defer cancel()
			opened.connection, opened.err = o.OpenDatabase(openCtx, d)
			if opened.err != nil && !skills.Unreachable(opened.err) {
				problems.add(at, "%s: %s", path, opened.err)
				opened.err = nil
			}
		}
		all[d.Name] = opened
	}
	for _, document := range w.Databases {
		d := document.Definition
		open(databases.Database{
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
			open(d, document.position("config.database"), "config.database")
		}
	}
	return all, problems, nil
}

// checkOnDatabase prepares a skill's query on a named database.
func checkOnDatabase(
	ctx context.Context, database skills.Database, document Document[skills.Definition], l ledgers,
) (Problems, error) {
	if l == createLedgers && database.Writes && skills.SQLWrites(document.Definition) {
		if err := skills.PrepareEffects(ctx, database); err != nil {
			var problems Problems
			problems.add(document.position("config.writes"), "config.writes: make the table agent_effects: %s", err)
			return problems, nil
		}
	}
	var problems Problems
	err := postgres.InTx(ctx, database.Pool, func(tx pgx.Tx) (err error) {
		problems, err = checkQuery(ctx, tx, document, database.Role)
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
