package executions_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// A name may look like the key of another step.
func TestNoTwoStepsShareAKey(t *testing.T) {
	t.Parallel()
	for _, names := range [][]string{{"a", "a", "a#2", "a"}, {"a#2", "a", "a", "a"}, {"a", "a#2", "a#2", "a", "a#2#2", "a#1", "a#"}} {
		t.Run(strings.Join(names, " "), func(t *testing.T) {
			t.Parallel()
			var seen [][]int
			got, _ := replayed(t, func(ctx context.Context, _ bool) (any, error) {
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

// What a transaction has called stays called when its connection breaks and it is tried again.
func TestACallWithinATransactionIsMadeOnce(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"write", "table/write"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			callWithin(t, name)
		})
	}
}

// callWithin makes a call in a transaction of a name, whose connection breaks.
func callWithin(t *testing.T, name string) {
	t.Helper()
	pool := pgtest.DB(t)
	effects(t, pool)
	var calls, tries atomic.Int32
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		return ends(executions.StepTx(ctx, name, func(ctx context.Context, tx pgx.Tx) (int32, error) {
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
	got := until(t, pool, p.begin(t, "flow"), executions.Completed)
	if calls.Load() != 1 || tries.Load() != 2 || string(got.Result) != "1" {
		t.Errorf("called %d times in %d tries, result %s", calls.Load(), tries.Load(), got.Result)
	}
	if n := value[int](t, pool, `select count(*) from effects`); n != 1 {
		t.Errorf("%d effects", n)
	}
}

// A snapshot takes the place of the records in its own loop, whatever the names of other steps are, and its state is that of every run.
func TestASnapshotIsOfItsOwnLoop(t *testing.T) {
	t.Parallel()
	var steps atomic.Int32
	got, _ := replayed(t, func(ctx context.Context, _ bool) (any, error) {
		n, err := executions.Step(ctx, "mail@home", func(context.Context) (int32, error) { return steps.Add(1), nil })
		if err != nil {
			return nil, err
		}
		at := 0
		_, err = executions.Loop(ctx, "mail", nil, func(ctx context.Context, _ json.RawMessage) (json.RawMessage, bool, error) {
			at++
			return json.RawMessage(fmt.Sprintf(`{"of": %d, "n": 1e2}`, at)), at == 3, nil
		})
		return n, err
	})
	if steps.Load() != 1 || string(got.Result) != "1" {
		t.Errorf("the step beside the loop ran %d times, result %s", steps.Load(), got.Result)
	}
}

// What a step is made of has the step's key before its own, also where that has slashes in it: so a phase stands for what is in it, a
// loop's snapshot takes its place, and a replay comes to all of it.
func TestWhatAStepIsMadeOfHasItsKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	inner := func(ctx context.Context) (string, error) {
		return executions.Step(ctx, "in/ner", func(ctx context.Context) (string, error) { return executions.StepKey(ctx), nil })
	}
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
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
		return ends(executions.Loop(ctx, "lo/op", key, func(ctx context.Context, all string) (string, bool, error) {
			key, err := inner(ctx)
			return all + " " + key, key == "lo/op@16/in/ner", err
		}))
	}))
	id := p.begin(t, "flow")
	got := until(t, pool, id, executions.Completed)
	var keys string
	if err := json.Unmarshal(got.Result, &keys); err != nil || !strings.HasPrefix(keys, "pha/se/in/ner lo/op@0/in/ner ") {
		t.Errorf("keys of the steps: %s, %v", got.Result, err)
	}
	steps := value[string](t, pool, `select string_agg(step, ' ' order by created_at) from agent_checkpoints`)
	if want := "pha/before se/gate pha/se/in/ner pha/se lo/op"; steps != want {
		t.Errorf("recorded %s, want %s", steps, want)
	}
	if replay, err := p.Replay(t.Context(), id); err != nil || !replay.Equal {
		t.Errorf("the replay: %+v, %v", replay.Divergence, err)
	}
}
