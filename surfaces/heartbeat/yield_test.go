package heartbeat_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
)

// holdLane acquires a lane for another owner.
func (w *testHeartbeat) holdLane(t *testing.T, lane string) {
	t.Helper()
	require.Truef(t, pgtest.Value[bool](t, w.pool, `select try_acquire_agent_lock($1, 'somebody#1', 300)`, lane),
		"lane %s is not free", lane)
}

func (w *testHeartbeat) freeLane(t *testing.T, lane string) {
	t.Helper()
	require.Truef(t, pgtest.Value[bool](t, w.pool, `select release_agent_lock($1, 'somebody#1')`, lane),
		"lane %s was lost", lane)
}

// A heartbeat that an admin keeps away names the admin's lease, as one beside another heartbeat does.
func TestSkipNamesAdmin(t *testing.T) {
	t.Parallel()
	w := newBusyHeartbeat(t)
	w.holdLane(t, heartbeat.OperateLane)
	x, got := w.runCompleted(t)
	assert.NoDiff(t, []string{"heartbeat skipped"}, w.traceLines(t, x.TraceID))
	assert.Contains(t, got.Skipped, "lane operate is held by somebody#1")
	assert.Contains(t, pgtest.Value[string](t, w.pool,
		`select output::text from agent_activity where trace_id = $1`, x.TraceID), "somebody#1")
}

func TestBusyLaneIsSkipped(t *testing.T) {
	t.Parallel()
	w := newBusyHeartbeat(t)
	w.holdLane(t, heartbeat.Lane)
	x, got := w.runCompleted(t)
	assert.NoDiff(t, []string{"heartbeat skipped"}, w.traceLines(t, x.TraceID))
	output := pgtest.Value[string](t, w.pool, `select output::text from agent_activity where trace_id = $1`, x.TraceID)
	assert.Truef(t, strings.Contains(output, "somebody#1") && strings.Contains(got.Skipped, "somebody#1"),
		"the holder is not named: %s, %q", output, got.Skipped)
	w.freeLane(t, heartbeat.Lane)
	assert.Equal(t, 0, len(w.model.Requests()))
}

// If lanes are disabled, rows of held lanes do not block a heartbeat.
func TestHeartbeatWithoutLanes(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.holdLane(t, heartbeat.OperateLane)
	w.holdLane(t, heartbeat.Lane)
	x := w.runWithoutLanes(t, 1)[0]
	got := summary(t, x)
	assert.Truef(t, got.Skipped == "" && len(got.Phases) == 6, "got %+v", got)
}

func TestConcurrentHeartbeatIsSkipped(t *testing.T) {
	t.Parallel()
	w := newBusyHeartbeat(t)
	runs := make([]executions.Execution, 4)
	var group sync.WaitGroup
	for n := range runs {
		group.Go(func() { runs[n], _ = w.run(t) })
	}
	group.Wait()
	for _, x := range runs {
		assert.Equal(t, executions.Completed, x.Status, postgres.Deref(x.ErrorMessage))
	}
	pgtest.Equal(t, w.pool, 2, `select count(*) from agent_activity where skill_name = 'heal_skill'`)
	pgtest.Equal(t, w.pool, 2, `select count(*) from agent_automation_runs`)
	pgtest.Equal(t, w.pool, 0, `select count(*) from agent_locks_live`)
}

func TestHeartbeatYieldsToAdmin(t *testing.T) {
	t.Parallel()
	w := newBusyHeartbeat(t)
	w.holdLane(t, heartbeat.OperateLane)
	x, got := w.runCompleted(t)
	assert.NoDiff(t, []string{"heartbeat skipped"}, w.traceLines(t, x.TraceID))
	assert.Truef(t, strings.Contains(got.Skipped, "operate"), "summary is %+v", got)
	assert.True(t, !pgtest.Value[bool](t, w.pool, `select is_agent_lock_held('heartbeat')`),
		"the skipped heartbeat still holds its lane")
}

