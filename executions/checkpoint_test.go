package executions_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

// blockCheckpointWrites blocks writes of checkpoints, but no reads, until the caller calls end.
func blockCheckpointWrites(t *testing.T, pool *pgxpool.Pool) (end func()) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	pgtest.Exec(t, tx, `lock table agent_checkpoints in share row exclusive mode`)
	ended := false
	end = func() {
		if !ended {
			ended = true
			assert.NoError(t, tx.Rollback(context.WithoutCancel(t.Context())))
		}
	}
	t.Cleanup(end)
	return end
}

func shortLease(o *executions.Options) { o.LeaseTTL = time.Second }

// runNextStep runs a further step. By then the previous step has a checkpoint.
func runNextStep(ctx context.Context) error {
	_, err := executions.Step(ctx, "next", func(context.Context) (int, error) { return 0, nil })
	return err
}

// A result that cannot be written within a lease does not count. The run ends, the execution continues elsewhere, and
// repeats the step.
func TestFailedCheckpointReleasesRun(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	done := make(chan error, 1)
	var calls atomic.Int32
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		n, err := executions.Step(ctx, "step", func(context.Context) (int32, error) { return calls.Add(1), nil })
		if err == nil {
			err = runNextStep(ctx)
		}
		if err != nil {
			select {
			case done <- err:
			default: // a later try
			}
		}
		return resultOf(n, err)
	}), shortLease)
	end := blockCheckpointWrites(t, pool)
	id := p.startFlow(t, "flow")
	assert.ErrorIs(t, testkit.Receive(t, done), executions.ErrLost)
	end()
	x := enginetest.Await(t, pool, id, executions.Completed)
	assert.Truef(t, calls.Load() >= 2 && string(x.Result) != "1",
		"the step ran %d times, and ended with %s", calls.Load(), x.Result)
}

// A warning for each write would fill the server's log.
func TestWritesCauseNoServerWarning(t *testing.T) {
	t.Parallel()
	config := pgtest.DB(t).Config()
	var warned atomic.Pointer[pgconn.Notice]
	config.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { warned.Store(n) }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Do(ctx, "look", executions.Call{Entry: activity.Entry{Skill: "look"}},
			func(context.Context, *executions.Effect) (int, error) { return 1, nil }))
	}))
	enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	assert.Equal(t, nil, warned.Load())
}

// If the result of a step cannot be written, its outer steps have no result either. That also holds if their context
// cannot see the stop (WithoutCancel), and if the database is back by then.
func TestFailedCheckpointLeavesOuterStepUnrecorded(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var calls atomic.Int32
	ready, locked := make(chan struct{}), make(chan func(), 1)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		n, err := executions.Phase(context.WithoutCancel(ctx), "around",
			func(ctx context.Context, _ *executions.Effect) (int32, error) {
				end := func() {}
				n, err := executions.Do(ctx, "within", executions.Call{Entry: activity.Entry{Skill: "within"}, Idempotent: true},
					func(context.Context, *executions.Effect) (int32, error) {
						if calls.Add(1) == 1 {
							close(ready)
							end = <-locked
						}
						return calls.Load(), nil
					})
				end()
				return n, err
			})
		return resultOf(n, err)
	}), shortLease)
	id := p.startFlow(t, "flow")
	<-ready
	locked <- blockCheckpointWrites(t, pool)
	x := enginetest.Await(t, pool, id, executions.Completed)
	assert.Truef(t, calls.Load() >= 2 && string(x.Result) != "1",
		"the step ran %d times, and ended with %s", calls.Load(), x.Result)
}

