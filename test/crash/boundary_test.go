package crash_test

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// victim is the application name of the killed process's connections.
const victim = "victim"

// counter numbers the requests of one run, from its first request on. It skips the process's background requests.
type counter struct {
	first     *regexp.Regexp // matches the first request; nil means that of a heartbeat
	mu        sync.Mutex
	started   bool
	n         int
	committed int // the number of the first commit, which has the start and its requester
}

// count returns the number of requests.
func (c *counter) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// startRequest returns the number of the request that commits the start, or 0.
func (c *counter) startRequest() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.committed
}

// heartbeatStart matches the first requests of a heartbeat.
var heartbeatStart = regexp.MustCompile(`insert into agent_executions|(claim|take)_agent_execution`)

// backgroundRequest matches the background requests of a process.
var backgroundRequest = regexp.MustCompile(
	`(?i)renew_agent|^select from agent_workers|sweep_agent|ensure_agent|river|^listen|agent_schedules|^select 1$|^-- ping|` +
		`trigger = 'signal'|^with ready as|(claim|take)_agent_executions|pg_notify\('agent_ready'|set_agent_limits|r.status = 'claimed' and case|agent_webhook_targets`)

// number numbers the requests of a run from 1. It returns 0 for other requests.
func (c *counter) number(r request) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.started = c.started || cmp.Or(c.first, heartbeatStart).MatchString(r.sql)
	if !c.started || backgroundRequest.MatchString(strings.Join(strings.Fields(r.sql), " ")) {
		return 0
	}
	c.n++
	if c.committed == 0 && r.sql == "commit" {
		c.committed = c.n
	}
	return c.n
}

// heartbeatRequests runs one heartbeat through a proxy and returns its requests.
func heartbeatRequests(t *testing.T) []string {
	t.Helper()
	s := newTestEnv(t)
	var c counter
	var boundaries []string
	p := newProxy(t, s.url, func(r request) proxyAction {
		if c.number(r) > 0 {
			boundaries = append(boundaries, r.sql)
		}
		return pass
	})
	a := s.startAgent(p.URL(victim), "heartbeat")
	require.Equal(t, 0, a.Exit())
	s.checkHeartbeat(s.heartbeat(), snapshot{})
	assert.Truef(t, len(boundaries) >= 40, "a heartbeat made %d requests; does the proxy still see them?", len(boundaries))
	return boundaries
}

// TestKillAtEveryBoundary kills a heartbeat before each of its database requests, and after each took effect. Another
// process completes it.
func TestKillAtEveryBoundary(t *testing.T) {
	t.Parallel()
	clean := heartbeatRequests(t)
	require.Truef(t, slices.Contains(clean, "commit"), "does the proxy still see commits?")
	atBoundaries(t, len(clean), 16, map[string]proxyAction{"before": killBefore, "after": killAfter},
		func(t *testing.T, n int, how proxyAction) {
			s := newTestEnv(t)
			var c counter
			s.startWithFaultIn(&c, n, how, "heartbeat").Exit()
			s.waitSessionsEnd()
			before := s.takeSnapshot()
			id := s.heartbeat()
			if id == "" {
				commit := c.startRequest()
				assert.True(t, commit == 0 || commit == n && how == killBefore, "the heartbeat has vanished")
				return // the heartbeat had not begun
			}
			s.expireLeases()
			s.startServer("")
			s.waitStatus(id, "completed")
			s.checkHeartbeat(id, before)
		})
}

// TestKillRescuer also kills the process that takes over, at one of its requests.
func TestKillRescuer(t *testing.T) {
	t.Parallel()
	total := len(heartbeatRequests(t))
	atBoundaries(t, total, 5, map[string]proxyAction{"before": killBefore, "after": killAfter},
		func(t *testing.T, n int, how proxyAction) {
			s := newTestEnv(t)
			s.startWithFault(n, how, "heartbeat").Exit()
			s.waitSessionsEnd()
			s.expireLeases()
			id := s.heartbeat()
			if id == "" {
				return
			}
			// The second process has more requests left if the first made fewer.
			second := s.startWithFault(1+(total-n)/3, how, "serve")
			eventually(t, "the second process is killed, or through before", func() bool {
				return !second.Running() || s.status(id) == "completed"
			})
			second.Kill()
			s.waitSessionsEnd()
			before := s.takeSnapshot()
			s.expireLeases()
			s.startServer("")
			s.waitStatus(id, "completed")
			s.checkHeartbeat(id, before)
		})
}