// newInterruptedHeartbeat returns a heartbeat. An admin acquires the lane operate during a skill call of the phase.
func newInterruptedHeartbeat(t *testing.T, phase string) *testHeartbeat {
	t.Helper()
	w := newTestHeartbeat(t)
	w.builtins["look"] = func(context.Context, skills.Call) (any, error) {
		if w.calls.Add("look") == 1 {
			w.holdLane(t, heartbeat.OperateLane)
		}
		return "seen", nil
	}
	script := map[string][]modeltest.Reply{
		"Objective tidy": {
			modeltest.ToolCall("remember", `{"key":"k","value":1}`).AndCall("look", `{}`).AndCall("look", `{}`),
			modeltest.Text("ok"),
		},
		"Task p": {modeltest.ToolCall("look", `{}`).AndCall("look", `{}`), modeltest.Text("ok")},
	}
	if phase == "advance_plan" {
		w.addObjective(t, objectives.Definition{Name: "tidy", Goal: "a", Steps: []string{"x"}})
		w.addObjective(t, objectives.Definition{Name: "zz other", Goal: "a", Priority: 9, Steps: []string{"x"}})
	} else {
		w.addAutomation(t, automations.Definition{Name: "p", Prompt: "Task p.", MaxAttempts: 1})
		w.addAutomation(t, automations.Definition{Name: "q", Skill: "look"})
		pgtest.Exec(t, w.pool, `update agent_automations set next_run_at = next_run_at - interval '1 hour' where name = 'p'`)
	}
	w.setReplies(script)
	return w
}

func TestRunningHeartbeatYields(t *testing.T) {
	t.Parallel()
	for _, phase := range []string{"advance_plan", "run_automations"} {
		t.Run(phase, func(t *testing.T) {
			w := newInterruptedHeartbeat(t, phase)
			e := w.engine(t, true)
			x, err := e.RunSync(context.WithoutCancel(t.Context()), heartbeat.Spec("agent"))
			require.NoError(t, err)
			require.Truef(t, x.Status == executions.Waiting && postgres.Deref(x.WaitingFor) == "lane" &&
				postgres.Deref(x.WaitingKey) == heartbeat.OperateLane, "the heartbeat is %s for %s %s", x.Status,
				postgres.Deref(x.WaitingFor), postgres.Deref(x.WaitingKey))
			assert.True(t, pgtest.Value[bool](t, w.pool, `select is_agent_lock_held('heartbeat')`),
				"the heartbeat lost its lane by waiting")
			requests := len(w.model.Requests())
			w.freeLane(t, heartbeat.OperateLane)
			x = enginetest.Await(t, w.pool, x.ID, executions.Completed)
			assert.True(t, len(w.model.Requests()) > requests, "the heartbeat did not continue after the admin's release")
			keys := map[string]bool{}
			for _, r := range w.model.Requests() {
				assert.True(t, !keys[r.IdempotencyKey()], "a request was made twice")
				keys[r.IdempotencyKey()] = true
			}
			lines := phases(w.traceLines(t, x.TraceID))
			assert.Truef(t, len(lines) == 6 && !strings.Contains(strings.Join(lines, " "), "error"), "phases are %q", lines)
			pgtest.Equal(t, w.pool, 0, `select count(*) from agent_activity where status = 'running'`)
			pgtest.Equal(t, w.pool, 0, `select count(*) from agent_automation_runs where status <> 'success'`)
		})
	}
}

// A waiting heartbeat does not park its lane, so another heartbeat may acquire the lane meanwhile.
func TestHeartbeatResumesAfterLaneHolder(t *testing.T) {
	t.Parallel()
	for _, phase := range []string{"advance_plan", "run_automations"} {
		t.Run(phase, func(t *testing.T) {
			w := newInterruptedHeartbeat(t, phase)
			x, err := w.engine(t, true).RunSync(context.WithoutCancel(t.Context()), heartbeat.Spec("agent"))
			require.Truef(t, err == nil && x.Status == executions.Waiting, "the heartbeat is %s: %v", x.Status, err)
			pgtest.Exec(t, w.pool, `update agent_locks set expires_at = clock_timestamp() where lane = 'heartbeat'`)
			w.holdLane(t, heartbeat.Lane)
			w.freeLane(t, heartbeat.OperateLane)
			pgtest.Eventually(t, func() bool {
				x, err := executions.Get(t.Context(), w.pool, x.ID)
				return err == nil && (x.Status == executions.Completed || postgres.Deref(x.WaitingKey) == heartbeat.Lane)
			}, "it waits for its lane")
			w.freeLane(t, heartbeat.Lane)
			x = enginetest.Await(t, w.pool, x.ID, executions.Completed)
			lines := w.traceLines(t, x.TraceID)
			got := phases(lines)
			assert.Truef(t, len(got) == 6 && !strings.Contains(strings.Join(lines, " "), "error"), "story is %q", lines)
			assert.Equal(t, 6, len(summary(t, x).Phases), x.ResultSummary)
			pgtest.Equal(t, w.pool, 0, `select count(*) from agent_automation_runs where status <> 'success'`)
		})
	}
}

func TestHeartbeatWaitTimeout(t *testing.T) {
	t.Parallel()
	for phase, want := range map[string][]string{
		"advance_plan": {
			"self_heal success", "follow_through skipped", "advance_plan skipped", "run_automations skipped", "reflect skipped",
			"save_memories success",
		},
		"run_automations": {
			"self_heal success", "follow_through skipped", "advance_plan skipped", "run_automations skipped", "reflect skipped",
			"save_memories skipped",
		},
	} {
		t.Run(phase, func(t *testing.T) {
			w := newInterruptedHeartbeat(t, phase)
			w.surface.YieldLimit = 300 * time.Millisecond
			e := w.engine(t, true)
			x, err := e.RunSync(context.WithoutCancel(t.Context()), heartbeat.Spec("agent"))
			require.NoError(t, err)
			x = enginetest.Await(t, w.pool, x.ID, executions.Completed)
			assert.NoDiff(t, want, phases(w.traceLines(t, x.TraceID)))
			pgtest.Equal(t, w.pool, 1, `select wait_number from agent_executions where id = $1`, x.ID)
			assert.Equal(t, 1, w.calls.Of("look"))
			if !strings.Contains(x.ResultSummary, "cut short at "+phase) || len(summary(t, x).Phases) != 6 {
				t.Errorf("summary is %q, %v", x.ResultSummary, summary(t, x).Phases)
			}
			pgtest.Equal(t, w.pool, 0, `select count(*) from agent_activity where status = 'running'`)
			n := pgtest.Value[int](t, w.pool, `select count(*) from agent_memory where key = 'k'`)
			assert.Equal(t, (phase == "advance_plan"), (n == 1), n, "of the memories noted before were saved")
			w.freeLane(t, heartbeat.OperateLane)
			if phase == "run_automations" {
				pgtest.Equal(t, w.pool, "error true", `select status || ' ' || (retry_at is not null) from agent_automation_runs`)
				pgtest.Equal(t, w.pool, 1, `select count(*) from agent_automations where name = 'q'
					and next_run_at < clock_timestamp()`)
			}
			pgtest.Equal(t, w.pool, 0, `select count(*) from agent_locks_live`)
		})
	}
}

// An admin arrives during the last model call of the heartbeat.
func TestNotesAreSavedBesideAdmin(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.surface.YieldLimit = 300 * time.Millisecond
	w.addFailingSkill(t, "fetch_prices") // news for the reflection
	script := map[string][]modeltest.Reply{"Reflect": {modeltest.ToolCall("remember", `{"key":"k","value":1}`)}}
	w.model.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		if n == 1 {
			w.holdLane(t, heartbeat.OperateLane)
		}
		return replyForTask(script, req)
	})
	x, err := w.engine(t, true).RunSync(context.WithoutCancel(t.Context()), heartbeat.Spec("agent"))
	require.NoError(t, err)
	x = enginetest.Await(t, w.pool, x.ID, executions.Completed)
	assert.NoDiff(t, "1 memories saved", summary(t, x).Phases["save_memories"])
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_memory where key = 'k'`)
	w.freeLane(t, heartbeat.OperateLane)
}

func TestResumedHeartbeatSkipsFinishedPhases(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	w.builtins["look"] = func(context.Context, skills.Call) (any, error) {
		if w.calls.Add("look") == 2 {
			w.holdLane(t, heartbeat.OperateLane)
		}
		return "seen", nil
	}
	w.addAutomation(t, automations.Definition{Name: "a", Skill: "look"})
	w.addAutomation(t, automations.Definition{Name: "b", Skill: "look"})
	pgtest.Exec(t, w.pool, `update agent_automations set next_run_at = next_run_at - interval '1 hour' where name = 'a'`)
	x, err := w.engine(t, true).RunSync(context.WithoutCancel(t.Context()), heartbeat.Spec("agent"))
	require.Truef(t, err == nil && x.Status == executions.Waiting, "the heartbeat is %s: %v", x.Status, err)
	w.holdLane(t, "automation:"+pgtest.Value[string](t, w.pool, `select id::text from agent_automations where name = 'a'`))
	w.freeLane(t, heartbeat.OperateLane)
	x = enginetest.Await(t, w.pool, x.ID, executions.Completed)
	assert.Equal(t, "automations: a succeeded, b succeeded", summary(t, x).Phases["run_automations"])
	lines := strings.Join(w.traceLines(t, x.TraceID), ", ")
	assert.Truef(t, !strings.Contains(lines, "run_automation skipped"), "story is %s", lines)
}
