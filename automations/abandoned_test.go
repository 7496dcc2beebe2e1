package automations_test

import (
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// execution makes one and brings it to a status.
func execution(t *testing.T, pool *pgxpool.Pool, status string) (id string) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `
		insert into agent_executions (trace_id, surface, flow, status) values ($1, 'heartbeat', 'heartbeat', 'running') returning id`,
		traceID).Scan(&id)
	if err != nil {
		t.Fatal(err)
	}
	if status != "running" {
		exec(t, pool, `update agent_executions set status = '`+status+`' where id = '`+id+`'`)
	}
	return id
}

func abandoned(t *testing.T, pool *pgxpool.Pool) []automations.Run {
	t.Helper()
	runs, err := automations.Abandoned(t.Context(), pool, 0)
	if err != nil {
		t.Fatal(err)
	}
	return runs
}

func TestARunIsAbandonedWhenItsExecutionHasEnded(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	of := map[string]string{} // by run
	for name, executionID := range map[string]string{
		"running": execution(t, pool, "running"), "waiting": execution(t, pool, "waiting"),
		"cancelled": execution(t, pool, "cancelled"), "failed": execution(t, pool, "failed"), "timeout": execution(t, pool, "timeout"),
		"completed": execution(t, pool, "completed"), "gone": "00000000-0000-0000-0000-000000000001", "none": "", "none, old": "",
	} {
		a := putDue(t, pool, automations.Definition{Name: name}, "1 hour")
		run, ok, err := automations.Claim(t.Context(), pool, a.ID, *a.NextRunAt, executionID, traceID)
		if !ok || err != nil {
			t.Fatal(ok, err)
		}
		of[run.ID] = name
		if name == "none, old" {
			exec(t, pool, `update agent_automation_runs set claimed_at = claimed_at - interval '25 hours' where id = '`+run.ID+`'`)
		}
	}
	ended := finish(t, pool, claim(t, pool, putDue(t, pool, automations.Definition{Name: "ended"}, "1 hour")), automations.Result{})
	exec(t, pool, `update agent_automation_runs set execution_id = '`+execution(t, pool, "failed")+`' where id = '`+ended.ID+`'`)
	var got []string
	for _, r := range abandoned(t, pool) {
		got = append(got, of[r.ID])
	}
	slices.Sort(got)
	if want := "cancelled/completed/failed/gone/none, old/timeout"; strings.Join(got, "/") != want {
		t.Errorf("abandoned are %s, not %s", strings.Join(got, "/"), want)
	}
}

// The age of a run without execution is that of its last attempt and not of its first.
func TestARetryIsNotAbandonedBecauseTheRunIsOld(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	run := claim(t, pool, putDue(t, pool, automations.Definition{Name: "a"}, "1 hour"))
	exec(t, pool, `update agent_automation_runs set created_at = created_at - interval '3 days', claimed_at = claimed_at - interval '3 days'`)
	if len(abandoned(t, pool)) != 1 {
		t.Fatal("the first attempt is not abandoned")
	}
	run = finish(t, pool, run, automations.Result{Error: "abandoned"})
	exec(t, pool, `update agent_automation_runs set retry_at = clock_timestamp()`)
	retry(t, pool, run)
	if runs := abandoned(t, pool); len(runs) > 0 {
		t.Errorf("the second is too: %+v", runs)
	}
}

func TestAnAbandonedRunIsEndedOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	a := putDue(t, pool, automations.Definition{Name: "a"}, "1 hour")
	if _, ok, err := automations.Claim(t.Context(), pool, a.ID, *a.NextRunAt, execution(t, pool, "cancelled"), traceID); !ok || err != nil {
		t.Fatal(ok, err)
	}
	var ended atomic.Int64
	var group errgroup.Group
	for range 8 {
		group.Go(func() error {
			runs, err := automations.Abandoned(t.Context(), pool, 0)
			for _, r := range runs {
				_, ok, err := automations.Finish(t.Context(), pool, r.ID, r.Attempt, automations.Result{Error: "its execution ended"})
				if err != nil {
					return err
				}
				if ok {
					ended.Add(1)
				}
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	runs, err := automations.Runs(t.Context(), pool, automations.RunFilter{})
	if err != nil || len(runs) != 1 || ended.Load() != 1 || runs[0].Status != automations.Error || runs[0].Attempt != 1 {
		t.Errorf("ended %d times: %+v, %v", ended.Load(), runs, err)
	}
}
