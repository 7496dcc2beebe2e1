//go:build unix

package resourcefaults_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
)

// TestAPoolThatIsTaken for longer than a lease: the run ends, nothing is recorded that was not, and when the
// connections come back the execution completes.
func TestAPoolThatIsTaken(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := admin(t, url)
	pool := pgtest.Pool(t, url, postgres.Options{MaxConns: 3, ApplicationName: "engine"})
	var first, second atomic.Int32
	at, told := newGate(), newHeard()
	e := engine(t, pool, map[string]executions.Func{"two": func(ctx context.Context, _ json.RawMessage) (executions.Result,
		error,
	) {
		if _, err := executions.Step(ctx, "first",
			func(context.Context) (int32, error) { return first.Add(1), nil }); err != nil {
			return executions.Result{}, err
		}
		_, err := executions.Step(ctx, "second", func(context.Context) (int32, error) {
			at.pass()
			return second.Add(1), nil
		})
		if err == nil { // before the next step that one is on record
			_, err = executions.Step(ctx, "third", func(context.Context) (int, error) { return 0, nil })
		}
		told.tell(err)
		return executions.Result{}, err
	}}, &testkit.Log{})
	x, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "two", Surface: trace.Flow})
	require.NoError(t, err)
	testkit.Receive(t, at.entered)
	giveBack := take(t, pool, 3)
	close(at.opened)
	assert.ErrorIs(t, testkit.Receive(t, told.first), executions.ErrLost)
	assert.Equal(t, 1, pgtest.Value[int](t, db, `select count(*) from agent_checkpoints where execution_id = $1`, x.ID))
	got := pgtest.Value[string](t, db, `select status from agent_executions where id = $1`, x.ID)
	assert.Truef(t, got == "running" || got == "pending", "the execution is %s", got)
	giveBack()
	eventually(t, "the execution completes", func() bool {
		return pgtest.Value[string](t, db, `select status from agent_executions where id = $1`, x.ID) == "completed"
	})
	assert.Truef(t, first.Load() == 1 && second.Load() >= 2,
		"the first step ran %d times, the second %d times", first.Load(), second.Load())
}

// take takes connections of a pool, as code that does not give them back would.
func take(t *testing.T, pool *pgxpool.Pool, n int) (giveBack func()) {
	t.Helper()
	var taken []*pgxpool.Conn
	for range n {
		c, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		taken = append(taken, c)
	}
	given := false
	giveBack = func() {
		for _, c := range taken {
			if !given {
				c.Release()
			}
		}
		given = true
	}
	t.Cleanup(giveBack)
	return giveBack
}

// TestAnEngineOnTheLeastPool: many runs with every sort of step share two connections.
func TestAnEngineOnTheLeastPool(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := admin(t, url)
	pgtest.Exec(t, db, `create table effects (by text not null, what text not null)`)
	pool := pgtest.Pool(t, url, postgres.Options{MaxConns: 2, ApplicationName: "engine"})
	e := engine(t, pool, map[string]executions.Func{"effect": effect, "all": everything}, &testkit.Log{},
		func(o *executions.Options) { o.Workers, o.LeaseTTL = 8, 20*time.Second })
	const runs = 20
	for range runs {
		_, _, err := e.Start(t.Context(), pool, executions.Spec{Flow: "all", Surface: trace.Flow})
		require.NoError(t, err)
	}
	eventually(t, "all runs have ended", func() bool {
		return pgtest.Value[int](t, db, `select count(*) from agent_executions where completed_at is null`) == 0
	})
	assert.Equal(t, 2*runs,
		pgtest.Value[int](t, db, `select count(*) from agent_executions where status = 'completed'`))
	assert.Equal(t, 2*runs, pgtest.Value[int](t, db, `select count(distinct by) from effects`))
}

// everything has each sort of step, a timer, a child, and a lane that all want.
func everything(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
	x, _ := executions.Current(ctx)
	if _, err := executions.Step(ctx, "step", func(context.Context) (int, error) { return 1, nil }); err != nil {
		return executions.Result{}, err
	}
	_, err := executions.Phase(ctx, "phase", func(ctx context.Context, _ *executions.Effect) (int, error) {
		return executions.StepTx(ctx, "write", func(ctx context.Context, tx pgx.Tx) (int, error) {
			_, err := tx.Exec(ctx, `insert into effects (by, what) values ($1, 'phase')`, x.ID)
			return 1, err
		})
	})
	if err != nil {
		return executions.Result{}, fmt.Errorf("phase: %w", err)
	}
	if _, err := executions.Wait(ctx, "pause", executions.Delay(time.Millisecond)); err != nil {
		return executions.Result{}, err
	}
	_, err = executions.Trigger(ctx, "child", executions.Child{Flow: "effect", Input: x.ID, Wait: true})
	return executions.Result{}, err
}