// TestStopAtEveryBoundary stops `agent serve` gracefully at each request of the heartbeat.
func TestStopAtEveryBoundary(t *testing.T) {
	t.Parallel()
	atBoundaries(t, len(heartbeatRequests(t)), 4, map[string]proxyAction{"at": terminate},
		func(t *testing.T, n int, how proxyAction) {
			s := newTestEnv(t)
			id := s.requestHeartbeat()
			a := s.startWithFault(n, how, "serve")
			assert.Equal(t, 0, a.Exit())
			before := s.takeSnapshot()
			open := s.runningCalls()
			assert.Truef(t, len(open) == 0, "left open: %+v", open)
			if s.status(id) != "completed" {
				s.checkReleased(id)
			}
			s.startServer("")
			s.waitStatus(id, "completed")
			s.checkHeartbeat(id, before)
		})
}

// TestInterruptAtEveryBoundary sends ^C to `agent heartbeat` at each of its requests.
func TestInterruptAtEveryBoundary(t *testing.T) {
	t.Parallel()
	atBoundaries(t, len(heartbeatRequests(t)), 4, map[string]proxyAction{"at": interrupt},
		func(t *testing.T, n int, how proxyAction) {
			s := newTestEnv(t)
			code := s.startWithFault(n, how, "heartbeat").Exit()
			id := s.heartbeat()
			switch got := s.status(id); {
			case code == 130 && got == "cancelled", code == 0 && got == "completed":
			default:
				t.Errorf("exit code %d, and the heartbeat is %s", code, got)
			}
			for what, sql := range leftovers {
				assert.Equal(t, 0, pgtest.Value[int](s.t, s.db, sql), what)
			}
		})
}

// TestCancelAtEveryBoundary cancels a heartbeat while one of its requests is in flight. The cancel leaves nothing
// behind, and the next heartbeat runs.
func TestCancelAtEveryBoundary(t *testing.T) {
	t.Parallel()
	atBoundaries(t, len(heartbeatRequests(t)), 4, map[string]proxyAction{"at": pass},
		func(t *testing.T, n int, _ proxyAction) {
			s := newTestEnv(t)
			id := s.requestHeartbeat()
			var c counter
			var admin sync.WaitGroup
			p := newProxy(t, s.url, func(r request) proxyAction {
				if c.number(r) == n {
					admin.Go(func() { // in parallel: if the run is in a transaction, the cancel waits for its end
						_, err := s.db.Exec(t.Context(), `select cancel_agent_execution($1, 'admin', 'enough')`, id)
						assert.NoError(t, err)
					})
				}
				return pass
			})
			s.startServer(p.URL(victim))
			eventually(t, "the execution ends", func() bool {
				return pgtest.Value[bool](s.t, s.db, `select completed_at is not null from agent_executions where id = $1`, id)
			})
			admin.Wait()
			got := s.status(id)
			assert.Truef(t, got != "failed", "the execution is %s", got)
			for _, what := range []string{"lanes held", "calls open", "rows running"} {
				eventually(t, "no "+what, func() bool { return pgtest.Value[int](s.t, s.db, leftovers[what]) == 0 })
			}
			next := s.requestHeartbeat()
			s.waitStatus(next, "completed")
			summary := pgtest.Value[string](s.t, s.db, `select result_summary from agent_executions where id = $1`, next)
			assert.Truef(t, !strings.HasPrefix(summary, "skipped"), "the next heartbeat was %s", summary)
		})
}

// atBoundaries runs a test at evenly spread boundaries, each in several ways. A sample alternates the ways from
// boundary to boundary.
func atBoundaries(t *testing.T, total, sample int, ways map[string]proxyAction,
	test func(t *testing.T, n int, how proxyAction),
) {
	t.Helper()
	every := boundaryStep(total, sample)
	for n := every; n <= total; n += every {
		for i, word := range slices.Sorted(maps.Keys(ways)) {
			if every > 1 && n/every%len(ways) != i {
				continue
			}
			t.Run(fmt.Sprintf("%s %03d", word, n), func(t *testing.T) {
				t.Parallel()
				test(t, n, ways[word])
			})
		}
	}
}

