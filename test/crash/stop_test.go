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

// stop blocks calls, like a response that does not come.
type stop struct {
	t       testing.TB
	arrived chan struct{}
	freed   chan struct{}
	once    sync.Once
	left    int
	mu      sync.Mutex
}

// newStop creates a stop that blocks the first n calls and lets later ones pass.
func newStop(t testing.TB, n int) *stop {
	t.Helper()
	x := &stop{t: t, arrived: make(chan struct{}, n), freed: make(chan struct{}), left: n}
	t.Cleanup(x.free)
	return x
}

// pass blocks a call. A nil stop blocks none.
func (x *stop) pass() {
	if x == nil {
		return
	}
	x.mu.Lock()
	mine := x.left > 0
	x.left--
	x.mu.Unlock()
	if mine {
		x.arrived <- struct{}{}
		<-x.freed
	}
}

// wait waits until a call is blocked.
func (x *stop) wait() {
	x.t.Helper()
	select {
	case <-x.arrived:
	case <-time.After(waitTimeout):
		x.t.Fatal("no call arrived")
	}
}

// free lets all calls pass.
func (x *stop) free() { x.once.Do(func() { close(x.freed) }) }

// holdSkill blocks the first n calls of a skill.
func (s *scene) holdSkill(skill string, n int) *stop {
	s.t.Helper()
	x := newStop(s.t, n)
	s.skills.Before(func(c bills.Call) {
		if c.Skill == skill {
			x.pass()
		}
	})
	return x
}

// holdModel blocks the first n requests to the model.
func (s *scene) holdModel(n int) *stop {
	s.t.Helper()
	x := newStop(s.t, n)
	s.atModel.Store(x)
	return x
}

// TestKillDuringCall kills `agent serve` after the other side got the request and before it responds. The outcome
// depends on whether the call may be repeated.
func TestKillDuringCall(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		hold  func(s *scene, kills int) *stop
		skill string // the skill of the row
		again bool   // the next process repeats the call under the same key
	}{
		"a model's answer":          {func(s *scene, n int) *stop { return s.holdModel(n) }, "model_call", true},
		"an idempotent skill":       {func(s *scene, n int) *stop { return s.holdSkill("look", n) }, "look", true},
		"a skill that is not so":    {func(s *scene, n int) *stop { return s.holdPay(1, n) }, "pay", false},
		"an approved call":          {func(s *scene, n int) *stop { return s.holdPay(3, n) }, "pay", false},
		"the call of an automation": {func(s *scene, n int) *stop { return s.holdPay(7, n) }, "pay", false},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t)
			held := c.hold(s, 1)
			a := s.serve("", "PGAPPNAME="+victim)
			id := s.begin()
			held.wait()
			a.Kill()
			s.quiet()
			before := s.look()
			inFlight := s.running()
			require.Truef(t, len(inFlight) == 1 && inFlight[0].Skill == c.skill && before.calls(inFlight[0].Key) == 1,
				"in flight: %+v", inFlight)
			s.hurry()
			s.serve("")
			s.ends(id, "completed")
			s.whole(id, before)
			want := 1
			if c.again {
				want = 2
			}
			assert.Equal(t, want, s.look().calls(inFlight[0].Key))
			s.shows(id, "unknown")
		})
	}
}

// TestKillTwiceDuringCall: each crash leaves its own row, and the key stays the same.
func TestKillTwiceDuringCall(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	held := s.holdSkill("look", 2)
	id := s.begin()
	for range 2 {
		a := s.serve("", "PGAPPNAME="+victim)
		held.wait()
		a.Kill()
		s.quiet()
		s.hurry()
	}
	key := s.running()[0].Key
	s.serve("")
	s.ends(id, "completed")
	now := s.look().rows[key]
	assert.Truef(t, now.Unknown == 2 && now.Recorded == 1 && s.called()[key] == 3,
		"the log says %+v of a call that was made %d times, want 2 unknown, 1 recorded, 3 calls", now, s.called()[key])
	s.phases(id)
	s.effects(id)
}

// holdPay blocks the first n payments of an amount.
func (s *scene) holdPay(amount, n int) *stop {
	s.t.Helper()
	x := newStop(s.t, n)
	s.skills.Before(func(c bills.Call) {
		if c.Skill == "pay" && strings.Contains(c.Args, string(rune('0'+amount))) {
			x.pass()
		}
	})
	return x
}

// running lists the calls whose row is open.
func (s *scene) running() []row {
	s.t.Helper()
	var open []row
	for _, r := range s.look().rows {
		if r.Running > 0 {
			open = append(open, r)
		}
	}
	return open
}

// shows checks that the trace of an execution has certain words.
func (s *scene) shows(id, words string) {
	s.t.Helper()
	trace := pgtest.Value[string](s.t, s.db, `select trace_id from agent_executions where id = $1`, id)
	a := s.agent("", "trace", trace, "--no-color")
	if code := a.Exit(); code != 0 || !strings.Contains(a.Out.String(), words) {
		s.t.Errorf("agent trace exits %d and does not show %q:\n%s", code, words, a.Out.String())
	}
}

// TestSecondSignalEndsProcess: a second signal ends the process without the waits of the first.
func TestSecondSignalEndsProcess(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	held := s.holdSkill("look", 1)
	a := s.serve("", "PGAPPNAME="+victim)
	id := s.begin()
	held.wait()
	a.Signal(syscall.SIGTERM)
	eventually(t, "the API has closed", func() bool { return s.stopping(a) })
	a.Signal(syscall.SIGTERM)
	assert.Equal(t, 130, a.Exit())
	s.quiet()
	before := s.look()
	s.hurry()
	s.serve("")
	s.ends(id, "completed")
	s.whole(id, before)
}

// TestInterruptedCommandCancelsHeartbeat: ^C cancels the heartbeat of its command.
func TestInterruptedCommandCancelsHeartbeat(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	held := s.holdSkill("look", 1)
	a := s.agent("", "heartbeat")
	held.wait()
	s.serve("") // this server must not take over the cancelled heartbeat
	a.Signal(syscall.SIGINT)
	assert.Equal(t, 130, a.Exit())
	id := s.heartbeat()
	assert.Equal(t, "cancelled", s.status(id))
	for what, sql := range map[string]string{
		"lanes held":   `select count(*) from agent_locks_live`,
		"rows running": `select count(*) from agent_activity where status = 'running'`,
		"claims":       `select count(*) from agent_executions where claim > 3`,
	} {
		assert.Equal(t, 0, pgtest.Value[int](s.t, s.db, sql), what)
	}
	assert.Equal(t, "unknown", pgtest.Value[string](s.t, s.db,
		`select status from agent_activity where skill_name = 'look'`))
	assert.Equal(t, 2, len(s.called()))
}

// stopping reports whether a process has begun to shut down.
func (s *scene) stopping(a *agent) bool {
	s.t.Helper()
	address := a.address()
	return !answers(s.t, address)
}

// handedBack checks that an execution is free for another process, and that no other resource is held for it.
func (s *scene) handedBack(id string) {
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