// Another process has the claim by now. The result comes too late, and the activity log keeps it as rejected.
func TestLateResultIsRecordedAsRejected(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	done := make(chan error, 1)
	var calls atomic.Int32
	body := flowMap(func(ctx context.Context) (executions.Result, error) {
		n, err := executions.Step(ctx, "step", func(ctx context.Context) (int32, error) {
			if calls.Add(1) > 1 {
				return 2, nil
			}
			x, _ := executions.Current(ctx)
			_, err := pool.Exec(ctx, `update agent_executions set claim = claim + 1, claimed_by = null, hinted_at = 'epoch'
				where id = @id`,
				postgres.Strict{"id": x.ID})
			return 1, err
		})
		if err == nil {
			err = runNextStep(ctx)
		}
		if err != nil {
			done <- err
		}
		return resultOf(n, err)
	})
	ghost := newEngine(t, pool, body, shortLease)
	end := blockCheckpointWrites(t, pool)
	wait := ghost.runInBackground(t)
	assert.ErrorIs(t, testkit.Receive(t, done), executions.ErrStale)
	end()
	x := wait()
	startEngine(t, pool, body)
	x = enginetest.Await(t, pool, x.ID, executions.Completed)
	assert.Truef(t, string(x.Result) == "2", "ended with %s", x.Result)
	pgtest.Equal(t, pool, "1", `
		select output ->> 'output' from agent_activity where execution_id = @id and skill_name = 'stale_write'
		   and error_class = 'stale'`, postgres.Strict{"id": x.ID})
}

// The engine writes the last step with the completion or not at all. In the second case the execution continues
// elsewhere and repeats the step.
func TestFailedCompletionDropsLastStep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var calls atomic.Int32
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		n, err := executions.Step(ctx, "step", func(context.Context) (int32, error) { return calls.Add(1), nil })
		return resultOf(n, err)
	}), shortLease)
	end := blockCheckpointWrites(t, pool)
	id := p.startFlow(t, "flow")
	pgtest.Eventually(t, func() bool { return calls.Load() > 1 }, "the step is made again")
	if x := getExecution(t, pool, id); x.Status.Ended() {
		t.Errorf("the execution is %s before its step is recorded", x.Status)
	}
	end()
	x := enginetest.Await(t, pool, id, executions.Completed)
	assert.Equal(t, string(x.Result), pgtest.Value[string](t, pool,
		`select output::text from agent_checkpoints where execution_id = @id and step = 'step'`,
		postgres.Strict{"id": id}), "the checkpoint of the step")
}

// A deferred result is written soon, even if the code runs no further step.
func TestDeferredCheckpointIsFlushed(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	goOn := make(chan struct{})
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		n, err := executions.Step(ctx, "step", func(context.Context) (int, error) { return 7, nil })
		<-goOn
		return resultOf(n, err)
	}))
	id := p.startFlow(t, "flow")
	pgtest.Until(t, pool, true,
		`select exists (select from agent_checkpoints where execution_id = @id and step = 'step')`,
		postgres.Strict{"id": id})
	close(goOn)
	enginetest.Await(t, pool, id, executions.Completed)
}

// Parallel branches: a step has a checkpoint no later than a step of another branch that ended after it.
func TestCheckpointsKeepStepOrder(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		for i := range 20 {
			first := make(chan struct{})
			other := make(chan error, 1)
			go func() {
				_, err := executions.Step(executions.Scope(ctx, "b"), "step", func(context.Context) (int, error) {
					<-first
					return 2, nil
				})
				other <- err
			}()
			_, err := executions.Step(executions.Scope(ctx, "a"), "step", func(context.Context) (int, error) { return i, nil })
			close(first)
			if err := errors.Join(err, <-other); err != nil {
				return executions.Result{}, err
			}
		}
		return executions.Result{}, nil
	}))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Completed)
	assert.Equal(t, 40, pgtest.Value[int](t, pool, `select count(*) from agent_checkpoints where execution_id = @id`,
		postgres.Strict{"id": id}))
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `
		select count(*) from agent_checkpoints a join agent_checkpoints b on b.execution_id = a.execution_id
		   and b.step = 'b' || substr(a.step, 2)
		 where a.execution_id = @id and a.step like 'a/%'
		   and a.created_at > b.created_at`, postgres.Strict{"id": id}))
}

// An exponent may exceed jsonb. The code gets the error, so the result is not deferred.
func TestRejectedResultIsReturnedToFlow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	done := make(chan error, 1)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		_, err := executions.Step(ctx, "step",
			func(context.Context) (json.RawMessage, error) { return json.RawMessage(`{"n": 1e400000}`), nil })
		done <- err
		return executions.Result{}, nil
	}))
	id := p.startFlow(t, "flow")
	var failure *executions.StepError
	err := testkit.Receive(t, done)
	assert.Truef(t, errors.As(err, &failure) && failure.Class == "result", "the code got the error %v", err)
	enginetest.Await(t, pool, id, executions.Completed)
}

