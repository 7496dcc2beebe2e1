package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/telemetry"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// session is a command's database connection and configuration.
type session struct {
	app.Database
	config    config.Config
	log       *slog.Logger
	serving   bool             // connections are reserved
	shared    bool             // the connections belong to a server and stay open
	server    *pgserver.Server // nil with DATABASE_URL
	ephemeral bool
	url       string
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
		return nil, c.orServer(err)
	}
	if err := migrations.Check(ctx, s.Pool); err != nil {
		s.close(ctx)
		return nil, c.orServer(err)
	}
	return s, nil
}

// errNoDatabase reports that no database is configured, and that the folder has no local one.
var errNoDatabase = errors.New("no database")

// withSession runs a command with an open database.
func (c *cli) withSession(
	work func(cmd *cobra.Command, args []string, s *session) error,
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		s, err := c.session(cmd.Context())
		if err != nil {
			return err
		}
		defer s.close(cmd.Context())
		cmd.SetContext(acting(cmd.Context()))
		return work(cmd, args, s)
	}
}

// withPromptSession is withSession for changes: a wait for a lock fails after a second, as over HTTP.
func (c *cli) withPromptSession(
	work func(cmd *cobra.Command, args []string, s *session) error,
) func(*cobra.Command, []string) error {
	return c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
		prompt, err := s.prompt(cmd.Context())
		if err != nil {
			return err
		}
		defer prompt.Pool.Close()
		return work(cmd, args, prompt)
	})
}

// prompt returns the session with a pool of its own, whose waits for locks fail after a second, as over HTTP. The
// caller closes that pool.
func (s *session) prompt(ctx context.Context) (*session, error) {
	pool, err := postgres.Reserve(ctx, s.Pool, 2)
	if err != nil {
		return nil, err
	}
	prompt := *s
	prompt.Pool = pool
	return &prompt, nil
}

// close releases all connections and ends the use of the local server, which stops after its last user.
func (s *session) close(ctx context.Context) {
	if s.shared {
		return
	}
	s.Close()
	if s.server != nil {
		if err := s.server.Stop(context.WithoutCancel(ctx)); err != nil {
			s.log.WarnContext(ctx, "local PostgreSQL did not stop", "error", err)
		}
	}
}

// stateDir holds the data of agent dev in the project's folder.
const stateDir = ".agent"

// settings loads the configuration and builds the logger, which writes to stderr.
func (c *cli) settings() (config.Config, *slog.Logger, error) { return c.loadSettings(config.Load) }

// loadSettings loads the settings of the program and of OpenTelemetry, and reports the problems of both in one error. A
// command that a caller sent has the settings of its server.
func (c *cli) loadSettings(
	load func(map[string]string, ...string) (config.Config, error),
) (config.Config, *slog.Logger, error) {
	cfg, err := load(c.environ, clientVariables...)
	settings, known := errors.AsType[*config.Error](err)
	if _, wrong := telemetry.Load(c.environ); wrong != nil && (err == nil || known) {
		problems := strings.Split(wrong.Error(), "\n")
		if known {
			problems = slices.Concat(settings.Problems, problems)
		}
		err = &config.Error{Problems: problems}
	}
	if err != nil {
		return cfg, nil, &exitError{exitUsage, err}
	}
	log, err := logging.New(c.err, cfg.LogFormat, cfg.LogLevel)
	if err != nil {
		return cfg, nil, &exitError{exitUsage, err}
	}
	if c.host != nil {
		return c.host.session.config, log, nil
	}
	for _, warning := range cfg.Unknown {
		log.Warn("setting ignored", "reason", warning)
	}
	return cfg, log, nil
}

// quietLogs raises the log level to warn for a conversation, or a person at a terminal.
func (c *cli) quietLogs() {
	if c.environ["AGENT_LOG_LEVEL"] == "" && (c.talks || terminal(c.err)) {
		c.environ["AGENT_LOG_LEVEL"] = "warn"
	}
}

// orServer adds a hint to the error of a missing or unreachable database: the caller has logged in to a server.
func (c *cli) orServer(err error) error {
	if c.host != nil || !errors.Is(err, errNoDatabase) && !postgres.Unreachable(err) {
		return err
	}
	logins, unread := c.readLogins()
	if unread != nil || len(logins) == 0 {
		return err
	}
	return hint(withAdvice(err), "or name the server of your login: --server %s, or AGENT_SERVER",
		slices.Sorted(maps.Keys(logins))[0])
}

// loadDevDotEnv loads .env when no database is configured, so that commands see the settings of agent dev.
func (c *cli) loadDevDotEnv() error {
	if c.host != nil || c.environ["DATABASE_URL"] != "" || c.environ["DATABASE_URL_FILE"] != "" {
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
	if c.host != nil {
		return &session{Database: c.host.session.Database, config: cfg, log: log, shared: true}, nil
	}
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
	database, err := app.Connect(ctx, s.config, s.url, s.serving, s.log)
	if err != nil {
		s.close(ctx)
		return err
	}
	s.Database = database
	return nil
}

// startServer starts or joins the local PostgreSQL. It creates the data only if create is set.
func (s *session) startServer(ctx context.Context, c *cli, create, ephemeral bool) error {
	s.ephemeral = ephemeral
	config := s.serverConfig(c)
	if !create && !pgserver.HasData(config.Dir) {
		return &exitError{
			exitUsage,
			hint(errNoDatabase, "set DATABASE_URL, or run `agent dev` in this folder first"),
		}
	}
	started, err := pgserver.Start(ctx, config)
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
		Owner: "agent", ActsAs: migrations.ClientRole, Logger: s.log,
		Progress: func(line string) { c.infof("%s", line) },
	}
}

// migrate migrates the schema. It prints a note if the schema is outdated, and a note during a long wait for another
// process.
func (s *session) migrate(ctx context.Context, c *cli) ([]string, error) {
	if errors.Is(migrations.Check(ctx, s.Pool), migrations.ErrOutdated) {
		c.infof("migrating the schema to version %d …", migrations.Version())
	}
	return migrations.Up(ctx, s.Sessions(), func(message string) { c.infof("%s", printable(message)) })
}

// displayURL returns a printable address. It hides the password of a configured database.
func (s *session) displayURL() string {
	if s.server != nil {
		return s.url
	}
	c := s.Pool.Config().ConnConfig
	return fmt.Sprintf("%s at %s, as %s", c.Database, net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port))), c.User)
}

// restartServer starts the local PostgreSQL again when it went down.
func (s *session) restartServer(ctx context.Context, c *cli) error {
	if s.server == nil {
		return nil
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.server.Done():
		}
		s.log.ErrorContext(ctx, "local PostgreSQL went down; restarting it")
		restarted, err := pgserver.Start(ctx, s.serverConfig(c))
		if err != nil {
			s.log.ErrorContext(ctx, "local PostgreSQL did not start", "error", err)
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(2 * time.Second):
			}
			continue
		}
		s.server = restarted
		if restarted.URL() != s.url {
			return fmt.Errorf("the local PostgreSQL has a new address; restart agent dev")
		}
	}
}
