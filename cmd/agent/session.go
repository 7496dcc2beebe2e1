package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// stateDir holds the data of agent dev in the project's folder.
const stateDir = ".agent"

// settings loads the configuration and builds the logger, which writes to stderr.
func (c *cli) settings() (config.Config, *slog.Logger, error) { return c.loadSettings(config.Load) }

func (c *cli) loadSettings(
	load func(map[string]string, ...string) (config.Config, error),
) (config.Config, *slog.Logger, error) {
	cfg, err := load(c.environ, "AGENT_OUTPUT", "AGENT_URL") // AGENT_URL is for external workers
	if err != nil {
		return cfg, nil, &exitError{exitUsage, err}
	}
	log, err := logging.New(c.err, cfg.LogFormat, cfg.LogLevel)
	if err != nil {
		return cfg, nil, &exitError{exitUsage, err}
	}
	for _, warning := range cfg.Unknown {
		log.Warn("setting ignored", "reason", warning)
	}
	return cfg, log, nil
}

// quietLogs raises the log level to warn for a person at a terminal.
func (c *cli) quietLogs() {
	if c.environ["AGENT_LOG_LEVEL"] == "" && terminal(c.err) {
		c.environ["AGENT_LOG_LEVEL"] = "warn"
	}
}

// session is a command's database connection and configuration.
type session struct {
	config    config.Config
	log       *slog.Logger
	pool      *pgxpool.Pool
	direct    *pgxpool.Pool // bypasses a pooler; nil without DATABASE_DIRECT_URL
	read      *replica.Reader
	serving   bool // connections are reserved
	reserved  reservedPools
	server    *pgserver.Server // nil with DATABASE_URL
	ephemeral bool
	url       string
}

// close releases all connections and stops the local server.
func (s *session) close(ctx context.Context) {
	if s.read != nil {
		s.read.Close()
	}
	for _, pool := range append(s.reserved.pools, s.pool, s.direct) {
		if pool != nil {
			pool.Close()
		}
	}
	if s.server != nil {
		if err := s.server.Stop(context.WithoutCancel(ctx)); err != nil {
			s.log.WarnContext(ctx, "local PostgreSQL did not stop", "error", err)
		}
	}
}

// session opens DATABASE_URL or the local database of agent dev, and checks the schema version.
func (c *cli) session(ctx context.Context) (*session, error) {
	if err := c.loadDevDotEnv(); err != nil {
		return nil, err
	}
	c.quietLogs()
	cfg, log, err := c.settings()
	if err != nil {
		return nil, err
	}
	s, err := c.openSession(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	if err := migrations.Check(ctx, s.pool); err != nil {
		s.close(ctx)
		return nil, err
	}
	return s, nil
}

// loadDevDotEnv loads .env when no database is configured, so that commands see the settings of agent dev.
func (c *cli) loadDevDotEnv() error {
	if c.environ["DATABASE_URL"] != "" || c.environ["DATABASE_URL_FILE"] != "" {
		return nil
	}
	_, err := c.loadDotEnv()
	return err
}

func (c *cli) loadDotEnv() (config.DotEnv, error) {
	file, err := config.LoadDotEnv(".env", c.environ, func(name string) bool { return strings.HasPrefix(name, "OTEL_") })
	if err != nil {
		return file, &exitError{exitUsage, err}
	}
	c.environ, c.references = file.Environ, file.References
	return file, nil
}

// openSession opens the database without a schema check.
func (c *cli) openSession(ctx context.Context, cfg config.Config, log *slog.Logger) (*session, error) {
	return c.openDatabase(ctx, &session{config: cfg, log: log})
}

// openServing is openSession with reserved connections.
func (c *cli) openServing(ctx context.Context, cfg config.Config, log *slog.Logger) (*session, error) {
	return c.openDatabase(ctx, &session{config: cfg, log: log, serving: true})
}

func (c *cli) openDatabase(ctx context.Context, s *session) (*session, error) {
	s.url = s.config.DatabaseURL.Reveal()
	if s.url == "" {
		if err := s.startServer(ctx, c, false, false); err != nil {
			return nil, err
		}
	}
	return s, s.connect(ctx)
}

// connect opens the pools. On failure it closes the session.
func (s *session) connect(ctx context.Context) error {
	options := postgres.Options{
		MaxConns: int32(min(s.config.Workers, 1000)) + 12, IdleTransaction: idleTransaction(s.config.WorkerLease),
	}
	var kept reservation
	if s.serving {
		options.Reserve = func(most int32) int32 {
			kept = reserveConns(most)
			return kept.total()
		}
	}
	pool, err := postgres.Open(ctx, s.url, options)
	if err != nil {
		s.close(ctx)
		return err
	}
	s.pool = pool
	if err := s.reserve(ctx, kept); err != nil {
		s.close(ctx)
		return err
	}
	if s.config.DirectURL.IsSet() && s.url == s.config.DatabaseURL.Reveal() {
		if err := s.openDirect(ctx); err != nil {
			s.close(ctx)
			return err
		}
	}
	s.read = s.newReader()
	return nil
}

// idleTransaction bounds idle transactions by the lease. A lost worker's row locks must not outlive its claims.
func idleTransaction(lease time.Duration) time.Duration {
	return min(max(lease, 5*time.Second), time.Minute)
}

// startServer starts or joins the local PostgreSQL. It creates one only if create is set.
func (s *session) startServer(ctx context.Context, c *cli, create, ephemeral bool) error {
	if _, err := os.Stat(stateDir); errors.Is(err, os.ErrNotExist) && !create {
		return &exitError{
			exitUsage,
			hint(errors.New("no database"), "set DATABASE_URL, or run `agent dev` in this folder first"),
		}
	}
	s.ephemeral = ephemeral
	started, err := pgserver.Start(ctx, s.serverConfig(c))
	if err != nil {
		return fmt.Errorf("start the local PostgreSQL: %w", err)
	}
	s.server, s.url = started, started.URL()
	return nil
}

// serverConfig returns the configuration for every start of the local PostgreSQL.
func (s *session) serverConfig(c *cli) pgserver.Config {
	dir, err := filepath.Abs(filepath.Join(stateDir, "pg"))
	if err != nil {
		dir = filepath.Join(stateDir, "pg") // the folder was removed; Start returns the error
	}
	return pgserver.Config{
		Dir: dir, Ephemeral: s.ephemeral, Durable: true, BinDir: s.config.PGBin, Database: "agent",
		Owner: "agent", Logger: s.log,
		Progress: func(line string) { c.infof("%s", line) },
	}
}

// migrate migrates the schema, and prints a note first when it is outdated.
func (s *session) migrate(ctx context.Context, c *cli) ([]string, error) {
	if errors.Is(migrations.Check(ctx, s.pool), migrations.ErrOutdated) {
		c.infof("migrating the schema to version %d …", migrations.Version())
	}
	return migrations.Up(ctx, s.sessionPool())
}

// displayURL returns a printable address. It hides the password of a configured database.
func (s *session) displayURL() string {
	if s.server != nil {
		return s.url
	}
	c := s.pool.Config().ConnConfig
	return fmt.Sprintf("%s at %s, as %s", c.Database, net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port))), c.User)
}

