// Package pgbouncer starts PgBouncer in front of a PostgreSQL server, for tests, in transaction pooling mode.
//
// A [Pooler] serves every database of one server, on a unix socket in a folder of its own. Each database has few server
// connections, so a client's transactions often run on different ones. It accepts startup parameters as strictly as
// PgBouncer does by default, and keeps its log. It runs the program that AGENT_TEST_PGBOUNCER names, or one on the
// PATH. Root installs a missing one from Debian's package, with the package's service (port 6432, no databases, not
// used here). Otherwise Start returns an error with the command that installs it.
//
// PgBouncer refuses to run as root. For root it runs as the user postgres, or as nobody if there is no such user, like
// the servers of internal/pgserver. On Linux it ends when the process that started it ends.
package pgbouncer

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

const (
	port         = 6432 // names the socket
	startTimeout = time.Minute
	stopTimeout  = 10 * time.Second
	pollInterval = 10 * time.Millisecond
)

// Config describes the pooler.
type Config struct {
	// Server is a connection string of the server behind it. Only its user may log in to the pooler, without
	// a password and for any database; the pooler logs in to the server with the password.
	Server string
	// PoolSize is the maximum of server connections per database; 8 if 0.
	PoolSize int
	// MaxPreparedStatements is PgBouncer's max_prepared_statements. Versions before 1.21 refuse the setting: see
	// [Pooler.SupportsPreparedStatements].
	MaxPreparedStatements int
	// Progress receives a line for the user during an installation; nil for none.
	Progress func(line string)
}

// Pooler is a running PgBouncer. Its methods may be called from any goroutine.
type Pooler struct {
	dir     string
	version version
	server  *pgx.ConnConfig
	process *os.Process
	done    chan struct{}
	exitErr error // the process's error, once done is closed
}

// Start starts a pooler and returns when it serves. ctx limits the start only. The error names the missing program, or
// contains the last lines of the pooler's log.
func Start(ctx context.Context, config Config) (*Pooler, error) {
	p, err := start(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("start PgBouncer: %w", err)
	}
	return p, nil
}

func start(ctx context.Context, config Config) (_ *Pooler, err error) {
	if config.Progress == nil {
		config.Progress = func(string) {}
	}
	server, err := pgx.ParseConfig(config.Server)
	if err != nil {
		return nil, errors.New("the server's connection string cannot be read") // the parser's text may quote its password
	}
	binary, err := findBinary(ctx, config.Progress)
	if err != nil {
		return nil, err
	}
	p := &Pooler{server: server, done: make(chan struct{})}
	if p.version, err = versionOf(ctx, binary); err != nil {
		return nil, err
	}
	if config.MaxPreparedStatements > 0 && !p.SupportsPreparedStatements() {
		return nil, fmt.Errorf("version %s does not support prepared statements: use 1.21 or later", p.version)
	}
	// The folder lies directly below the folder for temporary files. A test's own folder is closed to other users, and
	// its path is too long for a socket.
	if p.dir, err = os.MkdirTemp("", "lk-pgbouncer-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(p.dir))
		}
	}()
	user, err := pgserver.ServerAccount()
	if err != nil {
		return nil, err
	}
	if err := p.configure(config, user); err != nil {
		return nil, err
	}
	if err := p.launch(binary, user); err != nil {
		return nil, err
	}
	if err := p.waitReady(ctx); err != nil {
		return nil, errors.Join(err, p.kill())
	}
	return p, nil
}

// waitReady waits until the pooler accepts a login.
func (p *Pooler) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		err := p.ping(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("it ended (%w); the end of its log:\n%s", p.exitErr, textcut.LastLines(p.Log(), 5))
		case <-ctx.Done():
			return fmt.Errorf("it does not answer: %w; the end of its log:\n%s", err, textcut.LastLines(p.Log(), 5))
		case <-time.After(pollInterval):
		}
	}
}

// ping connects to the server through the pooler.
func (p *Pooler) ping(ctx context.Context) error {
	conn, err := pgconn.Connect(ctx, p.connString(p.server.Database, nil))
	if err != nil {
		return err
	}
	return errors.Join(conn.Ping(ctx), conn.Close(ctx))
}

// URL returns the connection string of the database that direct names, through the pooler. If direct is a URL, it
// keeps the other settings of its query (pool_max_conns, application_name and so on), except those of TLS.
func (p *Pooler) URL(direct string) (string, error) {
	config, err := pgx.ParseConfig(direct)
	if err != nil {
		return "", errors.New("through PgBouncer: the connection string cannot be read")
	}
	var settings url.Values
	if u, err := url.Parse(direct); err == nil {
		settings = u.Query()
	}
	return p.connString(config.Database, settings), nil
}

func (p *Pooler) connString(database string, settings url.Values) string {
	query := url.Values{}
	for name, values := range settings {
		if !strings.HasPrefix(name, "ssl") {
			query[name] = values
		}
	}
	query.Set("host", p.dir)
	query.Set("port", strconv.Itoa(port))
	return (&url.URL{
		Scheme: "postgres", User: url.User(p.server.User), Path: "/" + database,
		RawQuery: query.Encode(),
	}).String()
}

// SupportsPreparedStatements reports whether this version can keep clients' prepared statements
// ([Config.MaxPreparedStatements]).
func (p *Pooler) SupportsPreparedStatements() bool { return p.version.atLeast(1, 21) }

// Version is the program's version, for example "1.18.0".
func (p *Pooler) Version() string { return p.version.String() }

// Log returns the pooler's log so far.
func (p *Pooler) Log() string {
	text, err := os.ReadFile(filepath.Join(p.dir, logFile))
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// Stop ends the pooler and the connections of its clients, and removes its folder. It kills the pooler if ctx ends, or
// after stopTimeout. If the pooler had already ended, Stop returns an error.
func (p *Pooler) Stop(ctx context.Context) error {
	select {
	case <-p.done:
		err := fmt.Errorf("it had ended before (%w); the end of its log:\n%s", p.exitErr, textcut.LastLines(p.Log(), 20))
		return errors.Join(fmt.Errorf("stop PgBouncer: %w", err), os.RemoveAll(p.dir))
	default:
	}
	stop := syscall.SIGTERM
	if p.version.atLeast(1, 23) {
		stop = syscall.SIGQUIT // SIGTERM waits until all clients disconnect
	}
	if err := p.process.Signal(stop); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop PgBouncer: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	var err error
	select {
	case <-p.done:
	case <-ctx.Done():
		err = p.kill()
	}
	if err := errors.Join(err, os.RemoveAll(p.dir)); err != nil {
		return fmt.Errorf("stop PgBouncer: %w", err)
	}
	return nil
}

func (p *Pooler) kill() error {
	err := p.process.Kill()
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	if err == nil {
		<-p.done
	}
	return err
}
