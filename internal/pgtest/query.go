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

// Begin opens a transaction, which is rolled back when the test ends.
func Begin(tb testing.TB, db postgres.Beginner) pgx.Tx {
	tb.Helper()
	tx, err := db.Begin(tb.Context())
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(tb.Context())) })
	return tx
}
