//go:build unix

package failover_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// patience is how long anything may take on a busy machine before the test gives up.
const patience = 90 * time.Second

// server is a PostgreSQL of the test's own on a TCP port, with the settings of a new installation.
type server struct {
	t     testing.TB
	bin   string
	dir   string // of the data
	port  int
	cmd   *exec.Cmd
	ended chan struct{} // closed when the postmaster is gone
}

// newServer makes an empty one and starts it.
func newServer(t testing.TB) *server {
	t.Helper()
	s := place(t)
	s.run("initdb", "-D", s.dir, "-U", "postgres", "--auth=trust", "--no-locale", "-E", "UTF8", "--no-sync")
	s.start()
	s.sql(`create database agent`)
	return s
}

// standbyOf copies a running server and starts the copy, which follows it: what is committed is in both.
func standbyOf(t testing.TB, primary *server) *server {
	t.Helper()
	s := replicaOf(t, primary)
	primary.sql(`alter system set synchronous_standby_names = 'standby'`)
	primary.sql(`select pg_reload_conf()`)
	primary.await("the standby is synchronous",
		`select exists (select from pg_stat_replication where sync_state = 'sync')`)
	return s
}

// replicaOf copies a running server and starts the copy, which follows it without being waited for.
func replicaOf(t testing.TB, primary *server) *server {
	t.Helper()
	s := place(t)
	s.run("pg_basebackup", "-D", s.dir, "-X", "stream", "-c", "fast", "-R", "--no-sync",
		"-d", fmt.Sprintf("host=127.0.0.1 port=%d user=postgres application_name=standby", primary.port))
	s.start()
	return s
}

// place finds the programs, a folder and a port.
func place(t testing.TB) *server {
	t.Helper()
	found, err := pgserver.FindBinaries(os.Getenv)
	if errors.Is(err, pgserver.ErrNoBinaries) { // it gets them
		pgtest.URL(t)
		found, err = pgserver.FindBinaries(os.Getenv)
	}
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "failover-") //nolint:usetesting // the test's own folder is closed to the server's user
	require.NoError(t, err)
	t.Cleanup(func() {
		assert.NoError(t, os.RemoveAll(dir))
	})
	s := &server{t: t, bin: found.Dir, dir: filepath.Join(dir, "data"), port: freePort(t)}
	if who := s.attributes().Credential; who != nil {
		require.NoError(t, os.Chown(dir, int(who.Uid), int(who.Gid)))
	}
	return s
}

// freePort finds one below those that the system gives to whoever asks for any, so that it stays free while the
// server is away.
func freePort(t testing.TB) int {
	t.Helper()
	for range 100 {
		port := 20000 + rand.IntN(10000)
		listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		require.NoError(t, listener.Close())
		return port
	}
	t.Fatal("no port is free")
	return 0
}

// attributes make a process end with this one, and not run as root, which PostgreSQL refuses.
func (s *server) attributes() *syscall.SysProcAttr {
	attributes := proctest.DieWithUs()
	if os.Geteuid() != 0 {
		return attributes
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.Atoi(u.Uid)
		gid, err2 := strconv.Atoi(u.Gid)
		require.NoError(s.t, errors.Join(err, err2))
		attributes.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		return attributes
	}
	s.t.Fatal("PostgreSQL does not run as root, and there is no user postgres or nobody")
	return nil
}

func (s *server) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	cmd.Dir, cmd.SysProcAttr = filepath.Dir(s.dir), s.attributes()
	cmd.Env = []string{
		"LC_ALL=C", "TZ=UTC", "PATH=/usr/local/bin:/usr/bin:/bin",
		"LD_LIBRARY_PATH=" + os.Getenv("LD_LIBRARY_PATH"),
	}
	return cmd
}

// run runs one of PostgreSQL's programs.
func (s *server) run(name string, args ...string) {
	s.t.Helper()
	out, err := s.command(name, args...).CombinedOutput()
	require.Truef(s.t, err == nil, "%s: %v\n%s", name, err, out)
}

// start starts the server, and returns when it answers.
func (s *server) start() {
	s.t.Helper()
	log, err := os.OpenFile(s.dir+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	require.NoError(s.t, err)
	defer log.Close()
	cmd := s.command("postgres", "-D", s.dir, "-p", strconv.Itoa(s.port), "-c", "listen_addresses=127.0.0.1", "-c",
		"unix_socket_directories=",
		"-c", "shared_buffers=32MB", "-c", "max_connections=120", "-c", "dynamic_shared_memory_type=mmap", "-c",
		"wal_keep_size=64MB")
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(s.t, cmd.Start())
	ended := make(chan struct{})
	s.cmd, s.ended = cmd, ended
	go func() {
		defer close(ended)
		_ = cmd.Wait() // how it ended is in ProcessState
	}()
	s.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGCONT)
		_ = cmd.Process.Signal(syscall.SIGQUIT) // it may be gone
		<-ended
	})
	pgtest.Eventually(s.t, patience, func() bool {
		select {
		case <-ended:
			text, err := os.ReadFile(s.dir + ".log")
			s.t.Fatalf("PostgreSQL ended: %v\n%s", err, tail(string(text)))
		default:
		}
		return s.try("postgres", `select 1`) == nil
	}, "PostgreSQL answers")
}

// stop ends the server as pg_ctl does: SIGINT is its fast mode, SIGQUIT its immediate mode, SIGKILL kills the
// postmaster, whose children then end by themselves.
func (s *server) stop(how syscall.Signal) {
	s.t.Helper()
	require.NoError(s.t, s.cmd.Process.Signal(how))
	<-s.ended
}

// promote makes a primary of a standby.
func (s *server) promote() {
	s.t.Helper()
	s.sql(`select pg_promote()`)
}

// try runs a statement in a connection of its own.
func (s *server) try(database, sql string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), 20*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable&application_name=test",
		s.port, database))
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

func (s *server) sql(sql string) {
	s.t.Helper()
	require.NoError(s.t, s.try("postgres", sql), sql)
}

// await waits until a query of a truth value says yes.
func (s *server) await(what, sql string) {
	s.t.Helper()
	pgtest.Eventually(s.t, patience, func() bool { return s.try("postgres", "select 1 / ("+sql+")::int") == nil }, what)
}

// urlOf names the servers in one connection string, which leads to the one that takes writes.
func urlOf(servers ...*server) string {
	hosts := make([]string, len(servers))
	for i, s := range servers {
		hosts[i] = fmt.Sprintf("127.0.0.1:%d", s.port)
	}
	url := "postgres://postgres@" + strings.Join(hosts, ",") + "/agent?sslmode=disable"
	if len(servers) > 1 {
		url += "&target_session_attrs=read-write"
	}
	return url
}

// tail is the end of a log.
func tail(s string) string {
	lines := strings.SplitAfter(s, "\n")
	return strings.Join(lines[max(0, len(lines)-40):], "")
}
