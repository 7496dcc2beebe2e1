// Package migrations owns the schema: embedded SQL files, applied in order, and River's own migrations
// beside them in the schema "river".
//
// Up brings a database to this binary's version. It may be called by many processes at once: one
// migrates, the others wait for it and find nothing to do. The lock is a transaction-level advisory lock
// held by a connection that does nothing else, so it works through a transaction pooler and is freed by
// the server when the process dies. Each file is one transaction together with its row in
// agent_migrations, so a death in the middle leaves whole files applied and the rest to do.
//
// A database that was migrated by a newer binary is refused (ErrNewer), as is one whose applied files
// differ from this binary's (ErrChanged): files that have been released are never edited. sql/0001_lanes.sql
// opens with an essay about the tables.
package migrations

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// RiverSchema is the schema that River's tables live in.
const RiverSchema = "river"

var (
	// ErrNewer reports a schema that a newer binary made.
	ErrNewer = errors.New("the database was migrated by a newer version of agent; use that version or newer")
	// ErrChanged reports a database whose applied migrations are not this binary's.
	ErrChanged = errors.New("an applied migration differs from this binary's; use the binary that made the schema")
	// ErrOutdated reports a schema that misses migrations.
	ErrOutdated = errors.New("the database is not migrated; run `agent migrate`")
)

//go:embed sql/*.sql
var files embed.FS

type migration struct {
	version int
	name    string
	sql     string
	hash    string
}

// Up migrates the database to Version, River's schema included, and returns the names of the files it
// applied. It is idempotent and safe to run by many processes at once.
func Up(ctx context.Context, pool *pgxpool.Pool) ([]string, error) {
	all, err := load()
	if err != nil {
		return nil, err
	}
	lock, err := pool.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	defer func() { _ = lock.Rollback(context.WithoutCancel(ctx)) }()
	if _, err := lock.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('agent migrations', 0))`); err != nil {
		return nil, fmt.Errorf("lock migrations: %w", err)
	}
	_, err = pool.Exec(ctx, `
		create table if not exists agent_migrations (
		  version int primary key, name text not null, hash text not null,
		  applied_at timestamptz not null default clock_timestamp());
		create schema if not exists river`)
	if err != nil {
		return nil, fmt.Errorf("prepare migrations: %w", err)
	}
	missing, err := check(ctx, pool, all)
	if err != nil {
		return nil, err
	}
	if err := upRiver(ctx, pool); err != nil {
		return nil, err
	}
	var applied []string
	for _, m := range missing {
		if err := m.apply(ctx, pool); err != nil {
			return applied, err
		}
		applied = append(applied, m.name)
	}
	return applied, nil
}

// Check returns nil when the database has exactly this binary's schema, ErrOutdated when migrations are
// missing, ErrNewer or ErrChanged when the schema is another version's. It writes nothing.
func Check(ctx context.Context, pool *pgxpool.Pool) error {
	all, err := load()
	if err != nil {
		return err
	}
	var exists bool
	if err := pool.QueryRow(ctx, `select to_regclass('agent_migrations') is not null`).Scan(&exists); err != nil {
		return fmt.Errorf("check schema: %w", err)
	}
	if !exists {
		return ErrOutdated
	}
	missing, err := check(ctx, pool, all)
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		return ErrOutdated
	}
	return nil
}

// Version is the number of the newest migration in this binary.
func Version() int {
	all, err := load()
	if err != nil {
		return 0
	}
	return all[len(all)-1].version
}

// Hash names this binary's schema: equal hashes mean equal migrations.
func Hash() string {
	sum := sha256.New()
	all, err := load()
	if err != nil {
		return ""
	}
	for _, m := range all {
		sum.Write([]byte(m.hash))
	}
	return hex.EncodeToString(sum.Sum(nil))[:16]
}

// load reads the embedded files in order.
func load() ([]migration, error) {
	names, err := fs.Glob(files, "sql/*.sql")
	if err != nil {
		return nil, fmt.Errorf("list migrations: %w", err)
	}
	all := make([]migration, 0, len(names))
	for _, path := range names {
		text, err := files.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		name := strings.TrimPrefix(path, "sql/")
		version, err := strconv.Atoi(name[:strings.IndexByte(name, '_')])
		if err != nil {
			return nil, fmt.Errorf("migration %s has no number: %w", name, err)
		}
		sum := sha256.Sum256(text)
		all = append(all, migration{version, name, string(text), hex.EncodeToString(sum[:])})
	}
	return all, nil
}

// check compares what is applied with what this binary has, and returns what is missing.
func check(ctx context.Context, pool *pgxpool.Pool, all []migration) ([]migration, error) {
	rows, err := pool.Query(ctx, `select version, name, hash from agent_migrations order by version`)
	if err != nil {
		return nil, fmt.Errorf("read agent_migrations: %w", err)
	}
	type row struct {
		Version    int
		Name, Hash string
	}
	applied, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil {
		return nil, fmt.Errorf("read agent_migrations: %w", err)
	}
	for i, a := range applied {
		if i >= len(all) {
			return nil, fmt.Errorf("schema version %d: %w", a.Version, ErrNewer)
		}
		if a.Hash != all[i].hash {
			return nil, fmt.Errorf("migration %s: %w", a.Name, ErrChanged)
		}
	}
	return all[len(applied):], nil
}

// apply runs one file and records it, in one transaction.
func (m migration) apply(ctx context.Context, pool *pgxpool.Pool) error {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, m.sql); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `insert into agent_migrations (version, name, hash) values ($1, $2, $3)`,
			m.version, m.name, m.hash)
		return err
	})
	if err != nil {
		return fmt.Errorf("apply migration %s: %w", m.name, err)
	}
	return nil
}

func upRiver(ctx context.Context, pool *pgxpool.Pool) error {
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: RiverSchema})
	if err != nil {
		return fmt.Errorf("prepare River's migrations: %w", err)
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return fmt.Errorf("migrate River's schema: %w", err)
	}
	return nil
}
