package monitor

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

// formatVerdict returns a verdict as text, without times.
func formatVerdict(v Verdict) string {
	text := v.State
	for i, r := range v.Why {
		text += map[bool]string{true: ": ", false: ", "}[i == 0] + r.Text + " <" + r.Link + ">"
	}
	return text
}

// healthyCondition returns a condition without reasons, at noon, and two agents with a heartbeat every half hour.
func healthyCondition() (Condition, []agents.Agent) {
	noon := time.Date(2026, 11, 26, 12, 0, 0, 0, time.UTC)
	tick, ended := noon.Add(-10*time.Minute), noon.Add(-9*time.Minute)
	c := Condition{now: noon, workers: 1, overBudget: map[string]bool{}}
	for _, name := range []string{"sales", "billing"} {
		c.beats = append(c.beats, Beat{
			Agent: name, Cron: "*/30 * * * *", Timezone: "UTC", NextRunAt: noon.Add(20 * time.Minute), LastRunAt: &tick,
			Status: "completed", EndedAt: &ended,
		})
	}
	return c, []agents.Agent{
		{Definition: agents.Definition{Name: "sales", Default: true}},
		{Definition: agents.Definition{Name: "billing", Skills: []string{"pay"}}},
	}
}

// addFailure adds a failure with its outcome.
func (c *Condition) addFailure(kind, name, agent string, streak, hourFailed, hourAll int64) {
	at := c.now.Add(-time.Hour)
	c.list = append(c.list, failure{Kind: kind, Name: name, Agent: agent, At: at, Message: "no route"})
	o := outcome{
		Kind: "call", Name: name, LatestFailed: streak > 0, Streak: streak, HourAll: hourAll,
		HourFailed: hourFailed, Since: &at,
	}
	if kind == "flow" {
		o.Kind, o.Agent = "flow", agent
	}
	c.outcomes = append(c.outcomes, o)
}

