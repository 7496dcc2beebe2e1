package heartbeat_test

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/objectives"
)

// A heartbeat runs what an event made due when nobody else does, and nothing twice when others dispatch beside it.
func TestEventRunsAreMadeOnceByHeartbeatsAndDispatchers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.quiet()
	for i := range 4 {
		d := automations.Definition{Name: fmt.Sprint("on event ", i), Event: "E", Skill: "look"}
		if _, err := automations.Put(t.Context(), w.pool, d, automations.SourceWorkspace); err != nil {
			t.Fatal(err)
		}
		w.automation(t, automations.Definition{Name: fmt.Sprint("scheduled ", i), Skill: "look"})
	}
	exec(t, w.pool, `select raise_agent_event('E', 'k', '{}', null, '')`)
	e := w.engine(t, true)
	r := &runner.Runner{Pool: w.pool, Loop: w.beat.Loop, Engine: e, Logger: slog.New(slog.DiscardHandler), Agent: "agent"}
	if err := r.Register(); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for range 2 {
		group.Go(func() {
			if _, err := r.Dispatch(t.Context()); err != nil {
				t.Error(err)
			}
		})
		group.Go(func() { w.run(t) })
	}
	group.Wait()
	pgtest.Eventually(t, patience, func() bool {
		return value[int](t, w.pool, `select count(*) from agent_automation_runs where status = 'success'`) == 8
	}, "all runs end well")
	if n := value[int](t, w.pool, `select count(*) from agent_automation_runs`); n != 8 || w.calls.of("look") != 8 {
		t.Errorf("%d runs, %d calls, want 8 of each", n, w.calls.of("look"))
	}
}

func TestAHeartbeatAloneRunsWhatAnEventMadeDue(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.quiet()
	d := automations.Definition{Name: "on event", Event: "E", Skill: "look"}
	if _, err := automations.Put(t.Context(), w.pool, d, automations.SourceWorkspace); err != nil {
		t.Fatal(err)
	}
	exec(t, w.pool, `select raise_agent_event('E', 'k', '{}', null, '')`)
	x, _ := w.completed(t)
	if got := value[string](t, w.pool, `select status || ' ' || trace_id from agent_automation_runs`); got != "success "+x.TraceID {
		t.Errorf("the run is %s", got)
	}
}

// The model says that it did; nothing shows it.
func TestAStepIsNotDoneByWords(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, steps := w.objective(t, objectives.Definition{Name: "o", Goal: "a", Steps: []string{"first", "second"}})
	w.say(map[string][]modeltest.Reply{"Objective o": {
		complete(steps[0]), modeltest.ToolCall("look", `{}`), complete(steps[0]), complete(steps[1]), modeltest.Text("Both done."),
	}})
	w.completed(t)
	states := value[string](t, w.pool, `select string_agg(title || ' ' || status, ', ' order by position) from agent_objective_steps`)
	if states != "first done, second pending" {
		t.Errorf("steps are %s", states)
	}
	for n, told := range map[int]bool{1: true, 3: false, 4: true} {
		var words []string
		for _, m := range w.model.Requests()[n].Messages {
			words = append(words, m.Content)
		}
		last := strings.Join(words[len(words)-2:], " ")
		if strings.Contains(last, "Act first, then report") != told {
			t.Errorf("after reply %d the model was told %s", n, last)
		}
	}
	of := value[string](t, w.pool, `select skill_name || ' ' || (given_by = '') from agent_objective_evidence`)
	if of != "look true" {
		t.Errorf("evidence is %s", of)
	}
}
