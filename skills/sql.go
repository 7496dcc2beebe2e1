package skills

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Bounds of a result. Further rows are dropped, and the result is marked truncated.
const (
	defaultRows = 100
	maxRows     = 1000
	maxRowsSize = maxResultBytes - 1024 // bytes of all rows; the rest is for the object around them
)

// rollbackTimeout bounds the end of a transaction after its context has ended.
const rollbackTimeout = 5 * time.Second

// queryCanceled is the SQLSTATE of a statement that statement_timeout, or an administrator, cancelled.
const queryCanceled = "57014"

// sqlHandler runs one query: select, with, values or table. PostgreSQL encodes its rows as JSON.
type sqlHandler struct {
	query    string
	rowLimit int
	timeout  time.Duration // 0 for the skill's timeout
	database string        // a named database; empty for the agent's own
	writes   bool
}

type sqlConfig struct {
	Query              string `json:"query"`
	Database           string `json:"database"`
	Writes             bool   `json:"writes"`
	RowLimit           int    `json:"row_limit"`
	StatementTimeoutMS int    `json:"statement_timeout_ms"`
}

// sqlResult is the result of a sql: skill.
type sqlResult struct {
	Rows      []json.RawMessage `json:"rows"`
	RowCount  int               `json:"row_count"`
	Truncated bool              `json:"truncated"` // further rows were dropped
}

func parseSQL(rest string, config json.RawMessage, parameters []string) (handler, fielderr.List) {
	var c sqlConfig
	if err := decodeConfig(config, &c); err != nil {
		return nil, []error{err}
	}
	var problems fielderr.List
	if rest != "" && c.Query != "" {
		problems.Add("handler", "the query is here and in config.query; keep one")
	}
	query := strings.TrimRight(strings.TrimSpace(rest+c.Query), "; \t\r\n")
	if query == "" {
		problems.Add("config.query", "is empty; write one select")
	} else {
		problems = append(problems, checkPlaceholders(query, parameters)...)
	}
	if c.RowLimit < 0 || c.RowLimit > maxRows {
		problems.Add("config.row_limit", "must be between 1 and %d", maxRows)
	}
	if c.StatementTimeoutMS < 0 || c.StatementTimeoutMS > int(maxTimeout.Milliseconds()) {
		problems.Add("config.statement_timeout_ms", "must be between 1 and %d", maxTimeout.Milliseconds())
	}
	if c.Writes && c.Database == "" {
		problems.Add("config.writes", "needs config.database; no skill writes to the agent's own database")
	}
	c.RowLimit = cmp.Or(c.RowLimit, defaultRows)
	return sqlHandler{
		query: query, rowLimit: c.RowLimit, timeout: time.Duration(c.StatementTimeoutMS) * time.Millisecond,
		database: c.Database, writes: c.Writes,
	}, problems
}

func (h sqlHandler) ready(r *Registry) error {
	if h.database == "" && r.pool == nil || h.database != "" && r.named == nil {
		return errors.New("there is no database for sql: skills")
	}
	return nil
}

func (h sqlHandler) call(ctx context.Context, r *Registry, c Call, args map[string]any) (any, error) {
	timeout := c.Skill.Timeout()
	if h.timeout > 0 {
		timeout = min(timeout, h.timeout)
	}
	if err := h.checkVerb(); err != nil {
		return nil, newCallError(ClassSQL, "%s", err)
	}
	db, err := h.openDatabase(ctx, r)
	if err != nil {
		return nil, err
	}
	if h.writes {
		return h.runEffect(ctx, db, c, timeout, args)
	}
	query, values, err := h.bind(ctx, h.withRowLimit(), args)
	if err != nil {
		return nil, newCallError(ClassSQL, "%s", err)
	}
	// A read has no effect, so the skill repeats it after a restart of the database.
	result, err := executions.RetryTransient(ctx, func(ctx context.Context) (sqlResult, error) {
		result, err := h.readOnly(ctx, db, timeout, query, values)
		if postgres.IsCode(err, queryCanceled) {
			err = classifySQLError(timeout, err) // the skill's own timeout is not transient
		}
		return result, err
	})
	if err != nil {
		return nil, classifySQLError(timeout, err)
	}
	return result, nil
}

