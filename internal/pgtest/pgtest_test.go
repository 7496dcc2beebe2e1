package pgtest_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestEachTestHasItsOwnDatabase(t *testing.T) {
	seen := make(map[string]bool)
	for range 3 {
		db := pgtest.DB(t)
		var name string
		var tables int
		err := db.QueryRow(t.Context(), `
			select current_database(), (select count(*) from pg_tables where schemaname = 'public')`).Scan(&name, &tables)
		require.NoError(t, err)
		assert.True(t, tables != 0, "the database has no tables")
		assert.Truef(t, !seen[name], "database %s was handed out twice", name)
		seen[name] = true
	}
}

func TestEmptyHasNoTables(t *testing.T) {
	pgtest.Equal(t, pgtest.Empty(t), 0, "select count(*) from pg_tables where schemaname = 'public'")
}

func TestDatabasesAreDropped(t *testing.T) {
	var name string
	t.Run("user", func(t *testing.T) {
		name = pgtest.Value[string](t, pgtest.DB(t), "select current_database()")
	})
	pgtest.Equal(t, pgtest.Empty(t), false, "select exists (select from pg_database where datname = $1)", name)
}
