package heartbeat_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// declare stores agents. The first is the default agent.
func (w *testHeartbeat) declare(t *testing.T, list ...agents.Definition) []agents.Agent {
	t.Helper()
	w.surface.Loop.Agents = &agents.Directory{Settings: agents.Settings{Name: "house", HeartbeatCron: "*/30 * * * *"}}
	var all []agents.Agent
	for i, d := range list {
		d.Default = i == 0
		_, err := agents.Put(t.Context(), w.pool, d)
		require.NoError(t, err)
		a, err := w.surface.Loop.Agents.Find(t.Context(), w.pool, d.Name)
		require.NoError(t, err)
		all = append(all, a)
	}
	return all
}

func (w *testHeartbeat) runAgent(t *testing.T, a agents.Agent) executions.Execution {
	t.Helper()
	x, err := w.engine(t, false).RunSync(context.WithoutCancel(t.Context()), heartbeat.SpecOf(a))
	require.Truef(t, err == nil && x.Status == executions.Completed,
		"the heartbeat of %s is %s: %v, %v", a.Name, x.Status, postgres.Deref(x.ErrorMessage), err)
	return x
}

func TestHeartbeatPerAgent(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	all := w.declare(t,
		agents.Definition{Name: "sales", Instructions: "You sell."},
		agents.Definition{
			Name: "billing", Instructions: "You bill.",
			Heartbeat: &agents.Heartbeat{Prompt: "Look at open returns."},
		},
		agents.Definition{Name: "press", Instructions: "You write."})
	for _, d := range []objectives.Definition{
		{Name: "sell more", Goal: "Sell more."},
		{Name: "bill more", Goal: "Bill more.", Agent: "billing"},
		{Name: "write more", Goal: "Write more.", Agent: "press"}, // it has no heartbeat
	} {
		w.addObjective(t, d)
	}
	w.addAutomation(t, automations.Definition{Name: "digest", Prompt: "Write the digest.", Agent: "press"})

	x := w.runAgent(t, all[1])
	prompts := strings.Join(w.prompts(), "\n")
	assert.Truef(t, strings.Contains(prompts, "Bill more.") && strings.Contains(prompts, "Look at open returns.") &&
		!strings.Contains(prompts, "Sell more.") && !strings.Contains(prompts, "Write") && !strings.Contains(prompts,
		"You sell."),
		"the prompts of billing's heartbeat are %s", prompts)
	pgtest.Equal(t, w.pool, "follow_through billing, advance_plan billing, heartbeat_prompt billing, save_memories billing", `
		select string_agg(skill_name || ' ' || agent, ', ' order by created_at, id) from agent_activity
		  where execution_id = $1 and kind = 'phase'`, x.ID)
	assert.Contains(t, pgtest.Value[string](t, w.pool, `select string_agg(distinct lane, ', ') from agent_activity
		where execution_id = $1`, x.ID), "heartbeat:billing")

	before := len(prompts)
	x = w.runAgent(t, all[0])
	prompts = strings.Join(w.prompts(), "\n")[before:]
	assert.Truef(t, strings.Contains(prompts, "Sell more.") && strings.Contains(prompts, "Write more.") &&
		!strings.Contains(prompts, "Bill more.") && !strings.Contains(prompts, "open returns"),
		"the prompts of the default agent's heartbeat are %s", prompts)
	pgtest.Equal(t, w.pool, "press advance_plan, press automation digest, sales advance_plan", `
		select string_agg(distinct agent || ' ' || purpose, ', ' order by agent || ' ' || purpose)
		  from agent_activity where execution_id = $1 and kind = 'model'`, x.ID)
}

func (w *testHeartbeat) sync(t *testing.T, d *agents.Directory, server bool) {
	t.Helper()
	err := postgres.InTx(t.Context(), w.pool, func(tx pgx.Tx) error { return heartbeat.Sync(t.Context(), tx, d, server) })
	require.NoError(t, err)
}

