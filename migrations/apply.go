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
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

const (
	// lockTimeout is the time that a file waits in the queue for a lock, in PostgreSQL's words. It is less than the
	// default deadlock_timeout of a second: in a deadlock with a serving process the file usually gives up.
	lockTimeout = "400ms"
	// lockTries bounds the tries for a lock: they take some minutes.
	lockTries = 150
	// noTimeouts disables this server's statement and transaction timeouts, for the transaction or the session. A large
	// table needs longer; a timeout would stop the migration at the same place each time.
	noTimeouts = `
		select set_config(s.name, '0', $1) from pg_settings s
		 where s.name in ('statement_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout')`
	// keepalives let the server notice within 30 seconds that the machine of a migration is gone.
	keepalives = `
		select set_config('tcp_keepalives_' || name, value, true)
		  from (values ('idle', '15'), ('interval', '5'), ('count', '3')) s (name, value)`
	// retryPause is the pause between two tries; queued statements run meanwhile.
	retryPause = time.Second
	// lockPollInterval is the poll interval of a process that waits for the migration of another one.
	lockPollInterval = 200 * time.Millisecond
	// quietWait is how long a process waits for the migration of another one without a message.
	quietWait = 5 * time.Second
	// fixedSearchPath is the search path that functions of the contract keep (set search_path from current). No object of
	// a caller, such as a temporary table, hides the tables.
	fixedSearchPath = `select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true)`
	// outsideMark is the first line of a file that runs statement by statement, outside a transaction.
	outsideMark = "-- outside a transaction\n"
)

// step is the unit that is applied and recorded together: the baseline, the bridge, a change, changed code, or the last
// two of these.
type step struct {
	what    string // in errors
	version int    // 0: code alone
	hash    string
	sql     string
	code    []schemaFile
	names   []string // Up's result
}

// outside reports whether the step's statements run one by one.
func (s step) outside() bool { return strings.HasPrefix(s.sql, outsideMark) }

// apply runs one step and records it.
func (s step) apply(ctx context.Context, pool *pgxpool.Pool) error {
	try := s.runInTransaction
	if s.outside() {
		try = s.runStatements
	}
	err := try(ctx, pool)
	for i := 1; i < lockTries && postgres.IsCode(err, "55P03", "40P01"); i++ { // no lock in time, or a deadlock
		if !sleep.For(ctx, retryPause) {
			return fmt.Errorf("apply %s: %w", s.what, errors.Join(ctx.Err(), err))
		}
		err = try(ctx, pool)
	}
	switch {
	case postgres.IsCode(err, "55P03", "40P01"):
		return fmt.Errorf("apply %s: other transactions hold locks that it needs (%w); end transactions that are open for long "+
			"(select pid, xact_start, query from pg_stat_activity order by xact_start) and migrate again", s.what, err)
	case postgres.IsCode(err, "42P06", "42P07", "42710"): // a schema, table or other object with a name of this file
		return fmt.Errorf("apply %s: the database has an object of another program (%w); %s", s.what, err, ownDatabase)
	case err != nil:
		return fmt.Errorf("apply %s: %w", s.what, err)
	}
	return nil
}

// runInTransaction applies the whole file or nothing.
func (s step) runInTransaction(ctx context.Context, pool *pgxpool.Pool) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `set local lock_timeout = '`+lockTimeout+`'`); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, noTimeouts, true); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, `set local plpgsql.extra_errors = 'none'`); err != nil { // they turn warnings into errors
			return err
		}
		if _, err := tx.Exec(ctx, fixedSearchPath); err != nil {
			return err
		}
		// A partitioned table must not name the tablespace of the database itself.
		_, err := tx.Exec(ctx, `
			select set_config('default_tablespace', '', true) from pg_database d join pg_tablespace s on s.oid = d.dattablespace
			 where d.datname = current_database() and s.spcname = current_setting('default_tablespace')`)
		if err != nil {
			return err
		}
		if s.version == baseline { // its first file is code, too
			if _, err := tx.Exec(ctx, `set local check_function_bodies = off`); err != nil {
				return err
			}
		}
		if _, err := tx.Exec(ctx, s.sql); err != nil {
			return err
		}
		if err := s.replaceCode(ctx, tx); err != nil {
			return err
		}
		return s.record(ctx, tx)
	})
}