// boundaryStep returns the step between tested boundaries. 1 tests all.
func boundaryStep(total, sample int) int {
	switch {
	case os.Getenv("AGENT_CRASH_ALL") != "":
		return 1
	case testing.Short():
		sample = (sample + 2) / 3
	}
	return max(2, total/max(sample, 1))
}

// startWithFault starts the program with a fault at one request of its heartbeat.
func (s *testEnv) startWithFault(n int, action proxyAction, args ...string) *agent {
	s.t.Helper()
	return s.startWithFaultIn(&counter{}, n, action, args...)
}

// startWithFaultIn starts the program with a fault at request n of a counter.
func (s *testEnv) startWithFaultIn(c *counter, n int, action proxyAction, args ...string) *agent {
	s.t.Helper()
	p := newProxy(s.t, s.url, func(r request) proxyAction {
		if c.number(r) != n {
			return pass
		}
		s.t.Logf("at %q", strings.Join(strings.Fields(r.sql), " "))
		return action
	})
	started := make(chan struct{})
	var a *agent
	p.signal = func(sig syscall.Signal) {
		<-started
		if sig == syscall.SIGKILL {
			a.Kill() // also if the test has just ended it
			return
		}
		a.Signal(sig)
	}
	a = s.startAgent(p.URL(victim), args...)
	close(started)
	return a
}

// waitSessionsEnd waits until the server has ended the sessions of a killed process.
func (s *testEnv) waitSessionsEnd() {
	s.t.Helper()
	eventually(s.t, "the server has let go of the killed process", func() bool {
		return pgtest.Value[int](s.t, s.db, `
			select count(*) from pg_stat_activity where datname = current_database() and application_name = $1`, victim) == 0
	})
}

// snapshot is the state of the database and of the counted calls at one moment.
type snapshot struct {
	rows       map[string]row // calls and model calls, by idempotency key
	modelCalls map[string]int
	skillCalls map[string]int
}

// row is the activity log's record of the calls under one key.
type row struct {
	Key        string
	Skill      string
	Idempotent bool
	Running    int
	Recorded   int // ended by the process that made the call
	Unknown    int
}