// openDatabase returns the database of the query.
func (h sqlHandler) openDatabase(ctx context.Context, r *Registry) (Database, error) {
	if h.database == "" {
		return Database{Pool: r.pool}, nil
	}
	db, err := r.named(ctx, h.database)
	if err == nil && h.writes && !db.Writes {
		err = NewConfigError("database %s is read-only; declare access: write, or leave config.writes out", h.database)
	}
	return db, err
}

// readOnly runs the query in a read-only transaction and rolls the transaction back. The rollback undoes notifications
// and session settings, which a read-only transaction permits. Advisory locks outlive a transaction, so readOnly
// releases them inside it: behind a pooler, the session may then belong to another client. Functions that act outside
// the transaction, such as pg_cancel_backend, are a matter of the role's rights.
func (h sqlHandler) readOnly(
	ctx context.Context, db Database, timeout time.Duration, query string, values []any,
) (result sqlResult, err error) {
	tx, err := db.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly})
	if err != nil {
		return sqlResult{}, err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		_, unlockErr := tx.Exec(closing, `rollback to savepoint lanekeeper_query; select pg_advisory_unlock_all()`)
		if unlockErr != nil { // the connection is unusable
			_ = tx.Conn().Close(closing)
		}
		if rollbackErr := tx.Rollback(closing); err == nil && unlockErr == nil {
			err = rollbackErr
		}
	}()
	if _, err = tx.Exec(ctx, transactionSettings(timeout)+"; savepoint lanekeeper_query; "+db.setRole()); err != nil {
		return sqlResult{}, err
	}
	return h.run(ctx, tx.Conn(), query, values)
}

// transactionSettings sets the timeouts of a transaction.
func transactionSettings(timeout time.Duration) string {
	limit := strconv.FormatInt(max(timeout.Milliseconds(), 1), 10)
	return "set local statement_timeout = " + limit + "; set local timezone = 'UTC'"
}

// withRowLimit wraps a read-only query in its row limit.
func (h sqlHandler) withRowLimit() string {
	return withSizeLimit("(\n" + h.query + "\n) lanekeeper_row limit " + strconv.Itoa(h.rowLimit+1))
}

// withSizeLimit wraps rows, an entry of a from clause with the alias lanekeeper_row. The server sends the size of each
// row. It sends the rows themselves until their total size reaches maxRowsSize.
func withSizeLimit(rows string) string {
	return "select case when sum(lanekeeper_size) over (rows unbounded preceding) <= " + strconv.Itoa(maxRowsSize) +
		" then lanekeeper_text end, lanekeeper_size" +
		" from (select lanekeeper_text, octet_length(lanekeeper_text) + 1 as lanekeeper_size" +
		" from (select to_jsonb(lanekeeper_row)::text as lanekeeper_text from " + rows +
		") lanekeeper_texts) lanekeeper_sizes"
}

// run prepares the query, which rejects several statements, and executes it. It sends arguments as text of the types
// that the server inferred.
func (h sqlHandler) run(ctx context.Context, conn *pgx.Conn, query string, values []any) (sqlResult, error) {
	statement, err := conn.PgConn().Prepare(ctx, "", query, nil)
	if err != nil {
		return sqlResult{}, err
	}
	texts, err := parameterTexts(values, statement.ParamOIDs)
	if err != nil {
		return sqlResult{}, err
	}
	result, large := sqlResult{Rows: []json.RawMessage{}}, ""
	reader := conn.PgConn().ExecPrepared(ctx, "", texts, nil, nil)
	for reader.NextRow() {
		row, size := reader.Values()[0], reader.Values()[1]
		if row == nil && len(result.Rows) == 0 && !result.Truncated {
			large = string(size)
		}
		if row == nil || len(result.Rows) == h.rowLimit {
			result.Truncated = true
		}
		if !result.Truncated {
			result.Rows = append(result.Rows, slices.Clone(row))
		}
	}
	_, err = reader.Close()
	if err == nil && large != "" {
		err = newCallError(ClassTooLarge, "the first row has %s bytes, over the limit of %d: request less", large,
			maxRowsSize)
	}
	result.RowCount = len(result.Rows)
	return result, err
}