// The database may reject the name of a step, too.
func TestRejectedStepNameIsReturnedToFlow(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var long strings.Builder
	for range 200 { // too random to compress to the size limit of an index
		long.WriteString(rand.Text())
	}
	for what, name := range map[string]string{
		"NUL": "a\x00b", "bytes that are no text": "a\xffb",
		"a long name": long.String(),
	} {
		done := make(chan error, 1)
		p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
			_, err := executions.Step(ctx, name, func(context.Context) (int, error) { return 7, nil })
			select {
			case done <- err:
			default: // the test has the first error
			}
			return executions.Result{}, nil
		}))
		id := p.startFlow(t, "flow")
		assert.Error(t, testkit.Receive(t, done), what, "the code got no error")
		enginetest.Await(t, pool, id, executions.Completed)
		p.stop()
	}
}

// The database rejects the last step. The run fails instead of repeating for ever.
func TestRejectedLastStepFailsExecution(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `create function refuse() returns trigger language plpgsql
		as $$ begin raise exception 'no' using errcode = '22023'; end $$`)
	pgtest.Exec(t, pool, `create trigger refuse before insert on agent_checkpoints for each row
		when (new.step = 'bad') execute function refuse()`)
	var calls atomic.Int32
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		n, err := executions.Step(ctx, "bad", func(context.Context) (int32, error) { return calls.Add(1), nil })
		return resultOf(n, err)
	}))
	x := enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Failed)
	assert.Truef(t, x.FailedStep != nil && *x.FailedStep == "bad" && x.ErrorMessage != nil &&
		strings.Contains(*x.ErrorMessage, "could not be recorded"),
		"the execution failed with %v at %v", x.ErrorMessage, x.FailedStep)
	assert.Equal(t, 1, calls.Load())
}

// The function returns while the checkpoint of its last step is in flight and about to fail. The run must not end as if
// the step were recorded.
func TestCompletionWaitsForCheckpointInFlight(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `create function refuse() returns trigger language plpgsql as $$ begin
		perform pg_advisory_xact_lock(77);
		raise exception 'no' using errcode = '22023';
	end $$`)
	pgtest.Exec(t, pool, `create trigger refuse before insert on agent_checkpoints for each row
		when (new.step = 'bad') execute function refuse()`)
	tx := pgtest.Begin(t, pool)
	pgtest.Exec(t, tx, `select pg_advisory_xact_lock(77)`)
	returns := make(chan struct{})
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		defer close(returns)
		n, err := executions.Step(ctx, "bad", func(context.Context) (int, error) { return 7, nil })
		pgtest.Until(t, pool, true, `
			select exists (
			  select from pg_locks
			   where locktype = 'advisory' and objid = 77 and not granted
			     and database = (select oid from pg_database where datname = current_database()))`)
		return resultOf(n, err)
	}), func(o *executions.Options) { o.LeaseTTL = time.Minute })
	id := p.startFlow(t, "flow")
	testkit.Receive(t, returns)
	assert.NoError(t, tx.Rollback(t.Context()))
	x := enginetest.Await(t, pool, id, executions.Failed)
	assert.Truef(t, x.FailedStep != nil && *x.FailedStep == "bad", "the execution failed at %v", x.FailedStep)
}

