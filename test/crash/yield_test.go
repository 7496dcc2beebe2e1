//go:build unix

package crash_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

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

// keyOf is the idempotency key of the only call of a skill.
func (s *scene) keyOf(skill string) string {
	s.t.Helper()
	return pgtest.Value[string](s.t, s.db, `select idempotency_key from agent_activity where skill_name = $1`, skill)
}
