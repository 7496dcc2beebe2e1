//go:build unix

package failover_test

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// TestTheDatabaseIsRestartedAndStaysAway while two processes work: in order, without warning, and for a while, in the
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
			if !strings.Contains(a.Err.String(), says) {
				t.Errorf("process %d does not log: %s", i, says)
			}
		}
	}
	l.settle()
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
		err := l.db.QueryRow(l.t.Context(), `select count(*) from agent_executions where flow = 'errand' and status = 'completed' and created_at > $1`, began).Scan(&n)
		return err == nil && n > 0
	}, "executions end that were started after the outage")
	pgtest.Eventually(l.t, patience, func() bool {
		n := 0
		err := l.db.QueryRow(l.t.Context(), `select count(*) from agent_executions where flow = 'heartbeat' and status = 'completed' and created_at > $1`, began).Scan(&n)
		return err == nil && n > 0
	}, "a heartbeat comes and ends after the outage")
	l.t.Logf("recovered within %s", time.Since(began).Round(time.Millisecond))
}
