// Package pgtest gives each test a PostgreSQL database of its own, in tens of milliseconds.
//
// All test binaries of a user, also of several concurrent `go test` runs, share one server of internal/pgserver in a
// folder of the temporary directory. The first binary starts the server, and the last one stops it. The server does not
// sync to disk. AGENT_TEST_DATABASE_URL names another server instead, with a user that may create databases.
//
// For each version of the migrations and each month, pgtest migrates the schema once into a template database, named
// after both. Each test gets a copy. At the end of the test, pgtest drops the copy and all its connections. So tests
// may commit, use several connections, NOTIFY and run workers, in parallel, and see only their own writes.
//
// With AGENT_TEST_POOLER=1 in the environment, tests reach their databases through a PgBouncer in transaction mode
// (internal/pgbouncer), one for each test binary. scripts/test --all runs the suites of lanes and executions a second
// time this way. [DirectURL] bypasses the pooler, for tests that need a session.
//
// A test package that uses pgtest has
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
//
// because pgserver starts the test binary again as the guard of the server.
package pgtest

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

const (
	setUpLimit = 3 * time.Minute
	closeLimit = time.Minute
)

// Main runs the tests of a package and exits. It is the whole body of TestMain.
func Main(m interface{ Run() int }) {
	pgserver.GuardMain()
	sharedServer.allowed.Store(true)
	code := m.Run()
	if err := sharedServer.stop(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest:", err)
		code = max(code, 1)
	}
	if checker, ok := m.(interface{ Leaks() error }); ok && code == 0 { // see internal/leaks
		if err := checker.Leaks(); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// AtOnce lets n tests of a package run in parallel, for packages whose tests mostly wait. Call AtOnce before [Main]; an
// explicit -parallel takes precedence.
func AtOnce(n int) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if given {
		return
	}
	if err := flag.Set("test.parallel", strconv.Itoa(n)); err != nil {
		panic(err) // package testing no longer has the flag
	}
}

// DB returns a pool on a new database with the whole schema. At the end of the test, DB closes the pool and drops the
// database. An unreleased connection fails the test.
func DB(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	return open(tb, URL(tb))
}

// URL returns the connection string of a new database with the whole schema, and drops the database when the test ends.
// The string is for child processes and pools that the test opens.
func URL(tb testing.TB) string {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), setUpLimit)
	defer cancel()
	s, err := sharedServer.get()
	require.NoError(tb, err)
	name, err := s.clone(ctx)
	require.NoError(tb, err)
	return s.handOut(tb, name)
}

// Empty is like [DB] without the schema.
func Empty(tb testing.TB) *pgxpool.Pool {
	tb.Helper()
	return open(tb, EmptyURL(tb))
}

// EmptyURL is like [URL] without the schema.
func EmptyURL(tb testing.TB) string {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), setUpLimit)
	defer cancel()
	s, err := sharedServer.get()
	require.NoError(tb, err)
	name := newName()
	require.NoError(tb, s.create(ctx, name, "template0"))
	return s.handOut(tb, name)
}

// Pooled reports whether tests reach their databases through a pooler.
func Pooled() bool { return os.Getenv("AGENT_TEST_POOLER") == "1" }

// DirectURL returns the connection string, without a pooler, of the database that url names. url comes from [URL] or
// [EmptyURL].
func DirectURL(tb testing.TB, url string) string {
	tb.Helper()
	s, err := sharedServer.get()
	require.NoError(tb, err)
	config, err := pgx.ParseConfig(url)
	require.NoError(tb, err)
	return s.urlOf(config.Database)
}

// Dialer opens single connections for LISTEN, without a pooler, to the database of pool. pool comes from [DB] or
// [Empty], or connects to a URL of this package.
func Dialer(tb testing.TB, pool *pgxpool.Pool) func(ctx context.Context) (*pgx.Conn, error) {
	tb.Helper()
	if !Pooled() {
		return postgres.Dialer(pool)
	}
	direct := DirectURL(tb, pool.Config().ConnString())
	return func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, direct) }
}

func open(tb testing.TB, url string) *pgxpool.Pool {
	tb.Helper()
	pool, err := postgres.Open(tb.Context(), url, postgres.Options{ApplicationName: "test"})
	require.NoError(tb, err)
	tb.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			pool.Close()
		}()
		select {
		case <-closed:
		case <-time.After(closeLimit):
			tb.Errorf("the pool does not close: %d connections were not given back", pool.Stat().AcquiredConns())
		}
	})
	return pool
}

// Timeout bounds the waits of a test on a busy machine.
const Timeout = 90 * time.Second

// AvoidMidnight waits for the next UTC day if the current one ends within minutes. It is for tests of daily sums.
func AvoidMidnight(tb testing.TB) {
	tb.Helper()
	if left := 24*time.Hour - time.Since(time.Now().Truncate(24*time.Hour)); left < 3*time.Minute {
		tb.Logf("waiting %s for the next day", left)
		sleep.For(tb.Context(), left)
	}
}

// Eventually fails the test if condition does not become true within [Timeout].
func Eventually(tb testing.TB, condition func() bool, message string) {
	tb.Helper()
	EventuallyWithin(tb, Timeout, condition, message)
}

// EventuallyWithin fails the test if condition does not become true within timeout. It checks condition after 5 ms at
// first, and later every 50 ms.
func EventuallyWithin(tb testing.TB, timeout time.Duration, condition func() bool, message string) {
	tb.Helper()
	deadline := time.After(timeout)
	for pause := 5 * time.Millisecond; !condition(); pause = min(pause*5/4, 50*time.Millisecond) {
		select {
		case <-time.After(pause):
		case <-deadline:
			if condition() {
				return
			}
			tb.Fatalf("not within %s: %s", timeout, message)
		case <-tb.Context().Done():
			tb.Fatalf("the test ended before: %s", message)
		}
	}
}
