package migrations

import (
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// quoted is a name that means another without quotes; a file leaves them out.
var quoted = regexp.MustCompile(`[A-Z."\s]`)

// refusePlace returns an error, before anything is written, when the tables cannot be made where they would be, in the first schema of the
// search path that is there, or when they are in another: a schema of the role's own name, made later, comes before public, and a
// second agent would begin in it, on the first one's queue.
func refusePlace(ctx context.Context, pool *pgxpool.Pool) error {
	var schema, user, database, elsewhere string
	var mayTable, maySchema bool
	err := pool.QueryRow(ctx, `
		with first as (select coalesce(current_schema(), '') as name),
		     has as (select n.nspname as name from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.relname = 'agent_migrations')
		select f.name, current_user, current_database(),
		       coalesce((select min(h.name) from has h where not exists (select from has x where x.name = f.name)), ''),
		       coalesce((select has_schema_privilege(n.oid, 'create') from pg_namespace n where n.nspname = f.name), false),
		       has_database_privilege(current_database(), 'create') or exists (select from pg_namespace n where n.nspname = 'river')
		  from first f`).Scan(&schema, &user, &database, &elsewhere, &mayTable, &maySchema)
	name := func(s string) string { return pgx.Identifier{s}.Sanitize() }
	switch {
	case err != nil:
		return fmt.Errorf("look where the tables go: %w", err)
	case schema == "":
		return errors.New("no schema of the search path is there; create it, or leave search_path out of DATABASE_URL")
	case elsewhere != "":
		return fmt.Errorf("agent's tables are in the schema %s of this database, and the search path begins with %s; "+
			"add search_path=%s to DATABASE_URL, or %s", name(elsewhere), name(schema), elsewhere, ownDatabase)
	case quoted.MatchString(schema):
		return fmt.Errorf("the schema %s has a name that needs quotes; rename it, or name another in the search path: of small letters, digits and _", name(schema))
	case !mayTable || !maySchema:
		return fmt.Errorf("%s may not create tables in the schema %s, or schemas in the database; make it the owner: alter database %s owner to %s",
			name(user), name(schema), name(database), name(user))
	}
	return nil
}
