package objectives_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/objectives"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func put(t *testing.T, pool *pgxpool.Pool, d objectives.Definition) objectives.Objective {
	t.Helper()
	if d.Goal == "" {
		d.Goal = "goal"
	}
	_, err := objectives.Put(t.Context(), pool, d, objectives.SourceWorkspace)
	require.NoError(t, err)
	return get(t, pool, d.Name)
}

func get(t *testing.T, pool *pgxpool.Pool, name string) objectives.Objective {
	t.Helper()
	o, err := objectives.Get(t.Context(), pool, name)
	require.NoError(t, err)
	return o
}

func steps(t *testing.T, pool *pgxpool.Pool, o objectives.Objective) []objectives.Step {
	t.Helper()
	list, err := objectives.Steps(t.Context(), pool, o.ID)
	require.NoError(t, err)
	return list
}

// describe returns "title:status:attempts" of each step.
func describe(list []objectives.Step) string {
	var parts []string
	for _, s := range list {
		parts = append(parts, fmt.Sprintf("%s:%s:%d", s.Title, s.Status, s.Attempts))
	}
	return strings.Join(parts, " ")
}

func complete(t *testing.T, pool *pgxpool.Pool, s objectives.Step) {
	t.Helper()
	proof := []string{act(t, pool, "hb_1", "look", "call", "success")}
	ok, err := objectives.CompleteStep(t.Context(), pool, s.ID, "result of "+s.Title, "hb_1", proof)
	require.True(t, ok && err == nil, ok, err)
}

func due(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	list, err := objectives.Due(t.Context(), pool, objectives.AgentFilter{}, 0)
	require.NoError(t, err)
	var names []string
	for _, o := range list {
		names = append(names, o.Name)
	}
	return strings.Join(names, " ")
}

func TestValidate(t *testing.T) {
	t.Parallel()
	many := make([]string, 101)
	for i := range many {
		many[i] = fmt.Sprint(i)
	}
	for name, test := range map[string]struct {
		d    objectives.Definition
		want []string
	}{
		"all at once": {
			objectives.Definition{Priority: -1, ReviewEvery: "often", Steps: []string{"a", " ", "a"}},
			[]string{"name: ", "goal: ", "priority: ", "review_every: ", "steps[1]: ", "steps[2]: "},
		},
		"review zero":     {objectives.Definition{Name: "a", Goal: "g", ReviewEvery: "0s"}, []string{"review_every: "}},
		"review negative": {objectives.Definition{Name: "a", Goal: "g", ReviewEvery: "-2d"}, []string{"review_every: "}},
		"review endless":  {objectives.Definition{Name: "a", Goal: "g", ReviewEvery: "1e300d"}, []string{"review_every: "}},
		"review NaN":      {objectives.Definition{Name: "a", Goal: "g", ReviewEvery: "nand"}, []string{"review_every: "}},
		"too many steps":  {objectives.Definition{Name: "a", Goal: "g", Steps: many}, []string{"steps: are 101"}},
		"NUL":             {objectives.Definition{Name: "a\x00", Goal: "g\x00"}, []string{"name: ", "goal: "}},
	} {
		err := objectives.Validate(test.d)
		for _, want := range test.want {
			assert.ErrorContains(t, err, want, name)
		}
	}
	for _, every := range []string{"", "30m", "12h", "7d", "1.5d"} {
		assert.NoError(t, objectives.Validate(objectives.Definition{Name: "a", Goal: "g", ReviewEvery: every}))
	}
}

func TestPutKeepsResultsOfSteps(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	d := objectives.Definition{Name: "a", Goal: "g", ReviewEvery: "1d", Steps: []string{"one", "two"}}
	o := put(t, pool, d)
	assert.Truef(t, o.ReviewEverySeconds == 86400 && o.Priority == 2 && o.Total == 2 && o.Pending == 2 && o.Round == 1,
		"got %+v", o)
	if changed, err := objectives.Put(t.Context(), pool, d, objectives.SourceWorkspace); changed || err != nil {
		t.Errorf("the same again: %v, %v", changed, err)
	}
	complete(t, pool, steps(t, pool, o)[0])
	_, err := objectives.AddSteps(t.Context(), pool, o.ID, []string{"planned"})
	require.NoError(t, err)
	d.Goal, d.Steps = "other", []string{"two", "three", "one"}
	changed, err := objectives.Put(t.Context(), pool, d, objectives.SourceWorkspace)
	assert.Truef(t, changed && err == nil, "changed: %v, %v", changed, err)
	assert.Equal(t, "one:done:1 two:pending:0 planned:pending:0 three:pending:0", describe(steps(t, pool, o)))
	o = get(t, pool, "a")
	assert.Truef(t, o.Goal == "other" && o.Done == 1 && o.Total == 4, "got %+v", o)
}

func TestPutRejectsInvalidDefinition(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	_, err := objectives.Put(t.Context(), pool, objectives.Definition{Name: "a", Goal: "g", Steps: []string{"x", "x"}},
		"workspace")
	assert.Error(t, err, "accepted")
	_, err = objectives.Get(t.Context(), pool, "a")
	assert.ErrorIs(t, err, objectives.ErrNotFound)
}

func TestDue(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	put(t, pool, objectives.Definition{Name: "second", Steps: []string{"s"}})
	put(t, pool, objectives.Definition{Name: "first", Priority: 1, Steps: []string{"s"}})
	put(t, pool, objectives.Definition{Name: "unplanned", Priority: 3})
	put(t, pool, objectives.Definition{Name: "paused", Steps: []string{"s"}})
	put(t, pool, objectives.Definition{Name: "later", Steps: []string{"s"}})
	ended := put(t, pool, objectives.Definition{Name: "ended", Steps: []string{"s"}})
	pgtest.Exec(t, pool, `update agent_objectives set status = 'paused' where name = 'paused'`)
	pgtest.Exec(t, pool, `update agent_objectives set due_at = clock_timestamp() + interval '1 h' where name = 'later'`)
	complete(t, pool, steps(t, pool, ended)[0])
	assert.Equal(t, "first second unplanned", due(t, pool))
	n, err := objectives.Settle(t.Context(), pool)
	assert.Truef(t, n == 1 && err == nil, "settled %d, %v", n, err)
	o := get(t, pool, "ended")
	assert.Truef(t, o.Status == objectives.Completed, "got %+v", o)
}

func TestStepCompletesOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a", Steps: []string{"s"}})
	step := steps(t, pool, o)[0]
	var wins atomic.Int32
	var wg sync.WaitGroup
	for i := range 32 {
		traceID := fmt.Sprintf("hb_%d", i)
		proof := []string{act(t, pool, traceID, "look", "call", "success")}
		wg.Go(func() {
			if ok, err := objectives.CompleteStep(t.Context(), pool, step.ID, fmt.Sprint(i), traceID, proof); err != nil {
				t.Error(err)
			} else if ok {
				wins.Add(1)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, 1, wins.Load())
	_, ok, err := objectives.FailStep(t.Context(), pool, step.ID, "late", "hb_x")
	assert.Truef(t, !ok && err == nil, "failed a done step: %v, %v", ok, err)
	s := steps(t, pool, o)[0]
	assert.Truef(t, s.Status == objectives.Done && s.TraceID == "hb_"+s.Result && s.Attempts == 1, "got %+v", s)
}

func TestStepFailsAfterThreeAttempts(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a", Steps: []string{"s"}})
	id := steps(t, pool, o)[0].ID
	for i, want := range []string{"pending", "pending", "failed"} {
		s, ok, err := objectives.FailStep(t.Context(), pool, id, "why\x00", "hb_1")
		assert.Truef(t, ok && err == nil && s.Status == want && s.Attempts == i+1 && s.Result == "why\uFFFD",
			"attempt %d: %+v, %v, %v", i+1, s, ok, err)
	}
	_, ok, _ := objectives.FailStep(t.Context(), pool, id, "", "")
	assert.True(t, !ok, "a fourth attempt")
	o, err := objectives.Advanced(t.Context(), pool, o.ID, "hb_2")
	assert.Truef(t, err == nil && o.Status == objectives.Failed && o.LastTraceID == "hb_2", "got %+v, %v", o, err)
}

func TestAdvanced(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a", Steps: []string{"one", "two", "three"}})
	list := steps(t, pool, o)
	complete(t, pool, list[0])
	if got, err := objectives.Advanced(t.Context(), pool, o.ID, "hb_1"); err != nil || got.Status != objectives.Active ||
		got.Done != 1 || !got.DueAt.Equal(o.DueAt) {
		t.Errorf("with pending steps: %+v, %v", got, err)
	}
	complete(t, pool, list[1])
	pgtest.Exec(t, pool, `update agent_objective_steps set status = 'skipped' where id = '`+list[2].ID+`'`)
	got, err := objectives.Advanced(t.Context(), pool, o.ID, "hb_2")
	assert.Truef(t, err == nil && got.Status == objectives.Completed && got.Done == 2 && got.Total == 2 &&
		got.LastTraceID == "hb_2", "got %+v, %v", got, err)
	_, err = objectives.AddSteps(t.Context(), pool, o.ID, []string{"more"})
	assert.ErrorIs(t, err, objectives.ErrNotActive, "steps for a completed objective")
	_, err = objectives.Advanced(t.Context(), pool, "00000000-0000-0000-0000-000000000000", "")
	assert.ErrorIs(t, err, objectives.ErrNotFound)
}

func TestRecurringObjectiveBeginsNextRoundOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a", ReviewEvery: "1h", Steps: []string{"one", "two", "no"}})
	list := steps(t, pool, o)
	complete(t, pool, list[0])
	for range 3 {
		_, _, err := objectives.FailStep(t.Context(), pool, list[1].ID, "x", "hb_1")
		require.NoError(t, err)
	}
	pgtest.Exec(t, pool, `update agent_objective_steps set status = 'skipped' where id = '`+list[2].ID+`'`)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			_, err := objectives.Advanced(t.Context(), pool, o.ID, "hb_1")
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	got := get(t, pool, "a")
	assert.Truef(t, got.Round == 2 && got.Status == objectives.Active && got.DueAt.Sub(o.DueAt).Minutes() >= 59,
		"got %+v", got)
	after := steps(t, pool, o)
	if describe(after) != "one:pending:0 two:pending:0 no:skipped:0" || after[0].Result != "result of one" {
		t.Errorf("got %s, %q", describe(after), after[0].Result)
	}
	assert.Equal(t, "", due(t, pool))
	pgtest.Exec(t, pool, `update agent_objectives set due_at = clock_timestamp()`)
	assert.Equal(t, "a", due(t, pool))
}

func TestObjectiveWithoutStepsStaysDue(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	once := put(t, pool, objectives.Definition{Name: "once"})
	got, err := objectives.Advanced(t.Context(), pool, once.ID, "hb_1")
	assert.Truef(t, err == nil && got.Status == objectives.Active && due(t, pool) == "once", "got %+v, %v", got, err)
	often := put(t, pool, objectives.Definition{Name: "often", ReviewEvery: "1h"})
	got, err = objectives.Advanced(t.Context(), pool, often.ID, "hb_1")
	assert.Truef(t, err == nil && got.Round == 2 && due(t, pool) == "once", "got %+v, %v", got, err)
}

func TestConcurrentAddStepsKeepsOrder(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a", Steps: []string{"first"}})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			added, err := objectives.AddSteps(t.Context(), pool, o.ID,
				[]string{fmt.Sprintf("%d-a", i), "shared", fmt.Sprintf("%d-b", i)})
			assert.Truef(t, err == nil && len(added) >= 2, "%d added, %v", len(added), err)
		})
	}
	wg.Wait()
	list := steps(t, pool, o)
	assert.Equal(t, 18, len(list))
	for i, s := range list {
		assert.Equal(t, i+1, s.Position)
	}
	many := make([]string, 90)
	for i := range many {
		many[i] = fmt.Sprintf("many %d", i)
	}
	_, err := objectives.AddSteps(t.Context(), pool, o.ID, many)
	assert.Error(t, err, "more than 100 steps")
	assert.Equal(t, 18, len(steps(t, pool, o)))
}

