package main

import (
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

	"github.com/jackc/pgx/v5/pgxpool"

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

// idleTransaction is how long a process may leave a transaction alone: its executions go elsewhere after its lease, and what it has
// locked in the middle of a step must not keep them.
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