// Database is the target of a sql: skill.
type Database struct {
	Pool   *pgxpool.Pool
	Writes bool   // skills may declare that they write
	Role   string // role of the queries; empty for the connection's role
}

// Databases opens a named database. The error is a [*CallError]: [ClassConfiguration] for an unknown database or a
// missing setting, [ClassNetwork] for an unreachable server. It is safe for concurrent use.
type Databases func(ctx context.Context, name string) (Database, error)

// Check verifies that queries can run as the database's role, and that a writable database has the ledger of effects.
func (d Database) Check(ctx context.Context) error {
	tx, err := d.Pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly})
	if err != nil {
		return fmt.Errorf("begin a transaction: %w", err)
	}
	defer func() { _ = tx.Rollback(ctx) }() // the transaction only reads
	var ledger bool
	if err := tx.QueryRow(ctx, `select to_regclass('agent_effects') is not null`).Scan(&ledger); err != nil {
		return fmt.Errorf("find the table agent_effects: %w", err)
	}
	if d.Writes && !ledger {
		return errors.New("the table agent_effects is missing, which writing skills need: run agent apply")
	}
	if d.Role != "" {
		if _, err := tx.Exec(ctx, d.setRole()); err != nil {
			return fmt.Errorf("set the role %s: %w", d.Role, err)
		}
	}
	return nil
}

// setRole returns the statement that sets the database's role for a transaction; empty for none.
func (d Database) setRole() string {
	if d.Role == "" {
		return ""
	}
	return "set local role " + pgx.Identifier{d.Role}.Sanitize()
}

// classifySQLError classifies an error of a query.
func classifySQLError(limit fmt.Stringer, err error) error {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	switch {
	case errors.As(err, new(*CallError)):
		return err
	case !ok:
		return newCallError(ClassNetwork, "query the database: %s", err)
	case postgres.IsCode(err, queryCanceled):
		return newCallError(ClassTimeout, "the query did not end within %s", limit)
	}
	message := fmt.Sprintf("%s (SQLSTATE %s)", pgErr.Message, pgErr.Code)
	if pgErr.Hint != "" {
		message += ": " + pgErr.Hint
	}
	return newCallError(ClassSQL, "%s", message)
}

// statementStartRegexp matches space, comments and brackets before the first word of a statement.
var statementStartRegexp = regexp.MustCompile(`^(?:\s|--[^\n]*(?:\n|$)|/\*(?s:.*?)\*/|\()*`)

var wordRegexp = regexp.MustCompile(`^[A-Za-z]+`)

// firstWord returns the first word of a statement and its byte offset.
func firstWord(query string) (first string, at int) {
	at = len(statementStartRegexp.FindString(query))
	return wordRegexp.FindString(query[at:]), at
}

const singleQueryOnly = "only one read-only query is possible: select, with, values or table; " +
	"to write to a named database, declare config.writes"

// checkVerb rejects a statement of a kind that a skill may not run, by its first word. It explains mistakes; the
// read-only transaction and the role protect the data.
func (h sqlHandler) checkVerb() error {
	first, _ := firstWord(h.query)
	read := []string{"select", "with", "values", "table"}
	write := []string{"insert", "update", "delete", "merge"}
	switch lower := strings.ToLower(first); {
	case slices.Contains(read, lower), h.writes && slices.Contains(write, lower):
		return nil
	case h.writes:
		return fmt.Errorf("%q is not possible; write one insert, update, delete, merge, select or with", first)
	case slices.Contains(write, lower):
		return fmt.Errorf("%s; this begins with %s", singleQueryOnly, lower)
	}
	if near := nearest.To(strings.ToLower(first), read); near != "" {
		return fmt.Errorf("%s; this begins with %q (did you mean %q?)", singleQueryOnly, first, near)
	}
	return errors.New(singleQueryOnly)
}
