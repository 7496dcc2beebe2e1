package pgbouncer_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgbouncer"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// pooler starts a pooler in front of the test server. It returns two connection strings of a new database: through the
// pooler and direct.
func pooler(t *testing.T, config pgbouncer.Config) (p *pgbouncer.Pooler, through, direct string) {
	t.Helper()
	direct = pgtest.DirectURL(t, pgtest.EmptyURL(t))
	config.Server = direct
	p, err := pgbouncer.Start(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, p.Stop(context.WithoutCancel(t.Context())))
	})
	through, err = p.URL(direct)
	require.NoError(t, err)
	return p, through, direct
}

func open(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.Pool(t, url, postgres.Options{})
	return pool
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

// pid returns the process id of the server that runs the next transaction of conn.
func pid(t *testing.T, conn postgres.DB) (pid int) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(), "select pg_backend_pid()", pgx.QueryExecModeExec).Scan(&pid))
	return pid
}

func TestServerConnectionIsLentPerTransaction(t *testing.T) {
	t.Parallel()
	_, through, _ := pooler(t, pgbouncer.Config{PoolSize: 1})
	first, second := connect(t, through), connect(t, through)
	if a, b := pid(t, first), pid(t, second); a != b {
		t.Errorf("two clients have the server connections %d and %d, want one", a, b)
	}
	tx, err := first.Begin(t.Context())
	require.NoError(t, err)
	pid(t, tx)
	// The only server connection is in use. The other client waits, and gets it after the commit.
	answered := make(chan error, 1)
	go func() { answered <- second.Ping(t.Context()) }()
	select {
	case err := <-answered:
		t.Errorf("another client was answered during the transaction: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	require.NoError(t, tx.Commit(t.Context()))
	select {
	case err := <-answered:
		assert.NoError(t, err)
	case <-time.After(pgtest.Timeout):
		t.Error("another client does not get the server connection after the commit")
	}
}

func TestOpenDetectsPooler(t *testing.T) {
	t.Parallel()
	_, through, direct := pooler(t, pgbouncer.Config{PoolSize: 2})
	pool := open(t, through)
	assert.True(t, postgres.Pooled(pool) && !postgres.Pooled(open(t, direct)),
		"Pooled does not tell the pooled connection from the direct one")
	assert.Equal(t, pgx.QueryExecModeCacheDescribe, pool.Config().ConnConfig.DefaultQueryExecMode)
	// Many clients send the same statement over any server connection. The driver describes it once and sends it unnamed.
	failed := make(chan error, 64)
	for range cap(failed) {
		go func() {
			var sum int
			err := pool.QueryRow(t.Context(), "select @a::int + 1", postgres.Strict{"a": 41}).Scan(&sum)
			if err == nil && sum != 42 {
				err = errors.New("41 + 1 is not 42")
			}
			failed <- err
		}()
	}
	for range cap(failed) {
		assert.NoError(t, <-failed)
	}
	// With the explicit setting, Pooled still reports the pooler.
	execMode := open(t, through+"&default_query_exec_mode=exec")
	assert.True(t, postgres.Pooled(execMode), "a mode in the connection string hides the pooler")
}

func TestCancelReachesServerBehindPooler(t *testing.T) {
	t.Parallel()
	_, through, direct := pooler(t, pgbouncer.Config{PoolSize: 1})
	watching := open(t, direct)
	conn := connect(t, through)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := conn.Exec(ctx, "select pg_sleep(600)")
		done <- err
	}()
	sleeping := func() (n int) {
		const asleep = `select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'`
		require.NoError(t, watching.QueryRow(t.Context(), asleep).Scan(&n))
		return n
	}
	pgtest.Eventually(t, func() bool { return sleeping() == 1 }, "the statement runs")
	cancel()
	assert.Error(t, <-done, "the statement was not cancelled")
	pgtest.Eventually(t, func() bool { return sleeping() == 0 }, "the statement is cancelled")
}

// Versions from 1.21 on can keep prepared statements. cache_statement works there.
func TestPreparedStatements(t *testing.T) {
	t.Parallel()
	p, through, direct := pooler(t, pgbouncer.Config{PoolSize: 1})
	if !p.SupportsPreparedStatements() {
		_, err := pgbouncer.Start(t.Context(), pgbouncer.Config{Server: direct, MaxPreparedStatements: 100})
		assert.ErrorContains(t, err, "does not support prepared statements", p.Version())
		// This is the effect of cache_statement there: the statement is prepared on a connection that other clients use.
		first, second := connect(t, through), connect(t, through)
		_, err = first.Prepare(t.Context(), "answer", "select 42")
		require.NoError(t, err)
		_, err = second.Prepare(t.Context(), "answer", "select 43")
		assert.Truef(t, postgres.IsCode(err, "42P05"), "another client's statement of the same name: %v, want 42P05", err)
		return
	}
	_, through, _ = pooler(t, pgbouncer.Config{PoolSize: 2, MaxPreparedStatements: 100})
	pool := open(t, through+"&default_query_exec_mode=cache_statement")
	for i := range 20 {
		var got int
		err := pool.QueryRow(t.Context(), "select $1::int", i).Scan(&got)
		assert.Truef(t, err == nil && got == i, "%d, %v", got, err)
	}
}

// The test changes the environment, so it is not parallel.
func TestStartErrors(t *testing.T) {
	direct := pgtest.DirectURL(t, pgtest.EmptyURL(t))
	ctx, cancel := context.WithTimeout(t.Context(), pgtest.Timeout)
	defer cancel()
	_, err := pgbouncer.Start(ctx, pgbouncer.Config{Server: "postgres://u:hunter2@h:port/d"})
	assert.Truef(t, err != nil && !strings.Contains(err.Error(), "hunter2"), "error %v", err)
	dir, err := os.MkdirTemp("", "lk-pgbouncer-test-") //nolint:usetesting // the pooler's user cannot read the test's own folder
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, os.RemoveAll(dir))
	})
	for name, c := range map[string]struct{ script, want string }{
		"ends":         {"case $1 in --version) echo PgBouncer 1.25.0;; *) echo FATAL no room >&2; exit 1; esac", "FATAL no room"},
		"another":      {"echo nginx 1.0", "no version of PgBouncer"},
		"does not run": {"exit 3", "exit status 3"},
		"is not there": {"", "no such file"},
	} {
		path := filepath.Join(dir, name)
		if c.script != "" {
			require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+c.script+"\n"), 0o755))
		}
		require.NoError(t, os.Chmod(dir, 0o755))
		t.Setenv("AGENT_TEST_PGBOUNCER", path)
		_, err := pgbouncer.Start(ctx, pgbouncer.Config{Server: direct})
		assert.Truef(t, err != nil && strings.Contains(err.Error(), c.want), "%s: error %v, want %q", name, err, c.want)
	}
}

func TestStopLeavesNothing(t *testing.T) {
	t.Parallel()
	direct := pgtest.DirectURL(t, pgtest.EmptyURL(t))
	p, err := pgbouncer.Start(t.Context(), pgbouncer.Config{Server: direct})
	require.NoError(t, err)
	through, err := p.URL(direct)
	require.NoError(t, err)
	conn := connect(t, through)
	assert.Contains(t, p.Log(), "process up")
	config, err := pgx.ParseConfig(through)
	require.NoError(t, err)
	require.NoError(t, p.Stop(t.Context()))
	assert.Error(t, conn.Ping(t.Context()), "a client is still connected")
	_, err = os.Stat(config.Host)
	assert.ErrorIs(t, err, os.ErrNotExist, "its folder is still there")
}