// A server that starts during an apply must not remove the uncommitted schedule.
func TestServerStartWaitsForApply(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	d := &agents.Directory{Settings: agents.Settings{Name: "house", HeartbeatCron: "*/30 * * * *"}}
	apply, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = apply.Rollback(context.WithoutCancel(t.Context())) }()
	require.NoError(t, workspace.Lock(t.Context(), apply))
	var group errgroup.Group
	group.Go(func() error {
		return postgres.InTx(t.Context(), w.pool, func(tx pgx.Tx) error { return heartbeat.Sync(t.Context(), tx, d, true) })
	})
	pgtest.Until(t, w.pool, true, `select exists (select from pg_locks where locktype = 'advisory' and not granted
			and database = (select oid from pg_database where datname = current_database()))`)
	for _, a := range []agents.Definition{
		{Name: "sales", Default: true},
		{Name: "billing", Heartbeat: &agents.Heartbeat{}},
	} {
		_, err := agents.Put(t.Context(), apply, a)
		require.NoError(t, err)
	}
	require.NoError(t, heartbeat.Sync(t.Context(), apply, d, false))
	require.NoError(t, apply.Commit(t.Context()))
	require.NoError(t, group.Wait())
	pgtest.Equal(t, w.pool, "heartbeat sales, heartbeat:billing billing", `select string_agg(name || ' ' || agent, ', '
		order by name) from agent_schedules`)
}

func TestSchedulesFollowAgents(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	d := &agents.Directory{Settings: agents.Settings{Name: "house", HeartbeatCron: "*/30 * * * *", Timezone: "UTC"}}
	w.surface.Loop.Agents = d
	schedules := func(server bool) string {
		t.Helper()
		w.sync(t, d, server)
		return pgtest.Value[string](t, w.pool, `select string_agg(name || ' ' || agent || ' ' || cron || ' ' || timezone, ', '
			order by name) from agent_schedules`)
	}
	put := func(d agents.Definition) {
		t.Helper()
		_, err := agents.Put(t.Context(), w.pool, d)
		require.NoError(t, err)
	}
	assert.Equal(t, "heartbeat house */30 * * * * UTC", schedules(true))
	put(agents.Definition{Name: "sales", Default: true})
	put(agents.Definition{Name: "billing", Timezone: "Europe/Madrid", Heartbeat: &agents.Heartbeat{Cron: "0 8 * * *"}})
	put(agents.Definition{Name: "press"})
	d.Settings.HeartbeatCron = "* * * * *" // a command's setting must not change the stored schedule
	assert.Equal(t, "heartbeat sales */30 * * * * UTC, heartbeat:billing billing 0 8 * * * Europe/Madrid",
		schedules(false))
	next := pgtest.Value[string](t, w.pool, `select next_run_at::text from agent_schedules
		where name = 'heartbeat:billing'`)
	schedules(false)
	pgtest.Equal(t, w.pool, next, `select next_run_at::text from agent_schedules where name = 'heartbeat:billing'`)
	_, err := agents.Remove(t.Context(), w.pool, []string{"sales"})
	require.NoError(t, err)
	assert.Equal(t, "heartbeat sales * * * * * UTC", schedules(true))
}

func TestIdleHeartbeatsOfAgents(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	list := []agents.Definition{{Name: "a0"}}
	for _, name := range []string{"a1", "a2", "a3", "a4", "a5", "a6", "a7", "a8", "a9"} {
		list = append(list, agents.Definition{Name: name, Heartbeat: &agents.Heartbeat{Cron: "@every 1s"}})
	}
	w.declare(t, list...)
	w.sync(t, w.surface.Loop.Agents, true)
	w.engine(t, true)
	pgtest.Until(t, w.pool, 9, `select count(distinct agent) from agent_executions where status = 'completed'`)
	assert.Equal(t, 0, len(w.model.Requests()))
	lanesHeld := pgtest.Value[string](t, w.pool, `select coalesce(string_agg(distinct a.lane, ' ' order by a.lane), '')
		from agent_activity a where a.lane like 'heartbeat%'`)
	got := strings.Fields(lanesHeld)
	assert.Truef(t, len(got) == 9 && !slices.Contains(got, heartbeat.Lane), "the heartbeats held %s", lanesHeld)
}