func TestVerdictOfCondition(t *testing.T) {
	t.Parallel()
	before := func(c *Condition, d time.Duration) *time.Time {
		at := c.now.Add(-d)
		return &at
	}
	for name, test := range map[string]struct {
		change              func(c *Condition)
		all, sales, billing string // expected verdicts; empty sales means all for both agents
	}{
		"healthy": {func(*Condition) {}, "working", "", ""},
		"paused": {
			func(c *Condition) { c.pause = executions.Pause{Paused: true, PausedBy: "ana"} },
			"stopped: paused by ana <#pause>", "", "",
		},
		"no process": {
			func(c *Condition) { c.workers, c.beats = 0, nil }, "stopped: no process is running </lanes>", "",
			"",
		},
		"beats from cron": {func(c *Condition) { c.workers = 0 }, "working", "", ""},
		"process died": {func(c *Condition) {
			c.workers = 0
			for i := range c.beats {
				c.beats[i].EndedAt = before(c, 40*time.Minute)
			}
		}, "stopped: no process is running </lanes>", "", ""},
		"three in a row": {
			func(c *Condition) { c.addFailure("flow", "import", "billing", 3, 0, 0) },
			"degraded: flow import failing </executions?failed=1&flow=import>", "working",
			"degraded: flow import failing </executions?failed=1&flow=import>",
		},
		"two in a row": {func(c *Condition) { c.addFailure("flow", "import", "billing", 2, 1, 2) }, "working", "", ""},
		"most in an hour": {
			func(c *Condition) { c.addFailure("flow", "import", "of nobody", 1, 2, 3) },
			"degraded: flow import failing </executions?failed=1&flow=import>",
			"degraded: flow import failing </executions?failed=1&flow=import>", "working",
		},
		"recovered": {func(c *Condition) { c.addFailure("flow", "import", "sales", 0, 9, 10) }, "working", "", ""},
		"two flows": {
			func(c *Condition) {
				c.addFailure("flow", "import", "sales", 3, 0, 0)
				c.addFailure("flow", "export", "sales", 4, 0, 0)
				c.addFailure("model", "model_call", "sales", 4, 0, 0)
			},
			"degraded: 2 flows failing <#failing>, model calls failing </activity?status=error&skill=model_call>",
			"degraded: 2 flows failing <#failing>, model calls failing </activity?status=error&skill=model_call>", "working",
		},
		"disabled skill": {
			func(c *Condition) {
				c.addFailure("skill", "fetch", "sales", 5, 5, 5)
				c.disabled = []disabledSkill{{Name: "fetch"}, {Name: "pay", OnTrial: true}}
			},
			"degraded: skill fetch disabled by self-heal </skills/fetch>, skill pay on trial </skills/pay>",
			"degraded: skill fetch disabled by self-heal </skills/fetch>, skill pay on trial </skills/pay>",
			"degraded: skill pay on trial </skills/pay>",
		},
		"heartbeat overdue": {
			func(c *Condition) { c.beats[1].NextRunAt = *before(c, 3*time.Minute) },
			"degraded: heartbeat overdue for billing </executions?flow=heartbeat>", "working",
			"degraded: heartbeat overdue </executions?flow=heartbeat>",
		},
		"heartbeat hangs": {
			func(c *Condition) { c.beats[0].EndedAt = before(c, 63*time.Minute) },
			"degraded: no heartbeat finished for sales </executions?flow=heartbeat>",
			"degraded: no heartbeat finished </executions?flow=heartbeat>", "working",
		},
		"stuck": {
			func(c *Condition) { c.stuck = []stuckWork{{Agent: "billing", N: 2}, {Lane: "pipeline", N: 1}} },
			"degraded: 2 executions stuck </executions?view=stuck>, 1 lane stuck </lanes>",
			"degraded: 1 lane stuck </lanes>",
			"degraded: 2 executions stuck </executions?view=stuck>, 1 lane stuck </lanes>",
		},
		"budget of one": {
			func(c *Condition) { c.overBudget["billing"] = true },
			"degraded: today's budget is spent by billing </spend?days=1>", "working",
			"degraded: today's budget is spent </spend?days=1>",
		},
		"unknown spend": {
			func(c *Condition) {
				c.overBudget[""] = true
				c.Budgets = []Budget{{"day", "usd", 2, 1.93, 0, 2}}
			},
			"degraded: today's budget is spent ($1.93 of the $2.00 spent today are unknown) </spend?days=1>", "", "",
		},
		"unknown spend of refused calls": {
			func(c *Condition) {
				c.addFailure("model", "model_call", "billing", 3, 0, 0)
				c.list[0].Class = "budget_day"
				c.Budgets = []Budget{{"day", "usd", 1.99, 1.93, 0, 2}}
			},
			"degraded: model calls refused by a limit ($1.93 of the $1.99 spent today are unknown) </spend?days=1>",
			"working",
			"degraded: model calls refused by a limit ($1.93 of the $1.99 spent today are unknown) </spend?days=1>",
		},
		"budget of all": {
			func(c *Condition) { c.overBudget[""] = true }, "degraded: today's budget is spent </spend?days=1>", "",
			"",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, all := healthyCondition()
			test.change(&c)
			if test.sales == "" {
				test.sales, test.billing = test.all, test.all
			}
			assert.Equal(t, test.all, formatVerdict(c.Judge(nil, all)))
			assert.Equal(t, test.sales, formatVerdict(c.Judge(&all[0], all)))
			assert.Equal(t, test.billing, formatVerdict(c.Judge(&all[1], all)))
		})
	}
}

func TestMain(m *testing.M) { pgtest.Main(m) }

