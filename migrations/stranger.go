package migrations

import (
	"context"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

var created = regexp.MustCompile(
	`(?im)^create\s+(?:or\s+replace\s+)?(?:table|view)\s+(?:if\s+not\s+exists\s+)?([a-z0-9_]+)`)

// refuseStrangers returns an error, before anything is written, when a database that was never migrated has a table
// or view of a name that the files use.
func refuseStrangers(ctx context.Context, pool *pgxpool.Pool, t text) error {
	var names []string
	for _, n := range t.nouns {
		for _, match := range created.FindAllStringSubmatch(n.tables+n.code, -1) {
			names = append(names, match[1])
		}
	}
	var met string
	err := pool.QueryRow(ctx, `
		select coalesce(min(c.relname), '') from pg_class c
		 where c.relnamespace = (select n.oid from pg_namespace n where n.nspname = current_schema())
		   and c.relname = any (@names) and to_regclass('agent_migrations') is null`,
		postgres.Strict{"names": names}).Scan(&met)
	if err != nil {
		return fmt.Errorf("look for another program's tables: %w", err)
	}
	if met != "" {
		return fmt.Errorf("the database has a relation %s of another program; %s", met, ownDatabase)
	}
	return nil
}

const ownDatabase = "give agent a database of its own: createdb agent, and name it in DATABASE_URL"
