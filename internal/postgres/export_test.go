package postgres

import "github.com/jackc/pgx/v5"

// MaxCachedQueries is the maximum number of cached queries per connection.
const MaxCachedQueries = maxCachedQueries

// CachedQueries returns the number of a connection's cached queries.
func CachedQueries(conn *pgx.Conn) int { return len(cachedQueries(conn)) }