// insertExecution inserts an execution that ended some minutes ago.
func insertExecution(
	t *testing.T, pool *pgxpool.Pool, agent, flow, status, message string, minutes int, parent string,
) string {
	t.Helper()
	id := pgtest.Value[string](t, pool, `select lanekeeper.agent_uuid7(now() - make_interval(mins => $1))::text`, minutes)
	rows.Quiet(t, pool, `
		insert into agent_executions (id, trace_id, surface, agent, flow, status, error_message, parent_id, created_at,
		  completed_at)
		select $1::text::uuid, 'fl_' || upper(left(translate($1, '-ilou', ''), 26)), 'flow', $2, $3, $4, nullif($5, ''),
		       nullif($6, '')::uuid, now() - make_interval(mins => $7), now() - make_interval(mins => $7)`,
		id, agent, flow, status, message, parent, minutes)
	return id
}

// currentVerdict returns the verdict of a database as text.
func currentVerdict(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	s, err := Monitor{Agents: &agents.Directory{}}.Status(t.Context(), pool)
	require.NoError(t, err)
	return formatVerdict(s.Verdict)
}

func TestVerdictOfDatabase(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	assert.Equal(t, "stopped: no process is running </lanes>", currentVerdict(t, pool))
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	assert.Equal(t, "working", currentVerdict(t, pool))

	// Failures of more than a day ago, or before a success, do not count. Cancelled and skipped runs are ignored.
	for i := range 4 {
		insertExecution(t, pool, "agent", "import", "failed", "no route", 1600+i, "")
		insertExecution(t, pool, "agent", "export", "failed", "no route", 90+i, "")
		insertExecution(t, pool, "agent", "heartbeat", "failed", "no route", 80+i, "")
	}
	insertExecution(t, pool, "agent", "export", "completed", "", 70, "")
	insertExecution(t, pool, "agent", "heartbeat", "completed", "", 75, "")
	assert.Equal(t, "working", currentVerdict(t, pool))
	pgtest.Exec(t, pool, `delete from agent_executions where flow = 'heartbeat' and status = 'completed'`)
	insertExecution(t, pool, "agent", "heartbeat", "cancelled", "", 60, "")
	skipped := insertExecution(t, pool, "agent", "heartbeat", "completed", "", 65, "")
	rows.Quiet(t, pool, `
		update agent_executions set result_summary = 'skipped: an admin is at work' where id = $1::text::uuid`,
		skipped)
	assert.Equal(t, "degraded: flow heartbeat failing </executions?failed=1&flow=heartbeat>", currentVerdict(t, pool))
	pgtest.Exec(t, pool, `delete from agent_executions`)

	// Calls of skills, of other actions and of models count.
	rows.Skill(t, pool, "fetch", "", "", "")
	rows.Calls(t, pool, "fetch", "success", "", 9)
	rows.Calls(t, pool, "fetch", "error", "no route", 2)
	assert.Equal(t, "working", currentVerdict(t, pool))
	rows.Calls(t, pool, "fetch", "error", "no route", 1)
	rows.Calls(t, pool, "webhook_send", "error", "refused", 3)
	pgtest.Exec(t, pool, `insert into agent_activity (trace_id, kind, skill_name, status, error_message)
		select 'hb_1', 'model', 'model_call', 'error', 'overloaded' from generate_series(1, 3)`)
	assert.Equal(t, "degraded: skill fetch failing </skills/fetch>, "+
		"action webhook_send failing </activity?status=error&skill=webhook_send>, "+
		"model calls failing </activity?status=error&skill=model_call>", currentVerdict(t, pool))
	pgtest.Exec(t, pool, `update agent_activity set error_class = 'budget_surface' where kind = 'model'`)
	assert.Contains(t, currentVerdict(t, pool), "model calls refused by a limit </spend?days=1>")
	pgtest.Exec(t, pool, `update agent_skills set enabled = false, disabled_by = 'self_heal', disabled_at = now();
		update agent_activity set status = 'success' where skill_name <> 'fetch'`)
	assert.Equal(t, "degraded: skill fetch disabled by self-heal </skills/fetch>", currentVerdict(t, pool))
	pgtest.Exec(t, pool, `update agent_skills set disabled_by = 'ana'`)
	assert.Equal(t, "working", currentVerdict(t, pool))
	pgtest.Exec(t, pool, `update agent_skills set enabled = true, disabled_by = '', disabled_at = null, enabled_at = now()`)
	assert.Equal(t, "working", currentVerdict(t, pool), "earlier failures count after the skill was enabled")
	rows.Calls(t, pool, "fetch", "error", "no route", 3)
	assert.Equal(t, "degraded: skill fetch failing </skills/fetch>", currentVerdict(t, pool))
	pgtest.Exec(t, pool, `delete from agent_activity`)

	// Heartbeats, stuck executions and lanes count.
	pgtest.Exec(t, pool, `insert into agent_schedules (name, flow, surface, agent, cron, timezone, next_run_at)
		values ('heartbeat', 'heartbeat', 'heartbeat', 'agent', '@hourly', 'UTC', now() - interval '3 minutes')`)
	rows.Execution(t, pool, "waiting", "flow", "onboarding")
	rows.Quiet(t, pool, `update agent_executions set waiting_until = now() - interval '2 hours',
		updated_at = now() - interval '2 hours'`)
	pgtest.Exec(t, pool, `
		insert into agent_locks (lane, locked_by, fencing_token, locked_at, expires_at, parked)
		select name, 'somebody', 1, now() - since, now() + interval '1 hour', parked from (values
		  ('held', interval '16 minutes', false), ('new', interval '1 minute', false),
		    ('parked', interval '1 day', true)) l(name, since, parked);
		insert into agent_lock_waiters (lane, owner, since, expires_at)
		select lane, 'w', now() - interval '16 minutes', now() + interval '1 minute' from agent_locks`)
	assert.Equal(t, "degraded: heartbeat overdue </executions?flow=heartbeat>, 1 execution stuck "+
		"</executions?view=stuck>, "+
		"1 lane stuck </lanes>", currentVerdict(t, pool))
	_, err := executions.PauseAll(t.Context(), pool, "ana", "prices look wrong")
	require.NoError(t, err)
	assert.Equal(t, "stopped: paused by ana <#pause>", currentVerdict(t, pool))
}

