package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/pgbouncer"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

const (
	testPrefix     = "lk_test_"
	buildPrefix    = "lk_build_"
	templatePrefix = "lk_template_"
	templatesKept  = 4
	maxConnections = 400
	adminConns     = 4
)

// sharedServer is the one server of this test binary. The first test that needs the server starts it.
var sharedServer shared

type shared struct {
	allowed atomic.Bool // Main was called, so the guard can be this binary
	once    sync.Once
	server  *server
	err     error
}

// server is the server of this binary's test databases.
type server struct {
	own    *pgserver.Server // nil for AGENT_TEST_DATABASE_URL
	url    string
	admin  *pgxpool.Pool
	pooler *pgbouncer.Pooler // nil without AGENT_TEST_POOLER

	strategy string // the way to copy a database

	building sync.Mutex // one builder per process, so the waiting goroutines take no connection
}

func (s *shared) get() (*server, error) {
	if !s.allowed.Load() {
		return nil, errors.New("pgtest: add func TestMain(m *testing.M) { pgtest.Main(m) } to this package")
	}
	s.once.Do(func() { s.server, s.err = startServer() })
	return s.server, s.err
}

func (s *shared) stop() error {
	s.once.Do(func() { s.err = errors.New("the tests have ended") })
	if s.server == nil {
		return nil
	}
	s.server.admin.Close()
	var err error
	if s.server.pooler != nil {
		err = s.server.pooler.Stop(context.Background())
	}
	if s.server.own == nil {
		return err
	}
	return errors.Join(err, s.server.own.Stop(context.Background()))
}

// startServer connects to the server of AGENT_TEST_DATABASE_URL, or starts a server that the test programs of this
// machine share. It installs PostgreSQL if that is missing and can be installed.
func startServer() (*server, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute) // the start may include an installation
	defer cancel()
	s := &server{url: os.Getenv("AGENT_TEST_DATABASE_URL")}
	if s.url == "" {
		dir, err := directory()
		if err != nil {
			return nil, fmt.Errorf("pgtest: %w", err)
		}
		s.own, err = pgserver.Start(ctx, pgserver.Config{Dir: dir, MaxConnections: maxConnections, Progress: tell})
		if err != nil {
			return nil, fmt.Errorf("pgtest: %w", err)
		}
		s.url = s.own.URL()
	}
	var err error
	s.admin, err = postgres.Open(ctx, s.url, postgres.Options{MaxConns: adminConns, ApplicationName: "pgtest"})
	if err == nil {
		s.strategy, err = s.copyStrategy(ctx)
	}
	if err == nil && s.own != nil {
		err = s.vacuum(ctx)
	}
	if err == nil && s.own != nil && !s.own.Adopted() {
		err = s.sweep(ctx)
	}
	if err == nil && Pooled() {
		s.pooler, err = pgbouncer.Start(ctx, pgbouncer.Config{Server: s.url, Progress: tell})
	}
	if err != nil {
		return nil, fmt.Errorf("pgtest: %w", err)
	}
	return s, nil
}

func tell(line string) { fmt.Fprintln(os.Stderr, "pgtest:", line) }

