package workspace

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/databases"
)

func databaseKind() kind {
	return reader("database", databases.Validate, func(d databases.Definition) string { return d.Name },
		func(w *Workspace) *[]Document[databases.Definition] { return &w.Databases })
}

// databaseTable is how database documents meet their table.
func databaseTable(w Workspace) matcher {
	return table[databases.Definition, databases.Database]{
		kind: "database", documents: w.Databases, name: func(d databases.Definition) string { return d.Name },
		get: func(ctx context.Context, tx pgx.Tx, name string) (databases.Database, error) {
			return databases.Get(ctx, tx, name)
		},
		put: func(ctx context.Context, tx pgx.Tx, d databases.Definition) (bool, error) {
			return databases.Put(ctx, tx, d, Source)
		},
		notFound: databases.ErrNotFound, remove: databases.Remove,
		declared: []string{"description", "url_env", "access", "role", "source"},
	}
}
