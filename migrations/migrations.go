// Package migrations owns the schema: the text in schema/, the changes after it, and River's own migrations beside them
// in the schema "river".
//
// schema/ has a file for each subject, in reading order. A file opens with the promises of its subject. Its tables
// follow: they are the baseline, and are created once. Below the line "-- Code" are functions, views and triggers. They
// and all comments are repeatable: each has one body in one place, and the code of a file is applied again when it has
// changed. A change of a table is a numbered file of changes/. It is applied once and never edited after its release.
//
// Up brings a database to this binary's version. Any number of processes may call it at once: one migrates, the others
// wait and find nothing to do. The lock is a transaction-level advisory lock, held by a connection that does nothing
// else. It works through a transaction pooler, and the server frees it when the process dies. The baseline is one
// transaction with its code. Each change is one transaction with its row in agent_migrations. Changed code joins the
// last of them, or is a transaction of its own. So a crash leaves whole steps, and the next Up applies the rest.
//
// Up may be called while processes serve, of this version or the one before. A statement waits for a lock for less than
// half a second, because all later statements queue behind it. Then it gives up, lets them run, and tries again. The
// rule of docs/upgrading.md limits changes: expand first, contract a release later. The tests here check each file
// against it. A file whose first line is `-- outside a transaction` builds indexes concurrently, statement by
// statement. An index that a crash left incomplete is removed and built again.
//
// The functions that other programs call are in the schema of the tables: they are the contract. All others are in the
// schema "lanekeeper", which may change in any release and which only the owner uses. A function of the contract runs
// as the owner, with a search path of its own. The last file grants the contract to the role agent_client.
//
// A file in bridges/ brings the database of a former version to the baseline, in one transaction. Up refuses databases
// of a version without a bridge (ErrOld), databases of a newer binary (ErrNewer), and databases whose tables or changes
// differ from this binary's (ErrChanged).
package migrations

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

// RiverSchema is the schema that River's tables live in.
const RiverSchema = "river"

var (
	// ErrNewer reports a schema that a newer binary made.
	ErrNewer = errors.New("the database was migrated by a newer version of agent; use that version or newer")
	// ErrChanged reports a database whose applied migrations are not this binary's.
	ErrChanged = errors.New("the schema that was applied differs from this binary's; use the binary that made the schema")
	// ErrOld reports a schema from before the baseline without a bridge.
	ErrOld = errors.New("no migration leads from there to this version of agent; run `agent migrate` of the release " +
		"with schema 118 first, or with schema 269 if the database's version is between them")
	// ErrOutdated reports a schema that lacks migrations.
	ErrOutdated = errors.New("the database is not migrated to this version of agent; run `agent migrate`")
)

// baseline is the version of a new database.
const baseline = 270

// bridges are the former versions that lead to the baseline, by number. A hash is the one in the version's row of
// agent_migrations.
var bridges = map[int]string{
	118: "fbc3feac0597f02038a589bad0b86178bf90647458dd1bc437a5762235c1e09a",
	269: "a501f0c6f1056be8ef5b34ce4d18fddf5ef3c1a60775930711b7ec2c25cf7cbb",
}

//go:embed schema/*.sql changes bridges/*.sql
var files embed.FS

// Up migrates the database to Version, including River's schema, and returns the names of the applied steps. It is
// idempotent and safe to run by many processes at once. After some seconds of waiting for another process, it calls
// onWait with a message that names the process.
func Up(ctx context.Context, pool *pgxpool.Pool, onWait ...func(message string)) ([]string, error) {
	return UpWith(ctx, pool, files, onWait...)
}

// UpWith is Up with the files of another version, as its binary would apply them: for the tests of upgrades.
func UpWith(
	ctx context.Context, pool *pgxpool.Pool, version fs.FS, onWait ...func(message string),
) ([]string, error) {
	r, err := load(version)
	if err != nil {
		return nil, err
	}
	if pool.Config().MaxConns < 2 { // one holds the lock; a second one would wait for it without end
		return nil, errors.New("migrate: it needs two connections at once, and pool_max_conns in DATABASE_URL allows one; " +
			"set it to 2 or more")
	}
	lock, err := acquireLock(ctx, pool, onWait)
	if err != nil {
		return nil, err
	}
	defer func() { _ = lock.Rollback(context.WithoutCancel(ctx)) }()
	if err := rejectSchema(ctx, pool); err != nil {
		return nil, err
	}
	if err := rejectForeignObjects(ctx, pool, r); err != nil {
		return nil, err
	}
	_, err = pool.Exec(ctx, `
		create table if not exists agent_migrations (
		  version int primary key, name text not null, hash text not null,
		  applied_at timestamptz not null default clock_timestamp());
		create table if not exists agent_schema_code (
		  name text primary key, hash text not null, applied_at timestamptz not null default clock_timestamp());
		create schema if not exists river`)
	if err != nil {
		return nil, explainDenied(ctx, pool, fmt.Errorf("prepare migrations: %w", err))
	}
	return r.migrate(ctx, pool)
}

