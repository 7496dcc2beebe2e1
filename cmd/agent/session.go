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

// stateDir is where agent dev keeps what it keeps, within the project's folder.
const stateDir = ".agent"

// settings reads the configuration and makes the logger. Log lines go to stderr.
func (c *cli) settings() (config.Config, *slog.Logger, error) { return c.settingsBy(config.Load) }

func (c *cli) settingsBy(load func(map[string]string, ...string) (config.Config, error)) (config.Config, *slog.Logger, error) {
	cfg, err := load(c.environ, "AGENT_OUTPUT", "AGENT_URL") // the latter is of workers outside: where agent serves
	if err != nil {
		return cfg, nil, &exitError{exitUsage, err}
	}
	log, err := logging.New(c.err, cfg.LogFormat, cfg.LogLevel)
	if err != nil {
		return cfg, nil, &exitError{exitUsage, err}
	}
	for _, warning := range cfg.Unknown {
		log.Warn("setting not read", "reason", warning)
	}
	return cfg, log, nil
}

// calm keeps log lines that only tell what goes well from a person who waits for a result.
func (c *cli) calm() {
	if c.environ["AGENT_LOG_LEVEL"] == "" && terminal(c.err) {
		c.environ["AGENT_LOG_LEVEL"] = "warn"
	}
}

// session is a command's connection to the database, with the configuration it was opened under.
type session struct {
	config    config.Config
	log       *slog.Logger
	pool      *pgxpool.Pool
	direct    *pgxpool.Pool // the way around a pooler; nil without DATABASE_DIRECT_URL
	read      *replica.Reader
	serving   bool // connections are reserved
	reserved  reserved
	server    *pgserver.Server // nil with DATABASE_URL
	ephemeral bool
	url       string
}

// close gives everything back that is open.
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
			s.log.WarnContext(ctx, "the own PostgreSQL did not stop", "error", err)
		}
	}
}

// session opens the database that commands speak to: DATABASE_URL, or the one agent dev keeps here. The
// schema must be this binary's.
func (c *cli) session(ctx context.Context) (*session, error) {
	if err := c.besideDev(); err != nil {
		return nil, err
	}
	c.calm()
	cfg, log, err := c.settings()
	if err != nil {
		return nil, err
	}
	s, err := c.open(ctx, cfg, log)
	if err != nil {
		return nil, err
	}
	if err := migrations.Check(ctx, s.pool); err != nil {
		s.close(ctx)
		return nil, err
	}
	return s, nil
}

// besideDev reads the .env of the folder where the environment names no database: what agent dev runs with here, other
// commands run with, too.
func (c *cli) besideDev() error {
	if c.environ["DATABASE_URL"] != "" || c.environ["DATABASE_URL_FILE"] != "" {
		return nil
	}
	_, err := c.loadDotEnv()
	return err
}

// loadDotEnv adds what .env sets to the environment.
func (c *cli) loadDotEnv() (config.DotEnv, error) {
	file, err := config.LoadDotEnv(".env", c.environ, func(name string) bool { return strings.HasPrefix(name, "OTEL_") })
	if err != nil {
		return file, &exitError{exitUsage, err}
	}
	c.environ, c.references = file.Environ, file.References
	return file, nil
}

// open opens the database without asking for its schema.
func (c *cli) open(ctx context.Context, cfg config.Config, log *slog.Logger) (*session, error) {
	return c.opened(ctx, &session{config: cfg, log: log})
}

// openToServe is open with connections that are reserved.
func (c *cli) openToServe(ctx context.Context, cfg config.Config, log *slog.Logger) (*session, error) {
	return c.opened(ctx, &session{config: cfg, log: log, serving: true})
}

func (c *cli) opened(ctx context.Context, s *session) (*session, error) {
	s.url = s.config.DatabaseURL.Reveal()
	if s.url == "" {
		if err := s.own(ctx, c, false, false); err != nil {
			return nil, err
		}
	}
	return s, s.connect(ctx)
}

