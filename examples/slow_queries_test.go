package examples_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// withStatements returns a database with the caretaker's skills and the extension pg_stat_statements, in a schema
// outside the search path. It skips the test on a server without the extension, or with its library loaded.
func withStatements(t *testing.T) (pool *pgxpool.Pool, url string) {
	t.Helper()
	url = pgtest.URL(t)
	pool = connect(t, url)
	var available, loaded bool
	err := pool.QueryRow(t.Context(), `
		select exists (select from pg_available_extensions where name = 'pg_stat_statements'),
		       current_setting('pg_stat_statements.max', true) is not null`).Scan(&available, &loaded)
	require.NoError(t, err)
	if !available || loaded {
		t.Skip("this server does not offer pg_stat_statements, or has loaded it itself")
	}
	newCaller(t, pool).exec(`create schema "My Stats"`, `create extension pg_stat_statements schema "My Stats"`)
	_, err = workspace.Apply(t.Context(), pool, caretaker(t), workspace.Options{})
	require.NoError(t, err)
	return pool, url
}

func connect(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	return pgtest.Pool(t, url, postgres.Options{ApplicationName: "test"})
}

// fakeLoaded makes the server look as if it had loaded the extension's library, with one recorded query of this
// database. It replaces the extension's view by one of the same name and columns. The query has the characters that XML
// escapes, because the skill reads the view through XML, and the times have digits that the skill rounds.
func fakeLoaded(t *testing.T, pool *pgxpool.Pool, url string) *pgxpool.Pool {
	t.Helper()
	newCaller(t, pool).exec(
		`alter extension pg_stat_statements drop view "My Stats".pg_stat_statements`,
		`drop view "My Stats".pg_stat_statements`,
		`create view "My Stats".pg_stat_statements as
		 select (select oid from pg_database where datname = current_database()) as dbid, 'select '' <ä> &'' ' as query,
		        7::bigint as calls, 8::bigint as rows, 70.25::float8 as total_exec_time, 10.04::float8 as mean_exec_time
		 union all select 0, 'of another database', 1, 1, 1000, 1000`,
		`do $$ begin execute format('alter database %I set pg_stat_statements.max = 5000', current_database()); end $$`)
	return connect(t, url)
}

func TestSlowQueriesWithExtension(t *testing.T) {
	pool, url := withStatements(t)
	found := newCaller(t, fakeLoaded(t, pool, url)).call("slow_queries", `{}`)
	require.Equal(t, 1, found.RowCount, found.Rows)
	row := found.Rows[0]
	assert.Truef(t, row["source"] == "pg_stat_statements" && row["query"] == "select ' <ä> &' " && row["calls"] == 7.0 &&
		row["rows"] == 8.0 && row["total_ms"] == 70.3 && row["mean_ms"] == 10.0, "row is %v", row)
}

func TestSlowQueriesFallBackToActivity(t *testing.T) {
	for name, state := range map[string]string{
		"not loaded": `select 1`,
		"old version": `do $$ begin
			execute format('alter database %I set pg_stat_statements.max = 5000', current_database());
			alter extension pg_stat_statements drop view "My Stats".pg_stat_statements;
			drop view "My Stats".pg_stat_statements;
			create view "My Stats".pg_stat_statements as select 0::oid as dbid, 1.0 as total_time; end $$`,
	} {
		t.Run(name, func(t *testing.T) {
			pool, url := withStatements(t)
			newCaller(t, pool).exec(state)
			running := connect(t, url)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				_, err := running.Exec(ctx, `select pg_sleep(600) as busy`)
				ended <- err
			}()
			c := newCaller(t, connect(t, url))
			pgtest.Eventually(t, func() bool {
				found := c.call("slow_queries", `{}`)
				return found.RowCount == 1 && found.Rows[0]["source"] == "pg_stat_activity" &&
					found.Rows[0]["query"] == "select pg_sleep(600) as busy"
			}, "the running query is shown")
			cancel()
			assert.ErrorIs(t, <-ended, context.Canceled)
		})
	}
}
