package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// activityRow has the columns of an activity that the tests compare.
type activityRow struct {
	Skill, Step, Kind, Status, Class string
	Output                           string
}

func activityRows(t *testing.T, db postgres.DB, id string) []activityRow {
	t.Helper()
	return pgtest.Rows[activityRow](t, db, `
		select skill_name, step, kind, status, error_class, coalesce(output::text, '') from agent_activity
		 where execution_id = @id order by id`, postgres.Strict{"id": id})
}

// countOpenActivities counts the activities in progress.
func countOpenActivities(t *testing.T, db postgres.DB) int {
	t.Helper()
	return pgtest.Value[int](t, db, `select count(*) from agent_activity_open`)
}

func TestActivityHasThreadOfRun(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		_, err := activity.Note(ctx, pool, activity.Entry{Skill: "note"}, activity.Outcome{})
		if err != nil {
			return executions.Result{}, err
		}
		return resultOf(executions.Do(ctx, "look", executions.Call{Entry: activity.Entry{Skill: "look"}},
			func(context.Context, *executions.Effect) (string, error) { return "seen", nil }))
	}))
	for thread, want := range map[string]string{"talk": "note in talk, look in talk", "": "note in none, look in none"} {
		x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "flow", Surface: trace.Flow, ThreadID: thread})
		require.NoError(t, err)
		enginetest.Await(t, pool, x.ID, executions.Completed)
		got := pgtest.Value[string](t, pool, `
			select string_agg(skill_name || ' in ' || coalesce(thread_id, 'none'), ', ' order by id) from agent_activity
			 where execution_id = $1`, x.ID)
		assert.Equal(t, want, got, thread)
	}
}

// The checkpoint of a plain step commits with the intent of the next call. If the delay of a deferred checkpoint ends
// first, the engine writes it alone.
func TestCheckpointCommitsWithNextCallIntent(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.Step(ctx, "read", func(context.Context) (int, error) { return 1, nil }); err != nil {
			return executions.Result{}, err
		}
		return resultOf(executions.Do(ctx, "act", executions.Call{Entry: activity.Entry{Skill: "act"}, Idempotent: true},
			func(ctx context.Context, effect *executions.Effect) (together bool, err error) {
				x, _ := executions.Current(ctx)
				return together, pool.QueryRow(ctx, `
					select c.xmin = a.xmin from agent_checkpoints c, agent_activity a
					 where c.execution_id = @id and c.step = 'read' and a.id = @activity`,
					postgres.Strict{"id": x.ID, "activity": effect.ActivityID}).Scan(&together)
			}))
	}))
	pgtest.Eventually(t, func() bool {
		return string(enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed).Result) == "true"
	}, "step and intent in one commit")
}

// A step of another branch may use a step's result while its checkpoint is in flight with the intent of a call.
func TestBranchWaitsForDeferredCheckpointInFlight(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	lock, err := pool.Begin(t.Context())
	require.NoError(t, err)
	blocked, seen := make(chan struct{}), make(chan int, 1)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		if _, err := executions.Step(ctx, "read", func(context.Context) (int, error) { return 1, nil }); err != nil {
			return executions.Result{}, err
		}
		var branches errgroup.Group
		branches.Go(func() error {
			_, err := executions.Do(executions.Scope(ctx, "call"), "act", executions.Call{Entry: activity.Entry{Skill: "act"}},
				func(context.Context, *executions.Effect) (int, error) { return 1, nil })
			return err
		})
		branches.Go(func() error {
			<-blocked
			_, err := executions.Step(executions.Scope(ctx, "step"), "use", func(ctx context.Context) (n int, err error) {
				err = pool.QueryRow(ctx, `select count(*)::int from agent_checkpoints where step = 'read'`).Scan(&n)
				seen <- n
				return n, err
			})
			return err
		})
		return executions.Result{}, branches.Wait()
	}))
	_, err = lock.Exec(t.Context(), `lock table agent_activity_open in share mode`)
	require.NoError(t, err)
	id := p.startFlow(t, "flow")
	pgtest.Eventually(t, func() bool {
		return pgtest.Value[bool](t, pool,
			`select exists (select from pg_locks where not granted and relation = 'agent_activity_open'::regclass)`)
	}, "the intent waits")
	close(blocked)
	select {
	case n := <-seen:
		seen <- n
	case <-time.After(200 * time.Millisecond):
	}
	require.NoError(t, lock.Rollback(t.Context()))
	enginetest.Await(t, pool, id, executions.Completed)
	assert.Equal(t, 1, <-seen)
}