// directConns bounds the connections that bypass a pooler: two listeners and three for a migration.
const directConns = 4

// openDirect opens a pool that bypasses a connection pooler. It must reach the same database, or notifications and
// schema would differ.
func (s *session) openDirect(ctx context.Context) error {
	pool, err := postgres.Open(ctx, s.config.DirectURL.Reveal(), postgres.Options{MaxConns: directConns})
	if err != nil {
		return fmt.Errorf("DATABASE_DIRECT_URL: %w", err)
	}
	s.direct = pool
	if postgres.Pooled(pool) {
		return &exitError{exitUsage, hint(errors.New("DATABASE_DIRECT_URL: it also names a connection pooler"),
			"name the host and port of PostgreSQL itself, or unset it to poll")}
	}
	same, err := sameDatabase(ctx, s.pool, pool)
	if err != nil {
		return fmt.Errorf("DATABASE_DIRECT_URL: %w", err)
	}
	if !same {
		return &exitError{exitUsage, hint(errors.New("DATABASE_DIRECT_URL: not the database of DATABASE_URL"),
			"name the database behind the pooler, or unset it to poll")}
	}
	return nil
}

// sessionPool returns the pool with real server sessions, for LISTEN and session locks.
func (s *session) sessionPool() *pgxpool.Pool {
	if s.direct != nil {
		return s.direct
	}
	return s.pool
}

