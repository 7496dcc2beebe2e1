//go:build unix

package soak_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgserver"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// noise is what goes wrong while the flows run: processes die without a word, and so does the database.
type noise struct {
	t       testing.TB
	world   *world
	dir     string // of the server
	environ []string

	moving sync.Mutex // held while the process of a slot is replaced

	mu       sync.Mutex
	slots    []*proctest.Process
	bases    []string // where the slots serve; "" for one that does not
	server   *pgserver.Server
	kills    int
	restarts int
}

// begin starts a process in each slot.
func (n *noise) begin(processes int) {
	n.t.Helper()
	n.slots, n.bases = make([]*proctest.Process, processes), make([]string, processes)
	for i := range n.slots {
		n.launch(i)
	}
}

// launch starts a process in a slot.
func (n *noise) launch(i int) {
	a := launch(n.t, n.world.dir, n.environ, "serve")
	n.mu.Lock()
	defer n.mu.Unlock()
	n.slots[i], n.bases[i] = a, ""
}

// look learns where the processes serve, and starts those anew that could not begin while there was no database.
func (n *noise) look() {
	n.moving.Lock()
	defer n.moving.Unlock()
	for i := range n.slots {
		n.mu.Lock()
		a, base := n.slots[i], n.bases[i]
		n.mu.Unlock()
		select {
		case <-a.Ended():
			n.launch(i)
			continue
		default:
		}
		if base != "" {
			continue
		}
		for _, l := range a.Lines() {
			if l.Message == "serving" {
				n.mu.Lock()
				n.bases[i] = l.Listen
				n.mu.Unlock()
			}
		}
	}
}

// base is where a process serves; "" when none does.
func (n *noise) base() string {
	n.look()
	n.mu.Lock()
	defer n.mu.Unlock()
	first := rand.IntN(len(n.bases))
	for i := range n.bases {
		if base := n.bases[(first+i)%len(n.bases)]; base != "" {
			return base
		}
	}
	return ""
}

// keepKilling kills a process that serves every second or two, and starts another in its place, until ctx ends.
func (n *noise) keepKilling(ctx context.Context, every time.Duration) {
	for testkit.Wait(ctx, every/2+rand.N(every)) {
		n.look()
		n.kill(rand.IntN(len(n.slots)))
	}
}

// kill kills the process of a slot, if it serves.
func (n *noise) kill(i int) {
	n.moving.Lock()
	defer n.moving.Unlock()
	n.mu.Lock()
	a, serves := n.slots[i], n.bases[i] != ""
	n.mu.Unlock()
	if !serves {
		return
	}
	if err := a.Cmd.Process.Kill(); err != nil {
		return // it has ended by itself
	}
	<-a.Ended()
	n.mu.Lock()
	n.kills++
	n.mu.Unlock()
	n.launch(i)
}

// keepRestarting restarts the database so many times in the time given, by turns without warning and in good order.
func (n *noise) keepRestarting(ctx context.Context, times int, during time.Duration) {
	for i := range times {
		if !testkit.Wait(ctx, during/time.Duration(times+1)) {
			return
		}
		stopServer(n.t, n.server, i%2 == 0)
		server, err := pgserver.Start(context.WithoutCancel(ctx), pgserver.Config{Dir: n.dir, Durable: true})
		if err != nil {
			n.t.Errorf("start the server again: %v", err)
			return
		}
		n.mu.Lock()
		n.server = server
		n.restarts++
		n.mu.Unlock()
	}
}

// stop ends the server; the test has nothing to do with it any more.
func (n *noise) stop() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.server.Stop(context.Background()); err != nil {
		n.t.Error(err)
	}
}

// ownServer is a database of the test's own, which may be restarted, with the schema.
func ownServer(t *testing.T) (*pgserver.Server, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "soak-") //nolint:usetesting // the test's own folder is closed to the server's user
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	require.NoError(t, os.Chmod(dir, 0o755))
	server, err := pgserver.Start(t.Context(), pgserver.Config{Dir: dir, Durable: true})
	require.NoError(t, err)
	pool, err := postgres.Open(t.Context(), server.URL(), postgres.Options{})
	require.NoError(t, err)
	defer pool.Close()
	if _, err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	return server, dir
}

// stopServer stops a server: in order, or as pg_ctl's immediate mode does, so that it has to recover.
func stopServer(t testing.TB, own *pgserver.Server, immediate bool) {
	t.Helper()
	if immediate {
		pid, err := postmaster(own.Dir())
		if err == nil {
			err = syscall.Kill(pid, syscall.SIGQUIT)
		}
		if err != nil {
			t.Errorf("stop the server at once: %v", err)
		}
	}
	if err := own.Stop(context.Background()); err != nil && !immediate {
		t.Errorf("stop the server: %v", err)
	}
	<-own.Done()
}

// postmaster is the process id of the server whose files are below a folder.
func postmaster(dir string) (int, error) {
	content, err := os.ReadFile(filepath.Join(dir, "data", "postmaster.pid"))
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(content), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(first))
	if err != nil {
		return 0, fmt.Errorf("read postmaster.pid: %w", err)
	}
	return pid, nil
}
