package executions_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestSweepCoversLostNotification(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(noop))
	id := p.startFlow(t, "flow")
	pgtest.Exec(t, pool, `delete from river.river_job`)
	startEngine(t, pool, flowMap(noop))
	enginetest.Await(t, pool, id, executions.Completed)
}

func TestRolledBackStartLeavesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := newEngine(t, pool, flowMap(noop))
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, _, err = p.Start(t.Context(), tx, executions.Spec{Flow: "flow", Surface: "flow"})
	assert.NoError(t, err)
	assert.NoError(t, tx.Rollback(t.Context()))
	assert.Equal(t, 0, pgtest.Value[int](t, pool,
		`select (select count(*) from agent_executions) + (select count(*) from river.river_job)`))
}

func TestRepeatedWritesCountOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	id := insertPending(t, pool)
	n := mustClaim(t, pool, id, newWorker(t, pool))
	entry := activity.Entry{TraceID: "fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE", ExecutionID: id, Claim: n, Step: "pay", Skill: "pay"}
	one, err := activity.Open(t.Context(), pool, entry)
	require.NoError(t, err)
	two, err := activity.Open(t.Context(), pool, entry)
	assert.NoError(t, err)
	assert.Equal(t, two, one)
	for range 2 {
		assert.NoError(t, activity.Close(t.Context(), pool, one, entry, activity.Outcome{Output: 1}))
		pgtest.Exec(t, pool, `insert into agent_checkpoints (execution_id, step, claim) values (@id, 'pay', @claim)
			on conflict do nothing`,
			postgres.Strict{"id": id, "claim": n})
	}
	log := activityRows(t, pool, id)
	assert.Truef(t, len(log) == 1 && log[0].Status == "success", "activity %v", log)
}

// A process pauses in the middle of a step's transaction. The server ends its session, while its lease may still hold.
func TestIdleTransactionTimeoutIsRetried(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var tries atomic.Int32
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.StepTx(ctx, "write", func(ctx context.Context, tx pgx.Tx) (int, error) {
			if tries.Add(1) > 1 {
				return 0, nil
			}
			if err := tx.Conn().Close(ctx); err != nil {
				return 0, err
			}
			return 0, &pgconn.PgError{Severity: "FATAL", Code: "25P03", Message: "terminating connection due to " +
				"idle-in-transaction timeout"}
		}))
	}))
	id := p.startFlow(t, "flow")
	pgtest.Eventually(t, func() bool { return getExecution(t, pool, id).Status.Ended() }, "the execution ends")
	if got := getExecution(t, pool, id); got.Status != executions.Completed || tries.Load() != 2 {
		t.Errorf("status %s after %d tries: %s", got.Status, tries.Load(), postgres.Deref(got.ErrorMessage))
	}
}

// A slow database may cancel a statement by statement_timeout. Like an outage, that does not end the run: the engine
// repeats the write.
func TestCancelledWriteIsRetried(t *testing.T) {
	t.Parallel()
	for name, when := range map[string]string{
		"a record": "insert on agent_checkpoints for each row",
		"a call":   "insert on agent_activity for each row when (new.kind = 'call')",
		"a wait":   "update on agent_executions for each row when (new.status = 'waiting')",
		"an end":   "update on agent_executions for each row when (new.completed_at is not null)",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			pgtest.Exec(t, pool, `create sequence cancels`)
			pgtest.Exec(t, pool, `
				create function cancel() returns trigger language plpgsql as $$
				begin
				  if nextval('cancels') <= 3 then
				    perform pg_cancel_backend(pg_backend_pid());
				    perform pg_sleep(60);
				  end if;
				  return new;
				end $$`)
			pgtest.Exec(t, pool, `create trigger cancel before `+when+` execute function cancel()`)
			var calls, steps atomic.Int32
			p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
				_, err := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "call"}},
					func(context.Context, *executions.Effect) (int32, error) { return calls.Add(1), nil })
				if err != nil {
					return executions.Result{}, err
				}
				if _, err := executions.Wait(ctx, "wait", executions.Delay(time.Millisecond)); err != nil {
					return executions.Result{}, err
				}
				n, err := executions.Step(ctx, "step", func(context.Context) (int32, error) { return steps.Add(1), nil })
				return resultOf(n, err)
			}))
			id := p.startFlow(t, "flow")
			enginetest.Await(t, pool, id, executions.Completed)
			assert.Truef(t, calls.Load() == 1 && steps.Load() == 1, "%d calls, %d steps", calls.Load(), steps.Load())
		})
	}
}

// A query of a flow may time out once in a slow moment, which is retried. A repeated timeout is intended.
func TestCancelledQueryIsRetried(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		cancels, tries int
		ends           executions.Status
	}{
		"in a slow moment": {2, 3, executions.Completed},
		"each time":        {9, 3, executions.Failed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			var tries atomic.Int32
			p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
				query := func(ctx context.Context, db postgres.DB) (bool, error) {
					if int(tries.Add(1)) > test.cancels {
						return true, nil
					}
					_, err := db.Exec(ctx, `do $$ begin perform pg_cancel_backend(pg_backend_pid()), pg_sleep(60); end $$`)
					return true, err
				}
				_, err := executions.StepTx(ctx, "in a transaction", func(ctx context.Context, tx pgx.Tx) (bool, error) {
					return query(ctx, tx)
				})
				assert.Equal(t, test.tries, int(tries.Swap(0)))
				if test.ends == executions.Completed {
					require.NoError(t, err)
				}
				_, err = executions.Step(ctx, "step", func(ctx context.Context) (bool, error) { return query(ctx, pool) })
				return executions.Result{}, err
			}))
			id := p.startFlow(t, "flow")
			enginetest.Await(t, pool, id, test.ends)
			assert.Equal(t, test.tries, int(tries.Load()), tries.Load())
		})
	}
}

