package skills_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// A restart of the database is not the result of a query that it broke off: neither its run fails nor does the failure count against the skill.
func TestAQueryThatTheDatabaseBrokeOffIsMadeAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	e, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	if err != nil {
		t.Fatal(err)
	}
	const marker = "/* broken off */"
	r := registry(t, skills.Options{Pool: pool})
	asked := put(t, pool, skills.Definition{
		Name: "asked", Handler: "sql:", Timeout: "60s",
		Config: map[string]any{"query": "select pg_sleep(case when exists (select from broken) then 0 else 50 end)::text as slept " + marker},
	})
	if _, err := pool.Exec(t.Context(), `create table broken ()`); err != nil {
		t.Fatal(err)
	}
	err = e.Register("asks", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		got, err := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "asked"}, Idempotent: true},
			func(ctx context.Context, _ *executions.Effect) (json.RawMessage, error) {
				return r.Invoke(ctx, skills.Call{Skill: asked})
			})
		return executions.Result{Value: got}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var group errgroup.Group
	group.Go(func() error { return e.Run(ctx) })
	t.Cleanup(func() {
		stop()
		if err := group.Wait(); err != nil {
			t.Error(err)
		}
	})
	x, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "asks", Surface: trace.Flow})
	if err != nil {
		t.Fatal(err)
	}
	pgtest.Eventually(t, 90*time.Second, func() bool { return sleeping(t, pool, marker) }, "the query does not start")
	if _, err := pool.Exec(t.Context(), `insert into broken default values`); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `
		select pg_terminate_backend(pid) from pg_stat_activity
		 where datname = current_database() and query like '%' || $1 || '%' and pid <> pg_backend_pid()`, marker); err != nil {
		t.Fatal(err)
	}
	var status, message string
	pgtest.Eventually(t, 90*time.Second, func() bool {
		err := pool.QueryRow(t.Context(), `select status, coalesce(error_message, '') from agent_executions where id = $1`, x.ID).Scan(&status, &message)
		return err == nil && (status == "completed" || status == "failed")
	}, "the run does not end")
	if status != "completed" {
		t.Errorf("%s: %s", status, message)
	}
}
