package pgtest

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Exec runs a statement. An error ends the test.
func Exec(tb testing.TB, db postgres.DB, sql string, args ...any) {
	tb.Helper()
	if _, err := db.Exec(tb.Context(), sql, args...); err != nil {
		tb.Fatalf("%v\n%s", err, sql)
	}
}

// Value reads the single value of a query. An error, or no row, ends the test.
func Value[T any](tb testing.TB, db postgres.DB, sql string, args ...any) (value T) {
	tb.Helper()
	if err := db.QueryRow(tb.Context(), sql, args...).Scan(&value); err != nil {
		tb.Fatalf("%v\n%s", err, sql)
	}
	return value
}

// Column reads the single column of a query. An error ends the test.
func Column[T any](tb testing.TB, db postgres.DB, sql string, args ...any) []T {
	tb.Helper()
	rows, err := db.Query(tb.Context(), sql, args...)
	if err != nil {
		tb.Fatalf("%v\n%s", err, sql)
	}
	values, err := pgx.CollectRows(rows, pgx.RowTo[T])
	if err != nil {
		tb.Fatalf("%v\n%s", err, sql)
	}
	return values
}
