//go:build unix

package crash_test

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

// TestTheDatabaseRestarts while a heartbeat is under way: the process stays up, and goes on when the
// database is back. The lease outlasts the outage, however slow the machine is.
func TestTheDatabaseRestarts(t *testing.T) {
	t.Parallel()
	for name, immediate := range map[string]bool{"fast": false, "immediate": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := openDir(t)
			own := startServer(t, dir)
			migrate(t, own.URL())
			s := newSceneOn(t, own.URL())
			held := s.holdSkill("look", 1)
			a := s.serve("", "AGENT_WORKER_LEASE=5m")
			id := s.begin()
			held.wait()
			before := s.look()
			stopServer(t, own, immediate)
			held.free() // its result has to be recorded while there is no database
			a.Says("database unavailable, trying again")
			own = startServer(t, dir)
			if own.URL() != s.url {
				t.Fatalf("the server came back at %s, not at %s", own.URL(), s.url)
			}
			s.db.Reset()
			s.ends(id, "completed")
			if !a.Running() {
				t.Error("the process did not survive")
			}
			// The call was under way and its process lived: it is recorded, once.
			key := s.keyOf("look")
			before.rows[key] = row{}
			before.called[key] = 0
			s.whole(id, before)
			again := s.begin()
			s.ends(again, "completed")
		})
	}
}

// startServer starts a PostgreSQL of the test's own.
func startServer(t *testing.T, dir string) *pgserver.Server {
	t.Helper()
	own, err := pgserver.Start(t.Context(), pgserver.Config{Dir: dir, Durable: true})
	require.NoError(t, err)
	t.Cleanup(func() { _ = own.Stop(context.Background()) }) // stopped already, where the test got so far
	return own
}

// migrate gives a database the schema.
func migrate(t *testing.T, database string) {
	t.Helper()
	pool, err := postgres.Open(t.Context(), database, postgres.Options{})
	require.NoError(t, err)
	defer pool.Close()
	if _, err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
}

// openDir is a temporary folder that other users reach: a server that root starts belongs to one.
func openDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "crash-") //nolint:usetesting // the test's own folder is closed to others
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	require.NoError(t, os.Chmod(dir, 0o755))
	return dir
}

// stopServer stops a server: in order, or as pg_ctl's immediate mode does, so that it has to recover.
func stopServer(t *testing.T, own *pgserver.Server, immediate bool) {
	t.Helper()
	if immediate {
		require.NoError(t, syscall.Kill(postmaster(t, own.Dir()), syscall.SIGQUIT))
	}
	if err := own.Stop(t.Context()); err != nil && !immediate {
		t.Fatal(err)
	}
	<-own.Done()
}

// postmaster is the process id of the server whose files are below a folder.
func postmaster(t *testing.T, dir string) int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "data", "postmaster.pid"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%d servers below %s: %v", len(files), dir, err)
	}
	content, err := os.ReadFile(files[0])
	require.NoError(t, err)
	first, _, _ := strings.Cut(string(content), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(first))
	require.NoError(t, err)
	return pid
}
