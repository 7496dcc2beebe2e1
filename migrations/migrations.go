// Package migrations owns the schema: embedded SQL files, applied in order, and River's own migrations
// beside them in the schema "river".
//
// Up brings a database to this binary's version. It may be called by many processes at once: one
// migrates, the others wait for it and find nothing to do. The lock is a transaction-level advisory lock
// held by a connection that does nothing else, so it works through a transaction pooler and is freed by
// the server when the process dies. Each file is one transaction together with its row in
// agent_migrations, so a death in the middle leaves whole files applied and the rest to do.
//
// It may be called while other processes serve, of this version or the one before. A file never stands in
// a queue for a lock for longer than two seconds, because all who come later stand behind it: it gives up,
// lets them pass, and tries again. What a file may do at all is the rule of docs/upgrading.md, expand
// first and contract a release later, and the tests here hold every file to it. A file whose first line is
// `-- outside a transaction` builds indexes concurrently, statement by statement; what a death leaves half
// built is removed and built again.
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
	"sync"

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
	ErrOutdated = errors.New("the database is not migrated to this version of agent; run `agent migrate`")
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
func Up(ctx context.Context, pool *pgxpool.Pool) ([]string, error) { return UpWith(ctx, pool, files) }

// UpWith is Up with the files sql/*.sql of another version, as its binary would do it: for the tests of upgrades.
func UpWith(ctx context.Context, pool *pgxpool.Pool, version fs.FS) ([]string, error) {
	all, err := load(version)
	if err != nil {
		return nil, err
	}
	if pool.Config().MaxConns < 2 { // one holds the lock; the other would be waited for without end
		return nil, errors.New("migrate: it takes two connections at once, and pool_max_conns in DATABASE_URL allows one; set it to 2 or more")
	}
	lock, err := pool.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	defer func() { _ = lock.Rollback(context.WithoutCancel(ctx)) }()
	if err := alone(ctx, lock); err != nil {
		return nil, err
	}
	if err := refusePlace(ctx, pool); err != nil {
		return nil, err
	}
	if err := refuseStrangers(ctx, pool, all); err != nil {
		return nil, err
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

// alone takes the lock under which one process migrates, or waits for it. An index that is built concurrently waits for
// all who have a snapshot. So the lock is asked for again and again, since a session that stands in a queue has one, and
// by the simple protocol, since that of the other's last statement lives on in its portal. The session does nothing else
// while migrations run, for however long: the server must not end it, or its transaction, for that.
func alone(ctx context.Context, lock pgx.Tx) error {
	if _, err := lock.Exec(ctx, unhurried, true); err != nil {
		return fmt.Errorf("lock migrations: %w", err)
	}
	for {
		var mine bool
		err := lock.QueryRow(ctx, `select pg_try_advisory_xact_lock(hashtextextended('agent migrations', 0))`,
			pgx.QueryExecModeSimpleProtocol).Scan(&mine)
		if err != nil {
			return fmt.Errorf("lock migrations: %w", err)
		}
		if mine {
			return nil
		}
		if err := pause(ctx, askEvery); err != nil {
			return fmt.Errorf("wait for another process that migrates: %w", err)
		}
	}
}

// Check returns nil when the database has exactly this binary's schema, ErrOutdated when migrations are
// missing, ErrNewer or ErrChanged when the schema is another version's. It writes nothing.
func Check(ctx context.Context, pool *pgxpool.Pool) error {
	all, err := embedded()
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
	all, err := embedded()
	if err != nil {
		return 0
	}
	return all[len(all)-1].version
}

// Hash names this binary's schema: equal hashes mean equal migrations.
func Hash() string {
	sum := sha256.New()
	all, err := embedded()
	if err != nil {
		return ""
	}
	for _, m := range all {
		sum.Write([]byte(m.hash))
	}
	return hex.EncodeToString(sum.Sum(nil))[:16]
}

// embedded are the migrations of this binary.
var embedded = sync.OnceValues(func() ([]migration, error) { return load(files) })

// load reads the files of a version in order.
func load(version fs.FS) ([]migration, error) {
	names, err := fs.Glob(version, "sql/*.sql")
	if err != nil {
		return nil, fmt.Errorf("list migrations: %w", err)
	}
	all := make([]migration, 0, len(names))
	for _, path := range names {
		text, err := fs.ReadFile(version, path)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		name := strings.TrimPrefix(path, "sql/")
		digits, _, _ := strings.Cut(name, "_")
		number, err := strconv.Atoi(digits)
		if err != nil {
			return nil, fmt.Errorf("migration %s has no number: %w", name, err)
		}
		sum := sha256.Sum256(text)
		all = append(all, migration{number, name, string(text), hex.EncodeToString(sum[:])})
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
