package migrations_test

import (
	"context"
	"fmt"
	"io/fs"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// withChanges returns this version's files and further changes.
func withChanges(t *testing.T, later map[string]string) fstest.MapFS {
	t.Helper()
	all := fstest.MapFS{}
	for _, pattern := range []string{"schema/*.sql", "changes/*.sql", "bridges/*.sql"} {
		paths, err := fs.Glob(migrations.Files(), pattern)
		require.NoError(t, err)
		for _, path := range paths {
			all[path] = &fstest.MapFile{Data: []byte(readFile(t, path))}
		}
	}
	for name, text := range later {
		all["changes/"+name] = &fstest.MapFile{Data: []byte(text)}
	}
	return all
}

// changeFiles lists the changes after the baseline.
func changeFiles(t *testing.T) []string {
	t.Helper()
	paths, err := fs.Glob(migrations.Files(), "changes/*.sql")
	require.NoError(t, err)
	return paths
}

// openWith returns a pool for a connection string with one more parameter.
func openWith(t *testing.T, to, name, value string) *pgxpool.Pool {
	t.Helper()
	u, err := url.Parse(to)
	require.NoError(t, err)
	query := u.Query()
	query.Set(name, value)
	u.RawQuery = query.Encode()
	db := pgtest.Pool(t, u.String(), postgres.Options{MaxConns: 8})
	return db
}

// startUpgrade migrates in the background, and reports the result.
func startUpgrade(t *testing.T, db *pgxpool.Pool, to fs.FS) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	var running sync.WaitGroup
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	t.Cleanup(cancel)
	running.Go(func() {
		_, err := migrations.UpWith(ctx, db, to)
		done <- err
	})
	t.Cleanup(running.Wait)
	return done
}

// awaitUpgrade waits for the end of an upgrade, which must succeed.
func awaitUpgrade(t *testing.T, done <-chan error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	defer cancel()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-ctx.Done():
		t.Fatal("the migration does not end")
	}
}

// A statement that waits for a lock blocks all later ones. A serving process would stand still until the longest
// transaction ends.
func TestBlockedMigrationLetsOthersPass(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	reader := pgtest.Begin(t, db)
	pgtest.Exec(t, reader, `select count(*) from agent_executions`)
	done := startUpgrade(t, db, withChanges(t,
		map[string]string{"9001_more.sql": `alter table agent_executions add column more int not null default 0`}))
	pgtest.AwaitBlocked(t, db, 1, "add column more")
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	defer cancel()
	_, err := db.Exec(ctx, `select count(*) from agent_executions`)
	require.NoError(t, err, "a reader behind the migration")
	require.NoError(t, reader.Commit(t.Context()))
	awaitUpgrade(t, done)
	assert.True(t, pgtest.Value[bool](t, db, `select exists (select from agent_migrations where version = 9001)`),
		"the migration is not recorded")
}

// The session with the lock is idle in a transaction while a file runs. The server would end the pool's sessions for
// that.
func TestLongMigrationKeepsLock(t *testing.T) {
	t.Parallel()
	db := openWith(t, pgtest.URL(t), "idle_in_transaction_session_timeout", "100")
	_, err := migrations.UpWith(t.Context(), db, withChanges(t, map[string]string{"9001_long.sql": `
		create table witness (held boolean not null);
		select pg_sleep(1);
		insert into witness select exists (select from pg_locks where locktype = 'advisory' and granted
		   and database = (select oid from pg_database where datname = current_database()))`}))
	require.NoError(t, err)
	assert.True(t, pgtest.Value[bool](t, db, `select held from witness`), "the lock was lost while a file was applied")
}

const index = "-- outside a transaction\n" +
	"-- Found by thread; a comment; with a semicolon.\n" +
	"create index concurrently if not exists by_thread on agent_executions (thread_id, id);\n" +
	"create unique index concurrently if not exists by_flow on agent_executions (flow);\n"

// A concurrent index build must not wait for a process that waits for the migration lock.
func TestOneProcessBuildsIndexesConcurrently(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	later := withChanges(t, map[string]string{"9001_index.sql": index})
	var all []<-chan error
	for range 3 {
		all = append(all, startUpgrade(t, openWith(t, url, "pool_max_conns", "3"), later))
	}
	for _, done := range all {
		awaitUpgrade(t, done)
	}
	db := openWith(t, url, "pool_max_conns", "2")
	assert.Equal(t, 2, pgtest.Value[int](t, db, `select count(*) from pg_index
		where indexrelid in ('by_thread'::regclass, 'by_flow'::regclass) and indisvalid`))
}

// An index build that sees the snapshot of a try waits for the end of the try's transaction.
func TestWaitingMigrationEndsTransactionOfEachTry(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := openWith(t, url, "application_name", "holder")
	holder := pgtest.Begin(t, db)
	pgtest.Exec(t, holder, `select pg_advisory_xact_lock(hashtextextended('agent migrations', 0))`)
	done := startUpgrade(t, openWith(t, url, "application_name", "waiter"), withChanges(t, nil))
	pgtest.Until(t, db, true, `select exists (select from pg_stat_activity a where a.datname = current_database()
		and a.application_name = 'waiter' and a.state = 'idle' and a.query = 'rollback')`)
	require.NoError(t, holder.Rollback(t.Context()))
	awaitUpgrade(t, done)
}

