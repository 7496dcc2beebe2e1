//go:build unix

package soak_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// noise is what goes wrong while the flows run: processes die without a word, and so does the database.
type noise struct {
	t       testing.TB
	world   *world
	environ []string

	moving sync.Mutex // held while the process of a slot is replaced

	mu       sync.Mutex
	slots    []*proctest.Process
	bases    []string // where the slots serve; "" for one that does not
	server   *pgtest.OwnServer
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
		n.server.Stop(i%2 == 0)
		n.server.Start()
		n.mu.Lock()
		n.restarts++
		n.mu.Unlock()
	}
}
