// Package pgserver runs a private PostgreSQL server, so `agent dev` and the tests need no setup. It finds server
// binaries, or installs them with the machine's package manager. It creates a data directory and starts the server on a
// unix socket that only this user reaches.
//
// It promises one server per directory, for any number of concurrent starters. No server stays behind, even after kill
// -9 of all its users. Only an ephemeral server, or one without [Config.Durable], loses its data.
//
// The package uses three locks, all flock(2) on files beside the data. The kernel releases a lock when its holder dies:
//
//	start.lock  held while a process joins or starts a server: starters queue here
//	users.lock  shared by every process that uses the server
//	guard.lock  held by the guard while a server runs, starts or stops
//
// The server is the child of a guard. The guard is this binary, started again under another name (see [GuardMain]) in a
// session of its own. So ^C at a terminal does not reach the guard. The guard requests users.lock exclusively. The
// kernel grants the lock when the last user is gone. The guard then stops the server while it holds the lock, so the
// next starter waits for the end. A later process joins the running server ([Server.Adopted]) and keeps it alive when
// the first process ends.
//
// PostgreSQL refuses to run as root. If root starts the server, the server and its files belong to the user `postgres`,
// or without that user to `nobody`. place.go decides the folder.
package pgserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Config describes the server.
type Config struct {
	// Dir holds the server's files, one folder per major version: for `agent dev` the project's
	// .agent/pg. Unused when Ephemeral.
	Dir string
	// Ephemeral makes a server in a temporary directory, and removes the directory when the server stops.
	Ephemeral bool
	// Durable keeps every commit through a power failure. Without Durable, the server is faster and a restart of the
	// machine discards its data: for tests.
	Durable bool
	// BinDir is the folder with postgres and initdb (AGENT_PG_BIN); empty to search for it.
	BinDir string
	// NoInstall forbids the installation of binaries.
	NoInstall bool
	// Database is created if it does not exist; "postgres" if empty.
	Database string
	// Owner is a role that owns Database and all objects in it; empty for the superuser. Start creates the role without
	// superuser rights, and URL connects as that role.
	Owner string
	// ActsAs is a role that Owner may act as (set role); empty for none. Start creates the role, without login.
	ActsAs string
	// MaxConnections of the server; 100 if 0.
	MaxConnections int
	// Logger receives the events of the server; nil for none.
	Logger *slog.Logger
	// Progress receives a line for the user when a step is slow or unusual; nil for none.
	Progress func(line string)
}

// Server is a running server that this process uses.
type Server struct {
	layout  layout
	url     string
	adopted bool
	bin     Binaries
	users   *flock

	stop    context.CancelFunc
	watched sync.WaitGroup
	done    chan struct{}
	guard   *guard // nil when adopted
}

const (
	readyLimit = 2 * time.Minute // for crash recovery of a big database
	goneLimit  = 30 * time.Second
	watchEvery = 250 * time.Millisecond
	pollEvery  = 10 * time.Millisecond

	lingerLimit = 20 * time.Second
)

// Start starts a server for config, or joins the server that another process runs. It returns when the server accepts
// connections. ctx limits the start only.
func Start(ctx context.Context, config Config) (*Server, error) {
	if isGuard(os.Args) {
		return nil, errors.New("start postgres: this process was started as the guard of a server, but main (or TestMain) " +
			"does not call pgserver.GuardMain first")
	}
	s, err := start(ctx, config.withDefaults())
	if err != nil {
		return nil, fmt.Errorf("start postgres: %w", err)
	}
	return s, nil
}

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	c.Database = cmp.Or(c.Database, "postgres")
	c.MaxConnections = cmp.Or(c.MaxConnections, 100)
	return c
}

func start(ctx context.Context, config Config) (*Server, error) {
	bin, err := resolve(ctx, config)
	if err != nil {
		return nil, err
	}
	l, err := choosePlace(config, bin)
	if err != nil {
		return nil, err
	}
	s := &Server{layout: l, bin: bin, done: make(chan struct{})}
	if err := s.joinOrLaunch(ctx, config); err != nil {
		if !l.keep {
			err = errors.Join(err, os.RemoveAll(l.root))
		}
		return nil, err
	}
	if err := s.assignOwner(ctx, config); err != nil {
		return nil, errors.Join(err, s.users.close())
	}
	s.url = connString(s.layout, cmp.Or(config.Owner, superuser), config.Database)
	watch, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.stop = cancel
	s.watched.Go(func() { s.watch(watch) })
	return s, nil
}

// joinOrLaunch runs under start.lock: of concurrent starters, one launches the server and the others join it.
func (s *Server) joinOrLaunch(ctx context.Context, config Config) (err error) {
	s.users, err = lockPolling(ctx, s.layout.path(usersLock), s.layout.user, syscall.LOCK_SH)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.users.close())
		}
	}()
	starting, err := lockPolling(ctx, s.layout.path(startLock), s.layout.user, syscall.LOCK_EX)
	if err != nil {
		return err
	}
	err = s.join(ctx, config)
	if errors.Is(err, errNoServer) {
		err = s.launch(ctx, config)
	}
	return errors.Join(err, starting.close())
}

var errNoServer = errors.New("no server")

