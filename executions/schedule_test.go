package executions_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

func nothing(context.Context) (executions.Result, error) { return executions.Result{}, nil }

func every(spec string) executions.Schedule {
	return executions.Schedule{Name: "pulse", Flow: "flow", Surface: trace.Heartbeat, Cron: spec, Timezone: "UTC"}
}

func TestTwoEnginesStartOneExecutionPerTick(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(nothing))
	start(t, pool, flow(nothing))
	if err := p.Put(t.Context(), every("@every 1s")); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, pool, `select count(*) from agent_executions where status = 'completed'`) >= 4
	}, "four ticks have run")
	bad := value[int](t, pool, `select count(*) - count(distinct dedupe_key) from agent_executions`)
	odd := value[int](t, pool, `select count(*) from agent_executions where dedupe_key not like 'pulse ____-__-__T__:__:__%Z' or surface <> 'heartbeat'`)
	if bad != 0 || odd != 0 {
		t.Errorf("%d executions share a tick, %d have another key or surface", bad, odd)
	}
}

// River's leader ticks. While a dead one is still the leader nobody would, but for the sweep.
func TestTicksGoOnWhileTheLeaderIsDead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	exec(t, pool, `
		insert into river.river_leader (name, leader_id, elected_at, expires_at)
		values ('default', 'dead', now(), now() + interval '1 hour')`)
	p := start(t, pool, flow(nothing))
	if err := p.Put(t.Context(), every("@every 1s")); err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, pool, `select count(*) from agent_executions where status = 'completed'`) >= 2
	}, "two ticks have run")
	if leader := value[string](t, pool, `select leader_id from river.river_leader`); leader != "dead" {
		t.Errorf("%s became the leader, so this shows nothing", leader)
	}
}

func TestManyTickersStartADueTimeOnceAndMissedTicksBecomeOne(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, flow(nothing))
	if err := p.Put(t.Context(), every("*/30 * * * *")); err != nil {
		t.Fatal(err)
	}
	for round := range 5 {
		exec(t, pool, `update agent_schedules set next_run_at = clock_timestamp() - interval '9 hours'`)
		var group errgroup.Group
		for range 8 {
			group.Go(func() error { return p.Tick(t.Context()) })
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
		if n := value[int](t, pool, `select count(*) from agent_executions`); n != round+1 {
			t.Fatalf("%d executions after %d due times", n, round+1)
		}
		if !value[bool](t, pool, `select next_run_at > clock_timestamp() and last_run_at < clock_timestamp() - interval '8 hours' from agent_schedules`) {
			t.Error("the schedule did not move on")
		}
	}
}

func TestPuttingAScheduleAgainDoesNotPostponeIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, flow(nothing))
	next := func() time.Time { return value[time.Time](t, pool, `select next_run_at from agent_schedules`) }
	put := func(s executions.Schedule) {
		t.Helper()
		if err := p.Put(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	put(every("@every 1h"))
	exec(t, pool, `update agent_schedules set next_run_at = clock_timestamp() - interval '1 minute'`)
	due := next()
	put(every("@every 1h"))
	if !next().Equal(due) {
		t.Errorf("due %s, then %s", due, next())
	}
	put(every("@every 2h"))
	if left := time.Until(next()); left < 119*time.Minute || left > 121*time.Minute {
		t.Errorf("another interval is due in %s", left)
	}
}

func TestABadScheduleNamesItsFieldAndWritesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, nil)
	for says, s := range map[string]executions.Schedule{
		"minute":      every("61 * * * *"),
		"5":           every("* * *"),
		"Mars/Base":   {Name: "pulse", Flow: "flow", Surface: trace.Heartbeat, Cron: "* * * * *", Timezone: "Mars/Base"},
		"a name":      {Flow: "flow", Surface: trace.Heartbeat, Cron: "* * * * *", Timezone: "UTC"},
		"a flow":      {Name: "pulse", Surface: trace.Heartbeat, Cron: "* * * * *", Timezone: "UTC"},
		`and "radio"`: {Name: "pulse", Flow: "flow", Surface: "radio", Cron: "* * * * *", Timezone: "UTC"},
	} {
		if err := p.Put(t.Context(), s); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("want %q in the error, got %v", says, err)
		}
	}
	if n := value[int](t, pool, `select count(*) from agent_schedules`); n != 0 {
		t.Errorf("%d schedules were written", n)
	}
}

func TestABrokenScheduleDoesNotHoldUpTheOthers(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, nil)
	for name, change := range map[string]string{
		"bad cron": `cron = '* *'`, "bad zone": `timezone = 'Mars/Base'`, "bad surface": `surface = 'radio'`, "good": `name = 'good'`,
	} {
		exec(t, pool, `
			insert into agent_schedules (name, flow, surface, cron, timezone, next_run_at)
			values (@name, 'flow', 'heartbeat', '* * * * *', 'UTC', clock_timestamp() - interval '1 minute')`, postgres.Strict{"name": name})
		exec(t, pool, `update agent_schedules set `+change+` where name = @name`, postgres.Strict{"name": name})
	}
	err := p.Tick(t.Context())
	if err == nil || strings.Count(err.Error(), "schedule bad") != 3 {
		t.Errorf("the error does not name the three: %v", err)
	}
	if keys := value[string](t, pool, `select string_agg(split_part(dedupe_key, ' ', 1), ' ') from agent_executions`); keys != "good" {
		t.Errorf("started %q", keys)
	}
}
