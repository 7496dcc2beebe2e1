package postgres

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Strict is the standard form of named arguments: a missing or extra name is an error, not a NULL. A connection caches
// the rewritten queries, because the search for names in a long query takes longer than the rest of the client's work.
type Strict map[string]any

// rewrittenQuery is a query with positional parameters.
type rewrittenQuery struct {
	sql   string
	names []string // names of the parameters, in their order
}

// maxCachedQueries bounds the cached queries of a connection. pgx keeps as many prepared statements.
const maxCachedQueries = 512

// queryCacheKey is the key of the cached queries in a connection's custom data.
const queryCacheKey = "lanekeeper texts"

// RewriteQuery implements pgx.QueryRewriter.
func (s Strict) RewriteQuery(ctx context.Context, conn *pgx.Conn, sql string, args []any) (string, []any, error) {
	known := cachedQueries(conn)
	if t, ok := known[sql]; ok {
		if values, ok := s.values(t.names); ok {
			return t.sql, values, nil
		}
	}
	rewritten, values, err := pgx.StrictNamedArgs(s).RewriteQuery(ctx, conn, sql, args)
	if err != nil || known == nil {
		return rewritten, values, err
	}
	// With a separate value for each name, the values are the names in their order.
	own := pgx.StrictNamedArgs{}
	for name := range s {
		own[name] = name
	}
	_, order, err := own.RewriteQuery(ctx, conn, sql, args)
	if err != nil {
		return "", nil, err
	}
	t := rewrittenQuery{sql: rewritten, names: make([]string, len(order))}
	for i, name := range order {
		t.names[i], _ = name.(string)
	}
	if len(known) >= maxCachedQueries {
		clear(known)
	}
	known[sql] = t
	return rewritten, values, nil
}

// values lists the values of names; false if names and the argument names differ.
func (s Strict) values(names []string) ([]any, bool) {
	if len(names) != len(s) {
		return nil, false
	}
	values := make([]any, len(names))
	for i, name := range names {
		value, ok := s[name]
		if !ok {
			return nil, false
		}
		values[i] = value
	}
	return values, true
}

// cachedQueries returns the cached queries of a connection; nil without a connection. Only one goroutine uses a
// connection at a time.
func cachedQueries(conn *pgx.Conn) map[string]rewrittenQuery {
	if conn == nil {
		return nil
	}
	data := conn.PgConn().CustomData()
	known, ok := data[queryCacheKey].(map[string]rewrittenQuery)
	if !ok {
		known = map[string]rewrittenQuery{}
		data[queryCacheKey] = known
	}
	return known
}

// Text returns s in a form for text columns: without NUL, and with U+FFFD for invalid UTF-8.
func Text(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\ufffd"), "\x00", "")
}

// IsText reports whether a text column can hold s: s is UTF-8 without NUL.
func IsText(s string) bool { return Text(s) == s }
