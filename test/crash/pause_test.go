package crash_test

import (
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit/bills"
)

// TestLateWriteIsRejected delays a write until another process has completed the run. Any such write changes nothing,
// and the attempt is in the log.
func TestLateWriteIsRejected(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		sql, also, not string
		early          bool // the test ends the lease long before its end by the process's clock
	}{
		"a checkpoint":        {"insert into agent_checkpoints", "", "update agent_activity", false},
		"the end of a call":   {"insert into agent_checkpoints", "update agent_activity", "", false},
		"the log of a call":   {"insert into agent_activity (trace_id,", "'running'", "", true},
		"a transaction":       {"fence_agent_execution", "pg_advisory_xact_lock", "", true},
		"the end of the run":  {"complete_agent_execution(", "", "", false},
		"a wait for an admin": {"wait_agent_execution(", "", "", true},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newTestEnv(t)
			once := false
			p := newProxy(t, s.url, func(r request) proxyAction {
				if once || !strings.Contains(r.sql, c.sql) || !strings.Contains(r.sql, c.also) ||
					c.not != "" && strings.Contains(r.sql, c.not) {
					return pass
				}
				once = true
				return hold
			})
			if name == "a wait for an admin" {
				s.acquireLaneAsAdmin()
			}
			lease := "6s" // half of the processes wake after their own deadline
			if c.early {
				lease = "60s"
			}
			a := s.startServer(p.URL(victim), "AGENT_WORKER_LEASE="+lease)
			id := s.requestHeartbeat()
			p.waitHeld()
			a.Signal(syscall.SIGSTOP)
			if c.early {
				s.expireLease(a)
			}
			pgtest.Exec(s.t, s.db, `select release_agent_lock('operate', 'admin')`)
			s.startServer("")
			s.waitStatus(id, "completed")
			record := s.executionRows(id)
			close(p.released)
			a.Signal(syscall.SIGCONT)
			s.waitRejectedWrite(id, "")
			assert.Equal(t, record, s.executionRows(id))
		})
	}
}

// acquireLaneAsAdmin has an admin take the lane operate at the heartbeat's first call.
func (s *testEnv) acquireLaneAsAdmin() {
	s.skills.Before(func(bills.Call) {
		s.skills.Before(nil)
		pgtest.Exec(s.t, s.db, `select try_acquire_agent_lock('operate', 'admin', 300)`)
	})
}

// waitRejectedWrite waits until the log of an execution has a rejected write, for one skill if given.
func (s *testEnv) waitRejectedWrite(id, skill string) {
	s.t.Helper()
	eventually(s.t, "the refused write is in the activity log", func() bool {
		return pgtest.Value[bool](s.t, s.db, `
			select exists (select from agent_activity
			 where execution_id = $1 and skill_name = 'stale_write' and status = 'error' and error_class = 'stale'
			   and ($2 = '' or input ->> 'rejected_write' = $2))`, id, skill)
	})
}

// executionRows returns all rows of a run, except the notes about rejected writes.
func (s *testEnv) executionRows(id string) string {
	s.t.Helper()
	return pgtest.Value[string](s.t, s.db, `
		select string_agg(line, e'\n' order by line) from (
		  select to_jsonb(e)::text from agent_executions e where id = $1
		  union all select to_jsonb(c)::text from agent_checkpoints c where execution_id = $1
		  union all select to_jsonb(a)::text from agent_activity a where execution_id = $1 and skill_name <> 'stale_write'
		  union all select to_jsonb(l)::text from agent_locks l
		  union all select to_jsonb(m)::text from agent_memory m
		  union all select to_jsonb(o)::text from agent_objective_steps o) all_of_it (line)`, id)
}

// TestYieldedHeartbeatSurvivesItsProcess: a waiting heartbeat needs no process.
func TestYieldedHeartbeatSurvivesItsProcess(t *testing.T) {
	t.Parallel()
	s := newTestEnv(t)
	held := s.blockSkill("look", 1)
	a := s.startServer("", "PGAPPNAME="+victim)
	id := s.requestHeartbeat()
	held.waitBlocked()
	pgtest.Exec(s.t, s.db, `select try_acquire_agent_lock('operate', 'admin', 300)`)
	held.release()
	eventually(t, "the heartbeat waits for the admin", func() bool { return s.status(id) == "waiting" })
	a.Kill()
	s.waitSessionsEnd()
	before := s.takeSnapshot()
	pgtest.Exec(s.t, s.db, `select release_agent_lock('operate', 'admin')`)
	s.startServer("")
	s.waitStatus(id, "completed")
	s.checkHeartbeat(id, before)
}

// proxyAction is the proxy's action on one request of the client.
type proxyAction int

const (
	pass       proxyAction = iota
	killBefore             // the server never gets it
	killAfter              // it takes effect, the client gets no response
	terminate              // forward it, then send SIGTERM to the process
	interrupt              // forward it, then send SIGINT to the process
	hold                   // hold it until the test closes released, then deliver its response
)

// proxy stands between a process and the database.
type proxy struct {
	*pgproxy.Proxy

	t        testing.TB
	signal   func(syscall.Signal) // signals the client's process; a kill returns when the process is gone
	decide   func(request) proxyAction
	held     chan request  // the request on hold
	released chan struct{} // closed: forward it
	ended    chan struct{} // closed: the test is over

	mu sync.Mutex
	n  int
}

// request is a request: its number, and the statements that it executes.
type request struct {
	n   int
	sql string
}

// newProxy creates a proxy for the database of a URL. The proxy calls decide for each request, one at a time, with
// numbers from 1. Set signal before the first connection.
func newProxy(t testing.TB, target string, decide func(request) proxyAction) *proxy {
	t.Helper()
	p := &proxy{
		t: t, decide: decide, held: make(chan request, 1), released: make(chan struct{}), ended: make(chan struct{}),
	}
	p.Proxy = pgproxy.Intercept(t, target, p.intercept, func() { p.signal(syscall.SIGKILL) })
	t.Cleanup(func() { close(p.ended) }) // before the proxy closes, which waits for the request on hold
	return p
}

// waitHeld waits until a request is on hold.
func (p *proxy) waitHeld() {
	p.t.Helper()
	select {
	case <-p.held:
	case <-time.After(waitTimeout):
		p.t.Fatal("the request that is to be held up was not made")
	}
}

// intercept counts a request that executes a statement, and carries out its verdict.
func (p *proxy) intercept(req pgproxy.Request) pgproxy.Verdict {
	if !req.Executes {
		return pgproxy.Pass
	}
	p.mu.Lock()
	p.n++
	r := request{p.n, strings.Join(req.Bound, ";\n")}
	action := p.decide(r)
	p.mu.Unlock()
	switch action {
	case killBefore:
		p.signal(syscall.SIGKILL)
		return pgproxy.Refuse
	case killAfter:
		return pgproxy.LoseAnswer
	case hold:
		p.held <- r
		select {
		case <-p.released:
		case <-p.ended:
			return pgproxy.Refuse
		}
	case terminate:
		p.signal(syscall.SIGTERM)
	case interrupt:
		p.signal(syscall.SIGINT)
	case pass:
	}
	return pgproxy.Pass
}