func TestCallIntentIsRecordedBeforeEffect(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Do(ctx, "mail",
			executions.Call{Entry: activity.Entry{Skill: "send_mail", Input: map[string]any{"to": "ana"}}},
			func(ctx context.Context, effect *executions.Effect) (string, error) {
				var status, key, input string
				err := pool.QueryRow(ctx, `
					select a.status, a.idempotency_key, a.input::text from agent_activity a
					  join agent_activity_open o on o.activity_id = a.id
					 where a.id = @id`, postgres.Strict{"id": effect.ActivityID}).Scan(&status, &key, &input)
				if err != nil {
					return "", err
				}
				if status != "running" || key != effect.Key || key == "" || input != `{"to": "ana"}` {
					return "", fmt.Errorf("status %q, key %q, effect's key %q, input %s", status, key, effect.Key, input)
				}
				return "sent", nil
			}))
	}))
	got := enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	want := []activityRow{{"send_mail", "mail", "call", "success", "", `"sent"`}}
	assert.NoDiff(t, want, activityRows(t, pool, got.ID))
	same := pgtest.Value[bool](t, pool, `
		select a.xmin = c.xmin from agent_activity a, agent_checkpoints c where a.execution_id = @id
		   and c.execution_id = @id`,
		postgres.Strict{"id": got.ID})
	if !same || countOpenActivities(t, pool) != 0 {
		t.Errorf("end of the row and checkpoint in one commit: %v; rows listed as open: %d",
			same, countOpenActivities(t, pool))
	}
}

func TestFailedCallIsRecordedAndLogged(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	l := &logLines{}
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Do(ctx, "mail", executions.Call{Entry: activity.Entry{Skill: "send_mail"}},
			func(_ context.Context, effect *executions.Effect) (string, error) {
				effect.Output = "half of it"
				return "", quotaError{}
			}))
	}), l.capture)
	got := enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Failed)
	want := []activityRow{{"send_mail", "mail", "call", "error", "quota", `"half of it"`}}
	if diff := cmp.Diff(want, activityRows(t, pool, got.ID)); diff != "" || postgres.Deref(got.FailedStep) != "mail" {
		t.Errorf("failed step %q, activity (-want +got):\n%s", postgres.Deref(got.FailedStep), diff)
	}
	assert.Equal(t, any(quotaError{}.Error()), l.Records(t, "action completed")[0]["error"])
}

// runInterruptedCall runs a call, stops its process in the middle, and continues in another process. It returns the
// idempotency keys of the calls.
func runInterruptedCall(t *testing.T, idempotent bool) (executions.Execution, []activityRow, []string) {
	t.Helper()
	pool := pgtest.DB(t)
	middle := newGate(t)
	var mu sync.Mutex
	var keys []string
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		v, err := executions.Do(ctx, "pay", executions.Call{Entry: activity.Entry{Skill: "bank"}, Idempotent: idempotent},
			func(ctx context.Context, effect *executions.Effect) (string, error) {
				mu.Lock()
				keys = append(keys, effect.Key)
				mu.Unlock()
				if middle.enter(ctx) {
					return "first", errors.New("the process is dead")
				}
				return "second", nil
			})
		if failure := (*executions.StepError)(nil); errors.As(err, &failure) && failure.Class == executions.ClassUnknown {
			return executions.Result{Value: failure.Message}, nil
		}
		return resultOf(v, err)
	})
	newEngine(t, pool, flows).runInBackground(t)
	id := middle.awaitFirst(t)
	expireLease(t, pool, id)
	startEngine(t, pool, flows)
	got := enginetest.Await(t, pool, id, executions.Completed)
	assert.Equal(t, 0, countOpenActivities(t, pool))
	mu.Lock()
	defer mu.Unlock()
	return got, activityRows(t, pool, id), keys
}

func TestIdempotentCallIsRetriedWithSameKey(t *testing.T) {
	t.Parallel()
	got, log, keys := runInterruptedCall(t, true)
	want := []activityRow{
		{"bank", "pay", "call", "unknown", "interrupted", ""},
		{"bank", "pay", "call", "success", "", `"second"`},
	}
	assert.NoDiff(t, want, log)
	assert.Truef(t, len(keys) == 2 && keys[0] == keys[1] && string(got.Result) == `"second"`,
		"keys %q, result %s", keys, got.Result)
}

func TestNonIdempotentCallEndsUnknown(t *testing.T) {
	t.Parallel()
	got, log, keys := runInterruptedCall(t, false)
	want := []activityRow{{"bank", "pay", "call", "unknown", "interrupted", ""}}
	assert.NoDiff(t, want, log)
	assert.Truef(t, len(keys) == 1 && strings.Contains(string(got.Result), "the call of bank"),
		"keys %q, result %s", keys, got.Result)
}

