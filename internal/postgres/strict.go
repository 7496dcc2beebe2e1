package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Strict is the one form of named arguments the house uses: a name that is missing or left over is an error, not a
// NULL. A connection remembers how the texts that were sent over it are rewritten: to look for the names in a long
// one takes longer than the rest of what is done here to send it.
type Strict map[string]any

// text is a query as the server gets it.
type text struct {
	sql   string
	names []string // of its parameters, in their order
}

// textsMost is how many texts a connection remembers: as many as statements that pgx keeps prepared.
const textsMost = 512

// textsKey is where a connection has them.
const textsKey = "lanekeeper texts"

// RewriteQuery is part of pgx.QueryRewriter.
func (s Strict) RewriteQuery(ctx context.Context, conn *pgx.Conn, sql string, args []any) (string, []any, error) {
	known := textsOf(conn)
	if t, ok := known[sql]; ok {
		if values, ok := s.in(t.names); ok {
			return t.sql, values, nil
		}
	}
	rewritten, values, err := pgx.StrictNamedArgs(s).RewriteQuery(ctx, conn, sql, args)
	if err != nil || known == nil {
		return rewritten, values, err
	}
	// With each name as its own value, the values are the names in their order.
	own := pgx.StrictNamedArgs{}
	for name := range s {
		own[name] = name
	}
	_, order, err := own.RewriteQuery(ctx, conn, sql, args)
	if err != nil {
		return "", nil, err
	}
	t := text{sql: rewritten, names: make([]string, len(order))}
	for i, name := range order {
		t.names[i], _ = name.(string)
	}
	if len(known) >= textsMost {
		clear(known)
	}
	known[sql] = t
	return rewritten, values, nil
}

// in lists the values of names; false when they are not exactly those that there are.
func (s Strict) in(names []string) ([]any, bool) {
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

// textsOf are the texts that a connection remembers; nil without one. Only one goroutine uses a connection at a time.
func textsOf(conn *pgx.Conn) map[string]text {
	if conn == nil {
		return nil
	}
	data := conn.PgConn().CustomData()
	known, ok := data[textsKey].(map[string]text)
	if !ok {
		known = map[string]text{}
		data[textsKey] = known
	}
	return known
}
