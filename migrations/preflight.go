package migrations

import (
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// quoted is a name that has another meaning without quotes; a file omits them.
var quoted = regexp.MustCompile(`[A-Z."\s]`)

// rejectSchema returns an error, before anything is written, in two cases. The first existing schema of the search path
// does not admit the tables. Or the tables are in another schema. One with the role's own name, created later, precedes
// public: a second agent would begin in it, on the first one's queue.
func rejectSchema(ctx context.Context, pool *pgxpool.Pool) error {
	var schema, user, database, elsewhere string
	var mayTable, maySchema bool
	err := pool.QueryRow(ctx, `
		with first as (select coalesce(current_schema(), '') as name),
		     has as (select n.nspname as name from pg_class c join pg_namespace n on n.oid = c.relnamespace
		       where c.relname = 'agent_migrations')
		select f.name, current_user, current_database(),
		       coalesce((select min(h.name) from has h where not exists (select from has x where x.name = f.name)), ''),
		       coalesce((select has_schema_privilege(n.oid, 'create') from pg_namespace n where n.nspname = f.name), false),
		       has_database_privilege(current_database(), 'create')
		         or exists (select from pg_namespace n where n.nspname = 'river')
		  from first f`).Scan(&schema, &user, &database, &elsewhere, &mayTable, &maySchema)
	name := func(s string) string { return pgx.Identifier{s}.Sanitize() }
	switch {
	case err != nil:
		return fmt.Errorf("look where the tables go: %w", err)
	case schema == "":
		return errors.New("no schema of the search path is there; create it, or name one that is: add search_path=public to " +
			"DATABASE_URL")
	case elsewhere != "":
		return fmt.Errorf("agent's tables are in the schema %s of this database, and the search path begins with %s; "+
			"add search_path=%s to DATABASE_URL, or %s", name(elsewhere), name(schema), elsewhere, ownDatabase)
	case quoted.MatchString(schema):
		return fmt.Errorf("the schema %s has a name that needs quotes; rename it, or name another in the search path: of "+
			"small letters, digits and _", name(schema))
	case !mayTable || !maySchema:
		if err := rejectOtherOwner(ctx, pool); err != nil {
			return err
		}
		return fmt.Errorf("%s may not create tables in the schema %s, or schemas in the database; make it the owner: alter "+
			"database %s owner to %s",
			name(user), name(schema), name(database), name(user))
	}
	return nil
}

// rejectOtherOwner returns an error if the tables belong to another role than the migrating one. New objects would
// belong to the migrating role, and the owner could not use them.
func rejectOtherOwner(ctx context.Context, pool *pgxpool.Pool) error {
	var owner, user string
	err := pool.QueryRow(ctx, `
		select pg_get_userbyid(c.relowner), current_user from pg_class c where c.oid = to_regclass('agent_migrations')`).
		Scan(&owner, &user)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err == nil && owner != user:
		return fmt.Errorf("the tables belong to %s; migrate as that user", pgx.Identifier{owner}.Sanitize())
	}
	return err
}

var created = regexp.MustCompile(
	`(?im)^create\s+(?:or\s+replace\s+)?(?:table|view|function|domain|type)\s+(?:if\s+not\s+exists\s+)?([a-z0-9_]+)\b[^.]`)

// rejectForeignObjects reads a database without migrations. It returns an error if a table, view, function or type
// there already has a name that the files create. The schema lanekeeper is refused too, and a schema river that has
// tables or in which this user may not create.
func rejectForeignObjects(ctx context.Context, pool *pgxpool.Pool, r release) error {
	var names []string
	for _, n := range r.files {
		for _, match := range created.FindAllStringSubmatch(n.tables+n.code, -1) {
			names = append(names, match[1])
		}
	}
	var met string
	err := pool.QueryRow(ctx, `
		with here as (select n.oid from pg_namespace n where n.nspname = current_schema())
		select coalesce(min(x.name), '')
		  from (select 'relation ' || c.relname from pg_class c join here on here.oid = c.relnamespace
		         where c.relname = any (@names)
		        union all
		        select 'function ' || p.proname from pg_proc p join here on here.oid = p.pronamespace
		         where p.proname = any (@names)
		        union all
		        select 'type ' || y.typname from pg_type y join here on here.oid = y.typnamespace
		         where y.typname = any (@names) and y.typrelid = 0
		        union all
		        select 'relation river.' || c.relname from pg_class c where c.relnamespace = to_regnamespace('river')
		        union all
		        select 'schema ' || n.nspname from pg_namespace n
		         where n.nspname = 'lanekeeper' or n.nspname = 'river' and not has_schema_privilege(n.oid, 'create')) x (name)
		 where to_regclass('agent_migrations') is null`,
		postgres.Strict{"names": names}).Scan(&met)
	if err != nil {
		return fmt.Errorf("look for another program's tables: %w", err)
	}
	if met != "" {
		return fmt.Errorf("the database has the %s of another program; %s", met, ownDatabase)
	}
	return nil
}

// rejectLostVersions returns an error if the tables exist without the record of their version.
func rejectLostVersions(ctx context.Context, pool *pgxpool.Pool) error {
	var there bool
	err := pool.QueryRow(ctx, `select to_regclass('agent_executions') is not null`).Scan(&there)
	if err == nil && there {
		err = errors.New("the tables are there, and agent_migrations is empty: they were restored without their rows; restore " +
			"the whole dump, or migrate an empty database")
	}
	return err
}

const ownDatabase = "give agent a database of its own: createdb agent, and name it in DATABASE_URL"
