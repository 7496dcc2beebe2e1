package executions_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/trace"
)

// quotaError is an error with a class, like that of a client library.
type quotaError struct{}

func (quotaError) Error() string      { return "the quota is spent" }
func (quotaError) ErrorClass() string { return "quota" }

func TestReplayReturnsSameStepError(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		fn    func() (int, error)
		class string
		says  string
	}{
		"plain": {func() (int, error) { return 0, errors.New("no such file") }, "error", "no such file"},
		"with class": {
			func() (int, error) { return 0, fmt.Errorf("ask: %w", quotaError{}) }, "quota",
			"ask: the quota is spent",
		},
		"too late": {
			func() (int, error) { return 0, fmt.Errorf("ask: %w", context.DeadlineExceeded) }, "timeout",
			"ask: context deadline exceeded",
		},
		"panic":       {func() (int, error) { panic("index 7") }, "panic", "panic: index 7"},
		"with a NUL":  {func() (int, error) { return 0, errors.New("bad\x00byte") }, "error", "badbyte"},
		"not unicode": {func() (int, error) { return 0, errors.New("bad\xffbyte") }, "error", "bad\ufffdbyte"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var calls atomic.Int32
			var seen []executions.StepError
			got, pool := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
				_, err := executions.Step(ctx, "ask", func(context.Context) (int, error) { calls.Add(1); return c.fn() })
				var failure *executions.StepError
				if !errors.As(err, &failure) {
					return nil, fmt.Errorf("not a StepError: %w", err)
				}
				seen = append(seen, *failure)
				return nil, nil
			})
			want := executions.StepError{Step: "ask", Class: c.class, Message: c.says}
			if diff := cmp.Diff([]executions.StepError{want, want}, seen); diff != "" || got.Status != executions.Completed {
				t.Errorf("status %s, errors (-want +got):\n%s", got.Status, diff)
			}
			assert.Equal(t, 1, calls.Load())
			checkpoints, err := executions.Checkpoints(t.Context(), pool, got.ID)
			assert.Truef(t, err == nil && len(checkpoints) == 2 && checkpoints[0].Failed, "checkpoints %v, %v", checkpoints, err)
		})
	}
}

func TestRepeatedStepNamesAreNumbered(t *testing.T) {
	t.Parallel()
	var next atomic.Int32
	var seen [][]int
	got, pool := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
		var run []int
		for range 3 {
			n, err := executions.Step(ctx, "draw", func(context.Context) (int, error) { return int(next.Add(1)), nil })
			if err != nil {
				return nil, err
			}
			run = append(run, n)
		}
		seen = append(seen, run)
		return nil, nil
	})
	assert.NoDiff(t, [][]int{{1, 2, 3}, {1, 2, 3}}, seen)
	checkpoints, err := executions.Checkpoints(t.Context(), pool, got.ID)
	var keys []string
	for _, p := range checkpoints {
		keys = append(keys, p.Step)
	}
	diff := cmp.Diff([]string{"draw", "draw#2", "draw#3", "pause"}, keys)
	assert.Truef(t, diff == "" && err == nil, "keys %v (-want +got):\n%s", err, diff)
}

func TestScopesSeparateBranchResults(t *testing.T) {
	t.Parallel()
	var seen [][2]string
	got, _ := runAndReplay(t, func(ctx context.Context, again bool) (any, error) {
		var result [2]string
		turn := []chan struct{}{make(chan struct{}), make(chan struct{})}
		first := 0
		if again {
			first = 1 // the branches run in the other order
		}
		close(turn[first])
		group, ctx := errgroup.WithContext(ctx)
		for i, name := range []string{"left", "right"} {
			group.Go(func() (err error) {
				<-turn[i]
				result[i], err = executions.Step(executions.Scope(ctx, name), "work",
					func(context.Context) (string, error) { return name, nil })
				if i == first {
					close(turn[1-i])
				}
				return err
			})
		}
		err := group.Wait()
		seen = append(seen, result)
		return nil, err
	})
	want := [2]string{"left", "right"}
	if diff := cmp.Diff([][2]string{want, want}, seen); diff != "" || got.Status != executions.Completed {
		t.Errorf("status %s, results (-want +got):\n%s", got.Status, diff)
	}
}