func TestIdempotencyKeysAreUnique(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var mu sync.Mutex
	seen := map[string]int{}
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		for range 2 {
			_, err := executions.Do(ctx, "pay", executions.Call{Entry: activity.Entry{Skill: "pay"}},
				func(_ context.Context, effect *executions.Effect) (int, error) {
					mu.Lock()
					defer mu.Unlock()
					seen[effect.Key]++
					return 0, nil
				})
			if err != nil {
				return executions.Result{}, err
			}
		}
		return executions.Result{}, nil
	}))
	one, two := p.startFlow(t, "flow"), p.startFlow(t, "flow")
	enginetest.Await(t, pool, one, executions.Completed)
	enginetest.Await(t, pool, two, executions.Completed)
	mu.Lock()
	defer mu.Unlock()
	assert.Equal(t, 4, len(seen))
}

func TestPhaseKeepsItsRowOverACrash(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	middle := newGate(t)
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Phase(ctx, "plan", func(ctx context.Context, _ *executions.Effect) (string, error) {
			_, err := executions.Do(ctx, "ask", executions.Call{Entry: activity.Entry{Skill: "ask"}},
				func(context.Context, *executions.Effect) (int, error) { return 1, nil })
			if err != nil {
				return "", err
			}
			middle.enter(ctx)
			return "planned", nil
		}))
	})
	newEngine(t, pool, flows).runInBackground(t)
	id := middle.awaitFirst(t)
	first := pgtest.Value[string](t, pool, `select id::text from agent_activity where kind = 'phase'`)
	expireLease(t, pool, id)
	startEngine(t, pool, flows)
	enginetest.Await(t, pool, id, executions.Completed)
	want := []activityRow{
		{"plan", "plan", "phase", "success", "", `"planned"`},
		{"ask", "plan/ask", "call", "success", "", "1"},
	}
	assert.NoDiff(t, want, activityRows(t, pool, id))
	assert.Equal(t, first, pgtest.Value[string](t, pool,
		`select parent_id::text from agent_activity where skill_name = 'ask'`))
}

func TestStaleWorkerWriteIsRejectedAndRecorded(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		stop func(middle, end *gate) *gate // returns the gate at which the first process stops
		note activityRow
	}{
		"in a call": {
			func(middle, _ *gate) *gate { return middle },
			activityRow{"stale_write", "pay", "note", "error", "stale", `{"error": "", "output": "first", "status": "success"}`},
		},
		"before its end": {
			func(_, end *gate) *gate { return end },
			activityRow{
				"stale_write", "", "note", "error", "stale",
				`{"error": "", "output": {"Value": "first", "Summary": ""}, "status": "completed"}`,
			},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			here := newGate(t)
			nowhere := newGate(t)
			nowhere.callers.Add(1)
			middle, end := nowhere, nowhere
			if c.stop(here, nowhere) == here {
				middle = here
			} else {
				end = here
			}
			flows := flowMap(func(ctx context.Context) (executions.Result, error) {
				v, err := executions.Do(ctx, "pay", executions.Call{Entry: activity.Entry{Skill: "pay"}, Idempotent: true},
					func(ctx context.Context, _ *executions.Effect) (string, error) {
						if middle.enter(ctx) {
							return "first", nil
						}
						return "second", nil
					})
				if end.enter(ctx) {
					v = "first"
				}
				return resultOf(v, err)
			})
			wait := newEngine(t, pool, flows).runInBackground(t)
			id := here.awaitFirst(t)
			expireLease(t, pool, id)
			startEngine(t, pool, flows)
			before := enginetest.Await(t, pool, id, executions.Completed)
			recorded := activityRows(t, pool, id)
			checkpoints, err := executions.Checkpoints(t.Context(), pool, id)
			require.NoError(t, err)
			here.open()
			after := wait()
			if diff := cmp.Diff(before, after); diff != "" || string(after.Result) != `"second"` {
				t.Errorf("the stale end changed the execution (-before +after):\n%s", diff)
			}
			now, err := executions.Checkpoints(t.Context(), pool, id)
			diff := cmp.Diff(checkpoints, now)
			assert.Truef(t, diff == "" && err == nil, "the stale checkpoint counted %v (-before +after):\n%s", err, diff)
			assert.NoDiff(t, append(recorded, c.note), activityRows(t, pool, id))
			assert.Equal(t, 1, countCompletions(t, pool, id))
		})
	}
}

