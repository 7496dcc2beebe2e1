package pgtest

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Pool opens connections to a database for the duration of a test.
func Pool(tb testing.TB, url string, o postgres.Options) *pgxpool.Pool {
	tb.Helper()
	db, err := postgres.Open(tb.Context(), url, o)
	require.NoError(tb, err)
	tb.Cleanup(db.Close)
	return db
}

// Exec runs a statement. An error ends the test. Exec, Value, Column and Rows also work in cleanups.
func Exec(tb testing.TB, db postgres.DB, sql string, args ...any) {
	tb.Helper()
	if _, err := db.Exec(context.WithoutCancel(tb.Context()), sql, args...); err != nil {
		tb.Fatalf("%v\n%s", err, sql)
	}
}

// Value reads the single value of a query. An error, or no row, ends the test.
func Value[T any](tb testing.TB, db postgres.DB, sql string, args ...any) (value T) {
	tb.Helper()
	if err := db.QueryRow(context.WithoutCancel(tb.Context()), sql, args...).Scan(&value); err != nil {
		tb.Fatalf("%v\n%s", err, sql)
	}
	return value
}

// Equal expects the single value of a query.
func Equal[T comparable](tb testing.TB, db postgres.DB, want T, sql string, args ...any) {
	tb.Helper()
	if got := Value[T](tb, db, sql, args...); got != want {
		tb.Errorf("got %v, want %v: %s %v", got, want, sql, args)
	}
}

// Until waits for a single value of a query.
func Until[T comparable](tb testing.TB, db postgres.DB, want T, sql string, args ...any) {
	tb.Helper()
	message := fmt.Sprintf("%v: %s %v", want, sql, args)
	Eventually(tb, func() bool { return Value[T](tb, db, sql, args...) == want }, message)
}

// AwaitBlocked waits until n sessions of the database wait for a lock in statements that contain text.
func AwaitBlocked(tb testing.TB, db postgres.DB, n int, text string) {
	tb.Helper()
	Until(tb, db, true, `select count(*) >= $1 from pg_stat_activity where datname = current_database()
		and wait_event_type = 'Lock' and strpos(query, $2) > 0`, n, text)
}

// Column reads the single column of a query. An error ends the test.
func Column[T any](tb testing.TB, db postgres.DB, sql string, args ...any) []T {
	tb.Helper()
	return collect(tb, db, pgx.RowTo[T], sql, args)
}

// Rows reads rows into the fields of T in the order of the columns. An error ends the test.
func Rows[T any](tb testing.TB, db postgres.DB, sql string, args ...any) []T {
	tb.Helper()
	return collect(tb, db, pgx.RowToStructByPos[T], sql, args)
}

func collect[T any](tb testing.TB, db postgres.DB, to pgx.RowToFunc[T], sql string, args []any) []T {
	tb.Helper()
	rows, err := db.Query(context.WithoutCancel(tb.Context()), sql, args...)
	if err != nil {
		tb.Fatalf("%v\n%s", err, sql)
	}
	values, err := pgx.CollectRows(rows, to)
	if err != nil {
		tb.Fatalf("%v\n%s", err, sql)
	}
	return values
}

// Objects lists the objects of schemas in the server's own form, without the partitions of single months.
func Objects(tb testing.TB, db postgres.DB, schemas ...string) []string {
	tb.Helper()
	return Column[string](tb, db, `
		with relation as (
		  select c.oid, c.relname, c.relkind, c.reloptions from pg_class c
		   where c.relnamespace::regnamespace::text = any ($1) and c.relname !~ '_20[0-9]{2}_[0-9]{2}')
		select 'column ' || c.relname || '.' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod) || ' '
		       || a.attnotnull || ' ' || coalesce(pg_get_expr(d.adbin, d.adrelid), '') || ' '
		       || a.attidentity::text || a.attgenerated::text || a.attstorage::text || ' '
		       || coalesce(c.reloptions::text, '') || ' ' || coalesce(col_description(c.oid, a.attnum), '')
		  from relation c join pg_attribute a on a.attrelid = c.oid
		  left join pg_attrdef d on d.adrelid = c.oid and d.adnum = a.attnum
		 where c.relkind in ('r', 'p', 'v', 'i', 'c') and a.attnum > 0 and not a.attisdropped
		union all
		select 'constraint ' || conrelid::regclass || ' ' || conname || ' ' || pg_get_constraintdef(oid) from pg_constraint
		 where connamespace::regnamespace::text = any ($1) and conrelid::regclass::text !~ '_20[0-9]{2}_[0-9]{2}'
		   and contype <> 'n' -- NOT NULL is a constraint from 18 on, with a name that a renamed column keeps
		union all
		select 'index ' || pg_get_indexdef(i.indexrelid) || ' ' || i.indisvalid
		  from relation c join pg_index i on i.indrelid = c.oid
		union all
		select 'trigger ' || pg_get_triggerdef(t.oid)
		  from relation c join pg_trigger t on t.tgrelid = c.oid where not t.tgisinternal
		union all
		select 'view ' || c.relname || ' ' || pg_get_viewdef(c.oid) from relation c where c.relkind = 'v'
		union all
		select 'function ' || pg_get_functiondef(p.oid) || coalesce(obj_description(p.oid, 'pg_proc'), '')
		  from pg_proc p where p.pronamespace::regnamespace::text = any ($1)
		order by 1`, schemas)
}

// Begin opens a transaction, which is rolled back when the test ends.
func Begin(tb testing.TB, db postgres.Beginner) pgx.Tx {
	tb.Helper()
	tx, err := db.Begin(tb.Context())
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(tb.Context())) })
	return tx
}