func TestChangedCodeFailsExecution(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		says  string
		price func(ctx context.Context, again bool) error
	}{
		"another input": {"its input differs between runs", func(ctx context.Context, again bool) error {
			_, err := executions.Step(ctx, "price", func(context.Context) (int, error) { return 1, nil },
				executions.Input(again))
			return err
		}},
		"another type": {"its record does not fit int", func(ctx context.Context, again bool) error {
			if again {
				_, err := executions.Step(ctx, "price", func(context.Context) (int, error) { return 1, nil })
				return err
			}
			_, err := executions.Step(ctx, "price", func(context.Context) (string, error) { return "one", nil })
			return err
		}},
		"a wait now": {"has a record, but not of a wait", func(ctx context.Context, again bool) error {
			if again {
				_, err := executions.Wait(ctx, "price", executions.Event("price", time.Hour))
				return err
			}
			_, err := executions.Step(ctx, "price", func(context.Context) (struct{}, error) { return struct{}{}, nil })
			return err
		}},
		"a wait for text": {"has a record, but not of a wait", func(ctx context.Context, again bool) error {
			if again {
				_, err := executions.Wait(ctx, "price", executions.Event("price", time.Hour))
				return err
			}
			_, err := executions.Step(ctx, "price", func(context.Context) (string, error) { return "one", nil })
			return err
		}},
	}
	for name, c := range cases {
		for _, ignore := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s ignored=%v", name, ignore), func(t *testing.T) {
				t.Parallel()
				got, _ := runAndReplay(t, func(ctx context.Context, again bool) (any, error) {
					err := c.price(ctx, again)
					assert.Truef(t, !again || errors.Is(err, executions.ErrChanged), "the step returned %v, not ErrChanged", err)
					if ignore {
						err = nil
					}
					return nil, err
				})
				assert.Contains(t, postgres.Deref(got.ErrorMessage), "step price", c.says)
				assert.Truef(t, got.Status == executions.Failed && got.FailedStep != nil && *got.FailedStep == "price",
					"status %s, error %v, failed step %v", got.Status, postgres.Deref(got.ErrorMessage),
					postgres.Deref(got.FailedStep))
			})
		}
	}
}

func TestPanicFailsExecution(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		fn   flowFunc
		step string
		says string
	}{
		"in the flow": {
			func(context.Context) (executions.Result, error) { panic("no map") }, "",
			"flow flow panicked: no map",
		},
		"in a step": {func(ctx context.Context) (executions.Result, error) {
			return resultOf(executions.Step(ctx, "look", func(context.Context) (int, error) { panic("no map") }))
		}, "look", "panic: no map"},
		"in a transaction": {func(ctx context.Context) (executions.Result, error) {
			return resultOf(executions.StepTx(ctx, "look", func(context.Context, pgx.Tx) (int, error) { panic("no map") }))
		}, "look", "panic: no map"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			log := &testkit.Log{}
			p := startEngine(t, pool, flowMap(c.fn), func(o *executions.Options) {
				o.Logger = slog.New(slog.NewTextHandler(log, nil))
			})
			got := enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Failed)
			assert.Contains(t, log.String(), "TestPanicFailsExecution") // in the stack
			assert.Truef(t, postgres.Deref(got.ErrorMessage) == c.says && postgres.Deref(got.FailedStep) == c.step,
				"error %q, failed step %q", postgres.Deref(got.ErrorMessage), postgres.Deref(got.FailedStep))
			assert.Equal(t, 1, countCompletions(t, pool, got.ID))
		})
	}
}

func TestUnstorableResultsAreReplacedOrFail(t *testing.T) {
	t.Parallel()
	nothing := func(ctx context.Context) error { return nil }
	step := func(v any) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			_, err := executions.Step(ctx, "make", func(context.Context) (any, error) { return v, nil })
			return err
		}
	}
	call := func(ctx context.Context) error {
		_, err := executions.Do(ctx, "make", executions.Call{}, func(context.Context, *executions.Effect) (any, error) {
			return make(chan int), nil
		})
		return err
	}
	huge := func(ctx context.Context) error {
		_, err := executions.Do(ctx, "make", executions.Call{}, func(context.Context, *executions.Effect) (any, error) {
			return json.RawMessage("1e999999"), nil
		})
		return err
	}
	cases := map[string]struct {
		before func(ctx context.Context) error
		result executions.Result
		err    error
		status executions.Status
	}{
		"NUL in a step":        {step("a\x00b"), executions.Result{}, nil, executions.Completed},
		"channel in a step":    {step(make(chan int)), executions.Result{}, nil, executions.Failed},
		"channel from a call":  {call, executions.Result{}, nil, executions.Failed},
		"number in a step":     {step(json.RawMessage("1e999999")), executions.Result{}, nil, executions.Failed},
		"number from a call":   {huge, executions.Result{}, nil, executions.Failed},
		"number in the result": {nothing, executions.Result{Value: json.RawMessage("1e999999")}, nil, executions.Failed},
		"NUL in the summary":   {nothing, executions.Result{Summary: "a\x00b"}, nil, executions.Completed},
		"NUL in the result":    {nothing, executions.Result{Value: "a\x00b"}, nil, executions.Completed},
		"channel in result":    {nothing, executions.Result{Value: make(chan int)}, nil, executions.Failed},
		"NUL in the error":     {nothing, executions.Result{}, errors.New("a\x00b"), executions.Failed},
		"not UTF-8 at the end": {nothing, executions.Result{Summary: "a\xffb"}, errors.New("a\xffb"), executions.Failed},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
				if err := c.before(ctx); err != nil {
					return executions.Result{}, err
				}
				return c.result, c.err
			}))
			got := enginetest.Await(t, pool, p.startFlow(t, "flow"), c.status)
			open := pgtest.Value[int](t, pool, `select count(*) from agent_activity where status not in ('success', 'error')`)
			assert.Truef(t, open == 0, "%d activities have no clear end (%v)", open, postgres.Deref(got.ErrorMessage))
		})
	}
}