// A wait of one branch interrupts the call of another. In the next run the first branch may wait again before the
// second reaches its call.
func TestCallInterruptedByParallelWaitIsNotRepeated(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var runs, calls atomic.Int32
	var class atomic.Value
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		run := runs.Add(1)
		group, ctx := errgroup.WithContext(ctx)
		begun := make(chan struct{})
		group.Go(func() error {
			if run == 2 {
				<-ctx.Done() // this branch is slower than the other
			}
			_, err := executions.Do(executions.Scope(ctx, "calls"), "call",
				executions.Call{Entry: activity.Entry{Skill: "call"}},
				func(ctx context.Context, _ *executions.Effect) (int, error) {
					if calls.Add(1) > 1 {
						return 0, nil
					}
					close(begun)
					<-ctx.Done()
					return 0, ctx.Err()
				})
			failure, ok := errors.AsType[*executions.StepError](err)
			if ok {
				class.Store(failure.Class)
				return nil
			}
			return err
		})
		group.Go(func() error {
			if run == 1 {
				<-begun
			}
			for _, key := range []string{"first", "second"} {
				if _, err := executions.Wait(executions.Scope(ctx, "waits"), key, executions.Event(key, 0)); err != nil {
					return err
				}
			}
			return nil
		})
		return resultOf("done", group.Wait())
	}))
	id := p.startFlow(t, "flow")
	for _, key := range []string{"first", "second"} {
		pgtest.Eventually(t, func() bool {
			x := getExecution(t, pool, id)
			return x.Status == executions.Waiting && *x.WaitingKey == key
		}, "it waits")
		_, err := p.Deliver(t.Context(), pool, "EVENT_COMPLETED", key, json.RawMessage(`{}`), "")
		require.NoError(t, err)
	}
	enginetest.Await(t, pool, id, executions.Completed)
	assert.Truef(t, calls.Load() == 1 && class.Load() == executions.ClassUnknown,
		"called %d times, and the call ended %v", calls.Load(), class.Load())
}

// A connection failure in a step is not its result, also if another branch has run further steps meanwhile.
func TestBrokenConnectionIsRetriedBesideOtherBranch(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var tries atomic.Int32
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		group, ctx := errgroup.WithContext(ctx)
		begun, beside := make(chan struct{}), make(chan struct{})
		group.Go(func() error {
			_, err := executions.Step(executions.Scope(ctx, "one"), "read", func(ctx context.Context) (int, error) {
				if tries.Add(1) > 1 {
					return 0, nil
				}
				close(begun)
				<-beside
				_, err := pool.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`, postgres.Strict{})
				return 0, err
			})
			return err
		})
		group.Go(func() error {
			defer close(beside)
			<-begun
			_, err := executions.Step(executions.Scope(ctx, "other"), "step",
				func(context.Context) (int, error) { return 0, nil })
			return err
		})
		return resultOf("done", group.Wait())
	}))
	id := p.startFlow(t, "flow")
	pgtest.Eventually(t, func() bool { return getExecution(t, pool, id).Status.Ended() }, "it ends")
	got := getExecution(t, pool, id)
	assert.Truef(t, got.Status == executions.Completed && tries.Load() == 2, "%s after %d tries", got.Status, tries.Load())
}

// A wait runs the code again from the top. A transaction, or a call without a safe repeat, cannot be run again.
func TestWaitFailsInNonRepeatableStep(t *testing.T) {
	t.Parallel()
	waits := map[string]func(ctx context.Context) error{
		"wait": func(ctx context.Context) error {
			_, err := executions.Wait(ctx, "pause", executions.Delay(time.Millisecond))
			return err
		},
		"child": func(ctx context.Context) error {
			_, err := executions.Trigger(ctx, "child", executions.Child{Flow: "none", Wait: true})
			return err
		},
	}
	for name, wait := range waits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var failed []error
			got, pool := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
				_, first := executions.StepTx(ctx, "write",
					func(ctx context.Context, _ pgx.Tx) (int, error) { return 0, wait(ctx) })
				_, second := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "call"}},
					func(ctx context.Context, _ *executions.Effect) (int, error) { return 0, wait(ctx) })
				failed = append(failed, first, second)
				return nil, nil
			})
			for _, err := range failed {
				assert.ErrorContains(t, err, "not allowed within")
			}
			n := pgtest.Value[int](t, pool, `select count(*) from agent_executions`)
			assert.Truef(t, n == 1 && got.Status == executions.Completed, "%d executions, and the status is %s", n, got.Status)
		})
	}
}

func TestMisusedTransactionFailsStep(t *testing.T) {
	t.Parallel()
	const ended = "the step ended its transaction"
	for name, c := range map[string]struct {
		message string
		spoil   func(ctx context.Context, tx pgx.Tx)
	}{
		"open rows": {"the transaction is still being read from", func(ctx context.Context, tx pgx.Tx) {
			rows, _ := tx.Query(ctx, `select generate_series(1, 1000)`)
			rows.Next()
		}},
		"commit":          {ended, func(ctx context.Context, tx pgx.Tx) { _ = tx.Commit(ctx) }},
		"commit in SQL":   {ended, func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, `commit`) }},
		"rollback in SQL": {ended, func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, `rollback`) }},
		"ignored error": {
			"a statement of the transaction failed, and the step did not return its error",
			func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Exec(ctx, `select 1 / 0`) },
		},
	} {
		got, _ := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
			_, err := executions.StepTx(ctx, "spoil", func(ctx context.Context, tx pgx.Tx) (bool, error) {
				c.spoil(ctx, tx)
				return true, nil
			})
			return fmt.Sprint(err), nil
		})
		assert.Truef(t, strings.HasPrefix(string(got.Result), `"`+c.message), "%s: %s, want %s", name, got.Result, c.message)
	}
}

// A step starts a run. The run continues elsewhere with its own keys, and may wait although the step may not.
func TestNestedRunHasOwnStepKeys(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var effects atomic.Int32
	var p *testEngine
	p = startEngine(t, pool, map[string]executions.Func{
		"outer": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			closed := executions.Gate(executions.Scope(ctx, "branch"), func(ctx context.Context) error {
				if x, _ := executions.Current(ctx); x.Flow != "outer" {
					return errors.New("the gate is that of the outer run")
				}
				return nil
			})
			return resultOf(executions.Do(closed, "call", executions.Call{Entry: activity.Entry{Skill: "call"}},
				func(ctx context.Context, _ *executions.Effect) (string, error) {
					x, err := p.RunSync(ctx, executions.Spec{Flow: "inner", Surface: trace.Flow})
					return x.ID, err
				}))
		},
		"inner": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			n, err := executions.Step(ctx, "effect", func(context.Context) (int32, error) { return effects.Add(1), nil })
			if err != nil {
				return executions.Result{}, err
			}
			if _, err := executions.Wait(ctx, "pause", executions.Delay(time.Millisecond)); err != nil {
				return executions.Result{}, err
			}
			return resultOf(n, nil)
		},
	})
	outer, err := p.RunSync(t.Context(), executions.Spec{Flow: "outer", Surface: trace.Flow})
	require.Truef(t, err == nil && outer.Status == executions.Completed,
		"%s, %v, %v", outer.Status, outer.ErrorMessage, err)
	var id string
	require.NoError(t, json.Unmarshal(outer.Result, &id))
	var inner executions.Execution
	pgtest.Eventually(t, func() bool {
		inner, err = executions.Get(t.Context(), pool, id)
		return err == nil && inner.Status.Ended()
	}, "the inner run ends")
	assert.Truef(t, inner.Status == executions.Completed && string(inner.Result) == "1" && effects.Load() == 1,
		"%s with %s, %v, after %d effects", inner.Status, inner.Result, inner.ErrorMessage, effects.Load())
}

func TestStepTxLeavesConnectionForInnerSteps(t *testing.T) {
	t.Parallel()
	config := pgtest.DB(t).Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = 3, 0, 0
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.StepTx(ctx, "write", func(ctx context.Context, _ pgx.Tx) (int, error) {
			for range 3 {
				if _, err := executions.Step(ctx, "within", func(context.Context) (int, error) { return 1, nil }); err != nil {
					return 0, err
				}
			}
			return executions.StepTx(ctx, "write too", func(context.Context, pgx.Tx) (int, error) { return 1, nil })
		}))
	}))
	for range 30 {
		p.startFlow(t, "flow")
	}
	pgtest.Until(t, pool, 30, `select count(*) from agent_executions where status = 'completed'`)
}

