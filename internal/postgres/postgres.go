// Package postgres is the base of the packages that use the database. It has the small interface that other packages'
// functions take, the pool, one transaction helper and one listener.
//
// It promises four things. A function written against [DB] runs unchanged on a pool, a connection or a transaction; the
// caller decides which statements commit together. [Open] returns a pool that has reached the server, or an error line
// with the fault and its remedy, without the password. On a pool or a connection, [InTx] runs at READ COMMITTED under
// any default of the database. Everything but LISTEN works through PgBouncer in transaction mode.
//
// The last promise holds because no code here keeps state in a session. Only LISTEN would. [Listener] sends LISTEN,
// detects a pooler and then stays silent: notifications shorten a poll, and correctness never depends on them. Prepared
// statements would break too. [Open] compares the process id that the server announced with the process id that
// answers. The two differ behind a pooler. Then pgx describes statements once and sends them unnamed (cache_describe),
// which every version of PgBouncer supports. On a direct connection, pgx prepares and keeps statements
// (cache_statement). A default_query_exec_mode in the connection string overrides both, for example cache_statement
// behind PgBouncer 1.21 or later with max_prepared_statements set.
package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// DB is the interface of functions that use the database. *pgxpool.Pool, *pgx.Conn and pgx.Tx implement it.
type DB interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// Beginner is a DB that can open a transaction; on a pgx.Tx the transaction is a savepoint.
type Beginner interface {
	DB
	Begin(ctx context.Context) (pgx.Tx, error)
}

// txBeginner is a Beginner that can choose the isolation level: a pool or a connection.
type txBeginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// InTx runs fn in a READ COMMITTED transaction. It commits when fn returns nil, and rolls back when fn returns an error
// or panics. It returns the error of fn unchanged. On a pgx.Tx it is a savepoint of that transaction, at its isolation
// level.
func InTx(ctx context.Context, db Beginner, fn func(tx pgx.Tx) error) error {
	if b, ok := db.(txBeginner); ok {
		return pgx.BeginTxFunc(ctx, b, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, fn)
	}
	return pgx.BeginFunc(ctx, db, fn)
}

// Code returns the SQLSTATE of err, or "" if the server did not send err.
//
// A lock timeout may occur while a session passes from one lock of a row to the next. PostgreSQL then reports the
// timeout as a user's cancel: measured, 3 of 1,000 timeouts. If the statement waited for a row, Code returns the lock
// timeout, also for a real cancel. It needs a server with English messages. A server without further transaction ids
// sends the code for a text that is too long. Then Code returns codeNoIDs.
func Code(err error) string {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	switch {
	case !ok:
		return ""
	case pgErr.Code == codeCancelled && strings.HasPrefix(pgErr.Where, "while ") &&
		strings.HasSuffix(pgErr.Message, "due to user request"):
		return codeLocked
	case pgErr.Code == "54000" && (pgErr.Routine == "GetNewTransactionId" || pgErr.Routine == "GetNewMultiXactId"):
		return codeNoIDs
	}
	return pgErr.Code
}

// Unchanged reports that a failed statement, which was its own transaction, has certainly changed nothing. A server
// that shuts down may report the shutdown even after a commit.
func Unchanged(err error) bool {
	code := Code(err)
	return pgconn.SafeToRetry(err) || code == codeCancelled || code != "" && code[:2] != "57" && code[:2] != "08"
}

// IsCode reports whether the server raised err with one of the given SQLSTATEs, for example "LK001".
func IsCode(err error, codes ...string) bool {
	code := Code(err)
	return code != "" && slices.Contains(codes, code)
}

// RefusalText returns the server's message about a refused value, with the detail that names the fault.
func RefusalText(refused *pgconn.PgError) string {
	if refused.Detail == "" {
		return refused.Message
	}
	return refused.Message + ": " + refused.Detail
}

// Constraint returns the name of the constraint that err violates, or "".
func Constraint(err error) string {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.ConstraintName
	}
	return ""
}

// Collect reads the rows of a query with fn. It wraps an error of the query or of a row in verb.
func Collect[T any](rows pgx.Rows, err error, verb string, fn pgx.RowToFunc[T]) ([]T, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	values, err := pgx.CollectRows(rows, fn)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	return values, nil
}