// connect makes the pool; when it cannot, everything is given back.
func (s *session) connect(ctx context.Context) error {
	options := postgres.Options{
		MaxConns: int32(min(s.config.Workers, 1000)) + 12, IdleTransaction: idleTransaction(s.config.WorkerLease),
	}
	var kept division
	if s.serving {
		options.Reserve = func(most int32) int32 {
			kept = divide(most)
			return kept.all()
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
		if err := s.around(ctx); err != nil {
			s.close(ctx)
			return err
		}
	}
	s.read = s.reader()
	return nil
}

// idleTransaction is how long a process may leave a transaction alone: its executions go elsewhere after its lease,
// and what it has locked in the middle of a step must not keep them.
func idleTransaction(lease time.Duration) time.Duration {
	return min(max(lease, 5*time.Second), time.Minute)
}

// own starts or joins the own server. When there is none yet, it is made only if create says so.
func (s *session) own(ctx context.Context, c *cli, create, ephemeral bool) error {
	if _, err := os.Stat(stateDir); errors.Is(err, os.ErrNotExist) && !create {
		return &exitError{exitUsage, hint(errors.New("there is no database"), "set DATABASE_URL, or run `agent dev` in this folder first")}
	}
	s.ephemeral = ephemeral
	started, err := pgserver.Start(ctx, s.again(c))
	if err != nil {
		return fmt.Errorf("start the own PostgreSQL: %w", err)
	}
	s.server, s.url = started, started.URL()
	return nil
}

// again is how the own server is started, the first time and any other.
func (s *session) again(c *cli) pgserver.Config {
	dir, err := filepath.Abs(filepath.Join(stateDir, "pg"))
	if err != nil {
		dir = filepath.Join(stateDir, "pg") // the folder was removed under us; Start says so
	}
	return pgserver.Config{
		Dir: dir, Ephemeral: s.ephemeral, Durable: true, BinDir: s.config.PGBin, Database: "agent", Owner: "agent", Logger: s.log,
		Progress: func(line string) { c.say("%s", line) },
	}
}

// migrate brings the schema to this version, and says so before, where that takes a moment.
func (s *session) migrate(ctx context.Context, c *cli) ([]string, error) {
	if errors.Is(migrations.Check(ctx, s.pool), migrations.ErrOutdated) {
		c.say("bringing the schema to version %d …", migrations.Version())
	}
	return migrations.Up(ctx, s.sessions())
}

// shown says where the database is. The own server's address can be given to psql; another's may hide a
// password in several places, so it is not repeated.
func (s *session) shown() string {
	if s.server != nil {
		return s.url
	}
	c := s.pool.Config().ConnConfig
	return fmt.Sprintf("%s at %s, as %s", c.Database, net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port))), c.User)
}

// directConns is how many connections go around a pooler: two listen, and a migration takes three.
const directConns = 4

// around opens the way to the database that does not go through a pooler. It must lead to the same database: what is
// notified elsewhere is not heard, and a schema elsewhere is of no use.
func (s *session) around(ctx context.Context) error {
	pool, err := postgres.Open(ctx, s.config.DirectURL.Reveal(), postgres.Options{MaxConns: directConns})
	if err != nil {
		return fmt.Errorf("DATABASE_DIRECT_URL: %w", err)
	}
	s.direct = pool
	if postgres.Pooled(pool) {
		return &exitError{exitUsage, hint(errors.New("DATABASE_DIRECT_URL: it leads to a connection pooler too"),
			"name the host and port of PostgreSQL itself, or unset it: then the agent polls")}
	}
	same, err := sameDatabase(ctx, s.pool, pool)
	if err != nil {
		return fmt.Errorf("DATABASE_DIRECT_URL: %w", err)
	}
	if !same {
		return &exitError{exitUsage, hint(errors.New("DATABASE_DIRECT_URL: it names another database than DATABASE_URL"),
			"name the one that the pooler leads to, or unset it: then the agent polls")}
	}
	return nil
}

// sessions is the pool whose connections are sessions of the server's own, if there is one.
func (s *session) sessions() *pgxpool.Pool {
	if s.direct != nil {
		return s.direct
	}
	return s.pool
}