// nilError is an error type. The code returns a nil pointer to it.
type nilError struct{ by string }

func (d *nilError) Error() string { return d.by }

// errorWithCause has a cause that only errors.Is inspects.
type errorWithCause struct{ cause error }

func (*errorWithCause) Error() string   { return "unfolded" }
func (u *errorWithCause) Unwrap() error { return u.cause }

// panickingJSON is a value whose method panics.
type panickingJSON struct{}

func (panickingJSON) MarshalJSON() ([]byte, error) { panic("out of order") }

// The engine calls methods of results outside a recover. A panic there would end the process, and each process that
// runs it next.
func TestPanickingResultFailsStep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	call := executions.Call{Entry: activity.Entry{Skill: "call"}}
	flows := map[string]executions.Func{
		"nil error": func(context.Context, json.RawMessage) (executions.Result, error) {
			var err *nilError
			return executions.Result{}, err
		},
		"nil cause": func(context.Context, json.RawMessage) (executions.Result, error) {
			var err *errorWithCause
			return executions.Result{}, err
		},
		"nil error of a step": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return resultOf(executions.Step(ctx, "a", func(context.Context) (int, error) {
				var err *nilError
				return 0, err
			}))
		},
		"result": func(context.Context, json.RawMessage) (executions.Result, error) {
			return resultOf(panickingJSON{}, nil)
		},
		"result of a step": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return resultOf(executions.Step(ctx, "a",
				func(context.Context) (panickingJSON, error) { return panickingJSON{}, nil }))
		},
		"result of a transaction": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return resultOf(executions.StepTx(ctx, "a",
				func(context.Context, pgx.Tx) (panickingJSON, error) { return panickingJSON{}, nil }))
		},
		"result of a call": func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
			return resultOf(executions.Do(ctx, "a", call, func(context.Context, *executions.Effect) (panickingJSON, error) {
				return panickingJSON{}, nil
			}))
		},
	}
	p := startEngine(t, pool, flows)
	for name := range flows {
		got, err := p.RunSync(t.Context(), executions.Spec{Flow: name, Surface: trace.Flow})
		assert.Truef(t, err == nil && got.Status == executions.Failed && got.ErrorMessage != nil &&
			strings.Contains(*got.ErrorMessage, "panic"), "%s: %s, %v, %v", name, got.Status, got.ErrorMessage, err)
		assert.Equal(t, strings.Contains(name, " of a "),
			got.FailedStep != nil && *got.FailedStep == "a", name, got.FailedStep)
	}
	assert.Equal(t, string(
		activity.Error), pgtest.Value[string](t, pool, `select status from agent_activity where skill_name = 'call'`))
}