// Rows reads the rows of a query into structs, by the names of the columns. It wraps an error in verb.
func Rows[T any](ctx context.Context, db DB, verb, sql string, args ...any) ([]T, error) {
	rows, err := db.Query(ctx, sql, args...)
	return Collect(rows, err, verb, pgx.RowToStructByName[T])
}

// Values reads the single column of a query. It wraps an error in verb.
func Values[T any](ctx context.Context, db DB, verb, sql string, args ...any) ([]T, error) {
	rows, err := db.Query(ctx, sql, args...)
	return Collect(rows, err, verb, pgx.RowTo[T])
}

// RowsGeneric is [Rows] with the generic plan of the query, which a connection makes once (behind a pooler: each time).
// Use RowsGeneric for a long query whose plan should not depend on its arguments. Planning such a query takes as long
// as running it. Like functions with a cached plan, the query scans by indexes and without JIT. In a transaction of the
// caller, the settings last until the transaction ends.
func RowsGeneric[T any](ctx context.Context, db DB, verb, sql string, args ...any) ([]T, error) {
	b := &pgx.Batch{} // the batch is one transaction
	b.Queue(`
		select set_config('plan_cache_mode', 'force_generic_plan', true), set_config('enable_seqscan', 'off', true),
		       set_config('jit', 'off', true)`)
	b.Queue(sql, args...)
	results := db.SendBatch(ctx, b)
	_, err := results.Exec()
	var list []T
	if err == nil {
		rows, failed := results.Query()
		list, err = pgx.CollectRows(rows, pgx.RowToStructByName[T])
		err = cmp.Or(failed, err)
	}
	if err = cmp.Or(err, results.Close()); err != nil {
		return nil, fmt.Errorf("%s: %w", verb, err)
	}
	return list, nil
}

// Names is [Values] of texts, sorted.
func Names(ctx context.Context, db DB, verb, sql string, args ...any) ([]string, error) {
	names, err := Values[string](ctx, db, verb, sql, args...)
	slices.Sort(names)
	return names, err
}

// Row reads the one row of a query into a struct, by the names of the columns. It is [CollectOne] with pgx.ErrNoRows.
func Row[T any](ctx context.Context, db DB, verb, sql string, args ...any) (T, error) {
	return RowOr[T](ctx, db, pgx.ErrNoRows, verb, sql, args...)
}

// RowOr is [Row] with another error for no row, and for an id that is no UUID.
func RowOr[T any](ctx context.Context, db DB, missing error, verb, sql string, args ...any) (T, error) {
	rows, err := db.Query(ctx, sql, args...)
	return CollectOne(rows, err, missing, verb, pgx.RowToStructByName[T])
}

// CollectOne reads the only row of a query with fn. Without a row, and for an id that is no UUID or no text, it returns
// missing. A text parameter that PostgreSQL cannot store has the same result: pass it through Text. CollectOne wraps
// every error in verb.
func CollectOne[T any](rows pgx.Rows, err, missing error, verb string, fn pgx.RowToFunc[T]) (value T, _ error) {
	if err == nil {
		value, err = pgx.CollectExactlyOneRow(rows, fn)
	}
	if errors.Is(err, pgx.ErrNoRows) || IsCode(err, "22P02", "22021") {
		err = missing
	}
	if err != nil {
		return value, fmt.Errorf("%s: %w", verb, err)
	}
	return value, nil
}

// Deref returns the value of a nullable column; the zero value for NULL.
func Deref[T any](column *T) (value T) {
	if column != nil {
		value = *column
	}
	return value
}

// PageSize returns the size of a page: normal without a limit, otherwise limit, at most maximum.
func PageSize(limit, normal, maximum int) int {
	if limit <= 0 {
		return normal
	}
	return min(limit, maximum)
}

// Changed reports whether a statement changed a row. It wraps an error in verb.
func Changed(tag pgconn.CommandTag, err error, verb string) (bool, error) {
	if err != nil {
		return false, fmt.Errorf("%s: %w", verb, err)
	}
	return tag.RowsAffected() > 0, nil
}