// A short lock is not an outage and logs no warning.
func TestShortLockIsRetriedWithoutWarning(t *testing.T) {
	t.Parallel()
	for locked, warnings := range map[int]int{3: 0, 5: 2} {
		l := &logLines{}
		tries := 0
		p := newEngine(t, pgtest.DB(t), flowMap(func(ctx context.Context) (executions.Result, error) {
			_, err := executions.RetryTransient(ctx, func(context.Context) (bool, error) {
				if tries++; tries > locked {
					return true, nil
				}
				return false, &pgconn.PgError{Code: "55P03", Message: "canceling statement due to lock timeout"}
			})
			return executions.Result{}, err
		}), l.capture)
		x, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
		require.NoError(t, err)
		assert.Equal(t, executions.Completed, x.Status)
		assert.Equal(t, warnings, len(l.Records(t, "database unavailable, trying again")))
	}
}

// A connection failure during the release of a lane is not a result of the flow. The engine releases it over another
// connection, even if the first release took effect.
func TestReleaseSurvivesBrokenConnection(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for lane, done := range map[string]bool{
		"objective:1": false, "thread:1": false,
		"objective:2": true, "thread:2": true,
	} {
		p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
			hold, err := executions.Lane(ctx, lane)
			if err != nil {
				return executions.Result{}, err
			}
			tx, err := pool.Begin(ctx)
			if err != nil {
				return executions.Result{}, err
			}
			// a fenced write, for which the release waits
			if _, err := tx.Exec(ctx, `select from agent_locks where lane = $1 for key share`, lane); err != nil {
				return executions.Result{}, err
			}
			var broken errgroup.Group
			broken.Go(func() error {
				waits := `from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'
					and query like '%lanekeeper.release_agent_lock(%' and pid <> pg_backend_pid()`
				pgtest.Until(t, pool, true, `select exists (select `+waits+`)`)
				if done {
					pgtest.Exec(t, tx, `update agent_locks set locked_by = '', expires_at = '-infinity',
						fencing_token = fencing_token + 1, execution_id = null where lane = $1`, lane)
				}
				pgtest.Exec(t, pool, `select pg_terminate_backend(pid) `+waits)
				return tx.Commit(context.WithoutCancel(ctx))
			})
			return resultOf(nil, errors.Join(hold.Release(ctx), broken.Wait()))
		}))
		x, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
		assert.Truef(t, err == nil && x.Status == executions.Completed,
			"%s, given back before the connection broke %t: %s, %v, %v", lane, done, x.Status, x.ErrorMessage, err)
		assert.Truef(t, !pgtest.Value[bool](t, pool, `select is_agent_lock_held($1)`, lane), "%s is still held", lane)
		p.stop()
	}
}

func newPool(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.Pool(t, url, postgres.Options{MaxConns: 8})
	return pool
}

// The response to a completion may be lost, and the retry finds the end. The parent resumes at once all the same.
func TestParentResumesAfterLostCompletionResponse(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	waits := make(chan struct{})
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		<-waits
		x, _ := executions.Current(ctx)
		_, err := pool.Exec(ctx, `select lanekeeper.complete_agent_execution(@id, @claim, 'completed', '', null, null, null)`,
			postgres.Strict{"id": x.ID, "claim": x.Claim})
		return executions.Result{}, err
	}), neverSweep)
	parent, child := p.startExternal(t), p.startFlow(t, "flow")
	_, _, err := p.UnlockRun(t.Context(), parent, p.lock(t, parent, "w").LockID,
		executions.UnlockParams{Status: executions.Waiting, For: "agent", Key: child})
	require.NoError(t, err)
	close(waits)
	enginetest.Await(t, pool, parent, executions.Running)
}

// The commit that ends an execution may take effect although its response is lost. The effect then exists once, and the
// caller gets the result.
func TestEndTxSurvivesLostCommitResponse(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	pool := newPool(t, url)
	pgtest.Exec(t, pool, `create table effects (n int)`)
	var lose atomic.Bool
	through := pgproxy.LoseCommit(t, url, &lose)
	calls := 0
	p := startEngine(t, newPool(t, through.URL("engine")), flowMap(func(ctx context.Context) (executions.Result, error) {
		n, err := executions.EndTx(ctx, "end", func(ctx context.Context, tx pgx.Tx) (int, error) {
			calls++
			if _, err := tx.Exec(ctx, `insert into effects values (7)`); err != nil {
				return 0, err
			}
			lose.Store(true)
			return 7, nil
		}, func(n int) executions.Result { return executions.Result{Summary: "seven", Value: n} })
		assert.Truef(t, n == 7 && err == nil, "the step has %d, %v", n, err)
		return executions.Result{}, err
	}), neverSweep)
	x, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
	assert.Truef(t, err == nil && x.Status == executions.Completed && x.ResultSummary == "seven" &&
		string(x.Result) == "7" && x.Claim == 1, "it ended as %s with %q, %s: %v", x.Status, x.ResultSummary, x.Result, err)
	assert.Truef(t, !lose.Load() && calls == 1,
		"the answer was lost: %v; the transaction was made %d times", !lose.Load(), calls)
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from effects`))
	n := pgtest.Value[int](t, pool, `select count(*) from agent_events where external_id = 'completed ' || @id`,
		postgres.Strict{"id": x.ID})
	assert.Equal(t, 1, n, "ends")
}