func TestHeartbeatIsFoundAmongMany(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	pgtest.Exec(t, pool, `insert into agent_schedules (name, flow, surface, agent, cron, timezone, next_run_at, last_run_at)
		values ('slow', 'heartbeat', 'heartbeat', 'slow', '@hourly', 'UTC', now() + interval '1 minute', now())`)
	insertExecution(t, pool, "slow", "heartbeat", "completed", "", 600, "")
	rows.Quiet(t, pool, `
		insert into agent_executions (trace_id, surface, agent, flow, status, completed_at)
		select 'hb_' || n, 'heartbeat', 'fast', 'heartbeat', 'completed', now() from generate_series(1, 2001) n`)
	assert.Contains(t, currentVerdict(t, pool), "no heartbeat finished")
}

// The fresh lanes stand before the stuck one in the table and in its indexes.
func TestStuckLaneAmongManyIsFound(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	pgtest.Exec(t, pool, `
		insert into agent_locks (lane, locked_by, fencing_token, locked_at, expires_at)
		select 'a' || n, 'somebody', 1, now(), now() + interval '1 hour' from generate_series(1, 1500) n;
		insert into agent_locks (lane, locked_by, fencing_token, locked_at, expires_at)
		values ('b', 'somebody', 1, now() - interval '16 minutes', now() + interval '1 hour');
		insert into agent_lock_waiters (lane, owner, since, expires_at)
		values ('b', 'w', now() - interval '16 minutes', now() + interval '1 minute')`)
	assert.Equal(t, "degraded: 1 lane stuck </lanes>", currentVerdict(t, pool))
}