type classifiedError struct{ class string }

func (classifiedError) Error() string        { return "declined" }
func (c classifiedError) ErrorClass() string { return c.class }

// Invalid text may come from other services.
func TestInvalidTextOfCallIsReplaced(t *testing.T) {
	t.Parallel()
	got, pool := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
		call := executions.Call{Entry: activity.Entry{Skill: "call"}}
		_, err := executions.Do(ctx, "fails", call, func(_ context.Context, effect *executions.Effect) (int, error) {
			effect.Model = "a\x00\xff"
			return 0, classifiedError{"c\x00\xff"}
		})
		n, failed := executions.Do(ctx, "works", call, func(_ context.Context, effect *executions.Effect) (int, error) {
			effect.Model = "a\x00\xff"
			return 7, nil
		})
		if failed != nil {
			return nil, failed
		}
		return []any{err.Error(), n}, nil
	})
	assert.Equal(t, `["declined", 7]`, string(got.Result), got.Status, got.Result)
	args := postgres.Strict{"id": got.ID}
	assert.Equal(t, "fails error a\ufffd c\ufffd, works success a\ufffd ", pgtest.Value[string](t, pool, `
		select string_agg(concat_ws(' ', step, status, model, error_class), ', ' order by step) from agent_activity
		 where execution_id = @id`, args))
}

// One NaN row would make each sum with it NaN. JSON cannot encode NaN.
func TestInvalidCostFailsCall(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	got, pool := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
		var results []string
		for _, cost := range []float64{math.NaN(), math.Inf(1), -1e300, 99_999_999.9999999, 99_999_999} {
			_, err := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "call"}, Idempotent: true},
				func(_ context.Context, effect *executions.Effect) (int, error) {
					calls.Add(1)
					effect.CostUSD = cost
					return 1, nil
				})
			results = append(results, fmt.Sprint(err))
		}
		return results, nil
	})
	result := string(got.Result)
	assert.Truef(t, strings.Count(result, "cannot be recorded") == 4 && strings.HasSuffix(result, `"<nil>"]`) &&
		calls.Load() == 5, "%s %s after %d calls", got.Status, result, calls.Load())
	pgtest.Equal(t, pool, "error error error error success 99999999.000000", `select string_agg(status, ' ' order by id) || ' ' || sum(cost_usd)
		from agent_activity`)
}

func TestUndecodableResultNamesType(t *testing.T) {
	t.Parallel()
	got, _ := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
		return executions.Step(ctx, "a", func(context.Context) (fmt.Stringer, error) { return time.Second, nil })
	})
	assert.Truef(t, got.ErrorMessage != nil && strings.Contains(*got.ErrorMessage, "does not fit fmt.Stringer"),
		"%s %v", got.Status, got.ErrorMessage)
}

// blockUntilDone is the body of a call or step. It runs until its context ends.
func blockUntilDone(ctx context.Context, _ *executions.Effect) (int, error) {
	<-ctx.Done()
	return 0, ctx.Err()
}

