package migrations_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// restoreVersion returns a new database of a former version, with running and waiting executions, from a dump of
// pg_dump.
func restoreVersion(t *testing.T, version string) *pgxpool.Pool {
	t.Helper()
	packed, err := os.ReadFile("testdata/" + version + ".sql.gz")
	require.NoError(t, err)
	unpacked, err := gzip.NewReader(bytes.NewReader(packed))
	require.NoError(t, err)
	dump, err := io.ReadAll(unpacked)
	require.NoError(t, err)
	db := pgtest.Empty(t)
	// a new session: a dump changes session settings
	conn, err := pgx.ConnectConfig(t.Context(), db.Config().ConnConfig.Copy())
	require.NoError(t, err)
	defer func() { _ = conn.Close(t.Context()) }()
	pgtest.Exec(t, conn, string(dump), pgx.QueryExecModeSimpleProtocol)
	return db
}

// countRows counts the rows of each table. New tables and those of migrations do not count.
func countRows(t *testing.T, db *pgxpool.Pool, tables []string) string {
	t.Helper()
	var all []string
	for _, name := range tables {
		n := pgtest.Value[int](t, db, "select count(*) from "+name)
		all = append(all, fmt.Sprint(renamed.Replace(name), " ", n))
	}
	return strings.Join(all, "\n")
}

// renamed maps tables to their names in the baseline.
var renamed = strings.NewReplacer("agent_untold_ends", "agent_unpublished_completions")

// Up turns a former schema into that of a new database, and keeps its rows.
func TestBridgeBuildsSchemaOfNewDatabase(t *testing.T) {
	t.Parallel()
	for version, filled := range map[string]string{
		"0118": "agent_retention agent_retention_passes", "0269": "",
	} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			db := restoreVersion(t, version)
			tables := slices.DeleteFunc(pgtest.Column[string](t, db, `
				select c.oid::regclass::text from pg_class c where c.relnamespace = 'public'::regnamespace
				   and c.relkind in ('r', 'p') and not c.relispartition
				   and c.relname not in ('agent_migrations', 'agent_schema_code', 'agent_logouts') order by 1`),
				func(name string) bool { return slices.Contains(strings.Fields(filled), name) })
			rows := countRows(t, db, tables)
			applied, err := migrations.Up(t.Context(), db)
			require.Truef(t, err == nil && applied[0] == "bridge", "applied %v: %v", applied, err)
			assert.NoError(t, migrations.Check(t.Context(), db))
			schemas := []string{"public", "lanekeeper"}
			assert.NoDiff(t, pgtest.Objects(t, pgtest.DB(t), schemas...), pgtest.Objects(t, db, schemas...))
			for i, name := range tables {
				tables[i] = renamed.Replace(name)
			}
			assert.NoDiff(t, rows, countRows(t, db, tables))
			n := pgtest.Value[int](t, db, `select count(*) from agent_executions where status = 'running' and claim > 1000000`)
			assert.True(t, n != 0, "the claims of the former version hold")
			again, err := migrations.Up(t.Context(), db)
			assert.Truef(t, err == nil && len(again) == 0, "applied %v again: %v", again, err)
		})
	}
}

// Up rejects schemas from before the bridge, and writes nothing.
func TestSchemaWithoutBridgeIsRejected(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change string
		want   error
	}{
		"older":   {`delete from agent_migrations where version > 57`, migrations.ErrOld},
		"between": {`update agent_migrations set version = 200 where version = 118`, migrations.ErrOld},
		"changed": {`update agent_migrations set hash = 'x' where version = 118`, migrations.ErrChanged},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := restoreVersion(t, "0118")
			pgtest.Exec(t, db, c.change)
			applied, err := migrations.Up(t.Context(), db)
			assert.Truef(t, errors.Is(err, c.want) && len(applied) == 0, "applied %v: %v", applied, err)
			assert.ErrorIs(t, migrations.Check(t.Context(), db), c.want)
		})
	}
}

var defines = regexp.MustCompile(
	`(?im)^create (?:or replace )?(function|procedure|view|trigger|table|type) ([a-z0-9_.]+)`)

// No body is duplicated: one place defines each function, view and table.
func TestSchemaFilesDefineObjectsOnce(t *testing.T) {
	t.Parallel()
	where := map[string]string{}
	for path, file := range withChanges(t, nil) {
		if !strings.HasPrefix(path, "schema/") {
			continue
		}
		for _, m := range defines.FindAllStringSubmatch(string(file.Data), -1) {
			what := fmt.Sprint(m[1], " ", m[2])
			first, twice := where[what]
			assert.Truef(t, !twice, "%s is defined in %s and in %s", what, first, path)
			where[what] = path
		}
	}
	assert.Truef(t, len(where) >= 200, "%d definitions: the test does not see them", len(where))
}

// The code can be applied again, and with checked bodies. A new database gets it unchecked, because functions call
// later ones.
func TestFunctionBodiesAreValid(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for path, file := range withChanges(t, nil) {
		if strings.HasPrefix(path, "schema/") {
			_, code, _ := strings.Cut(string(file.Data), "\n-- Code\n")
			_, err := db.Exec(t.Context(), code, pgx.QueryExecModeSimpleProtocol)
			assert.NoError(t, err, path)
		}
	}
}
