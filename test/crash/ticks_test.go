package crash_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/testkit/bills"
)

// TestTwoServersRunOneHeartbeatPerTick runs two processes on a schedule faster than some of its heartbeats. It kills
// River's leader in the middle of one, and then checks all heartbeats.
func TestTwoServersRunOneHeartbeatPerTick(t *testing.T) {
	t.Parallel()
	s := newTestEnv(t)
	pgtest.Exec(s.t, s.db, `update agent_automations set cron = '@every 1s', skill_name = 'look', arguments = '{}'`)
	fast := []string{"AGENT_HEARTBEAT_CRON=@every 1s", "AGENT_WORKER_LEASE=6s"}
	first := s.startServer("", fast...)
	eventually(t, "the first process leads", func() bool {
		return pgtest.Value[bool](s.t, s.db, `select exists (select from river.river_leader where expires_at > now())`)
	})
	s.startServer("", fast...)

	// A heartbeat is delayed for some ticks. Each of them is skipped.
	slow := s.blockSkill("look", 1)
	slow.waitBlocked()
	skipped := s.countHeartbeats("skipped")
	eventually(t, "ticks are skipped during a heartbeat", func() bool { return s.countHeartbeats("skipped") >= skipped+2 })
	slow.release()
	s.waitHeartbeats("done", 4)

	// The leader dies during a heartbeat.
	lost := s.blockSkillOf(first, "look")
	lost.waitBlocked()
	id := pgtest.Value[string](s.t, s.db, `select id::text from agent_executions where status = 'running' and claimed_by in
		(select id from agent_workers where name like '%pid ' || $1) and exists (select from agent_activity a
		  where a.execution_id = agent_executions.id and a.skill_name = 'look' and a.status = 'running')`, first.pid())
	first.Kill()
	done := s.countHeartbeats("done")
	s.waitStatus(id, "completed")
	s.waitHeartbeats("done", done+4)
	claims := pgtest.Value[int](s.t, s.db, `select claim from agent_executions where id = $1`, id)
	assert.Truef(t, claims >= 3, "the killed leader's heartbeat ended with claim %d: no process took it over", claims)
	s.checkTicks()
}

// countHeartbeats counts the ended heartbeats: done or skipped.
func (s *testEnv) countHeartbeats(how string) int {
	s.t.Helper()
	return pgtest.Value[int](s.t, s.db, `
		select count(*) from agent_executions
		 where flow = 'heartbeat' and status = 'completed' and (result_summary like 'skipped: %') = ($1 = 'skipped')`, how)
}

// waitHeartbeats waits for a number of heartbeats.
func (s *testEnv) waitHeartbeats(how string, n int) {
	s.t.Helper()
	eventually(s.t, "heartbeats go on", func() bool { return s.countHeartbeats(how) >= n })
}

// blockSkillOf blocks one call of a skill by a certain process.
func (s *testEnv) blockSkillOf(a *agent, skill string) *blocker {
	s.t.Helper()
	x := newBlocker(s.t, 1)
	s.skills.Before(func(c bills.Call) {
		var its bool
		err := s.db.QueryRow(s.ctx(), `
			select exists (select from agent_activity v
			   join agent_executions e on e.id = v.execution_id join agent_workers w on w.id = e.claimed_by
			 where v.idempotency_key = $1 and v.status = 'running' and w.name like '%pid ' || $2)`, c.Key, a.pid()).Scan(&its)
		if err == nil && its && c.Skill == skill {
			x.enter()
		}
	})
	return x
}

// checkTicks checks that each due time ran once, no two heartbeats ran at once, and each skip was recorded.
func (s *testEnv) checkTicks() {
	s.t.Helper()
	for what, sql := range map[string]string{
		"executions without a due time": `
			select count(*) from agent_executions where dedupe_key is null`,
		"due times that were started twice": `
			select count(*) from (select dedupe_key from agent_executions group by 1 having count(*) > 1) x`,
		"ticks less than a second apart": `
			select count(*) from (
			  select due - lag(due) over (order by due) as gap from (
			    select split_part(dedupe_key, ' ', 2)::timestamptz as due from agent_executions) d) g
			 where gap < interval '1 second'`,
		"heartbeats at work at the same time": `
			with work as (
			  select execution_id, min(created_at) as began, max(finished_at) as ended from agent_activity
			   where kind = 'phase' and skill_name <> 'heartbeat' and parent_id is null group by 1)
			select count(*) from work a join work b on a.execution_id < b.execution_id and a.began < b.ended
			  and b.began < a.ended`,
		"heartbeats that were skipped and left no row": `
			select count(*) from agent_executions e where e.result_summary like 'skipped: %' and not exists (
			  select from agent_activity a where a.execution_id = e.id and a.skill_name = 'heartbeat' and a.status = 'skipped')`,
		"skipped heartbeats that did something": `
			select count(*) from agent_executions e where e.result_summary like 'skipped: %' and exists (
			  select from agent_activity a where a.execution_id = e.id and a.skill_name <> 'heartbeat')`,
		"heartbeats that failed": `
			select count(*) from agent_executions where status in ('failed', 'timeout', 'cancelled')`,
		"automation runs that were made twice": `
			select count(*) from (select a.execution_id, a.input ->> 'scheduled_for' from agent_activity a
			 where a.skill_name = 'run_automation' group by 1, 2 having count(*) > 1) x`,
	} {
		assert.Equal(s.t, 0, pgtest.Value[int](s.t, s.db, sql), what, "want none")
	}
	if s.t.Failed() {
		s.t.Log(s.timeline())
	}
}

// timeline lists the heartbeats, for a failure.
func (s *testEnv) timeline() string {
	s.t.Helper()
	rows, err := s.db.Query(s.ctx(), `
		select concat_ws(' ', dedupe_key, status, claim, result_summary, error_message) from agent_executions order by id`)
	if err != nil {
		return err.Error()
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err.Error()
	}
	return strings.Join(lines, "\n")
}
