//go:build unix

package failover_test

import (
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// One of two processes is killed. Then the database is restarted in order, without warning, and for a while, in the
// long form for longer than a worker's lease.
func TestTheDatabaseIsRestartedAndStaysAway(t *testing.T) {
	t.Parallel()
	away, lease := 4*time.Second, "30s"
	if long() {
		away, lease = time.Minute, "15s"
	}
	s := newServer(t)
	w := newWorld(t, urlOf(s), lease)
	w.serve(2)
	l := w.begin()
	l.atTheWorstMoment()
	l.kill(0)
	w.open()
	l.recovers()
	for _, outage := range []struct {
		how  syscall.Signal
		away time.Duration
	}{{syscall.SIGINT, 0}, {syscall.SIGQUIT, 0}, {syscall.SIGINT, away}} {
		l.atTheWorstMoment()
		s.stop(outage.how)
		if outage.away > 0 {
			w.unready("database")
		}
		w.open() // what was called is answered, and cannot be recorded
		testkit.Wait(t.Context(), outage.away)
		w.survived()
		s.start()
		l.recovers()
	}
	for i, a := range w.agents {
		for _, says := range []string{
			"database unavailable, trying again", "not ready: the database does not answer",
			"notification connection lost",
		} {
			assert.Truef(t, strings.Contains(a.Err.String(), says), "process %d does not log: %s", i, says)
		}
	}
	l.settle()
}

// kill kills a process as kill -9 does, ends its lease, and starts another in its place.
func (l *load) kill(i int) {
	l.t.Helper()
	l.agents[i].Kill()
	pgtest.Exec(l.t, l.db, `update agent_workers set expires_at = clock_timestamp() where name like '%pid ' || $1`,
		strconv.Itoa(l.agents[i].Cmd.Process.Pid))
	l.agents[i] = launch(l.t, l.dir, l.environ(), "serve")
	base := l.agents[i].Base()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.bases[i] = base
}

// atTheWorstMoment returns when executions wait, and calls of each skill and of the model are under way.
func (l *load) atTheWorstMoment() {
	l.t.Helper()
	l.shut()
	pgtest.Eventually(l.t, patience, func() bool { return l.holds("look", "pay", "model") }, "calls are under way")
}

// recovers waits until the processes are ready and what is asked for from now on is done.
func (l *load) recovers() {
	l.t.Helper()
	began := time.Now()
	l.ready("after the outage")
	before := l.started()
	pgtest.Eventually(l.t, patience, func() bool { return l.started() > before+4 },
		"executions are started after the outage")
	pgtest.Eventually(l.t, patience, func() bool {
		n := 0
		err := l.db.QueryRow(l.t.Context(), `select count(*) from agent_executions where flow = 'errand'
			and status = 'completed' and created_at > $1`, began).Scan(&n)
		return err == nil && n > 0
	}, "executions end that were started after the outage")
	pgtest.Eventually(l.t, patience, func() bool {
		n := 0
		err := l.db.QueryRow(l.t.Context(), `select count(*) from agent_executions where flow = 'heartbeat'
			and status = 'completed' and created_at > $1`, began).Scan(&n)
		return err == nil && n > 0
	}, "a heartbeat comes and ends after the outage")
	l.t.Logf("recovered within %s", time.Since(began).Round(time.Millisecond))
}

// TestAPrimaryIsLostAndItsStandbyPromoted while two processes work.
func TestAPrimaryIsLostAndItsStandbyPromoted(t *testing.T) {
	t.Parallel()
	primary := newServer(t)
	standby := standbyOf(t, primary)
	w := newWorld(t, urlOf(primary, standby), "30s")
	w.serve(2)
	l := w.begin()
	l.atTheWorstMoment()
	primary.stop(syscall.SIGKILL)
	w.unready("database")
	w.open()
	standby.promote()
	l.recovers()
	l.settle()
}