// The code ends a step by a time limit, or because another branch failed. The step then has an error as its result, the
// same in every run.
func TestCancelledStepIsRecorded(t *testing.T) {
	t.Parallel()
	call := executions.Call{Entry: activity.Entry{Skill: "call"}}
	cases := map[string]struct {
		fn   func(ctx context.Context) error
		want executions.StepError
	}{
		"a step with a limit": {func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			_, err := executions.Step(ctx, "slow", func(ctx context.Context) (int, error) { return blockUntilDone(ctx, nil) })
			return err
		}, executions.StepError{Step: "slow", Class: "timeout", Message: "context deadline exceeded"}},
		"a call with a limit": {func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			_, err := executions.Do(ctx, "slow", call, blockUntilDone)
			return err
		}, executions.StepError{Step: "slow", Class: "timeout", Message: "context deadline exceeded"}},
		"a transaction with a limit": {func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			_, err := executions.StepTx(ctx, "slow", func(ctx context.Context, tx pgx.Tx) (int, error) {
				_, err := tx.Exec(ctx, `select pg_sleep(60)`)
				return 0, err
			})
			return err
		}, executions.StepError{Step: "slow", Class: "timeout", Message: "context deadline exceeded"}},
		"a transaction whose function only checks its time limit": {func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
			defer cancel()
			_, err := executions.StepTx(ctx, "slow",
				func(ctx context.Context, _ pgx.Tx) (int, error) { return blockUntilDone(ctx, nil) })
			return err
		}, executions.StepError{Step: "slow", Class: "timeout", Message: "context deadline exceeded"}},
		"a call next to a failing call": {func(ctx context.Context) (err error) {
			group, ctx := errgroup.WithContext(ctx)
			begun := make(chan struct{})
			group.Go(func() error {
				defer close(begun)
				_, err = executions.Do(executions.Scope(ctx, "one"), "slow", call,
					func(ctx context.Context, effect *executions.Effect) (int, error) {
						begun <- struct{}{}
						return blockUntilDone(ctx, effect)
					})
				return nil
			})
			group.Go(func() error {
				<-begun
				return errors.New("failed")
			})
			if failed := group.Wait(); failed == nil {
				return errors.New("the group did not fail")
			}
			return err
		}, executions.StepError{Step: "one/slow", Class: "error", Message: "context canceled"}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var seen []executions.StepError
			got, pool := runAndReplay(t, func(ctx context.Context, again bool) (any, error) {
				err := c.fn(ctx)
				failure, ok := errors.AsType[*executions.StepError](err)
				if !ok {
					return nil, fmt.Errorf("not a StepError: %w", err)
				}
				seen = append(seen, *failure)
				return nil, nil
			})
			if diff := cmp.Diff([]executions.StepError{c.want, c.want}, seen); diff != "" || got.Status != executions.Completed {
				t.Errorf("status %s, errors (-want +got):\n%s", got.Status, diff)
			}
			assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 'call'
				and status <> 'error'`))
		})
	}
}

// A step past its deadline does not start, and records that as its result. Otherwise a later run, which replays faster
// and is in time, would run the step.
func TestStepPastDeadlineIsRecorded(t *testing.T) {
	t.Parallel()
	cases := map[string]func(ctx context.Context, made *atomic.Int64) error{
		"step": func(ctx context.Context, made *atomic.Int64) error {
			_, err := executions.Step(ctx, "late", func(context.Context) (int64, error) { return made.Add(1), nil })
			return err
		},
		"call": func(ctx context.Context, made *atomic.Int64) error {
			call := executions.Call{Entry: activity.Entry{Skill: "call"}}
			_, err := executions.Do(ctx, "late", call, func(context.Context, *executions.Effect) (int64, error) {
				return made.Add(1), nil
			})
			return err
		},
		"transaction": func(ctx context.Context, made *atomic.Int64) error {
			_, err := executions.StepTx(ctx, "late", func(context.Context, pgx.Tx) (int64, error) { return made.Add(1), nil })
			return err
		},
		"wait": func(ctx context.Context, _ *atomic.Int64) error {
			_, err := executions.Wait(ctx, "late", executions.Event("key", time.Hour))
			return err
		},
	}
	for name, fn := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var made atomic.Int64
			var seen []string
			got, pool := runAndReplay(t, func(ctx context.Context, again bool) (any, error) {
				if !again {
					ended, cancel := context.WithTimeout(ctx, 0)
					defer cancel()
					ctx = ended
				}
				err := fn(ctx, &made)
				failure, ok := errors.AsType[*executions.StepError](err)
				if !ok {
					return nil, fmt.Errorf("not a StepError: %w", err)
				}
				seen = append(seen, failure.Step+": "+failure.Class+", "+failure.Message)
				return nil, nil
			})
			const late = "late: timeout, context deadline exceeded"
			diff := cmp.Diff([]string{late, late}, seen)
			assert.Truef(t, diff == "" && got.Status == executions.Completed && made.Load() == 0,
				"status %s, made %d times, errors (-want +got):\n%s", got.Status, made.Load(), diff)
			assert.Equal(t, 0, pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 'call'`))
		})
	}
}

// The name of a step may equal the key of another.
func TestStepKeysAreUnique(t *testing.T) {
	t.Parallel()
	for _, names := range [][]string{
		{"a", "a", "a#2", "a"},
		{"a#2", "a", "a", "a"},
		{"a", "a#2", "a#2", "a", "a#2#2", "a#1", "a#"},
	} {
		t.Run(strings.Join(names, " "), func(t *testing.T) {
			t.Parallel()
			var seen [][]int
			got, _ := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
				var all []int
				for i, name := range names {
					n, err := executions.Step(ctx, name, func(context.Context) (int, error) { return i, nil })
					if err != nil {
						return nil, err
					}
					all = append(all, n)
				}
				seen = append(seen, all)
				return nil, nil
			})
			if diff := cmp.Diff(seen[0], seen[1]); diff != "" || got.Status != executions.Completed {
				t.Errorf("status %s, results (-first +again):\n%s", got.Status, diff)
			}
		})
	}
}

