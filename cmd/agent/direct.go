package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// directConns is how many connections go around a pooler: two listen, and a migration takes three.
const directConns = 4

// around opens the way to the database that does not go through a pooler. It must lead to the same database: what is
// notified elsewhere is not heard, and a schema elsewhere is of no use.
func (s *session) around(ctx context.Context) error {
	pool, err := postgres.Open(ctx, s.config.DirectURL.Reveal(), postgres.Options{MaxConns: directConns})
	if err != nil {
		return fmt.Errorf("DATABASE_DIRECT_URL: %w", err)
	}
	s.direct = pool
	if postgres.Pooled(pool) {
		return &exitError{exitUsage, hint(errors.New("DATABASE_DIRECT_URL: it leads to a connection pooler too"),
			"name the host and port of PostgreSQL itself, or unset it: then the agent polls")}
	}
	same, err := sameDatabase(ctx, s.pool, pool)
	if err != nil {
		return fmt.Errorf("DATABASE_DIRECT_URL: %w", err)
	}
	if !same {
		return &exitError{exitUsage, hint(errors.New("DATABASE_DIRECT_URL: it names another database than DATABASE_URL"),
			"name the one that the pooler leads to, or unset it: then the agent polls")}
	}
	return nil
}

// sessions is the pool whose connections are sessions of the server's own, if there is one.
func (s *session) sessions() *pgxpool.Pool {
	if s.direct != nil {
		return s.direct
	}
	return s.pool
}

// sameDatabase reports whether two ways lead to one database of one running server.
func sameDatabase(ctx context.Context, ways ...*pgxpool.Pool) (bool, error) {
	var first string
	for i, way := range ways {
		var here string
		err := way.QueryRow(ctx, `
			select concat_ws(' ', extract(epoch from pg_postmaster_start_time()), (select oid from pg_database where datname = current_database()))`).Scan(&here)
		if err != nil {
			return false, fmt.Errorf("compare the databases: %w", err)
		}
		if i == 0 {
			first = here
		} else if here != first {
			return false, nil
		}
	}
	return true, nil
}