func TestReplayReturnsStoredFormOfResult(t *testing.T) {
	t.Parallel()
	var seen []string
	runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
		s, err := executions.Step(ctx, "make", func(context.Context) (string, error) { return "a\x00b", nil })
		seen = append(seen, s)
		return nil, err
	})
	assert.Truef(t, len(seen) == 2 && seen[0] == seen[1] && !strings.Contains(seen[0], "\x00"),
		"first run and replay saw %q", seen)
}

func TestNowIsRecorded(t *testing.T) {
	t.Parallel()
	var seen []time.Time
	runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
		now, err := executions.Now(ctx)
		seen = append(seen, now)
		return nil, err
	})
	assert.Truef(t, len(seen) == 2 && seen[0].String() == seen[1].String() && !seen[0].IsZero(),
		"first run and replay saw %v", seen)
}

func TestStepOutsideExecutionFails(t *testing.T) {
	t.Parallel()
	_, err := executions.Step(t.Context(), "x", func(context.Context) (int, error) { return 0, nil })
	assert.ErrorIs(t, err, executions.ErrNotInExecution, "Step")
	_, err = executions.Lane(t.Context(), "x")
	assert.ErrorIs(t, err, executions.ErrNotInExecution, "Lane")
}

func TestStepNeedsName(t *testing.T) {
	t.Parallel()
	got, _ := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
		_, err := executions.Step(ctx, "", func(context.Context) (int, error) { return 1, nil })
		return nil, err
	})
	assert.True(t, got.Status == executions.Failed && postgres.Deref(got.ErrorMessage) == "a step needs a name", got)
}

func TestResultOver16MiBIsRefused(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("x", 16<<20)
	const limit = "it has 16777218 bytes, more than 16 MiB"
	for name, c := range map[string]struct {
		says string
		flow func(ctx context.Context) (any, error)
	}{
		"step": {"the result of step make cannot be stored: " + limit, func(ctx context.Context) (any, error) {
			return executions.Step(ctx, "make", func(context.Context) (string, error) { return large, nil })
		}},
		"transaction": {"encode the result of step make: " + limit, func(ctx context.Context) (any, error) {
			return executions.StepTx(ctx, "make", func(context.Context, pgx.Tx) (string, error) { return large, nil })
		}},
		"flow": {"encode result: " + limit, func(context.Context) (any, error) { return large, nil }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newEngine(t, pgtest.DB(t), flowMap(func(ctx context.Context) (executions.Result, error) {
				return resultOf(c.flow(ctx))
			}))
			got, err := p.RunSync(t.Context(), executions.Spec{Flow: "flow", Surface: trace.Flow})
			assert.Truef(t, err == nil && got.Status == executions.Failed && postgres.Deref(got.ErrorMessage) == c.says,
				"%s, %.200q, %v", got.Status, postgres.Deref(got.ErrorMessage), err)
		})
	}
}

// createEffects creates a table for the effects of StepTx. The function counts its rows.
func createEffects(t *testing.T, db postgres.DB) func() int {
	t.Helper()
	pgtest.Exec(t, db, `create table effects (id bigint generated always as identity, by text)`)
	return func() int { return pgtest.Value[int](t, db, `select count(*) from effects`) }
}

