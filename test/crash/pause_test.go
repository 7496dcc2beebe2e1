package crash_test

import (
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/bills"
)

// TestAPausedWorkerWakesToNothing: a process is stopped in the middle of a step until its lease has ended
// and another has completed the run. What it does when it wakes is refused and can be seen.
func TestAPausedWorkerWakesToNothing(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	held := s.holdSkill("look", 1)
	a := s.serve("", "AGENT_WORKER_LEASE=6s")
	id := s.begin()
	held.wait()
	token := s.token()
	a.Signal(syscall.SIGSTOP)
	before := s.look()

	second := s.holdPay(1, 1) // so that the other's hold of the lane can be looked at
	s.serve("")
	second.wait()
	later := s.token()
	assert.Truef(t, later > token, "the lane's token went from %d to %d, want a larger one", token, later)
	second.free()
	s.ends(id, "completed")
	s.whole(id, before)

	record := s.record(id)
	held.free()
	a.Signal(syscall.SIGCONT)
	s.rejects(id, "look")
	assert.Equal(t, record, s.record(id))
	// It has lost that run, not its life: it begins anew under another lease.
	eventually(t, "the woken process has a lease again", func() bool {
		return pgtest.Value[bool](s.t, s.db, `select exists (select from agent_workers where expires_at > clock_timestamp()
			and name like '%pid ' || $1)`, a.pid())
	})
}

// TestAWriteThatComesTooLate: a write leaves the process, and reaches the database when the run has been
// completed by another. Whichever write it is, it changes nothing, and the attempt is in the log.
func TestAWriteThatComesTooLate(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		sql, also, not string
		early          bool // the test ends the lease, long before it is over by the process's clock
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
			s := newScene(t)
			once := false
			p := newProxy(t, s.url, func(r request) verdict {
				if once || !strings.Contains(r.sql, c.sql) || !strings.Contains(r.sql, c.also) ||
					c.not != "" && strings.Contains(r.sql, c.not) {
					return pass
				}
				once = true
				return hold
			})
			if name == "a wait for an admin" {
				s.adminComes()
			}
			lease := "6s" // and half of the processes have a deadline of their own behind them when they wake
			if c.early {
				lease = "60s"
			}
			a := s.serve(p.URL(victim), "AGENT_WORKER_LEASE="+lease)
			id := s.begin()
			p.holds()
			a.Signal(syscall.SIGSTOP)
			if c.early {
				s.expire(a)
			}
			pgtest.Exec(s.t, s.db, `select release_agent_lock('operate', 'admin')`)
			s.serve("")
			s.ends(id, "completed")
			record := s.record(id)
			close(p.released)
			a.Signal(syscall.SIGCONT)
			s.rejects(id, "")
			assert.Equal(t, record, s.record(id))
		})
	}
}

// adminComes has an admin take the lane operate when the heartbeat's first call is made.
func (s *scene) adminComes() {
	s.skills.Before(func(bills.Call) {
		s.skills.Before(nil)
		pgtest.Exec(s.t, s.db, `select try_acquire_agent_lock('operate', 'admin', 300)`)
	})
}

// token is the fencing token of the heartbeat's lane.
func (s *scene) token() int64 {
	s.t.Helper()
	return pgtest.Value[int64](s.t, s.db, `select fencing_token from agent_locks_live where lane = 'heartbeat'`)
}

// rejects waits until a refused write is in the log of an execution; of a certain skill where one is named.
func (s *scene) rejects(id, skill string) {
	s.t.Helper()
	eventually(s.t, "the refused write is in the activity log", func() bool { return s.rejected(id, skill) })
}

func (s *scene) rejected(id, skill string) bool {
	s.t.Helper()
	return pgtest.Value[bool](s.t, s.db, `
		select exists (select from agent_activity
		 where execution_id = $1 and skill_name = 'stale_write' and status = 'error' and error_class = 'stale'
		   and ($2 = '' or input ->> 'rejected_write' = $2))`, id, skill)
}