func TestVerdictIgnoresRejections(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	// insertRejected inserts n runs that failed in the step r with an error class, each with an approval of a status.
	insertRejected := func(n int, flow, approval, class string) {
		for i := range n {
			if n > 3 {
				i = 0 // all newer than the other flows
			}
			id := insertExecution(t, pool, "agent", flow, "failed", "it was no", i, "")
			rows.Quiet(t, pool, `update agent_executions set failed_step = 'r' where id = $1::text::uuid`, id)
			pgtest.Exec(t, pool, `
				insert into agent_activity (trace_id, execution_id, kind, skill_name, step, status, error_class)
				values ('fl_1', $1::text::uuid, 'phase', 'skill', 'r', 'error', $2)`, id, class)
			rows.Quiet(t, pool, `
				insert into agent_approvals (trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
				  arguments_hash, status, expires_at)
				values ('fl_1', $1::text::uuid, 'r/ask drop', true, 'drop', 1, '{}', 'x', $2, now() + interval '1 day')`,
				id, approval)
		}
	}
	insertRejected(3, "rejected", "rejected", "denied")
	f, err := ReadFailures(t.Context(), pool)
	require.NoError(t, err)
	assert.Equal(t, 0, len(f.Groups(func(string) bool { return true }, nil)))
	assert.Equal(t, "working", currentVerdict(t, pool))
	insertRejected(3, "late", "expired", "denied")      // nobody decided
	insertRejected(3, "after", "rejected", "model_off") // the step continued after the rejection
	assert.Equal(t, "degraded: 2 flows failing <#failing>", currentVerdict(t, pool))
	insertRejected(failuresRead, "rejected", "rejected", "denied")
	assert.Equal(t, "degraded: 2 flows failing <#failing>", currentVerdict(t, pool), "newer rejections hide the failures")
}

// A trial may use another model than the agent, so neither its failures nor its successes count.
func TestVerdictIgnoresEvals(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	insertModelCalls := func(trace, surface, status string) {
		pgtest.Exec(t, pool, `
			insert into agent_activity (trace_id, surface, kind, skill_name, status, error_message)
			select $1, $2, 'model', 'model_call', $3, 'no such model' from generate_series(1, 3)`, trace, surface, status)
	}
	insertModelCalls("ev_1", "eval", "error")
	for i := range 3 {
		id := insertExecution(t, pool, "agent", "eval:1", "failed", "no such model", i, "")
		rows.Quiet(t, pool, `
			update agent_executions set surface = 'eval', trace_id = 'ev_' || id, status = $2 where id = $1::text::uuid`,
			id, []string{"failed", "timeout"}[i%2])
	}
	assert.Equal(t, "working", currentVerdict(t, pool))
	insertModelCalls("hb_1", "heartbeat", "error")
	insertModelCalls("ev_1", "eval", "success")
	assert.Equal(t, "degraded: model calls failing </activity?status=error&skill=model_call>", currentVerdict(t, pool))
}

func TestFailureGroups(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	const refused = "dial tcp 10.0.0.%d:443: connect: connection refused"
	for i := range 3 { // two flows and a skill fail with the same root error
		message := fmt.Sprintf(refused, i)
		parent := insertExecution(t, pool, "agent", "nightly", "failed", "step import: flow import: step fetch: "+message,
			20+i, "")
		child := insertExecution(t, pool, "agent", "import", "failed", "step fetch: "+message, 20+i, parent)
		pgtest.Exec(t, pool, `insert into agent_activity (trace_id, execution_id, skill_name, status, error_class,
			error_message)
			values ('hb_1', $1::text::uuid, 'fetch', 'error', 'network', $2)`, child, message)
	}
	rows.Skill(t, pool, "fetch", "", "", "")
	insertExecution(t, pool, "agent", "sync", "failed", "customer 7919 has no address", 40, "")
	insertExecution(t, pool, "agent", "sync", "failed", "customer 104729 has no address", 30, "")
	insertExecution(t, pool, "agent", "sync", "completed", "", 10, "")
	f, err := ReadFailures(t.Context(), pool)
	require.NoError(t, err)
	var got []string
	for _, g := range f.Groups(func(string) bool { return true }, nil) {
		var subjects []string
		for _, s := range g.Subjects {
			subjects = append(subjects, s.Kind+" "+s.Name)
		}
		got = append(got, fmt.Sprintf("%s | %s | %d runs, %d calls | %v | %s", g.Message, g.Class, g.Runs, g.Calls, g.Failing,
			strings.Join(subjects, ", ")))
	}
	assert.NoDiff(t, []string{
		"dial tcp 10.0.0.2:443: connect: connection refused | network | 6 runs, 3 calls | true | flow import, flow nightly, skill fetch",
		"customer 104729 has no address |  | 2 runs, 0 calls | false | flow sync",
	}, got)
}