// migrate applies the missing steps.
func (r release) migrate(ctx context.Context, pool *pgxpool.Pool) ([]string, error) {
	todo, err := r.pendingSteps(ctx, pool)
	if err != nil {
		return nil, explainDenied(ctx, pool, err)
	}
	if len(todo) > 0 {
		if err := rejectOtherOwner(ctx, pool); err != nil {
			return nil, err
		}
	}
	if err := upRiver(ctx, pool); err != nil {
		return nil, err
	}
	var applied []string
	for _, s := range todo {
		if err := s.apply(ctx, pool); err != nil {
			return applied, err
		}
		applied = append(applied, s.names...)
	}
	if _, err := EnsureMonths(ctx, pool, nil, MonthsAhead); err != nil {
		return applied, err
	}
	admitted, err := clientHasRights(ctx, pool)
	if err == nil && (!admitted || len(todo) > 0) {
		err = r.createClient(ctx, pool)
	}
	return applied, err
}

// acquireLock returns a transaction with the lock under which one process migrates. A session that waits in a queue
// holds a snapshot, which would block a concurrent index build. So it polls with a try-lock, by the simple protocol,
// which keeps no portal with a snapshot. Each try is a transaction of its own: an index build that sees the snapshot
// of a try waits for the end of its transaction.
func acquireLock(ctx context.Context, pool *pgxpool.Pool, onWait []func(message string)) (pgx.Tx, error) {
	for began := time.Now(); ; {
		lock, mine, err := tryLock(ctx, pool)
		if err != nil {
			return nil, fmt.Errorf("lock migrations: %w", err)
		}
		if mine {
			return lock, nil
		}
		if len(onWait) > 0 && time.Since(began) > quietWait {
			message, err := describeHolder(ctx, pool)
			if err != nil {
				return nil, err
			}
			if message != "" {
				onWait[0](message)
				onWait = nil
			}
		}
		if !sleep.For(ctx, lockPollInterval) {
			return nil, fmt.Errorf("wait for another process that migrates: %w", ctx.Err())
		}
	}
}

// tryLock tries once, and ends the transaction of a failed try. The session is idle in its transaction while
// migrations run, so its time limits are disabled.
func tryLock(ctx context.Context, pool *pgxpool.Pool) (lock pgx.Tx, mine bool, err error) {
	if lock, err = pool.Begin(ctx); err != nil {
		return nil, false, err
	}
	if _, err = lock.Exec(ctx, noTimeouts, true); err == nil {
		_, err = lock.Exec(ctx, keepalives)
	}
	if err == nil {
		err = lock.QueryRow(ctx, `select pg_try_advisory_xact_lock(hashtextextended('agent migrations', 0))`,
			pgx.QueryExecModeSimpleProtocol).Scan(&mine)
	}
	if err != nil || !mine {
		err = errors.Join(err, lock.Rollback(context.WithoutCancel(ctx)))
	}
	return lock, mine, err
}

// describeHolder names the process with the lock, and says what to do if it hangs. It is empty if no process has the
// lock.
func describeHolder(ctx context.Context, pool *pgxpool.Pool) (message string, err error) {
	err = pool.QueryRow(ctx, `
		select coalesce(min(format('waiting for process %s (%s), which migrates%s; if it hangs, end it: select '
		                           'pg_terminate_backend(%1$s)', l.pid,
		                           coalesce(nullif(a.application_name, ''), 'without application_name'),
		                           to_char(a.xact_start at time zone 'UTC', '" since "YYYY-MM-DD HH24:MI:SS" UTC"'))), '')
		  from pg_locks l left join pg_stat_activity a on a.pid = l.pid
		 where l.locktype = 'advisory' and l.granted and l.objsubid = 1
		   and l.database = (select oid from pg_database where datname = current_database())
		   and (l.classid::bigint << 32) | l.objid::bigint = hashtextextended('agent migrations', 0)`,
		pgx.QueryExecModeSimpleProtocol).Scan(&message)
	if err != nil {
		return "", fmt.Errorf("find the process that migrates: %w", err)
	}
	return message, nil
}

// Check returns nil if this binary's migrations and code were applied to the database, and ErrOutdated if it lacks
// some, or River's. For another version's schema it returns ErrOld, ErrNewer or ErrChanged. It does not compare the
// objects themselves ([CheckObjects] does), nor the version of River's. It writes nothing.
func Check(ctx context.Context, pool *pgxpool.Pool) error {
	r, err := embedded()
	if err != nil {
		return err
	}
	var exists, river bool
	err = pool.QueryRow(ctx, `
		select to_regclass('agent_migrations') is not null, exists (
		         select from pg_class c where c.relnamespace = to_regnamespace('river') and c.relname = 'river_migration')`).
		Scan(&exists, &river)
	if err != nil {
		return fmt.Errorf("check schema: %w", err)
	}
	if !exists {
		return ErrOutdated
	}
	todo, err := r.pendingSteps(ctx, pool)
	if err != nil {
		return explainDenied(ctx, pool, err)
	}
	if len(todo) > 0 || !river {
		return ErrOutdated
	}
	return nil
}

// Version is the number of this binary's schema.
func Version() int {
	r, err := embedded()
	if err != nil {
		return 0
	}
	return r.version()
}

// Hash names this binary's schema: equal hashes mean equal text.
func Hash() string {
	r, err := embedded()
	if err != nil {
		return ""
	}
	return r.hash()[:16]
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