// join waits until the running server accepts connections. It returns errNoServer if none runs.
func (s *Server) join(ctx context.Context, config Config) error {
	held, err := isLocked(s.layout.path(guardLock))
	if err != nil {
		return err
	}
	if !held {
		return errNoServer
	}
	if s.layout.sockets, err = recordedSockets(s.layout); err != nil {
		return err
	}
	ended := func() (bool, error) {
		held, err := isLocked(s.layout.path(guardLock))
		return !held, err
	}
	if err := awaitReady(ctx, s.layout, config.Database, ended); err != nil {
		return err
	}
	s.adopted = true
	config.Logger.DebugContext(ctx, "postgres joined", "dir", s.layout.root)
	return nil
}

// launch starts a server. It waits for lingering processes of a killed server. Without Durable, it creates the data
// directory again if the start fails.
func (s *Server) launch(ctx context.Context, config Config) error {
	began := time.Now()
	err := s.tryLaunch(ctx, config)
	for errors.Is(err, errLingering) && time.Since(began) < lingerLimit && ctx.Err() == nil {
		err = s.tryLaunch(ctx, config)
	}
	if err != nil && !config.Durable && ctx.Err() == nil && exists(s.layout.data()) {
		config.Progress("the test server's directory is damaged, creating it again: " + err.Error())
		if err := os.RemoveAll(s.layout.data()); err != nil {
			return err
		}
		err = s.tryLaunch(ctx, config)
	}
	if err == nil {
		config.Logger.DebugContext(ctx, "postgres started", "dir", s.layout.root, "took", time.Since(began))
	}
	return err
}

// tryLaunch prepares the data directory and starts the server once. It returns when the server accepts connections.
func (s *Server) tryLaunch(ctx context.Context, config Config) error {
	if err := prepareData(ctx, s.layout, s.bin, config); err != nil {
		return err
	}
	if err := clearStale(ctx, s.layout); err != nil {
		return err
	}
	sockets, err := makeSockets(s.layout)
	if err != nil {
		return err
	}
	s.layout.sockets = sockets
	g, err := launchGuard(s.layout, s.bin, config)
	if err != nil {
		return err
	}
	if err := awaitReady(ctx, s.layout, config.Database, g.hasEnded); err != nil {
		return errors.Join(s.explainStart(err), g.abandon())
	}
	s.guard = g
	return nil
}

// errLingering reports processes of a killed server that still hold its shared memory.
var errLingering = errors.New("processes of the previous server are still running")

// explainStart adds the end of the server's log, which usually has the reason.
func (s *Server) explainStart(err error) error {
	if !errors.Is(err, errNoServer) {
		return err
	}
	log := tail(s.layout.path(logFile), 8)
	err = fmt.Errorf("the server stopped at once; its log %s ends with:\n%s", s.layout.path(logFile), log)
	if strings.Contains(log, "is still in use") { // shared memory
		return errors.Join(errLingering, err)
	}
	return err
}

// watch closes done when the server ends.
func (s *Server) watch(ctx context.Context) {
	defer close(s.done)
	ticker := time.NewTicker(watchEvery)
	defer ticker.Stop()
	var ended <-chan struct{}
	if s.guard != nil {
		ended = s.guard.ended
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-ended:
			return
		case <-ticker.C:
		}
		if held, err := isLocked(s.layout.path(guardLock)); err == nil && !held {
			return
		}
	}
}

// URL returns a connection string over the unix socket, for Config.Owner or, if that is empty, the superuser.
func (s *Server) URL() string { return s.url }

// Adopted reports whether another process started the server.
func (s *Server) Adopted() bool { return s.adopted }

// Dir returns the folder with the data directory, the locks and the server's log.
func (s *Server) Dir() string { return s.layout.root }

// Binaries returns the server's binaries.
func (s *Server) Binaries() Binaries { return s.bin }

// Done returns a channel that closes when the server ends, or after Stop. The caller may then call Start again.
func (s *Server) Done() <-chan struct{} { return s.done }

// Stop ends this process's use of the server. The last user's Stop returns when the server is down; any other Stop
// returns at once. Repeated calls are safe.
func (s *Server) Stop(ctx context.Context) error {
	s.stop()
	s.watched.Wait()
	if err := s.users.close(); err != nil {
		return fmt.Errorf("stop postgres: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, goneLimit)
	defer cancel()
	if err := s.awaitGone(ctx); err != nil {
		return fmt.Errorf("stop postgres: %w", err)
	}
	return nil
}

// awaitGone returns when the server is down or has another user. An ephemeral server has no other users.
func (s *Server) awaitGone(ctx context.Context) error {
	if !s.layout.keep {
		select {
		case <-s.guard.ended:
			return os.RemoveAll(s.layout.root) // the guard has removed it, unless it was killed
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return poll(ctx, func() (bool, error) {
		held, err := isLocked(s.layout.path(guardLock))
		if err != nil || !held {
			return true, err
		}
		// If the lock on users.lock is shared, other processes use the server. The guard holds it exclusively while it
		// stops the server. A free lock means that the guard has not woken up yet.
		return othersUse(s.layout.path(usersLock))
	})
}

// connString returns a URL with spaces as %20: in a URL of PostgreSQL a + is a plus sign.
func connString(l layout, role, database string) string {
	query := url.Values{"host": {l.sockets}, "port": {strconv.Itoa(port)}, "sslmode": {"disable"}}
	u := url.URL{
		Scheme: "postgres", User: url.User(role), Host: "", Path: "/" + database,
		RawQuery: strings.ReplaceAll(query.Encode(), "+", "%20"),
	}
	return u.String()
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func absolute(dir string) (string, error) {
	if dir == "" {
		return "", errors.New("no directory given")
	}
	return filepath.Abs(dir)
}