// takeSnapshot takes a snapshot.
func (s *testEnv) takeSnapshot() snapshot {
	s.t.Helper()
	rows, err := s.db.Query(s.ctx(), `
		select a.idempotency_key as key, min(a.skill_name) as skill,
		       bool_or(a.kind = 'model' or coalesce(k.idempotent, true)) as idempotent,
		       count(*) filter (where a.status = 'running') as running,
		       count(*) filter (where a.status in ('success', 'error')) as recorded,
		       count(*) filter (where a.status = 'unknown') as unknown
		  from agent_activity a left join agent_skills k on k.id = a.skill_id
		 where a.idempotency_key <> '' group by 1`)
	require.NoError(s.t, err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
	require.NoError(s.t, err)
	got := snapshot{map[string]row{}, s.modelCalls(), s.skillCalls()}
	for _, r := range list {
		got.rows[r.Key] = r
	}
	return got
}

// calls returns how often a key was sent to the model or to a skill.
func (x snapshot) calls(key string) int { return x.modelCalls[key] + x.skillCalls[key] }

// checkHeartbeat compares a completed heartbeat with the snapshot from its first process's death.
func (s *testEnv) checkHeartbeat(id string, before snapshot) {
	s.t.Helper()
	after := s.takeSnapshot()
	keys := maps.Clone(after.modelCalls)
	maps.Copy(keys, after.skillCalls)
	for key := range keys {
		_, logged := after.rows[key]
		assert.Truef(s.t, logged, "a call went out under key %q that the log does not know", key)
	}
	for key, now := range after.rows {
		s.checkCall(before.rows[key], now, before.calls(key), after.calls(key))
	}
	s.checkPhases(id)
	s.checkEffects(id)
}

// checkCall checks one call: how often it was made, and its record in the activity log.
func (s *testEnv) checkCall(was, now row, callsWere, callsAre int) {
	s.t.Helper()
	again, most := callsAre-callsWere, 1
	want := row{
		Key: now.Key, Skill: now.Skill, Idempotent: now.Idempotent, Recorded: 1,
		Unknown: was.Unknown + was.Running,
	}
	switch {
	case was.Recorded > 0: // it had ended: no process repeats it
		most = 0
	case want.Unknown > 0 && !now.Idempotent: // it was in flight with unknown result: not repeated
		most, want.Recorded = 0, 0
	}
	assert.Truef(s.t, again == most, "%s was called %d times more, want %d (before: %+v)", now.Skill, again, most, was)
	assert.Truef(s.t, now == want, "the log says of a call %+v, want %+v (before the crash: %+v)", now, want, was)
}

// checkPhases checks that each of the six phases has one successful row, in order.
func (s *testEnv) checkPhases(id string) {
	s.t.Helper()
	got := pgtest.Value[string](s.t, s.db, `
		select coalesce(string_agg(skill_name || ' ' || status, ', ' order by created_at), '') from agent_activity
		 where execution_id = $1 and kind = 'phase' and parent_id is null`, id)
	want := "self_heal success, follow_through success, advance_plan success, run_automations success, " +
		"reflect success, save_memories success"
	assert.Truef(s.t, got == want, "phases: %s\n  want: %s", got, want)
}

// checkEffects checks the heartbeat's effects in its own database: each happened once, and nothing is left open.
func (s *testEnv) checkEffects(id string) {
	s.t.Helper()
	for what, sql := range map[string]string{
		"execution completed": `select count(*) from agent_executions where id = $1 and status = 'completed'
			and result_type = 'success'`,
		"skill healed":     `select count(*) from agent_activity where execution_id = $1 and skill_name = 'heal_skill'`,
		"objective's step": `select count(*) from agent_activity where execution_id = $1 and skill_name = 'advance_step'`,
		"step done":        `select count(*) from agent_objective_steps where status = 'done'`,
		"memory saved":     `select count(*) from agent_activity where execution_id = $1 and skill_name = 'save_memory'`,
		"memory":           `select count(*) from agent_memory where revision = 1`,
		"automation's run": `select count(*) from agent_automation_runs where execution_id = $1 and status <> 'claimed'
			and attempt = 1`,
		"automation":       `select count(*) from agent_activity where execution_id = $1 and skill_name = 'run_automation'`,
		"grant used":       `select count(*) from agent_approvals where status = 'consumed' and consumed_for like $1 || ' %'`,
		"completion event": `select count(*) from agent_events where event = 'AGENT_COMPLETED' and key = $1`,
	} {
		assert.Equal(s.t, 1, s.count(sql, id), what)
	}
	for what, sql := range leftovers {
		assert.Equal(s.t, 0, pgtest.Value[int](s.t, s.db, sql), what, "want none")
	}
	if unknown := pgtest.Value[int](s.t, s.db, `
		select count(*) from agent_activity where execution_id = $1 and skill_name = 'pay' and status = 'unknown'
		  and purpose = 'advance_plan'`,
		id); unknown > 0 && !s.modelSawResult("nobody knows whether it took effect") {
		s.t.Error("the model did not learn that the effect of its call is unknown")
	}
}

// leftovers are queries for rows that no process may leave behind.
var leftovers = map[string]string{
	"lanes held":   `select count(*) from agent_locks_live`,
	"calls open":   `select count(*) from agent_activity_open`,
	"rows running": `select count(*) from agent_activity where status = 'running'`,
	"stale writes": `select count(*) from agent_activity where skill_name = 'stale_write'`,
}

// count runs a counting query, which may use the execution's id.
func (s *testEnv) count(sql, id string) int {
	s.t.Helper()
	if !strings.Contains(sql, "$1") {
		return pgtest.Value[int](s.t, s.db, sql)
	}
	return pgtest.Value[int](s.t, s.db, sql, cmp.Or(id, "none"))
}
