//go:build unix

package crash_test

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// TestAHeartbeatYieldsToAnAdmin: one that is under way stops before its next step when an admin takes the
// lane operate, and goes on when the admin is gone.
func TestAHeartbeatYieldsToAnAdmin(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	held := s.holdSkill("look", 1)
	s.serve("")
	id := s.begin()
	held.wait()
	if !pgtest.Value[bool](s.t, s.db, `select try_acquire_agent_lock('operate', 'admin', 300)`) {
		t.Fatal("the admin does not get the lane")
	}
	held.free()
	eventually(t, "the heartbeat waits for the admin", func() bool { return s.status(id) == "waiting" })
	before := s.look()
	if n := pgtest.Value[int](s.t, s.db, `select count(*) from agent_executions where waiting_for = 'lane' and waiting_key = 'operate'`); n != 1 {
		t.Errorf("%d executions wait for the lane operate, want 1", n)
	}
	if before.rows[s.keyOf("look")].Recorded != 1 {
		t.Errorf("the step under way was not recorded: %+v", before.rows)
	}
	// A heartbeat that falls due meanwhile does not begin.
	other := s.begin()
	s.ends(other, "completed")
	s.wasSkipped(other)
	if got := s.status(id); got != "waiting" {
		t.Errorf("the heartbeat is %s while the admin is at work, want waiting", got)
	}
	if !pgtest.Value[bool](s.t, s.db, `select release_agent_lock('operate', 'admin')`) {
		t.Fatal("the admin's lane is gone")
	}
	s.ends(id, "completed")
	s.whole(id, before)
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

// TestTicksWhileAnAdminIsAtWork are recorded as skipped, and call no model.
func TestTicksWhileAnAdminIsAtWork(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	pgtest.Exec(s.t, s.db, `select try_acquire_agent_lock('operate', 'admin', 300)`)
	s.serve("", "AGENT_HEARTBEAT_CRON=@every 1s")
	s.atLeast("skipped", 2)
	for id := range strings.SplitSeq(pgtest.Value[string](s.t, s.db, `
		select string_agg(id::text, ' ') from agent_executions where status = 'completed'`), " ") {
		s.wasSkipped(id)
	}
	if n := len(s.model.Requests()) + len(s.called()); n != 0 {
		t.Errorf("%d calls were made while the admin was at work", n)
	}
	if !pgtest.Value[bool](s.t, s.db, `select is_agent_lock_held('operate')`) {
		t.Error("the admin has lost the lane")
	}
}

// TestABusyLaneIsASkip: `agent heartbeat` leaves the lane to who has it, and that is no failure.
func TestABusyLaneIsASkip(t *testing.T) {
	t.Parallel()
	s := newScene(t)
	if !pgtest.Value[bool](s.t, s.db, `select try_acquire_agent_lock('heartbeat', 'somebody else', 300)`) {
		t.Fatal("the lane is taken")
	}
	token := s.token()
	a := s.agent("", "heartbeat")
	if code := a.Exit(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	s.wasSkipped(s.heartbeat())
	if !strings.Contains(a.Out.String(), "skipped") {
		t.Errorf("the story does not say that it was skipped:\n%s", a.Out.String())
	}
	holder := pgtest.Value[string](s.t, s.db, `select locked_by from agent_locks_live where lane = 'heartbeat'`)
	if holder != "somebody else" || s.token() != token {
		t.Errorf("the lane is held by %q with token %d, want its first holder with %d", holder, s.token(), token)
	}
}

// wasSkipped checks that a heartbeat left one row, which says that it was skipped.
func (s *scene) wasSkipped(id string) {
	s.t.Helper()
	got := pgtest.Value[string](s.t, s.db, `
		select string_agg(skill_name || ' ' || status, ', ' order by id) from agent_activity where execution_id = $1`, id)
	if got != "heartbeat skipped" {
		s.t.Errorf("a heartbeat that did not take place left the rows %q, want one that was skipped", got)
	}
}

// keyOf is the idempotency key of the only call of a skill.
func (s *scene) keyOf(skill string) string {
	s.t.Helper()
	return pgtest.Value[string](s.t, s.db, `select idempotency_key from agent_activity where skill_name = $1`, skill)
}
