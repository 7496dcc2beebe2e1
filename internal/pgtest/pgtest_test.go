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
	var tables int
	err := pgtest.Empty(t).QueryRow(t.Context(),
		"select count(*) from pg_tables where schemaname = 'public'").Scan(&tables)
	require.NoError(t, err)
	assert.Equal(t, 0, tables)
}

func TestDatabasesAreDropped(t *testing.T) {
	var name string
	t.Run("user", func(t *testing.T) {
		require.NoError(t, pgtest.DB(t).QueryRow(t.Context(), "select current_database()").Scan(&name))
	})
	var there bool
	err := pgtest.Empty(t).QueryRow(t.Context(), "select exists (select from pg_database where datname = $1)",
		name).Scan(&there)
	require.NoError(t, err)
	assert.Truef(t, name != "" && !there, "database %q is still there", name)
}