// A goroutine that outlives its flow gets an error from its steps.
func TestStepAfterFlowReturnedFails(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	left := make(chan context.Context, 1)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		left <- context.WithoutCancel(ctx)
		return executions.Result{}, nil
	}))
	id := p.startFlow(t, "flow")
	ctx := <-left
	enginetest.Await(t, pool, id, executions.Completed)
	_, err := executions.Step(ctx, "late", func(context.Context) (int, error) { return 1, nil })
	assert.Truef(t, errors.Is(err, executions.ErrNotInExecution) &&
		strings.Contains(err.Error(), "after its flow returned"), "the step: %v", err)
	assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_checkpoints`))
}

// storedVariables returns the variables in the row.
func storedVariables(t *testing.T, pool *pgxpool.Pool, id string) string {
	t.Helper()
	text, err := compact(getExecution(t, pool, id).Variables)
	require.NoError(t, err)
	return string(text)
}

type variables = map[string]any

func setVariables(ctx context.Context, v any, errs *error) {
	*errs = errors.Join(*errs, executions.SetVariables(ctx, v))
}

func TestVariablesAreStoredWithNextWrite(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	seen := make(chan string, 10)
	look := func(ctx context.Context) (int, error) {
		x, _ := executions.Current(ctx)
		now, err := executions.Get(ctx, pool, x.ID)
		text, compactErr := compact(now.Variables)
		seen <- string(text)
		return 0, errors.Join(err, compactErr)
	}
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		var setErr error
		setVariables(ctx, variables{"a": 1}, &setErr)
		_, one := executions.Step(ctx, "first", look)  // not written yet
		_, two := executions.Step(ctx, "second", look) // with the first step's checkpoint
		setVariables(ctx, variables{"a": 2, "nul": "\x00"}, &setErr)
		_, three := executions.StepTx(ctx, "third", func(context.Context, pgx.Tx) (int, error) { return 0, nil })
		_, four := executions.Step(ctx, "fourth", look) // with the transaction
		setVariables(ctx, variables{"a": 3}, &setErr)
		if err := errors.Join(setErr, one, two, three, four); err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "event", executions.Event("go", 0)); err != nil {
			return executions.Result{}, err
		}
		return executions.Result{}, executions.SetVariables(ctx, variables{"a": 4})
	}))
	id := p.startFlow(t, "flow")
	enginetest.Await(t, pool, id, executions.Waiting)
	for i, want := range []string{`{}`, `{"a":1}`, "{\"a\":2,\"nul\":\"\ufffd\"}"} {
		assert.Equal(t, want, testkit.Receive(t, seen), i)
	}
	assert.Equal(t, `{"a":3}`, storedVariables(t, pool, id))
	mustDeliver(t, pool, "go", `{}`)
	enginetest.Await(t, pool, id, executions.Completed)
	assert.Equal(t, `{"a":4}`, storedVariables(t, pool, id))
}

// A crash loses unwritten variables. The replay sets them again, and the row never shows an older value meanwhile.
func TestReplaySetsVariablesAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	g := newGate(t)
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		for i := range 3 {
			if err := executions.SetVariables(ctx, variables{"i": i}); err != nil {
				return executions.Result{}, err
			}
			if i < 2 {
				// StepTx writes at once, with the variables set until then.
				if _, err := executions.StepTx(ctx, "step",
					func(context.Context, pgx.Tx) (int, error) { return i, nil }); err != nil {
					return executions.Result{}, err
				}
			}
		}
		g.enter(ctx)
		return resultOf(executions.Step(ctx, "last", func(context.Context) (int, error) { return 0, nil }))
	})
	paused := newEngine(t, pool, flows)
	wait := paused.runInBackground(t)
	id := g.awaitFirst(t)
	assert.Equal(t, `{"i":1}`, storedVariables(t, pool, id))
	expireLease(t, pool, id)
	startEngine(t, pool, flows)
	enginetest.Await(t, pool, id, executions.Completed)
	assert.Equal(t, `{"i":2}`, storedVariables(t, pool, id))
	g.open()
	wait()
}

// A stale claim writes no variables.
func TestStaleClaimStoresNoVariables(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	g := newGate(t)
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		who := "successor"
		if g.enter(ctx) {
			who = "ghost"
		}
		if err := executions.SetVariables(ctx, variables{"by": who}); err != nil {
			return executions.Result{}, err
		}
		if who == "ghost" {
			_, wait := executions.Wait(ctx, "event", executions.Event("key", 0))
			return executions.Result{}, wait
		}
		return executions.Result{}, nil
	})
	paused := newEngine(t, pool, flows)
	wait := paused.runInBackground(t)
	id := g.awaitFirst(t)
	expireLease(t, pool, id)
	startEngine(t, pool, flows)
	enginetest.Await(t, pool, id, executions.Completed)
	g.open()
	wait()
	assert.Equal(t, `{"by":"successor"}`, storedVariables(t, pool, id))
}

func TestVariablesMustBeObject(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for name, v := range map[string]any{
		"list": []int{1}, "null": nil, "channel": make(chan int),
		"huge": json.RawMessage(`{"n": 1e999}`), "nan": math.NaN(),
	} {
		p := newEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
			return executions.Result{}, executions.SetVariables(ctx, v)
		}))
		got, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: "flow"})
		assert.Truef(t, err == nil && got.Status == executions.Failed, "%s: %s, %v", name, got.Status, err)
	}
	assert.ErrorIs(t, executions.SetVariables(t.Context(), variables{}), executions.ErrNotInExecution)
}

// The engine leaves out variables that the database rejects, and the execution ends.
func TestRejectedVariablesDoNotStopRun(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if err := executions.SetVariables(ctx, json.RawMessage(`{"n": 0.`+strings.Repeat("0", 20000)+`1}`)); err != nil {
			return executions.Result{}, err
		}
		return resultOf(executions.Step(ctx, "step", func(context.Context) (int, error) { return 1, nil }))
	}))
	enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
}

// The record of an end names the step that ended it, not a failed step that the code handled.
func TestFailedStepIsRecorded(t *testing.T) {
	t.Parallel()
	fails := func(ctx context.Context, name string) error {
		_, err := executions.Step(ctx, name, func(context.Context) (int, error) { return 0, errors.New(name + " broke") })
		return err
	}
	for name, c := range map[string]struct {
		flow flowFunc
		end  executions.Status
		want string
	}{
		"by itself": {
			func(ctx context.Context) (executions.Result, error) { return executions.Result{}, fails(ctx, "b") },
			executions.Failed, "b",
		},
		"after one that was handled": {func(ctx context.Context) (executions.Result, error) {
			if fails(ctx, "a") == nil {
				return executions.Result{}, errors.New("a did not fail")
			}
			return executions.Result{}, fails(ctx, "b")
		}, executions.Failed, "b"},
		"before a step that tidied up": {func(ctx context.Context) (executions.Result, error) {
			broken := fails(ctx, "b")
			_, err := executions.Step(ctx, "tidy", func(context.Context) (int, error) { return 0, nil })
			return executions.Result{}, errors.Join(err, broken)
		}, executions.Failed, "b"},
		"none": {func(ctx context.Context) (executions.Result, error) {
			if fails(ctx, "a") == nil {
				return executions.Result{}, errors.New("a did not fail")
			}
			_, err := executions.Step(ctx, "fine", func(context.Context) (int, error) { return 0, nil })
			return executions.Result{}, errors.Join(err, errors.New("something else"))
		}, executions.Failed, ""},
		"a wait": {func(ctx context.Context) (executions.Result, error) {
			out, err := executions.Wait(ctx, "reply", executions.Event("never", 30*time.Millisecond))
			if err == nil && out.TimedOut {
				err = executions.ErrTimedOut
			}
			return executions.Result{}, err
		}, executions.Timeout, "reply"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := startEngine(t, pgtest.DB(t), flowMap(c.flow))
			x := enginetest.Await(t, p.pool, p.startFlow(t, "flow"), c.end)
			assert.Truef(t, postgres.Deref(x.FailedStep) == c.want && postgres.Deref(x.ErrorMessage) != "",
				"failed step %q, %q", postgres.Deref(x.FailedStep), postgres.Deref(x.ErrorMessage))
		})
	}
}

// A StepTx may hold lanes that the holder of the row needs, so it does not wait for the row. The next write stores
// its variables.
func TestStepTxDoesNotWaitForLocksToStoreVariables(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	other := pgtest.Begin(t, pool)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		x, _ := executions.Current(ctx)
		if err := executions.SetVariables(ctx, variables{"a": 1}); err != nil {
			return executions.Result{}, err
		}
		bounded, cancel := context.WithTimeout(ctx, timeout/2)
		defer cancel()
		if _, err := executions.StepTx(bounded, "step", func(ctx context.Context, _ pgx.Tx) (int, error) {
			_, err := other.Exec(ctx, `select from agent_executions where id = @id for no key update`,
				postgres.Strict{"id": x.ID})
			return 1, err
		}); err != nil {
			return executions.Result{}, err
		}
		assert.Equal(t, `{}`, storedVariables(t, pool, x.ID))
		return executions.Result{}, other.Rollback(ctx)
	}))
	id := p.startFlow(t, "flow")
	x := enginetest.Await(t, pool, id, executions.Completed)
	assert.Equal(t, `{"a":1}`, storedVariables(t, pool, x.ID))
}