// sameDatabase reports whether all pools reach one database of one running server.
func sameDatabase(ctx context.Context, ways ...*pgxpool.Pool) (bool, error) {
	var first string
	for i, way := range ways {
		var here string
		err := way.QueryRow(ctx, `
			select concat_ws(' ', extract(epoch from pg_postmaster_start_time()),
			  (select oid from pg_database where datname = current_database()))`).Scan(&here)
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

// minDividedPool is the smallest pool with reserved connections. Smaller pools are shared.
const minDividedPool = 6

// reservation counts a serving process's reserved connections by purpose. The engine gets the rest.
type reservation struct{ system, admin, visitors int32 }

// reserveConns splits a pool of most connections.
func reserveConns(most int32) reservation {
	if most < minDividedPool {
		return reservation{}
	}
	each := min(max(most/7, 1), 8)
	return reservation{system: min(most/minDividedPool, 2), admin: each, visitors: each}
}

func (d reservation) total() int32 { return d.system + d.admin + d.visitors }

// reservedPools are pools beside the engine's. They are nil when the process does not serve, or has few connections.
type reservedPools struct {
	system   *pgxpool.Pool // readiness, and the worker's lease
	admin    *pgxpool.Pool // the API and the Engine Room
	visitors *pgxpool.Pool // requests of visitors and of strangers
	pools    []*pgxpool.Pool
}

func (s *session) reserve(ctx context.Context, d reservation) error {
	for _, part := range []struct {
		into **pgxpool.Pool
		most int32
	}{{&s.reserved.system, d.system}, {&s.reserved.admin, d.admin}, {&s.reserved.visitors, d.visitors}} {
		if part.most == 0 {
			continue
		}
		pool, err := postgres.Reserve(ctx, s.pool, part.most)
		if err != nil {
			return err
		}
		*part.into, s.reserved.pools = pool, append(s.reserved.pools, pool)
	}
	return nil
}

// adminPool returns the pool of the admin's requests.
func (a *app) adminPool() *pgxpool.Pool { return cmp.Or(a.reserved.admin, a.pool) }

// replicaConns bounds the connections to the read replica.
const replicaConns = 8

// newReader reads from DATABASE_READ_URL if set, else from the primary.
func (s *session) newReader() *replica.Reader {
	primary := cmp.Or(s.reserved.admin, s.pool)
	if !s.config.ReadURL.IsSet() || s.url != s.config.DatabaseURL.Reveal() {
		return replica.Primary(primary)
	}
	var log *slog.Logger // commands print the source themselves
	if s.serving {
		log = s.log
	}
	return replica.New(replica.Options{
		Primary: primary, Probe: cmp.Or(s.reserved.system, s.pool),
		Open: s.openReplica, Check: migrations.Check, Logger: log,
		// With more lag, leases of live workers and lanes would look expired.
		MaxLag: s.config.WorkerLease / 3,
	})
}

func (s *session) openReplica(ctx context.Context) (*pgxpool.Pool, error) {
	url := s.config.ReadURL.Reveal()
	if hosts := hostsOf(url); hosts > 1 {
		return nil, fmt.Errorf("it names %d servers with different lags: %w", hosts, replica.ErrOther)
	}
	pool, err := postgres.Open(ctx, url, postgres.Options{MaxConns: replicaConns})
	if err != nil {
		return nil, errors.New(strings.ReplaceAll(err.Error(), "DATABASE_URL", "DATABASE_READ_URL"))
	}
	return pool, nil
}

// withReader is withSession for queries that may read from the replica. Without a primary the session has only the
// replica.
func (c *cli) withReader(
	work func(cmd *cobra.Command, args []string, s *session) error,
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		s, err := c.session(ctx)
		if postgres.Unreachable(err) {
			s, err = c.replicaSession(ctx, err)
		}
		if err != nil {
			return err
		}
		defer s.close(ctx)
		if s.read.Configured() {
			if _, err := s.read.Measure(ctx); err != nil {
				c.infof("read from the primary, not the replica: %v", err)
			}
		}
		from, err := s.read.Do(ctx, false, func(ctx context.Context) error {
			cmd.SetContext(ctx)
			return work(cmd, args, s)
		})
		if from.Replica() {
			c.infof("read from the replica, %s", from)
		}
		return err
	}
}

// replicaSession opens a session with only the replica. It returns cause when there is none.
func (c *cli) replicaSession(ctx context.Context, cause error) (*session, error) {
	cfg, log, err := c.settings()
	if err != nil {
		return nil, err
	}
	if !cfg.ReadURL.IsSet() {
		return nil, cause
	}
	s := &session{config: cfg, log: log}
	s.read = replica.New(replica.Options{Open: s.openReplica, Check: migrations.Check})
	if _, err := s.read.Measure(ctx); err != nil {
		s.close(ctx)
		return nil, cause
	}
	return s, nil
}

func diagnoseReplica(ctx context.Context, s *session, add func(string, error, string) bool) {
	if !s.read.Configured() {
		return
	}
	behind, err := s.read.Measure(ctx)
	if err != nil {
		err = replicaError(err)
	}
	add("replica", err, fmt.Sprintf("a standby of this database, %.1f s behind", behind.Seconds()))
}

// hostsOf counts the servers in a connection string; 0 if it is invalid.
func hostsOf(url string) int {
	c, err := pgx.ParseConfig(url)
	if err != nil {
		return 0
	}
	address := func(host string, port uint16) string {
		return net.JoinHostPort(host, strconv.Itoa(int(port)))
	}
	hosts := map[string]bool{address(c.Host, c.Port): true}
	for _, other := range c.Fallbacks { // one server has several fallbacks
		hosts[address(other.Host, other.Port)] = true
	}
	return len(hosts)
}

// checkReplica rejects a replica of another database. One that is unreachable or lagging may recover.
func (s *session) checkReplica(ctx context.Context) error {
	if !s.read.Configured() {
		return nil
	}
	if _, err := s.read.Measure(ctx); errors.Is(err, replica.ErrOther) {
		return &exitError{exitUsage, replicaError(err)}
	}
	return nil
}

func replicaError(err error) error {
	todo := "reads use DATABASE_URL until it is available"
	if errors.Is(err, replica.ErrOther) {
		todo = "name a streaming standby of DATABASE_URL, or unset it to read from DATABASE_URL"
	}
	return hint(fmt.Errorf("DATABASE_READ_URL: %w", err), "%s", todo)
}
