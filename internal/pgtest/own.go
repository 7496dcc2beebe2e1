package pgtest

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// OwnServer is a durable PostgreSQL server of one test, with the schema.
type OwnServer struct {
	tb     testing.TB
	dir    string
	server *pgserver.Server
}

// Own starts a server, and removes it when the test ends.
func Own(tb testing.TB) *OwnServer {
	tb.Helper()
	s := &OwnServer{tb: tb, dir: OpenDir(tb)}
	tb.Cleanup(func() { _ = s.server.Stop(context.Background()) }) // it may not have started again after a crash
	s.start()
	pool := Pool(tb, s.URL(), postgres.Options{})
	_, err := migrations.Up(tb.Context(), pool)
	require.NoError(tb, err)
	pool.Close()
	return s
}

// OpenDir is a temporary directory that other users can read: a server that root starts belongs to another user.
func OpenDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "lanekeeper-own-") //nolint:usetesting // TempDir is closed to other users
	require.NoError(tb, err)
	tb.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	require.NoError(tb, os.Chmod(dir, 0o755))
	return dir
}

// URL is the database postgres of the server.
func (s *OwnServer) URL() string { return s.server.URL() }

func (s *OwnServer) start() {
	s.tb.Helper()
	config := pgserver.Config{Dir: s.dir, Durable: true, MaxConnections: 200}
	server, err := pgserver.Start(context.WithoutCancel(s.tb.Context()), config)
	require.NoError(s.tb, err)
	s.server = server
}

// Crash stops the server like pg_ctl's immediate mode. It starts the server again at the same address, and the server
// recovers.
func (s *OwnServer) Crash() {
	s.tb.Helper()
	require.NoError(s.tb, syscall.Kill(Postmaster(s.tb, s.server.Dir()), syscall.SIGQUIT))
	_ = s.server.Stop(context.Background()) // its error is the crash
	<-s.server.Done()
	s.start()
}

// Postmaster returns the process id of the server whose files are below a directory, which may be a pattern.
func Postmaster(tb testing.TB, dir string) int {
	tb.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "data", "postmaster.pid"))
	if err != nil || len(files) != 1 {
		tb.Fatalf("%d servers below %s: %v", len(files), dir, err)
	}
	content, err := os.ReadFile(files[0])
	require.NoError(tb, err)
	first, _, _ := strings.Cut(string(content), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(first))
	require.NoError(tb, err)
	return pid
}