func TestStepTxCommitsEffectWithCheckpoint(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	count := createEffects(t, pool)
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		for _, fail := range []bool{false, true} {
			_, err := executions.StepTx(ctx, "write", func(ctx context.Context, tx pgx.Tx) (int, error) {
				if _, err := tx.Exec(ctx, `insert into effects (by) values ('step')`); err != nil {
					return 0, err
				}
				if fail {
					return 0, quotaError{}
				}
				return 1, nil
			})
			if failure := (*executions.StepError)(nil); fail != errors.As(err, &failure) || fail && failure.Class != "quota" {
				return executions.Result{}, fmt.Errorf("fail %v: %w", fail, err)
			}
		}
		return resultOf(executions.Wait(ctx, "pause", executions.Delay(1)))
	}))
	got := enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	assert.Equal(t, 1, count())
	same := pgtest.Value[bool](t, pool, `
		select e.xmin = c.xmin from effects e, agent_checkpoints c where c.execution_id = @id and c.step = 'write'`,
		postgres.Strict{"id": got.ID})
	failed := pgtest.Value[bool](t, pool, `select failed from agent_checkpoints where step = 'write#2'`)
	assert.Truef(t, same && failed, "effect and checkpoint in one transaction: %v; error recorded: %v", same, failed)
}

func TestStaleStepTxLeavesNoEffect(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	count := createEffects(t, pool)
	between := newGate(t)
	var calls atomic.Int32
	flows := flowMap(func(ctx context.Context) (executions.Result, error) {
		by := "second"
		if between.enter(ctx) {
			by = "first"
		}
		return resultOf(executions.StepTx(ctx, "write", func(ctx context.Context, tx pgx.Tx) (string, error) {
			calls.Add(1)
			_, err := tx.Exec(ctx, `insert into effects (by) values (@by)`, postgres.Strict{"by": by})
			return by, err
		}))
	})
	wait := newEngine(t, pool, flows).runInBackground(t)
	id := between.awaitFirst(t)
	expireLease(t, pool, id)
	startEngine(t, pool, flows)
	enginetest.Await(t, pool, id, executions.Completed)
	between.open()
	got := wait()
	assert.Equal(t, 1, count(), "effects")
	assert.Equal(t, 1, calls.Load(), "calls")
	assert.Equal(t, `"second"`, string(got.Result))
	assert.Equal(t, 1, pgtest.Value[int](t, pool, `select count(*) from agent_activity where skill_name = 'stale_write'
		and step = 'write'`))
}

func TestGateRunsBeforeNewStepsOnly(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var asked, waits atomic.Int32
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		gated := executions.Gate(ctx, func(ctx context.Context) error {
			asked.Add(1)
			_, err := executions.Wait(ctx, "yield", executions.Delay(1))
			if errors.Is(err, executions.ErrParked) {
				waits.Add(1)
			}
			return err
		})
		for range 2 {
			if _, err := executions.Step(gated, "work", func(context.Context) (int, error) { return 0, nil }); err != nil {
				return executions.Result{}, err
			}
		}
		return resultOf(executions.StepTx(gated, "write", func(context.Context, pgx.Tx) (int, error) { return 0, nil }))
	}))
	enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	assert.Truef(t, asked.Load() == 6 && waits.Load() == 3,
		"the gate was asked %d times and waited %d times; each of 3 steps asks it, waits, and asks again", asked.Load(),
		waits.Load())
}

// A replay of a long loop starts at its last snapshot, not at its beginning. Its old records are gone.
func TestLoopReplaysFromSnapshot(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var steps, bodies atomic.Int32
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		return resultOf(executions.Loop(ctx, "count", 0, func(ctx context.Context, sum int) (int, bool, error) {
			bodies.Add(1)
			n, err := executions.Step(ctx, "add", func(context.Context) (int, error) { steps.Add(1); return sum + 1, nil })
			if err == nil && n == 38 {
				_, err = executions.Wait(ctx, "pause", executions.Delay(50*time.Millisecond))
			}
			return n, n == 40, err
		}))
	}))
	id := p.startFlow(t, "flow")
	got := enginetest.Await(t, pool, id, executions.Completed)
	assert.Truef(t, string(got.Result) == "40" && steps.Load() == 40,
		"result %s after %d steps, want 40 after 40", got.Result, steps.Load())
	// 38 until the wait, then again from 32 on: 6 replayed, 2 new.
	assert.Equal(t, 38+8, bodies.Load())
	checkpoints, err := executions.Checkpoints(t.Context(), pool, id)
	assert.Truef(t, err == nil && len(checkpoints) == 1 && checkpoints[0].Step == "count",
		"%d records left (%v), want the loop's alone", len(checkpoints), err)
}