// record is everything that is kept of a run, without the notes about what was refused.
func (s *scene) record(id string) string {
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

// TestAYieldedHeartbeatSurvivesItsProcess: while it waits it needs none.
func TestAYieldedHeartbeatSurvivesItsProcess(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	held := s.holdSkill("look", 1)
	a := s.serve("", "PGAPPNAME="+victim)
	id := s.begin()
	held.wait()
	pgtest.Exec(s.t, s.db, `select try_acquire_agent_lock('operate', 'admin', 300)`)
	held.free()
	eventually(t, "the heartbeat waits for the admin", func() bool { return s.status(id) == "waiting" })
	a.Kill()
	s.quiet()
	before := s.look()
	pgtest.Exec(s.t, s.db, `select release_agent_lock('operate', 'admin')`)
	s.serve("")
	s.ends(id, "completed")
	s.whole(id, before)
}

// TestTheDatabaseRestarts while a heartbeat is under way: the process stays up, and goes on when the
// database is back. The lease outlasts the outage, however slow the machine is.
func TestTheDatabaseRestarts(t *testing.T) {
	t.Parallel()
	for name, immediate := range map[string]bool{"fast": false, "immediate": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			own := pgtest.Own(t)
			s := newSceneOn(t, own.URL())
			held := s.holdSkill("look", 1)
			a := s.serve("", "AGENT_WORKER_LEASE=5m")
			id := s.begin()
			held.wait()
			before := s.look()
			own.Stop(immediate)
			held.free() // its result has to be recorded while there is no database
			a.Says("database unavailable, trying again")
			own.Start()
			require.Equal(t, s.url, own.URL())
			s.db.Reset()
			s.ends(id, "completed")
			assert.True(t, a.Running(), "the process did not survive")
			// The call was under way and its process lived: it is recorded, once.
			key := pgtest.Value[string](s.t, s.db, `select idempotency_key from agent_activity where skill_name = $1`, "look")
			before.rows[key] = row{}
			before.called[key] = 0
			s.whole(id, before)
			again := s.begin()
			s.ends(again, "completed")
		})
	}
}

// verdict is what the proxy does with one request of the client.
type verdict int

const (
	pass       verdict = iota
	killBefore         // the server never sees it
	killAfter          // it takes effect, and the client never hears of it
	terminate          // it is passed on, and the process is asked to stop
	interrupt          // it is passed on, and ^C is pressed
	hold               // it is kept back until Proxy.release, and its answer is delivered
)

// proxy stands between a process and the database.
type proxy struct {
	*pgproxy.Proxy

	t        testing.TB
	signal   func(syscall.Signal) // to the client's process; returns when a killed one is gone
	decide   func(request) verdict
	held     chan request  // what is being kept back
	released chan struct{} // closed: let it go
	ended    chan struct{} // closed: the test is over

	mu sync.Mutex
	n  int
}

// request is one request: its number, and the statements it executes.
type request struct {
	n   int
	sql string
}

// newProxy makes a proxy for the database of a URL. decide is called for each request, one at a time,
// with numbers from 1; set signal before anything connects.
func newProxy(t testing.TB, target string, decide func(request) verdict) *proxy {
	t.Helper()
	p := &proxy{
		t: t, decide: decide, held: make(chan request, 1), released: make(chan struct{}), ended: make(chan struct{}),
	}
	p.Proxy = pgproxy.Listen(t, target, func(client, server net.Conn) pgproxy.Link {
		return &link{proxy: p, client: client, server: server}
	})
	t.Cleanup(func() { close(p.ended) }) // before the proxy is closed, which waits for what is held
	return p
}

// holds waits until a request is kept back.
func (p *proxy) holds() {
	p.t.Helper()
	select {
	case <-p.held:
	case <-time.After(waitTimeout):
		p.t.Fatal("the request that is to be held up was not made")
	}
}

// step counts a request and asks what to do with it.
func (p *proxy) step(sql string) (request, verdict) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.n++
	r := request{p.n, sql}
	return r, p.decide(r)
}

// link is one connection through the proxy.
type link struct {
	proxy          *proxy
	client, server net.Conn
	killed         atomic.Bool // the process is killed at the next answer
}

// Upstream carries what the client says, whole requests at a time.
func (l *link) Upstream() { pgproxy.Forward(l.client, l.server, l.send) }

// send passes one request on, unless the process dies of it.
func (l *link) send(req pgproxy.Request) bool {
	if req.Executes {
		switch r, v := l.proxy.step(strings.Join(req.Bound, ";\n")); v {
		case killBefore:
			l.proxy.signal(syscall.SIGKILL)
			return false
		case killAfter:
			l.killed.Store(true)
		case hold:
			l.proxy.held <- r
			select {
			case <-l.proxy.released:
			case <-l.proxy.ended:
				return false
			}
		case terminate:
			l.proxy.signal(syscall.SIGTERM)
		case interrupt:
			l.proxy.signal(syscall.SIGINT)
		case pass:
		}
	}
	_, err := l.server.Write(req.Raw)
	return err == nil
}

// Downstream carries what the server answers.
func (l *link) Downstream() {
	if pgproxy.Answers(l.server, l.client, l.killed.Load) {
		l.proxy.signal(syscall.SIGKILL)
	}
}