// directory returns the shared folder of this user; it refuses a folder of another user. If memory has room, the folder
// is in memory. There, to create and drop a database takes a tenth of the time, and a slow disk does not stall the
// tests.
func directory() (string, error) {
	name := "lanekeeper-test-" + strconv.Itoa(os.Geteuid())
	dir := filepath.Join(os.TempDir(), name)
	free := os.Getenv("TMPDIR") == "" || strings.HasPrefix(os.Getenv("TMPDIR"), memory+"/")
	if free && memory != "" && (exists(filepath.Join(memory, name)) || hasRoom()) {
		dir = filepath.Join(memory, name)
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return "", err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !info.IsDir() || !ok || int(stat.Uid) != os.Geteuid() {
		return "", fmt.Errorf("%s is not a folder of this user: remove it or set TMPDIR", dir)
	}
	return dir, os.Chmod(dir, 0o755)
}

// newName returns a database name that identifies its test binary.
func newName() string {
	return testPrefix + strconv.Itoa(os.Getpid()) + "_" + rand.Text()[:10]
}

func (s *server) urlOf(database string) string {
	u, err := url.Parse(s.url)
	if err != nil || u.Scheme == "" {
		return s.url + " dbname=" + database // the key=value form; the last value counts
	}
	u.Path = "/" + database
	return u.String()
}

// copyStrategy returns the cheapest strategy to copy a database. From version 15 on, the server by default writes the
// whole copy to the WAL, which takes three times as long without fsync. Older versions always copy files.
func (s *server) copyStrategy(ctx context.Context) (strategy string, err error) {
	err = s.admin.QueryRow(ctx, `
		select case when current_setting('server_version_num')::int >= 150000 then ' strategy file_copy'
		  else '' end`).Scan(&strategy)
	return strategy, err
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// create makes database a copy of template. It retries while a connection, such as autovacuum's, uses the template.
func (s *server) create(ctx context.Context, database, template string) error {
	statement := "create database " + quote(database) + " template " + quote(template) + s.strategy
	for {
		_, err := s.admin.Exec(ctx, statement)
		if err == nil {
			return nil
		}
		if !postgres.IsCode(err, "55006") || ctx.Err() != nil {
			return fmt.Errorf("create database %s: %w", database, err)
		}
		sleep.For(ctx, 20*time.Millisecond)
	}
}

// handOut returns the database's URL to the test and drops the database at the test's end.
func (s *server) handOut(tb testing.TB, database string) string {
	tb.Helper()
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := s.drop(ctx, database); err != nil {
			tb.Error(err)
		}
	})
	if s.pooler == nil {
		return s.urlOf(database)
	}
	pooled, err := s.pooler.URL(s.urlOf(database))
	require.NoError(tb, err)
	return pooled
}

func (s *server) drop(ctx context.Context, database string) error {
	if _, err := s.admin.Exec(ctx, "drop database if exists "+quote(database)+" with (force)"); err != nil {
		return fmt.Errorf("drop database %s: %w", database, err)
	}
	return nil
}

// vacuum removes the rows of dropped databases from the shared catalogs: 200 rows each. The server may run for weeks
// without autovacuum.
func (s *server) vacuum(ctx context.Context) error {
	if _, err := s.admin.Exec(ctx, "vacuum (skip_locked, truncate false) pg_shdepend, pg_database"); err != nil {
		return fmt.Errorf("vacuum shared catalogs: %w", err)
	}
	return nil
}

// rollBackPrepared rolls back the prepared transactions of a killed test. They would keep its database, and hold back
// what other tests wait for.
func (s *server) rollBackPrepared(ctx context.Context, database string) error {
	ids, err := s.names(ctx, "select gid from pg_prepared_xacts where database = $1", database)
	if err != nil || len(ids) == 0 {
		return err
	}
	conn, err := pgx.Connect(ctx, s.urlOf(database))
	if err != nil {
		return fmt.Errorf("connect to %s: %w", database, err)
	}
	for _, id := range ids {
		_, err := conn.Exec(ctx, "rollback prepared '"+strings.ReplaceAll(id, "'", "''")+"'")
		if err != nil && !postgres.IsCode(err, "42704") { // another sweep was faster
			return errors.Join(err, conn.Close(ctx))
		}
	}
	return conn.Close(ctx)
}

var ownedName = regexp.MustCompile(`^(?:` + testPrefix + `|` + buildPrefix + `)(\d+)_`)

// sweep drops databases of killed test binaries, and templates of old schemas.
func (s *server) sweep(ctx context.Context) error {
	names, err := s.names(ctx, "select datname from pg_database where datname like 'lk\\_%' order by oid desc")
	if err != nil {
		return err
	}
	templates := 0
	for _, name := range names {
		if match := ownedName.FindStringSubmatch(name); match != nil {
			pid, err := strconv.Atoi(match[1])
			if err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
				if err := errors.Join(s.rollBackPrepared(ctx, name), s.drop(ctx, name)); err != nil {
					return err
				}
			}
			continue
		}
		if templates++; templates > templatesKept {
			_, err := s.admin.Exec(ctx, "drop database "+quote(name))
			if err != nil && !postgres.IsCode(err, "55006", "3D000") { // the database is in use or gone
				return fmt.Errorf("drop database %s: %w", name, err)
			}
		}
	}
	return nil
}

func (s *server) names(ctx context.Context, query string, args ...any) ([]string, error) {
	rows, err := s.admin.Query(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }
