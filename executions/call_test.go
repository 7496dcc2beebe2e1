package executions_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// row is what the tests look at of an activity.
type row struct {
	Skill, Step, Kind, Status, Class string
	Output                           string
}

func rows(t *testing.T, db postgres.DB, id string) []row {
	t.Helper()
	got, err := db.Query(t.Context(), `
		select skill_name, step, kind, status, error_class, coalesce(output::text, '') from agent_activity
		 where execution_id = @id order by id`, postgres.Strict{"id": id})
	if err != nil {
		t.Fatal(err)
	}
	all, err := pgx.CollectRows(got, pgx.RowToStructByPos[row])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// open counts the activities that are listed as under way.
func open(t *testing.T, db postgres.DB) int {
	t.Helper()
	return value[int](t, db, `select count(*) from agent_activity_open`)
}

func TestWhatARunInAThreadDoesIsFiledUnderTheThread(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		_, err := activity.Note(ctx, pool, activity.Entry{Skill: "note"}, activity.Outcome{})
		if err != nil {
			return executions.Result{}, err
		}
		return ends(executions.Do(ctx, "look", executions.Call{Entry: activity.Entry{Skill: "look"}},
			func(context.Context, *executions.Effect) (string, error) { return "seen", nil }))
	}))
	for thread, want := range map[string]string{"talk": "note in talk, look in talk", "": "note in none, look in none"} {
		x, _, err := p.Start(t.Context(), pool, executions.Spec{Flow: "flow", Surface: trace.Flow, ThreadID: thread})
		if err != nil {
			t.Fatal(err)
		}
		until(t, pool, x.ID, executions.Completed)
		got := value[string](t, pool, `
			select string_agg(skill_name || ' in ' || coalesce(thread_id, 'none'), ', ' order by id) from agent_activity where execution_id = $1`, x.ID)
		if got != want {
			t.Errorf("of a run in thread %q there is %q, not %q", thread, got, want)
		}
	}
}

