package crash_test

import (
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/bills"
)

// blocker blocks calls, like a response that does not come.
type blocker struct {
	t         testing.TB
	blocked   chan struct{}
	released  chan struct{}
	once      sync.Once
	remaining int
	mu        sync.Mutex
}

// newBlocker creates a blocker that blocks the first n calls and lets later ones pass.
func newBlocker(t testing.TB, n int) *blocker {
	t.Helper()
	x := &blocker{t: t, blocked: make(chan struct{}, n), released: make(chan struct{}), remaining: n}
	t.Cleanup(x.release)
	return x
}

// enter blocks a call. A nil stop blocks none.
func (x *blocker) enter() {
	if x == nil {
		return
	}
	x.mu.Lock()
	mine := x.remaining > 0
	x.remaining--
	x.mu.Unlock()
	if mine {
		x.blocked <- struct{}{}
		<-x.released
	}
}

// waitBlocked waits until a call is blocked.
func (x *blocker) waitBlocked() {
	x.t.Helper()
	select {
	case <-x.blocked:
	case <-time.After(waitTimeout):
		x.t.Fatal("no call arrived")
	}
}

// release lets all calls pass.
func (x *blocker) release() { x.once.Do(func() { close(x.released) }) }

// blockSkill blocks the first n calls of a skill.
func (s *testEnv) blockSkill(skill string, n int) *blocker {
	s.t.Helper()
	x := newBlocker(s.t, n)
	s.skills.Before(func(c bills.Call) {
		if c.Skill == skill {
			x.enter()
		}
	})
	return x
}

// blockModel blocks the first n requests to the model.
func (s *testEnv) blockModel(n int) *blocker {
	s.t.Helper()
	x := newBlocker(s.t, n)
	s.modelBlocker.Store(x)
	return x
}

// TestKillDuringCall kills `agent serve` after the other side got the request and before it responds. The outcome
// depends on whether the call may be repeated.
func TestKillDuringCall(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		hold  func(s *testEnv, kills int) *blocker
		skill string // the skill of the row
		again bool   // the next process repeats the call under the same key
	}{
		"a model's answer":          {func(s *testEnv, n int) *blocker { return s.blockModel(n) }, "model_call", true},
		"an idempotent skill":       {func(s *testEnv, n int) *blocker { return s.blockSkill("look", n) }, "look", true},
		"a skill that is not so":    {func(s *testEnv, n int) *blocker { return s.blockPayment(1, n) }, "pay", false},
		"an approved call":          {func(s *testEnv, n int) *blocker { return s.blockPayment(3, n) }, "pay", false},
		"the call of an automation": {func(s *testEnv, n int) *blocker { return s.blockPayment(7, n) }, "pay", false},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newTestEnv(t)
			held := c.hold(s, 1)
			a := s.startServer("", "PGAPPNAME="+victim)
			id := s.requestHeartbeat()
			held.waitBlocked()
			a.Kill()
			s.waitSessionsEnd()
			before := s.takeSnapshot()
			inFlight := s.runningCalls()
			require.Truef(t, len(inFlight) == 1 && inFlight[0].Skill == c.skill && before.calls(inFlight[0].Key) == 1,
				"in flight: %+v", inFlight)
			s.expireLeases()
			s.startServer("")
			s.waitStatus(id, "completed")
			s.checkHeartbeat(id, before)
			want := 1
			if c.again {
				want = 2
			}
			assert.Equal(t, want, s.takeSnapshot().calls(inFlight[0].Key))
			s.checkTrace(id, "unknown")
		})
	}
}

// TestKillTwiceDuringCall: each crash leaves its own row, and the key stays the same.
func TestKillTwiceDuringCall(t *testing.T) {
	t.Parallel()
	s := newTestEnv(t)
	held := s.blockSkill("look", 2)
	id := s.requestHeartbeat()
	for range 2 {
		a := s.startServer("", "PGAPPNAME="+victim)
		held.waitBlocked()
		a.Kill()
		s.waitSessionsEnd()
		s.expireLeases()
	}
	key := s.runningCalls()[0].Key
	s.startServer("")
	s.waitStatus(id, "completed")
	now := s.takeSnapshot().rows[key]
	assert.Truef(t, now.Unknown == 2 && now.Recorded == 1 && s.skillCalls()[key] == 3,
		"the log says %+v of a call that was made %d times, want 2 unknown, 1 recorded, 3 calls", now, s.skillCalls()[key])
	s.checkPhases(id)
	s.checkEffects(id)
}

// blockPayment blocks the first n payments of an amount.
func (s *testEnv) blockPayment(amount, n int) *blocker {
	s.t.Helper()
	x := newBlocker(s.t, n)
	s.skills.Before(func(c bills.Call) {
		if c.Skill == "pay" && strings.Contains(c.Args, string(rune('0'+amount))) {
			x.enter()
		}
	})
	return x
}

// runningCalls lists the calls whose row is open.
func (s *testEnv) runningCalls() []row {
	s.t.Helper()
	var open []row
	for _, r := range s.takeSnapshot().rows {
		if r.Running > 0 {
			open = append(open, r)
		}
	}
	return open
}

// checkTrace checks that the trace of an execution has certain words.
func (s *testEnv) checkTrace(id, words string) {
	s.t.Helper()
	trace := pgtest.Value[string](s.t, s.db, `select trace_id from agent_executions where id = $1`, id)
	a := s.startAgent("", "trace", trace, "--no-color")
	if code := a.Exit(); code != 0 || !strings.Contains(a.Out.String(), words) {
		s.t.Errorf("agent trace exits %d and does not show %q:\n%s", code, words, a.Out.String())
	}
}

// TestSecondSignalEndsProcess: a second signal ends the process without the waits of the first.
func TestSecondSignalEndsProcess(t *testing.T) {
	t.Parallel()
	s := newTestEnv(t)
	held := s.blockSkill("look", 1)
	a := s.startServer("", "PGAPPNAME="+victim)
	id := s.requestHeartbeat()
	held.waitBlocked()
	a.Signal(syscall.SIGTERM)
	eventually(t, "the API has closed", func() bool { return !a.acceptsConnections() })
	eventually(t, "a second signal ends the process", func() bool {
		_ = a.Cmd.Process.Signal(syscall.SIGTERM) // one within 100 ms of the first has no effect
		select {
		case <-a.Ended():
			return true
		default:
			return false
		}
	})
	assert.Equal(t, 130, a.Exit())
	s.waitSessionsEnd()
	before := s.takeSnapshot()
	s.expireLeases()
	s.startServer("")
	s.waitStatus(id, "completed")
	s.checkHeartbeat(id, before)
}

// checkReleased checks that an execution is free for another process, and that no other resource is held for it.
func (s *testEnv) checkReleased(id string) {
	s.t.Helper()
	if !pgtest.Value[bool](s.t, s.db, `select status = 'running' and claimed_by is null and attempt = 0
		from agent_executions where id = $1`, id) {
		s.t.Errorf("the execution was not handed back: %s",
			pgtest.Value[string](s.t, s.db, `select to_jsonb(e)::text from agent_executions e where id = $1`, id))
	}
	// The execution keeps its thread, so no other conversation starts in the middle of its own.
	assert.Equal(s.t, 0, pgtest.Value[int](s.t, s.db, `select count(*) from agent_locks_live where lane not like 'thread:%'
		or execution_id is distinct from $1::uuid`, id), "lanes are still held")
	assert.Equal(s.t, 0, pgtest.Value[int](s.t, s.db,
		`select count(*) from agent_workers where expires_at > clock_timestamp()`), "workers still have a lease")
}
