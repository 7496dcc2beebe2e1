package databases

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Put stores the declaration d and reports whether it changed anything.
func Put(ctx context.Context, db postgres.DB, d Definition, source string) (changed bool, err error) {
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("put database %q: %w", d.Name, err)
	}
	verb := fmt.Sprintf("put database %q", d.Name)
	return postgres.Upsert(ctx, db, verb, "agent_databases", "name", postgres.Strict{
		"name": d.Name, "description": d.Description, "url_env": d.URLEnv, "access": cmp.Or(d.Access, AccessRead),
		"role": d.Role, "source": source,
	})
}

// Remove deletes the databases of source except keep, and returns their names.
func Remove(ctx context.Context, db postgres.DB, source string, keep []string) ([]string, error) {
	return postgres.Names(ctx, db, "remove databases of source "+source, `
		delete from agent_databases where source = @source and name <> all(@keep::text[]) returning name`,
		postgres.Strict{"source": source, "keep": append([]string{}, keep...)})
}

// Get returns one database, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, name string) (Database, error) {
	rows, err := db.Query(ctx, `
		select name, description, url_env, access, role, source, created_at, updated_at
		  from agent_databases where name = @name`, postgres.Strict{"name": name})
	return postgres.CollectOne(rows, err, ErrNotFound, fmt.Sprintf("get database %q", name),
		pgx.RowToStructByName[Database])
}

// List returns the declared databases by name.
func List(ctx context.Context, db postgres.DB) ([]Database, error) {
	return postgres.Rows[Database](ctx, db, "list databases", `
		select name, description, url_env, access, role, source, created_at, updated_at
		  from agent_databases order by name limit 1000`)
}
