package heartbeat_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	openai "github.com/sashabaranov/go-openai"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
)

// TestHeartbeatSurvivesCrashes stops the first process during its k-th model call, for every k. Its lease expires and
// another process resumes.
func TestHeartbeatSurvivesCrashes(t *testing.T) {
	t.Parallel()
	const calls = 9
	for k := 1; k <= calls; k++ {
		t.Run(fmt.Sprintf("in model call %d", k), func(t *testing.T) {
			w := newTestHeartbeat(t)
			w.addFailingSkill(t, "fetch_prices")
			_, steps := w.addObjective(t, objectives.Definition{
				Name: "tidy", Goal: "Keep the tables small.",
				Steps: []string{"a", "b"},
			})
			w.addAutomation(t, automations.Definition{Name: "look", Skill: "look"})
			w.addAutomation(t, automations.Definition{Name: "write up", Prompt: "Write the daily summary."})
			scripts := map[string][]modeltest.Reply{
				"Objective tidy": {
					modeltest.ToolCall("look", `{}`), completeStep(steps[0]), lookAndComplete(steps[1]), rememberTool("one"),
					modeltest.Text("ok"),
				},
				"daily summary": {rememberTool("two"), modeltest.Text("Written.")},
				"Reflect":       {rememberTool("three").AndCall("remember", `{"key":"four","value":4}`), modeltest.Text("Mostly well.")},
			}
			reached, release := make(chan struct{}), make(chan struct{})
			var requests atomic.Int32
			w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
				if int(requests.Add(1)) == k {
					close(reached)
					return modeltest.Custom(func(http.ResponseWriter, *http.Request) {
						<-release
						panic(http.ErrAbortHandler)
					})
				}
				return replyForTask(scripts, req)
			})
			x := w.loseProcess(t, reached, release)
			w.checkComplete(t, x, k, calls)
		})
	}
}

// replyForTask returns the scripted reply by the task in the prompt and the number of earlier replies.
func replyForTask(scripts map[string][]modeltest.Reply, req openai.ChatCompletionRequest) modeltest.Reply {
	_, answers := modeltest.Turn(req)
	for word, replies := range scripts {
		if strings.Contains(req.Messages[1].Content, word) && answers < len(replies) {
			return replies[answers]
		}
	}
	return modeltest.Text("Done.")
}

// loseProcess runs a heartbeat in a process that stalls after it closes reached. Another process ends the heartbeat.
// Only then loseProcess closes release, so the first process continues too late.
func (w *testHeartbeat) loseProcess(t *testing.T, reached, release chan struct{}) executions.Execution {
	t.Helper()
	var first errgroup.Group
	engine := w.engine(t, false)
	ended := make(chan struct{})
	first.Go(func() error {
		defer close(ended)
		_, err := engine.RunSync(context.WithoutCancel(t.Context()), heartbeat.Spec("agent"))
		return err
	})
	select {
	case <-reached:
	case <-ended:
		t.Fatalf("the first process ended before it stalled: %v", first.Wait())
	}
	pgtest.Exec(t, w.pool, `update agent_workers set expires_at = clock_timestamp() - interval '1 second'`)
	w.engine(t, true)
	id := pgtest.Value[string](t, w.pool, `select id::text from agent_executions`)
	x := enginetest.Await(t, w.pool, id, executions.Completed)
	close(release)
	require.NoError(t, first.Wait())
	return x
}

// checkComplete compares the result with a heartbeat without a crash.
func (w *testHeartbeat) checkComplete(t *testing.T, x executions.Execution, lost, calls int) {
	t.Helper()
	want := []string{
		"self_heal success", "follow_through skipped", "advance_plan success", "run_automations success", "reflect success",
		"save_memories success",
	}
	assert.NoDiff(t, want, phases(w.traceLines(t, x.TraceID)))
	bodies := map[string]string{}
	times := map[string]int{}
	for _, r := range w.model.Requests() {
		key := r.IdempotencyKey()
		if body, repeated := bodies[key]; repeated && body != r.Body {
			t.Errorf("a repeated request differs from the first:\n%s", cmp.Diff(body, r.Body))
		}
		bodies[key] = r.Body
		times[key]++
	}
	repeats := 0
	for _, n := range times {
		repeats += n - 1
	}
	// The interrupted call is repeated. The first process may retry once after its release.
	assert.Truef(t, len(times) == calls && repeats >= 1 && repeats <= 2,
		"%d different requests, %d repeated; want %d and the one that was lost", len(times), repeats, calls)
	for what, sql := range map[string]string{
		"4 memories saved once": `select count(*) = 4 and max(revision) = 1 from agent_memory`,
		"4 rows of memories":    `select count(*) = 4 from agent_activity where skill_name = 'save_memory'`,
		"2 steps done once":     `select count(*) = 2 and max(attempts) = 1 from agent_objective_steps where status = 'done'`,
		"2 rows of steps":       `select count(*) = 2 from agent_activity where skill_name = 'advance_step'`,
		"2 runs": `select count(*) = 2 and max(attempt) = 1 from agent_automation_runs
			where status = 'success'`,
		"1 heal":               `select count(*) = 1 from agent_activity where skill_name = 'heal_skill'`,
		"nothing left running": `select count(*) = 0 from agent_activity where status = 'running'`,
		"no lane held":         `select count(*) = 0 from agent_locks_live`,
		"one trace":            `select count(distinct trace_id) = 1 from agent_activity where trace_id like 'hb%'`,
	} {
		assert.Truef(t, pgtest.Value[bool](t, w.pool, sql), "not so: %s", what)
	}
	assert.Equal(t, 3, w.calls.Of("look"), lost)
}

// A heartbeat is cancelled during an automation. Its run stays claimed.
func TestCancelledHeartbeatRetriesAutomation(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	w.addAutomation(t, automations.Definition{Name: "often", Skill: "look"})
	lost := pgtest.Value[string](t, w.pool, `
		insert into agent_executions (trace_id, surface, flow, status)
		values ('hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'heartbeat', 'heartbeat', 'running') returning id::text`)
	pgtest.Exec(t, w.pool, `update agent_executions set status = 'cancelled' where id = $1`, lost)
	a, err := automations.Get(t.Context(), w.pool, "often")
	require.NoError(t, err)
	_, ok, err := automations.Claim(t.Context(), w.pool, a.ID, *a.NextRunAt, lost, "")
	require.True(t, ok && err == nil, ok, err)
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() { w.runCompleted(t) })
	}
	all.Wait()
	state := func() string {
		return pgtest.Value[string](t, w.pool, `select status || ' ' || attempt || ' ' || coalesce(error_message, '')
			from agent_automation_runs`)
	}
	assert.Equal(t, "error 1 its execution ended first, so its progress is unknown", state())
	pgtest.Exec(t, w.pool, `update agent_automation_runs set retry_at = clock_timestamp()`)
	w.runCompleted(t)
	if got := state(); got != "success 2 " || w.calls.Of("look") != 1 {
		t.Errorf("after a retry the run is %q, with %d calls", got, w.calls.Of("look"))
	}
}

// A heartbeat writes to its agent's memory. The same key in the shared memory is no conflict.
func TestHeartbeatUsesAgentMemory(t *testing.T) {
	t.Parallel()
	w := newHeartbeatWithMemory(t, modeltest.ToolCall("remember", `{"key":"contact","value":"Bea"}`), modeltest.Text("Done."))
	w.surface.Loop.Agents = &agents.Directory{}
	house := agents.Definition{Name: "house", Default: true, Memory: agents.MemoryOwn}
	_, err := agents.Put(t.Context(), w.pool, house)
	require.NoError(t, err)
	w.runCompleted(t)
	e := w.contact(t)
	assert.Truef(t, string(e.Value) == `"Ana"`, "the shared memory has %s", e.Value)
	e, err = memory.Owner("house").Get(t.Context(), w.pool, "observation", "contact")
	assert.Truef(t, err == nil && string(e.Value) == `"Bea"`, "the agent's own memory has %s, %v", e.Value, err)
	open, err := memory.Conflicts(t.Context(), w.pool, memory.ConflictFilter{})
	assert.Truef(t, err == nil && len(open) == 0, "there are conflicts: %v, %v", open, err)
}