func TestACallIsARunningRowBeforeItActs(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		return ends(executions.Do(ctx, "mail", executions.Call{Entry: activity.Entry{Skill: "send_mail", Input: map[string]any{"to": "ana"}}},
			func(ctx context.Context, effect *executions.Effect) (string, error) {
				var status, key, input string
				err := pool.QueryRow(ctx, `
					select a.status, a.idempotency_key, a.input::text from agent_activity a join agent_activity_open o on o.activity_id = a.id
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
	got := until(t, pool, p.begin(t, "flow"), executions.Completed)
	want := []row{{"send_mail", "mail", "call", "success", "", `"sent"`}}
	if diff := cmp.Diff(want, rows(t, pool, got.ID)); diff != "" {
		t.Errorf("activity (-want +got):\n%s", diff)
	}
	same := value[bool](t, pool, `
		select a.xmin = c.xmin from agent_activity a, agent_checkpoints c where a.execution_id = @id and c.execution_id = @id`,
		postgres.Strict{"id": got.ID})
	if !same || open(t, pool) != 0 {
		t.Errorf("end of the row and checkpoint in one commit: %v; rows listed as open: %d", same, open(t, pool))
	}
}

func TestTheRowOfAFailedCallSaysWhy(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
		return ends(executions.Do(ctx, "mail", executions.Call{Entry: activity.Entry{Skill: "send_mail"}},
			func(_ context.Context, effect *executions.Effect) (string, error) {
				effect.Output = "half of it"
				return "", quota{}
			}))
	}))
	got := until(t, pool, p.begin(t, "flow"), executions.Failed)
	want := []row{{"send_mail", "mail", "call", "error", "quota", `"half of it"`}}
	if diff := cmp.Diff(want, rows(t, pool, got.ID)); diff != "" || str(got.FailedStep) != "mail" {
		t.Errorf("failed step %q, activity (-want +got):\n%s", str(got.FailedStep), diff)
	}
}

// interrupted runs a call whose process is lost in the middle; another one goes on. It returns the keys
// under which the call was made.
func interrupted(t *testing.T, idempotent bool) (executions.Execution, []row, []string) {
	t.Helper()
	pool := pgtest.DB(t)
	middle := newGate(t)
	var mu sync.Mutex
	var keys []string
	flows := flow(func(ctx context.Context) (executions.Result, error) {
		v, err := executions.Do(ctx, "pay", executions.Call{Entry: activity.Entry{Skill: "pay"}, Idempotent: idempotent},
			func(ctx context.Context, effect *executions.Effect) (string, error) {
				mu.Lock()
				keys = append(keys, effect.Key)
				mu.Unlock()
				if middle.pass(ctx) {
					return "first", errors.New("the process is dead")
				}
				return "second", nil
			})
		if failure := (*executions.StepError)(nil); errors.As(err, &failure) && failure.Class == executions.ClassUnknown {
			return executions.Result{Value: "told: " + failure.Class}, nil
		}
		return ends(v, err)
	})
	prepare(t, pool, flows).runAside(t)
	id := middle.arrival(t)
	expire(t, pool, id)
	start(t, pool, flows)
	got := until(t, pool, id, executions.Completed)
	if n := open(t, pool); n != 0 {
		t.Errorf("%d rows are listed as open", n)
	}
	mu.Lock()
	defer mu.Unlock()
	return got, rows(t, pool, id), keys
}

func TestAnIdempotentCallIsMadeAgainUnderTheSameKey(t *testing.T) {
	t.Parallel()
	got, log, keys := interrupted(t, true)
	want := []row{{"pay", "pay", "call", "unknown", "interrupted", ""}, {"pay", "pay", "call", "success", "", `"second"`}}
	if diff := cmp.Diff(want, log); diff != "" {
		t.Errorf("activity (-want +got):\n%s", diff)
	}
	if len(keys) != 2 || keys[0] != keys[1] || string(got.Result) != `"second"` {
		t.Errorf("keys %q, result %s", keys, got.Result)
	}
}

func TestACallThatIsNotIdempotentEndsUnknown(t *testing.T) {
	t.Parallel()
	got, log, keys := interrupted(t, false)
	want := []row{{"pay", "pay", "call", "unknown", "interrupted", ""}}
	if diff := cmp.Diff(want, log); diff != "" {
		t.Errorf("activity (-want +got):\n%s", diff)
	}
	if len(keys) != 1 || string(got.Result) != `"told: unknown"` {
		t.Errorf("keys %q, result %s", keys, got.Result)
	}
}

func TestEachStepOfEachExecutionHasItsOwnKey(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var mu sync.Mutex
	seen := map[string]int{}
	p := start(t, pool, flow(func(ctx context.Context) (executions.Result, error) {
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
	one, two := p.begin(t, "flow"), p.begin(t, "flow")
	until(t, pool, one, executions.Completed)
	until(t, pool, two, executions.Completed)
	mu.Lock()
	defer mu.Unlock()
	if len(seen) != 4 {
		t.Errorf("4 calls had %d keys", len(seen))
	}
}

func TestAPhaseKeepsItsRowOverACrash(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	middle := newGate(t)
	flows := flow(func(ctx context.Context) (executions.Result, error) {
		return ends(executions.Phase(ctx, "plan", func(ctx context.Context, _ *executions.Effect) (string, error) {
			_, err := executions.Do(ctx, "ask", executions.Call{Entry: activity.Entry{Skill: "ask"}},
				func(context.Context, *executions.Effect) (int, error) { return 1, nil })
			if err != nil {
				return "", err
			}
			middle.pass(ctx)
			return "planned", nil
		}))
	})
	prepare(t, pool, flows).runAside(t)
	id := middle.arrival(t)
	first := value[string](t, pool, `select id::text from agent_activity where kind = 'phase'`)
	expire(t, pool, id)
	start(t, pool, flows)
	until(t, pool, id, executions.Completed)
	want := []row{{"plan", "plan", "phase", "success", "", `"planned"`}, {"ask", "plan/ask", "call", "success", "", "1"}}
	if diff := cmp.Diff(want, rows(t, pool, id)); diff != "" {
		t.Errorf("activity (-want +got):\n%s", diff)
	}
	if parent := value[string](t, pool, `select parent_id::text from agent_activity where skill_name = 'ask'`); parent != first {
		t.Errorf("the call is filed under %s, the phase is %s", parent, first)
	}
}

func TestAStaleWorkerChangesNothingAndItsResultIsKept(t *testing.T) {
	t.Parallel()
	cases := map[string]struct {
		stop func(middle, end *gate) *gate // where the first process stops
		note row
	}{
		"in a call": {
			func(middle, _ *gate) *gate { return middle },
			row{"stale_write", "pay", "note", "error", "stale", `{"error": "", "output": "first", "status": "success"}`},
		},
		"before its end": {
			func(_, end *gate) *gate { return end },
			row{"stale_write", "", "note", "error", "stale", `{"error": "", "output": {"Value": "first", "Summary": ""}, "status": "completed"}`},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.DB(t)
			here := newGate(t)
			nowhere := newGate(t)
			nowhere.passed.Add(1)
			middle, end := nowhere, nowhere
			if c.stop(here, nowhere) == here {
				middle = here
			} else {
				end = here
			}
			flows := flow(func(ctx context.Context) (executions.Result, error) {
				v, err := executions.Do(ctx, "pay", executions.Call{Entry: activity.Entry{Skill: "pay"}, Idempotent: true},
					func(ctx context.Context, _ *executions.Effect) (string, error) {
						if middle.pass(ctx) {
							return "first", nil
						}
						return "second", nil
					})
				if end.pass(ctx) {
					v = "first"
				}
				return ends(v, err)
			})
			wait := prepare(t, pool, flows).runAside(t)
			id := here.arrival(t)
			expire(t, pool, id)
			start(t, pool, flows)
			before := until(t, pool, id, executions.Completed)
			kept := rows(t, pool, id)
			points, err := executions.Checkpoints(t.Context(), pool, id)
			if err != nil {
				t.Fatal(err)
			}
			here.open()
			after := wait()
			if diff := cmp.Diff(before, after); diff != "" || string(after.Result) != `"second"` {
				t.Errorf("the stale end changed the execution (-before +after):\n%s", diff)
			}
			now, err := executions.Checkpoints(t.Context(), pool, id)
			if diff := cmp.Diff(points, now); diff != "" || err != nil {
				t.Errorf("the stale checkpoint counted %v (-before +after):\n%s", err, diff)
			}
			if diff := cmp.Diff(append(kept, c.note), rows(t, pool, id)); diff != "" {
				t.Errorf("activity (-want +got):\n%s", diff)
			}
			if n := completions(t, pool, id); n != 1 {
				t.Errorf("%d AGENT_COMPLETED", n)
			}
		})
	}
}