// A retry of the transaction does not repeat a call within it.
func TestCallInTransactionRunsOnce(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"write", "table/write"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testCallInTx(t, name)
		})
	}
}

// testCallInTx makes a call in a transaction with a given name. The connection of the transaction breaks.
func testCallInTx(t *testing.T, name string) {
	t.Helper()
	pool := pgtest.DB(t)
	createEffects(t, pool)
	var calls, tries atomic.Int32
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.StepTx(ctx, name, func(ctx context.Context, tx pgx.Tx) (int32, error) {
			n, err := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "call"}},
				func(context.Context, *executions.Effect) (int32, error) { return calls.Add(1), nil })
			if err == nil && tries.Add(1) == 1 {
				_, err = tx.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`)
			}
			if err == nil {
				_, err = tx.Exec(ctx, `insert into effects (by) values (@by)`, postgres.Strict{"by": "write"})
			}
			return n, err
		}))
	}))
	got := enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	assert.Truef(t, calls.Load() == 1 && tries.Load() == 2 && string(got.Result) == "1",
		"called %d times in %d tries, result %s", calls.Load(), tries.Load(), got.Result)
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from effects`))
}

// A snapshot replaces only the records of its own loop, whatever the names of other steps. Every run sees the same
// state.
func TestSnapshotReplacesOnlyItsLoop(t *testing.T) {
	t.Parallel()
	var steps atomic.Int32
	got, _ := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
		n, err := executions.Step(ctx, "mail@home", func(context.Context) (int32, error) { return steps.Add(1), nil })
		if err != nil {
			return nil, err
		}
		at := 0
		_, err = executions.Loop(ctx, "mail", nil,
			func(ctx context.Context, _ json.RawMessage) (json.RawMessage, bool, error) {
				at++
				return json.RawMessage(fmt.Sprintf(`{"of": %d, "n": 1e2}`, at)), at == 3, nil
			})
		return n, err
	})
	assert.Truef(t, steps.Load() == 1 && string(got.Result) == "1",
		"the step outside the loop ran %d times, result %s", steps.Load(), got.Result)
}

// Keys of inner steps start with the key of their step, slashes included. So a phase covers its steps, a snapshot
// replaces them, and a replay reaches all.
func TestInnerStepKeysHavePrefix(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	inner := func(ctx context.Context) (string, error) {
		return executions.Step(ctx, "in/ner",
			func(ctx context.Context) (string, error) { return executions.StepKey(ctx), nil })
	}
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		gated := executions.Gate(ctx, func(ctx context.Context) error {
			_, err := executions.Step(ctx, "gate", func(context.Context) (int, error) { return 1, nil })
			return err
		})
		key, err := executions.Phase(gated, "pha/se", func(ctx context.Context, _ *executions.Effect) (string, error) {
			return inner(executions.Gate(ctx, nil))
		})
		if err != nil {
			return executions.Result{}, err
		}
		return resultOf(executions.Loop(ctx, "lo/op", key, func(ctx context.Context, all string) (string, bool, error) {
			key, err := inner(ctx)
			return all + " " + key, key == "lo/op@16/in/ner", err
		}))
	}))
	id := p.startFlow(t, "flow")
	got := enginetest.Await(t, pool, id, executions.Completed)
	var keys string
	if err := json.Unmarshal(got.Result, &keys); err != nil || !strings.HasPrefix(keys, "pha/se/in/ner lo/op@0/in/ner ") {
		t.Errorf("keys of the steps: %s, %v", got.Result, err)
	}
	pgtest.Equal(t, pool, "pha/before se/gate pha/se/in/ner pha/se lo/op",
		`select string_agg(step, ' ' order by created_at) from agent_checkpoints`)
	replay, err := p.Replay(t.Context(), id)
	assert.Truef(t, err == nil && replay.Equal, "the replay: %+v, %v", replay.Divergence, err)
}

// The statements of OnResult are in the transaction that stores the call's result or error.
func TestOnResultCommitsWithResult(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `create table settled (step text primary key)`)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		call := func(step string, callErr error) error {
			_, err := executions.Do(ctx, step, executions.Call{},
				func(_ context.Context, effect *executions.Effect) (bool, error) {
					effect.OnResult = func(b *pgx.Batch) {
						b.Queue(`insert into settled values (@step) on conflict do nothing`, postgres.Strict{"step": step})
					}
					return true, callErr
				})
			return err
		}
		if err := call("succeeds", nil); err != nil {
			return executions.Result{}, err
		}
		_ = call("fails", errors.New("no"))
		return executions.Result{}, nil
	}))
	enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	pgtest.Equal(t, pool, "fails succeeds", `
		select string_agg(s.step, ' ' order by s.step) from settled s join agent_checkpoints c using (step)
		 where s.xmin = c.xmin`)
}
