//go:build unix

package randomflows_test

import (
	"math/rand/v2"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/proctest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// patience is how long anything may take on a busy machine before the test gives up.
const patience = 2 * time.Minute

// workers are how many processes run flows at once.
const workers = 3

// trouble is what happens to the processes.
type trouble struct {
	t       testing.TB
	pool    *pgxpool.Pool
	sink    string
	proxies [workers]*proxy
	slots   [workers]*proctest.Process

	kills, stops, ends, cuts, pauses int
}

func newTrouble(w *world, database string) *trouble {
	t := w.t
	t.Helper()
	x := &trouble{t: t, pool: w.pool, sink: w.url}
	for i := range workers {
		x.proxies[i] = newProxy(t, database)
		x.launch(i)
	}
	return x
}

// launch starts a process in a slot.
func (x *trouble) launch(i int) {
	x.t.Helper()
	program, err := os.Executable()
	require.NoError(x.t, err)
	environ := proctest.Environ(workerURL+"="+x.proxies[i].URL(""), workerSink+"="+x.sink)
	x.slots[i] = proctest.Start(x.t, patience, x.t.TempDir(), environ, program, "worker")
}

// make makes trouble for so long: of each sort as much as of the others, and of cuts more.
func (x *trouble) make(lasts time.Duration) {
	var next []int
	for end := time.Now().Add(lasts); time.Now().Before(end); rest(500 * time.Millisecond) {
		i := rand.IntN(workers)
		p := x.slots[i]
		if !p.Running() { // its connection broke as it began
			x.launch(i)
			continue
		}
		if len(next) == 0 {
			next = rand.Perm(7)
		}
		sort := next[0]
		next = next[1:]
		switch sort {
		case 0:
			p.Kill()
			x.launch(i)
			x.kills++
		case 1:
			p.Signal(syscall.SIGSTOP)
			rest(lease)
			p.Signal(syscall.SIGCONT)
			x.stops++
		case 2:
			if code := p.Terminate(); code != 0 {
				x.t.Logf("a process that was asked to end ended with %d: %s", code, p.Err.Tail(5))
			}
			x.launch(i)
			x.ends++
		case 3:
			x.pause()
		default:
			x.cuts += x.proxies[i].cut()
		}
	}
	for i := range x.slots {
		for !x.works(i) {
			x.launch(i)
		}
	}
}

// works waits until the process of a slot works; false when its connection broke as it began.
func (x *trouble) works(i int) bool {
	x.t.Helper()
	p := x.slots[i]
	begun := func() bool { return strings.Contains(p.Out.String(), "works") }
	pgtest.Eventually(x.t, patience, func() bool { return begun() || !p.Running() }, "a process begins to work")
	return begun() && p.Running()
}

// pause pauses the agent for a while.
func (x *trouble) pause() {
	ctx := x.t.Context()
	_, err := executions.PauseAll(ctx, x.pool, "somebody", "to see what is in the way")
	assert.NoError(x.t, err, "pause")
	rest(500 * time.Millisecond)
	_, err = executions.ResumeAll(ctx, x.pool, "somebody", "")
	assert.NoError(x.t, err, "resume")
	x.pauses++
}
