//go:build unix

package crash_test

import (
	"syscall"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// TestASecondSignalEndsTheProcess does not wait for what the first one waits for.
func TestASecondSignalEndsTheProcess(t *testing.T) {
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

// TestInterruptingACommandCancelsItsHeartbeat: ^C means that it is not wanted any more.
func TestInterruptingACommandCancelsItsHeartbeat(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	held := s.holdSkill("look", 1)
	a := s.agent("", "heartbeat")
	held.wait()
	s.serve("") // which must not take over what is being cancelled
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

// handedBack checks that an execution waits for whoever takes it, and that nothing else is held for it.
func (s *scene) handedBack(id string) {
	s.t.Helper()
	if !pgtest.Value[bool](s.t, s.db, `select status = 'running' and claimed_by is null and attempt = 0
		from agent_executions where id = $1`, id) {
		s.t.Errorf("the execution was not handed back: %s",
			pgtest.Value[string](s.t, s.db, `select to_jsonb(e)::text from agent_executions e where id = $1`, id))
	}
	// A thread stays with it: nobody else begins to talk in the middle of its conversation.
	assert.Equal(s.t, 0, pgtest.Value[int](s.t, s.db, `select count(*) from agent_locks_live where lane not like 'thread:%'
		or execution_id is distinct from $1::uuid`, id), "lanes are still held")
	assert.Equal(s.t, 0, pgtest.Value[int](s.t, s.db,
		`select count(*) from agent_workers where expires_at > clock_timestamp()`), "workers still have a lease")
}