func TestWaitingMigrationNamesHolder(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	holder := pgtest.Begin(t, openWith(t, url, "application_name", "stopped"))
	pgtest.Exec(t, holder, `select pg_advisory_xact_lock(hashtextextended('agent migrations', 0))`)
	pid := pgtest.Value[int](t, holder, `select pg_backend_pid()`)
	var messages []string
	_, err := migrations.UpWith(t.Context(), openWith(t, url, "application_name", "waiter"), withChanges(t, nil),
		func(message string) {
			messages = append(messages, message)
			assert.NoError(t, holder.Rollback(t.Context()))
		})
	require.NoError(t, err)
	require.Equal(t, 1, len(messages))
	assert.Contains(t, messages[0], fmt.Sprintf("process %d (stopped), which migrates since 2", pid),
		fmt.Sprintf("select pg_terminate_backend(%d)", pid))
}

func TestInvalidIndexIsRebuilt(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	insertExecution(t, db)
	second := insertExecution(t, db)
	later := withChanges(t, map[string]string{"9001_index.sql": index})
	err := <-startUpgrade(t, db, later)
	require.Truef(t, postgres.IsCode(err, "23505"), "a unique index on duplicate values: %v", err)
	require.True(t, !pgtest.Value[bool](t, db, `select indisvalid from pg_index where indexrelid = 'by_flow'::regclass`),
		"nothing was left half built")
	pgtest.Exec(t, db, `update agent_executions set flow = 'another' where id = $1::uuid`, second)
	awaitUpgrade(t, startUpgrade(t, db, later))
	assert.True(t, pgtest.Value[bool](t, db, `select indisvalid from pg_index where indexrelid = 'by_flow'::regclass`),
		"the index was left half built")
}

// Up applies changed code with its change, or alone. It does not apply other code again.
func TestChangedCodeIsAppliedAgain(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	with := func(later map[string]string, body string) fstest.MapFS {
		all := withChanges(t, later)
		all["schema/010_types.sql"].Data = append(all["schema/010_types.sql"].Data,
			"create or replace function f() returns int language sql as '"+body+"';\n"...)
		return all
	}
	change := map[string]string{"9001_more.sql": `create table more (id int)`}
	for _, c := range []struct {
		version fstest.MapFS
		want    []string
	}{
		{with(nil, "select 1"), []string{"code of 010_types"}},
		{with(nil, "select 1"), nil},
		{with(change, "select 2 from more"), []string{"9001_more.sql", "code of 010_types"}},
		{with(change, "select 3"), []string{"code of 010_types"}},
	} {
		got, err := migrations.UpWith(t.Context(), db, c.version)
		require.Truef(t, err == nil && slices.Equal(got, c.want), "applied %v (%v), want %v", got, err, c.want)
	}
	assert.Equal(t, 3, pgtest.Value[int](t, db, `select f()`))
}

// A change and its code are one transaction: if the code cannot be applied, the change is rolled back.
func TestChangeWithoutItsCodeIsNotApplied(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	broken := withChanges(t, map[string]string{"9001_more.sql": `create table more (id int)`})
	broken["schema/010_types.sql"].Data = append(broken["schema/010_types.sql"].Data,
		"create or replace function f() returns nothing language sql as '';\n"...)
	_, err := migrations.UpWith(t.Context(), db, broken)
	require.Truef(t, err != nil && strings.Contains(err.Error(), "code of 010_types"), "code with an error: %v", err)
	assert.True(t, !pgtest.Value[bool](t, db, `select to_regclass('more') is not null
		or exists (select from agent_migrations where version = 9001)`), "the change is there without its code")
}

// A general statement timeout would stop a long migration at the same place each time.
func TestAMigrationTakesAsLongAsItTakes(t *testing.T) {
	if pgtest.Pooled() {
		t.Skip("behind a pooler the limits of a session are the database's")
	}
	t.Parallel()
	db := pgtest.DB(t)
	insertExecution(t, db)
	pgtest.Exec(t, db, `create function slowly(text) returns text language plpgsql immutable
		as $$ begin perform pg_sleep(0.8); return $1; end $$`)
	name := pgx.Identifier{pgtest.Value[string](t, db, `select current_database()`)}.Sanitize()
	limits := []string{"statement_timeout = '500ms'", "plpgsql.extra_errors = 'all'"}
	// since version 17
	if pgtest.Value[bool](t, db, `select exists (select from pg_settings where name = 'transaction_timeout')`) {
		limits = append(limits, "transaction_timeout = '700ms'")
	}
	for _, limit := range limits {
		pgtest.Exec(t, db, "alter database "+name+" set "+limit)
	}
	db.Reset()
	awaitUpgrade(t, startUpgrade(t, db, withChanges(t, map[string]string{
		"9001_long.sql": `select pg_sleep(0.8); create function f(x int) returns void language plpgsql
			as $$ declare x int; begin end $$`,
		"9002_index.sql": "-- outside a transaction\ncreate index concurrently if not exists by_slow on agent_executions " +
			"(slowly(flow));\n",
	})))
	assert.Equal(t, "500ms", pgtest.Value[string](t, db, `select current_setting('statement_timeout')`))
}

// One connection holds the lock. Without a second one, Up would wait for itself.
func TestMigrationNeedsTwoConnections(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	defer cancel()
	url := pgtest.EmptyURL(t)
	_, err := migrations.Up(ctx, openWith(t, url, "pool_max_conns", "1"))
	assert.Truef(t, err != nil && strings.Contains(err.Error(), "set it to 2 or more"), "with one connection: %v", err)
	_, err = migrations.Up(ctx, openWith(t, url, "pool_max_conns", "2"))
	assert.NoError(t, err, "with two connections")
}