// sameDatabase reports whether two ways lead to one database of one running server.
func sameDatabase(ctx context.Context, ways ...*pgxpool.Pool) (bool, error) {
	var first string
	for i, way := range ways {
		var here string
		err := way.QueryRow(ctx, `
			select concat_ws(' ', extract(epoch from pg_postmaster_start_time()), (select oid from pg_database where datname = current_database()))`).Scan(&here)
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

// leastDivided is the smallest pool that is divided: with fewer connections everybody shares them.
const leastDivided = 6

// division is how many connections of a process that serves are kept for whom. The rest is the engine's.
type division struct{ system, admin, visitors int32 }

// divide divides so many connections.
func divide(most int32) division {
	if most < leastDivided {
		return division{}
	}
	each := min(max(most/7, 1), 8)
	return division{system: min(most/leastDivided, 2), admin: each, visitors: each}
}

func (d division) all() int32 { return d.system + d.admin + d.visitors }

// reserved are pools beside the engine's. They are nil in a process that does not serve, or has too few connections.
type reserved struct {
	system   *pgxpool.Pool // readiness, and the worker's lease
	admin    *pgxpool.Pool // the API and the Engine Room
	visitors *pgxpool.Pool // requests of visitors and of strangers
	pools    []*pgxpool.Pool
}

// reserve makes the pools.
func (s *session) reserve(ctx context.Context, d division) error {
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

// adminPool is where the admin's requests go to the database.
func (a *app) adminPool() *pgxpool.Pool { return cmp.Or(a.reserved.admin, a.pool) }

// replicaConns bounds the connections of a process to the read replica.
const replicaConns = 8

// reader reads from the replica, if DATABASE_READ_URL names one, and else from the primary.
func (s *session) reader() *replica.Reader {
	primary := cmp.Or(s.reserved.admin, s.pool)
	if !s.config.ReadURL.IsSet() || s.url != s.config.DatabaseURL.Reveal() {
		return replica.Primary(primary)
	}
	var log *slog.Logger // a command that asks says by itself where the answer is from
	if s.serving {
		log = s.log
	}
	return replica.New(replica.Options{
		Primary: primary, Probe: cmp.Or(s.reserved.system, s.pool),
		Open: s.openReplica, Check: migrations.Check, Logger: log,
		// On an older state the leases of live workers and lanes would look expired.
		MaxLag: s.config.WorkerLease / 3,
	})
}

// openReplica connects to the replica.
func (s *session) openReplica(ctx context.Context) (*pgxpool.Pool, error) {
	url := s.config.ReadURL.Reveal()
	if hosts := hostsOf(url); hosts > 1 {
		return nil, fmt.Errorf("it names %d servers, each with a lag of its own: %w", hosts, replica.ErrOther)
	}
	pool, err := postgres.Open(ctx, url, postgres.Options{MaxConns: replicaConns})
	if err != nil {
		return nil, errors.New(strings.ReplaceAll(err.Error(), "DATABASE_URL", "DATABASE_READ_URL"))
	}
	return pool, nil
}

// reading is withSession for a question, which is asked of the replica where that is possible. The session has only
// that when the primary cannot be reached.
func (c *cli) reading(work func(cmd *cobra.Command, args []string, s *session) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		s, err := c.session(ctx)
		if postgres.Unreachable(err) {
			s, err = c.withoutPrimary(ctx, err)
		}
		if err != nil {
			return err
		}
		defer s.close(ctx)
		if s.read.Configured() {
			if _, err := s.read.Measure(ctx); err != nil {
				c.say("from the primary, not the replica: %v", err)
			}
		}
		from, err := s.read.Do(ctx, false, func(ctx context.Context) error {
			cmd.SetContext(ctx)
			return work(cmd, args, s)
		})
		if from.Replica() {
			c.say("from the replica, %s", from)
		}
		return err
	}
}

// withoutPrimary is a session that has only the replica; away is why, and the error when that cannot be read either.
func (c *cli) withoutPrimary(ctx context.Context, away error) (*session, error) {
	cfg, log, err := c.settings()
	if err != nil {
		return nil, err
	}
	if !cfg.ReadURL.IsSet() {
		return nil, away
	}
	s := &session{config: cfg, log: log}
	s.read = replica.New(replica.Options{Open: s.openReplica, Check: migrations.Check})
	if _, err := s.read.Measure(ctx); err != nil {
		s.close(ctx)
		return nil, away
	}
	return s, nil
}

// examineReplica looks whether the replica can be read.
func examineReplica(ctx context.Context, s *session, add func(string, error, string) bool) {
	if !s.read.Configured() {
		return
	}
	behind, err := s.read.Measure(ctx)
	if err != nil {
		err = replicaError(err)
	}
	add("replica", err, fmt.Sprintf("a standby of this database, %.1f s behind", behind.Seconds()))
}

// hostsOf counts the servers that a connection string names; 0 for one that cannot be read.
func hostsOf(url string) int {
	c, err := pgx.ParseConfig(url)
	if err != nil {
		return 0
	}
	address := func(host string, port uint16) string {
		return net.JoinHostPort(host, strconv.Itoa(int(port)))
	}
	hosts := map[string]bool{address(c.Host, c.Port): true}
	for _, other := range c.Fallbacks { // a server has one more for each way to speak to it
		hosts[address(other.Host, other.Port)] = true
	}
	return len(hosts)
}

// checkReplica refuses a replica of something else. One that is away, or too far behind, may come.
func (s *session) checkReplica(ctx context.Context) error {
	if !s.read.Configured() {
		return nil
	}
	if _, err := s.read.Measure(ctx); errors.Is(err, replica.ErrOther) {
		return &exitError{exitUsage, replicaError(err)}
	}
	return nil
}

// replicaError says why the replica is not read, and what to do.
func replicaError(err error) error {
	todo := "pages are read from DATABASE_URL until it can be read"
	if errors.Is(err, replica.ErrOther) {
		todo = "name a streaming standby of DATABASE_URL, or unset it: then pages are read from DATABASE_URL"
	}
	return hint(fmt.Errorf("DATABASE_READ_URL: %w", err), "%s", todo)
}