// replaceCode applies the code of all files, and only then checks the bodies: functions call those of later files.
func (s step) replaceCode(ctx context.Context, tx pgx.Tx) error {
	if len(s.code) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, `set local check_function_bodies = off`); err != nil {
		return err
	}
	for _, n := range s.code {
		if _, err := tx.Exec(ctx, n.code); err != nil {
			return fmt.Errorf("code of %s: %w", n.name, err)
		}
		_, err := tx.Exec(ctx, `
			insert into agent_schema_code as c (name, hash) values (@name, @hash)
			on conflict (name) do update set hash = excluded.hash, applied_at = clock_timestamp()`,
			postgres.Strict{"name": n.name, "hash": digest(n.code)})
		if err != nil {
			return err
		}
	}
	return nil
}

func (s step) record(ctx context.Context, db postgres.DB) error {
	if s.version == 0 {
		return nil
	}
	_, err := db.Exec(ctx, `insert into agent_migrations (version, name, hash) values (@version, @name, @hash)`,
		postgres.Strict{"version": s.version, "name": s.names[0], "hash": s.hash})
	return err
}

// runStatements applies a file of repeatable statements: `create index concurrently if not exists` and `drop index
// concurrently if exists`.
func (s step) runStatements(ctx context.Context, pool *pgxpool.Pool) error {
	err := withSession(ctx, pool, func(conn *pgxpool.Conn) error {
		for _, name := range s.indexNames() {
			if err := dropInvalidIndex(ctx, conn, name); err != nil {
				return err
			}
		}
		for statement := range strings.SplitSeq(strings.TrimPrefix(s.sql, outsideMark), ";\n") {
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
	return s.record(ctx, pool)
}

// withSession calls fn with a session without time limits, and closes the session afterwards. Behind a pooler, the
// limits stay, because clients share the session.
func withSession(ctx context.Context, pool *pgxpool.Pool, fn func(conn *pgxpool.Conn) error) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	if postgres.Pooled(pool) {
		return fn(conn)
	}
	defer func() { _ = conn.Conn().Close(context.WithoutCancel(ctx)) }()
	if _, err := conn.Exec(ctx, noTimeouts, false); err != nil {
		return err
	}
	return fn(conn)
}

var indexBuild = regexp.MustCompile(`(?i)create\s+(?:unique\s+)?index\s+concurrently\s+if\s+not\s+exists\s+([a-z0-9_]+)`)

// indexNames returns the indexes that a file builds concurrently.
func (s step) indexNames() []string {
	var names []string
	for _, match := range indexBuild.FindAllStringSubmatch(s.sql, -1) {
		names = append(names, match[1])
	}
	return names
}

// dropInvalidIndex drops an index whose build was interrupted. The server never uses such an index, and `create index
// if not exists` would take it for a complete one. The server may still build it for a dead process: the lock of the
// table waits for that.
func dropInvalidIndex(ctx context.Context, conn *pgxpool.Conn, index string) error {
	table, err := invalidIndexTable(ctx, conn, index)
	if err != nil || table == "" {
		return err
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `lock table `+table+` in share update exclusive mode`)
		return err
	})
	if err != nil {
		return err
	}
	if table, err = invalidIndexTable(ctx, conn, index); err != nil || table == "" {
		return err
	}
	_, err = conn.Exec(ctx, `drop index concurrently if exists `+index, pgx.QueryExecModeSimpleProtocol)
	return err
}

// invalidIndexTable returns the quoted table of an incomplete index; empty if there is no such index.
func invalidIndexTable(ctx context.Context, conn *pgxpool.Conn, index string) (table string, err error) {
	err = conn.QueryRow(ctx, `
		select coalesce((select indrelid::regclass::text from pg_index where indexrelid = to_regclass($1) and not indisvalid),
		                '')`,
		index).Scan(&table)
	return table, err
}
