package skills

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// SQLError is a problem of the query of a sql: skill, with its position.
type SQLError struct {
	Field   string // handler or config.query
	Offset  int    // in bytes within the field; -1 if unknown
	Message string
}

func (e *SQLError) Error() string { return e.Message }

// SQLDatabase reports whether d is a sql: skill, and returns its named database; empty for the agent's own.
func SQLDatabase(d Definition) (database string, ok bool) {
	kind, _, _ := strings.Cut(strings.TrimSpace(d.Handler), ":")
	database, _ = d.Config["database"].(string)
	return database, kind == "sql"
}

// SQLWrites reports whether d declares that it writes.
func SQLWrites(d Definition) bool {
	writes, _ := d.Config["writes"].(bool)
	return writes
}

// CheckSQL lets the server prepare the query of a sql: skill without executing it. It returns a problem of the query as
// an [*SQLError]. tx stays usable.
func CheckSQL(ctx context.Context, tx pgx.Tx, d Definition, role string) error {
	r, err := resolve(d)
	if err != nil {
		return err
	}
	_, names, _ := resolveParameters(d)
	parsed, _ := parseHandler(r.handler, r.config, names)
	h, ok := parsed.(sqlHandler)
	if !ok {
		return nil
	}
	c := sqlCheck{handler: h, tx: tx, database: Database{Role: role}}
	c.field, c.offset = "config.query", -1
	text, _ := d.Config["query"].(string)
	if text == "" {
		c.field, text = "handler", d.Handler
	}
	c.offset = strings.Index(text, h.query)
	return c.check(ctx)
}

// sqlCheck checks one query. offset is its position in bytes within the field; -1 if it is not found there.
type sqlCheck struct {
	handler  sqlHandler
	tx       pgx.Tx
	database Database
	field    string
	offset   int
}

func (c sqlCheck) check(ctx context.Context) error {
	if err := c.handler.checkVerb(); err != nil {
		_, at := firstWord(c.handler.query)
		return &SQLError{c.field, c.offset + at, err.Error()}
	}
	fields, err := c.prepare(ctx, c.handler.query)
	if err != nil {
		return err
	}
	seen := make(map[string]bool, len(fields))
	for _, f := range fields {
		if seen[f.Name] {
			_, at := firstWord(c.handler.query)
			return &SQLError{c.field, c.offset + at, fmt.Sprintf(
				"several columns have the name %q; give each its own name with as", f.Name)}
		}
		seen[f.Name] = true
	}
	switch {
	case !c.handler.writes:
		_, err = c.prepare(ctx, c.handler.withRowLimit())
	case len(fields) > 0:
		_, err = c.prepare(ctx, c.handler.wrapReturning())
	}
	return err
}

// prepare lets the server prepare a text that contains the query, and returns the columns.
func (c sqlCheck) prepare(ctx context.Context, text string) ([]pgconn.FieldDescription, error) {
	bound, _, err := c.handler.bind(ctx, text, nil)
	if err != nil {
		return nil, &SQLError{c.field, c.offset, err.Error()}
	}
	inner, err := c.tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	statement, err := func() (*pgconn.StatementDescription, error) {
		if role := c.database.setRole(); role != "" {
			if _, err := inner.Exec(ctx, role); err != nil {
				return nil, fmt.Errorf("set the role %s: %w", c.database.Role, err)
			}
		}
		return inner.Conn().PgConn().Prepare(ctx, "", bound, nil)
	}()
	if rollbackErr := inner.Rollback(ctx); err == nil {
		err = rollbackErr
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	switch {
	case err == nil:
		return statement.Fields, nil
	case !ok:
		return nil, err
	}
	message, err := c.translateError(ctx, pgErr)
	if err != nil {
		return nil, err
	}
	return nil, &SQLError{c.field, c.locate(text, bound, int(pgErr.Position)), message}
}

var (
	suggestedColumnRegexp = regexp.MustCompile(`^Perhaps you meant to reference the column "(?:.*\.)?([^".]+)"`)
	missingRelationRegexp = regexp.MustCompile(`^relation "([^"]+)" does not exist$`)
	parameterRegexp       = regexp.MustCompile(`\$(\d+)`)
)

// translateError returns the server's error with its hint, in terms of the workspace file.
func (c sqlCheck) translateError(ctx context.Context, pgErr *pgconn.PgError) (string, error) {
	switch {
	case strings.Contains(pgErr.Message, "cannot insert multiple commands"),
		strings.Contains(pgErr.Message, "data-modifying statement must be at the top level"):
		return singleQueryOnly, nil
	case pgErr.Code == undefinedTable:
		if name := missingRelationRegexp.FindStringSubmatch(pgErr.Message); name != nil {
			near, err := c.suggestRelation(ctx, name[1])
			return pgErr.Message + near, err
		}
	}
	names := placeholders(c.handler.query)
	text := parameterRegexp.ReplaceAllStringFunc(pgErr.Message, func(ref string) string {
		n := 0
		if _, err := fmt.Sscanf(ref, "$%d", &n); err != nil || n < 1 || n > len(names) {
			return ref
		}
		return "@" + names[n-1]
	})
	if pgErr.Message == `syntax error at or near ":"` {
		text += "; a parameter is written @name, not :name"
	}
	if pgErr.Code == "42P18" { // indeterminate_datatype
		text += "; add the type, for example @limit::int"
	}
	if meant := suggestedColumnRegexp.FindStringSubmatch(pgErr.Hint); meant != nil {
		return fmt.Sprintf("%s (did you mean %q?)", text, meant[1]), nil
	}
	if pgErr.Hint != "" {
		text += "; " + pgErr.Hint
	}
	return text, nil
}

// suggestRelation returns a suggestion of a similar table or view, or "".
func (c sqlCheck) suggestRelation(ctx context.Context, name string) (string, error) {
	known, err := postgres.Names(ctx, c.tx, "list tables", `
		select relname from pg_class
		 where relkind in ('r', 'p', 'v', 'm', 'f') and pg_table_is_visible(oid)
		   and relnamespace <> 'pg_catalog'::regnamespace limit 5000`)
	if near := nearest.To(name, known); near != "" {
		return fmt.Sprintf(" (did you mean %q?)", near), err
	}
	return "", err
}

// locate converts the server's position to an offset in the field. The position counts characters of the bound text
// from 1.
func (c sqlCheck) locate(text, bound string, position int) int {
	if c.offset < 0 || position < 1 {
		return -1
	}
	at := originalOffset(text, bound, position-1) - strings.Index(text, c.handler.query)
	if at < 0 || at > len(c.handler.query) {
		return -1
	}
	return c.offset + at
}

var placeholderPrefixRegexp = regexp.MustCompile(`^@[\pL_][\pL\pN_]*`)

// originalOffset maps a character of the text with $numbers to a byte of the text with @names.
func originalOffset(text, bound string, character int) int {
	i, j := 0, 0
	for n := 0; n < character && j < len(bound) && i < len(text); n++ {
		if bound[j] == '$' && text[i] == '@' {
			number := parameterRegexp.FindString(bound[j:])
			if n+len(number) > character {
				return i
			}
			n += len(number) - 1
			i += len(placeholderPrefixRegexp.FindString(text[i:]))
			j += len(number)
			continue
		}
		_, wide := utf8.DecodeRuneInString(bound[j:])
		i, j = i+wide, j+wide
	}
	return i
}

// Unreachable reports whether an error of a [Databases] means that the server is unreachable for now.
func Unreachable(err error) bool { return postgres.Unreachable(err) }