func TestErrorKey(t *testing.T) {
	t.Parallel()
	same := []string{
		"order 17 of fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE failed: 018f0000-0000-7000-8000-000000000000",
		"Order  4 of fl_01JD3V7K8ZQ6W2M5T9X4C1B0AF failed: 018f0000-0000-7000-8000-0000000000ff",
	}
	assert.Equal(t, errorKey(same[0]), errorKey(same[1]))
	assert.True(t, errorKey("no such table orders") != errorKey("no such table customers"), "two errors have one key")
}

// queuedEvents returns the events that are queued for targets.
func queuedEvents(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	return pgtest.Value[[]string](t, pool, `
		select coalesce(array_agg(o.event || ' ' || coalesce(o.payload -> 'data' ->> 'state', o.payload -> 'data' ->> 'percent')
		  order by o.id), '{}') from agent_webhook_outbox o`)
}

func TestCheckAnnouncesChangeOnce(t *testing.T) {
	t.Parallel()
	pgtest.AvoidMidnight(t)
	pool := pgtest.DB(t)
	m := Monitor{Agents: &agents.Directory{}, Limits: budgets.Limits{Day: budgets.Limit{USD: 10}}}
	check := func() { // three concurrent checks, then another
		var group errgroup.Group
		for range 3 {
			group.Go(func() error { return m.Check(t.Context(), pool, 0) })
		}
		require.NoError(t, group.Wait())
		require.NoError(t, m.Check(t.Context(), pool, 0))
	}
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	rows.Skill(t, pool, "fetch", "", "", "")
	check() // no target exists
	pgtest.Exec(t, pool, `insert into agent_webhook_targets (name, url, secrets, events)
		values ('ops', 'https://example.com', array['${S}'], '{verdict.changed,budget.reached}')`)
	check()
	assert.Equal(t, 0, len(queuedEvents(t, pool)))
	pgtest.Exec(t, pool, `update agent_skills set enabled = false, disabled_by = 'self_heal', disabled_at = now();
		insert into agent_budgets (scope, cost_usd) values ('day:' || (now() at time zone 'UTC')::date, 8)`)
	check()
	assert.NoDiff(t, []string{"verdict.changed degraded", "budget.reached 80"}, queuedEvents(t, pool))
	pgtest.Exec(t, pool, `update agent_budgets set cost_usd = 9.99; update agent_skills set enabled = true, disabled_by = '', disabled_at = null`)
	check()
	pgtest.Exec(t, pool, `update agent_budgets set cost_usd = 10`)
	check()
	events := []string{
		"verdict.changed degraded", "budget.reached 80", "verdict.changed working", "verdict.changed degraded",
		"budget.reached 100",
	}
	assert.NoDiff(t, events, queuedEvents(t, pool))
	pgtest.Exec(t, pool, `delete from agent_budgets`)
	require.NoError(t, m.Check(t.Context(), pool, time.Hour))
	assert.NoDiff(t, events, queuedEvents(t, pool)) // no check is due within the hour
	check()
	assert.NoDiff(t, append(events, "verdict.changed working"), queuedEvents(t, pool))
}

func TestAcknowledgedReasonCountsAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	m := Monitor{Agents: &agents.Directory{}}
	status := func() Status {
		s, err := m.Status(t.Context(), pool)
		require.NoError(t, err)
		return s
	}
	acknowledge := func() {
		_, _, err := m.Acknowledge(t.Context(), pool, status().Mark, "the shop moves", "ana")
		require.NoError(t, err)
	}
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	fail := func(message string) {
		for range 3 {
			insertExecution(t, pool, "agent", "import", "failed", message, 1, "")
		}
	}
	fail("shop 7 is closed")
	_, _, err := m.Acknowledge(t.Context(), pool, "other", "why", "ana")
	assert.ErrorIs(t, err, ErrChanged, "another mark")
	acknowledge()
	s := status()
	assert.Truef(t, s.State == Working && len(s.Known) == 1 && s.Known[0].By == "ana" &&
		s.Known[0].Note == "the shop moves", "acknowledged: %+v", s.Verdict)
	fail("shop 8 is closed") // the same error
	assert.Equal(t, Working, status().State)
	fail("no such table shops")
	assert.Equal(t, Degraded, status().State)
	acknowledge()
	require.NoError(t, m.Check(t.Context(), pool, 0))
	assert.Equal(t, Working, status().State)
	pgtest.Exec(t, pool, `delete from agent_executions`) // the failure has ended
	require.NoError(t, m.Check(t.Context(), pool, 0))
	fail("no such table shops")
	assert.Equal(t, Degraded, status().State)
	if n := pgtest.Value[int](t, pool, `select count(*) from agent_audit where act = 'acknowledge_verdict' and reason = 'the shop moves'`); n != 2 {
		t.Errorf("%d acknowledgements in the audit", n)
	}
}

func TestLateWriteDoesNotHideTheCause(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	for i := range 3 {
		id := insertExecution(t, pool, "agent", "pay", "failed", "the call was interrupted", i+1, "")
		rows.Quiet(t, pool, `update agent_executions set failed_step = 's' where id = $1::text::uuid`, id)
		pgtest.Exec(t, pool, `
			insert into agent_activity (trace_id, execution_id, kind, skill_name, step, status, error_class, error_message)
			values ('fl_1', $1::text::uuid, 'note', 'stale_write', 's', 'error', 'stale', 'stale claim')`, id)
	}
	s, err := Monitor{Agents: &agents.Directory{}}.Status(t.Context(), pool)
	require.NoError(t, err)
	assert.True(t, len(s.Failing) == 1 && s.Failing[0].Message == "the call was interrupted", s.Failing)
}

func TestQueuedWorkNeedsAProcess(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `
		insert into agent_schedules (name, flow, surface, agent, cron, timezone, last_run_at, next_run_at)
		values ('heartbeat', 'heartbeat', 'heartbeat', 'agent', '@daily', 'UTC', now() - interval '1 day', now())`)
	insertExecution(t, pool, "agent", "heartbeat", "completed", "", 60, "")
	late := `update agent_executions set created_at = now() - interval '3 minutes' where status = 'pending'`
	rows.Execution(t, pool, "pending", "flow", "external:sum") // no process runs it
	rows.Quiet(t, pool, late)
	assert.Equal(t, "working", currentVerdict(t, pool))
	rows.Execution(t, pool, "pending", "flow", "onboarding")
	assert.Equal(t, "working", currentVerdict(t, pool))
	rows.Quiet(t, pool, late)
	assert.Equal(t, "stopped: no process is running </lanes>", currentVerdict(t, pool))
	pgtest.Exec(t, pool, `insert into agent_workers (name, expires_at) values ('w', now() + interval '1 hour')`)
	assert.Equal(t, "working", currentVerdict(t, pool))
}
