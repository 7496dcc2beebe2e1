package migrations

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// lockPatience is how long a file stands in the queue for a lock, in PostgreSQL's words.
	lockPatience = "2s"
	// lockTries is how often it does so before it gives up: some minutes.
	lockTries = 60
	// unhurried lifts the limits that the database, or the role, sets for the time of everybody's statements: what a file does takes as long as the
	// tables are large, and would be cut off at the same place each time. Those that this server knows, for a transaction or for the session.
	unhurried = `
		select set_config(s.name, '0', $1) from pg_settings s
		 where s.name in ('statement_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout')`
	// letPass is how long those who stood behind it may pass between two tries.
	letPass = time.Second
	// askEvery is the pause of a process that waits for another one to have migrated.
	askEvery = 200 * time.Millisecond
	// outside is the first line of a file that is run statement by statement.
	outside = "-- outside a transaction\n"
)

// apply runs one file and records it.
func (m migration) apply(ctx context.Context, pool *pgxpool.Pool) error {
	try := m.inTransaction
	if strings.HasPrefix(m.sql, outside) {
		try = m.oneByOne
	}
	err := try(ctx, pool)
	for i := 1; i < lockTries && postgres.IsCode(err, "55P03", "40P01"); i++ { // no lock in time, or a deadlock
		if ended := pause(ctx, letPass); ended != nil {
			return fmt.Errorf("apply migration %s: %w", m.name, errors.Join(ended, err))
		}
		err = try(ctx, pool)
	}
	switch {
	case postgres.IsCode(err, "55P03", "40P01"):
		return fmt.Errorf("apply migration %s: others hold what it needs to lock (%w); end transactions that are open for long "+
			"(select pid, xact_start, query from pg_stat_activity order by xact_start) and migrate again", m.name, err)
	case postgres.IsCode(err, "42P07", "42710"): // a table, or another thing, of a name that this file is the first to use
		return fmt.Errorf("apply migration %s: the database has something of another program (%w); %s", m.name, err, ownDatabase)
	case err != nil:
		return fmt.Errorf("apply migration %s: %w", m.name, err)
	}
	return nil
}

// inTransaction applies the whole file or nothing.
func (m migration) inTransaction(ctx context.Context, pool *pgxpool.Pool) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `set local lock_timeout = '`+lockPatience+`'`); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, unhurried, true); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `set local plpgsql.extra_errors = 'none'`); err != nil { // which refuse what is no error, for developers
			return err
		}
		if _, err := tx.Exec(ctx, m.sql); err != nil {
			return err
		}
		return m.record(ctx, tx)
	})
}

func (m migration) record(ctx context.Context, db postgres.DB) error {
	_, err := db.Exec(ctx, `insert into agent_migrations (version, name, hash) values ($1, $2, $3)`, m.version, m.name, m.hash)
	return err
}

// oneByOne applies a file of statements that may be run again: `create index concurrently if not exists` and
// `drop index concurrently if exists`.
func (m migration) oneByOne(ctx context.Context, pool *pgxpool.Pool) error {
	for _, name := range m.builds() {
		if err := dropUnfinished(ctx, pool, name); err != nil {
			return err
		}
	}
	err := alongside(ctx, pool, func(conn *pgxpool.Conn) error {
		for statement := range strings.SplitSeq(strings.TrimPrefix(m.sql, outside), ";\n") {
			if strings.TrimSpace(statement) == "" {
				continue
			}
			if _, err := conn.Exec(ctx, statement, pgx.QueryExecModeSimpleProtocol); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return m.record(ctx, pool)
}

// alongside lends fn a session without limits of time, which is closed afterwards. Behind a pooler a session is not ours, so its limits stay.
func alongside(ctx context.Context, pool *pgxpool.Pool, fn func(conn *pgxpool.Conn) error) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if postgres.Pooled(pool) {
		return fn(conn)
	}
	defer func() { _ = conn.Conn().Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, unhurried, false); err != nil {
		return err
	}
	return fn(conn)
}

var built = regexp.MustCompile(`(?i)create\s+(?:unique\s+)?index\s+concurrently\s+if\s+not\s+exists\s+([a-z0-9_]+)`)

// builds names the indexes that a file builds concurrently.
func (m migration) builds() []string {
	var names []string
	for _, match := range built.FindAllStringSubmatch(m.sql, -1) {
		names = append(names, match[1])
	}
	return names
}

// dropUnfinished removes an index whose build ended in the middle: it is never used, and would be taken for a whole
// one. The server may still be at work on it for a process that is dead; that is waited for.
func dropUnfinished(ctx context.Context, pool *pgxpool.Pool, index string) error {
	table, err := unfinished(ctx, pool, index)
	if err != nil || table == "" {
		return err
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `lock table `+table+` in share update exclusive mode`)
		return err
	})
	if err != nil {
		return err
	}
	if table, err = unfinished(ctx, pool, index); err != nil || table == "" {
		return err
	}
	_, err = pool.Exec(ctx, `drop index concurrently if exists `+index, pgx.QueryExecModeSimpleProtocol)
	return err
}

// unfinished is the table, quoted, of an index that is not whole; empty when there is no such index.
func unfinished(ctx context.Context, pool *pgxpool.Pool, index string) (table string, err error) {
	err = pool.QueryRow(ctx, `
		select coalesce((select indrelid::regclass::text from pg_index where indexrelid = to_regclass($1) and not indisvalid), '')`,
		index).Scan(&table)
	return table, err
}

// pause waits, unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
