package postgres

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
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

// PostgreSQL has times that Go and JSON lack: infinity, and years before 1 and after 9999. For such a time, a query
// returns the nearest time that every client can represent. So one such time does not block the reading of other rows.
// The earliest of these times is not Go's zero time, which means no time.
var (
	firstTime = time.Date(1, time.January, 2, 0, 0, 0, 0, time.UTC)
	lastTime  = time.Date(9999, time.December, 30, 0, 0, 0, 0, time.UTC)
)

// readTimes makes conn read times as finite UTC values in any zone of the machine. So times look the same in JSON and
// logs of every machine.
func readTimes(conn *pgx.Conn) {
	conn.TypeMap().RegisterType(&pgtype.Type{
		Name: "timestamptz", OID: pgtype.TimestamptzOID, Codec: &timeCodec{pgtype.TimestamptzCodec{ScanLocation: time.UTC}},
	})
}

// timeCodec reads values that pgx's codec refuses into a time.Time. It reads other targets like pgx.
type timeCodec struct{ pgtype.TimestamptzCodec }

// PlanScan implements pgtype.Codec.
func (c *timeCodec) PlanScan(m *pgtype.Map, oid uint32, format int16, target any) pgtype.ScanPlan {
	if _, plain := target.(*time.Time); !plain {
		return c.TimestamptzCodec.PlanScan(m, oid, format, target)
	}
	if plan := c.TimestamptzCodec.PlanScan(m, oid, format, &pgtype.Timestamptz{}); plan != nil {
		return timePlan{plan}
	}
	return nil
}

type timePlan struct{ whole pgtype.ScanPlan }

// Scan implements pgtype.ScanPlan.
func (p timePlan) Scan(from []byte, target any) error {
	var read pgtype.Timestamptz
	if err := p.whole.Scan(from, &read); err != nil {
		return err
	}
	into, plain := target.(*time.Time)
	switch {
	case !plain:
		return fmt.Errorf("cannot scan a time into %T", target)
	case !read.Valid:
		return fmt.Errorf("cannot scan NULL into %T", target)
	}
	*into = clampTime(read)
	return nil
}

// clampTime returns a time within the range that JSON and every client can represent.
func clampTime(t pgtype.Timestamptz) time.Time {
	switch {
	case t.InfinityModifier == pgtype.Infinity, t.InfinityModifier == pgtype.Finite && t.Time.After(lastTime):
		return lastTime
	case t.InfinityModifier == pgtype.NegativeInfinity, t.Time.Before(firstTime):
		return firstTime
	}
	return t.Time
}

// StaleError reports a refused change: the row has another revision than the change is based on.
type StaleError struct {
	What, Name    string // such as objective, and its name
	Read, Current int    // the revision that the change is based on, and the current one
}

func (e *StaleError) Error() string {
	return fmt.Sprintf(
		"%s %.60q is at revision %d and not at %d: it was changed since; nothing was done, look at it again", e.What,
		e.Name, e.Current, e.Read)
}

// LockRevision locks the row that sql selects by @name, until the transaction ends. sql returns the row's revision.
// LockRevision returns a [*StaleError] for another revision, and missing for no row. Revision 0 matches every revision.
func LockRevision(ctx context.Context, tx pgx.Tx, what, sql, name string, revision int, missing error) error {
	if revision == 0 {
		return nil
	}
	rows, err := tx.Query(ctx, sql, Strict{"name": name})
	current, err := CollectOne(rows, err, missing, fmt.Sprintf("lock %s %q", what, name), pgx.RowTo[int])
	if err == nil && current != revision {
		err = &StaleError{what, name, revision, current}
	}
	return err
}