func TestRemovePausesAdvancedObjectives(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	worked := put(t, pool, objectives.Definition{Name: "worked", Steps: []string{"s"}})
	put(t, pool, objectives.Definition{Name: "fresh", Steps: []string{"s"}})
	put(t, pool, objectives.Definition{Name: "kept"})
	complete(t, pool, steps(t, pool, worked)[0])
	names, err := objectives.Remove(t.Context(), pool, []string{"kept"})
	assert.Truef(t, err == nil && slices.Equal(names, []string{"fresh", "worked"}), "got %v, %v", names, err)
	o := get(t, pool, "worked")
	assert.Truef(t, o.Status == objectives.Paused && o.Done == 1, "got %+v", o)
	o = put(t, pool, objectives.Definition{Name: "worked", Steps: []string{"s"}})
	assert.Truef(t, o.Status == objectives.Active && o.Done == 1, "restored: %+v", o)
	_, err = objectives.SetStatus(t.Context(), pool, worked.ID, objectives.Active, objectives.Paused)
	require.NoError(t, err)
	_, err = objectives.Remove(t.Context(), pool, []string{"kept"})
	require.NoError(t, err)
	o = put(t, pool, objectives.Definition{Name: "worked", Goal: "changed", Steps: []string{"s"}})
	assert.Truef(t, o.Status == objectives.Paused, "the admin's pause: %+v", o)
	ok, err := objectives.SetStatus(t.Context(), pool, worked.ID, objectives.Paused, objectives.Active)
	assert.Truef(t, ok && err == nil, "resume: %v, %v", ok, err)
	list, err := objectives.List(t.Context(), pool, objectives.Filter{Status: objectives.Active})
	assert.Truef(t, err == nil && len(list) == 2 && list[0].Name == "kept", "got %+v, %v", list, err)
}

func TestRunsWithoutProgressDelayObjective(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a", Goal: "g", Steps: []string{"s", "t", "u", "v"}})
	off := func(runs int) float64 {
		t.Helper()
		for range runs {
			pgtest.Exec(t, pool, `update agent_objectives set due_at = clock_timestamp() where due_at > clock_timestamp()`)
			require.NoError(t, objectives.BackOff(t.Context(), pool, o.ID))
		}
		minutes := pgtest.Value[float64](t, pool, `select extract(epoch from due_at - clock_timestamp())::float8 / 60
			from agent_objectives`)
		return minutes
	}
	for n, want := range []float64{15, 30, 60, 120, 240, 480, 960, 1440, 1440} {
		got := off(1)
		assert.Truef(t, got <= want && got >= want-5, "after %d runs the next is due in %.1f min, want %.0f", n+1, got, want)
	}
	got := get(t, pool, "a")
	assert.Truef(t, got.IdleRuns == 9 && due(t, pool) == "", "it is %+v", got)
	list := steps(t, pool, o)
	for name, change := range map[string]func() error{
		"a step is done": func() error { complete(t, pool, list[0]); return nil },
		"a step fails": func() error {
			_, _, err := objectives.FailStep(t.Context(), pool, list[1].ID, "why", "hb_1")
			return err
		},
		"an admin's word": func() error {
			_, err := objectives.ConfirmStep(t.Context(), pool, list[2].ID, "admin", "I saw it", "op_1")
			return err
		},
		"a step is planned": func() error {
			_, err := objectives.AddSteps(t.Context(), pool, o.ID, []string{"w"})
			return err
		},
		"an edit": func() error {
			put(t, pool, objectives.Definition{Name: "a", Goal: "another", Steps: []string{"s"}})
			return nil
		},
		"another agent": func() error {
			_, err := pool.Exec(t.Context(), `update agent_objectives set agent = 'other'`)
			return err
		},
		"resumed": func() error {
			_, err := objectives.SetStatus(t.Context(), pool, o.ID, objectives.Active, objectives.Paused)
			if err == nil {
				_, err = objectives.SetStatus(t.Context(), pool, o.ID, objectives.Paused, objectives.Active)
			}
			return err
		},
	} {
		off(2)
		require.NoError(t, change(), name)
		got := get(t, pool, "a")
		assert.Truef(t, got.IdleRuns == 0 && due(t, pool) == "a", "%s: the objective is %+v", name, got)
	}
}