func TestFinishedLoopIsNotRepeated(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var bodies atomic.Int32
	p := startEngine(t, pool, flowMap(func(ctx context.Context) (executions.Result, error) {
		last, err := executions.Loop(ctx, "thrice", "", func(_ context.Context, word string) (string, bool, error) {
			bodies.Add(1)
			return word + "x", len(word) == 2, nil
		})
		if err != nil {
			return executions.Result{}, err
		}
		if _, err := executions.Wait(ctx, "pause", executions.Delay(50*time.Millisecond)); err != nil {
			return executions.Result{}, err
		}
		return resultOf(last, nil)
	}))
	got := enginetest.Await(t, pool, p.startFlow(t, "flow"), executions.Completed)
	assert.Truef(t, string(got.Result) == `"xxx"` && bodies.Load() == 3,
		"result %s after %d iterations, want xxx after 3", got.Result, bodies.Load())
}

// A step may return JSON as it received it, for example from a request. Every run gets the same value, so it can be the
// input of the next step.
func TestRawJSONResultIsStable(t *testing.T) {
	t.Parallel()
	type answer struct {
		Code int
		Body json.RawMessage
	}
	const body = `{"price": 1.5e-7, "a": [1,2], "name":"\u00e9 <b>", "a": 1}`
	var seen []json.RawMessage
	got, _ := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
		plain, err := executions.Step(ctx, "plain",
			func(context.Context) (json.RawMessage, error) { return json.RawMessage(body), nil })
		if err != nil {
			return nil, err
		}
		within, err := executions.Step(ctx, "within", func(context.Context) ([]*answer, error) {
			return []*answer{{Code: 200, Body: json.RawMessage(body)}}, nil
		})
		if err != nil {
			return nil, err
		}
		seen = append(seen, plain, within[0].Body)
		return executions.Do(ctx, "send",
			executions.Call{Entry: activity.Entry{Skill: "send", Input: []any{plain, within[0].Body}}},
			func(context.Context, *executions.Effect) (int, error) { return 1, nil })
	})
	assert.Equal(t, executions.Completed, got.Status, postgres.Deref(got.ErrorMessage))
	for _, text := range seen[1:] {
		assert.Truef(t, bytes.Equal(text, seen[0]), "%s\nand first %s", text, seen[0])
	}
}

// The first run gets the same bytes that later runs read from the database.
func TestJSONBTextMatchesPostgres(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, text := range []string{
		`{}`, `[]`, `null`, ` [ true , false,null ] `, `"a\"\\\/\b\f\n\r\t\u0001\u001f\u007f\u2028é\ud83d\ude00<>&'"`,
		`{"bb":1,"a":{"é":[],"zz":{}},"":0,"a":2}`, `[0,-0,0.0,-0.00,1.50,-1.50,10,100.00,12345678901234567890.123456789]`,
		`[1e0,1E2,1e+2,1.5e-7,-1.50e1,1.5e3,0e5,-0e5,0.0e-3,1e21,1e-20,12.345e2,12.345e4,1e400,1.7976931348623157e308,5e-324]`,
	} {
		want := pgtest.Value[string](t, pool, `select (@text::text)::jsonb::text`, postgres.Strict{"text": text})
		got, err := executions.AsStored(json.RawMessage(text))
		assert.Truef(t, err == nil && string(got) == want, "%s\nis  %s (%v)\nnot %s", text, got, err, want)
	}
}

// jsonb has no negative zero, the result of rounding a small negative number.
func TestNegativeZeroIsStable(t *testing.T) {
	t.Parallel()
	type rounded struct {
		Text  string
		Value float64 `json:"-0"`
		More  []any
	}
	got, _ := runAndReplay(t, func(ctx context.Context, _ bool) (any, error) {
		v, err := executions.Step(ctx, "round", func(context.Context) (rounded, error) {
			zero := math.Round(-0.3)
			return rounded{Text: `-0, "-0" \`, Value: zero, More: []any{zero, -0.5, 1e-07, -1e-07, "-0", json.Number("-0.0")}},
				nil
		})
		if err != nil {
			return nil, err
		}
		if math.Signbit(v.Value) {
			return nil, errors.New("it has a sign")
		}
		return executions.Step(ctx, "use", func(context.Context) (rounded, error) { return v, nil }, executions.Input(v))
	})
	assert.Equal(t, `{"-0": 0, "More": [0, -0.5, 0.0000001, -0.0000001, "-0", 0], "Text": "-0, \"-0\" \\"}`, string(
		got.Result), got.Status, got.Result)
}
