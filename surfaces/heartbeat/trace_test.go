package heartbeat_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
)

func rememberTool(key string) modeltest.Reply {
	return modeltest.ToolCall("remember", fmt.Sprintf(`{"key":%q,"value":{"n":1}}`, key))
}

// lookAndComplete calls look and completes a step.
func lookAndComplete(step string) modeltest.Reply {
	return modeltest.ToolCall("look", `{}`).AndCall("complete_step",
		fmt.Sprintf(`{"step_id":%q,"result":"found 42 rows"}`, step))
}

// newBusyHeartbeat returns a heartbeat with 2 failing skills, 3 steps, 2 automations, and a model that notes 4
// memories.
func newBusyHeartbeat(t *testing.T) *testHeartbeat {
	t.Helper()
	w := newTestHeartbeat(t)
	w.addFailingSkill(t, "fetch_prices")
	w.addFailingSkill(t, "post_report")
	_, steps := w.addObjective(t, objectives.Definition{
		Name: "tidy", Goal: "Keep the tables small.",
		Steps: []string{"look", "judge", "report"},
	})
	w.addAutomation(t, automations.Definition{Name: "morning look", Skill: "look"})
	w.addAutomation(t, automations.Definition{Name: "write up", Prompt: "Write the daily summary."})
	w.setReplies(map[string][]modeltest.Reply{
		"Objective tidy": {
			modeltest.ToolCall("look", `{}`), completeStep(steps[0]), lookAndComplete(steps[1]), lookAndComplete(steps[2]), rememberTool("tables"),
			modeltest.Text("All three steps are done."),
		},
		"daily summary": {rememberTool("summary"), modeltest.Text("Written.")},
		"Reflect": {
			rememberTool("lesson one").AndCall("remember",
				`{"category":"lesson","key":"lesson two","value":"call less","expires_in_days":30.0}`),
			modeltest.Text("Mostly well."),
		},
	})
	return w
}

func TestFullHeartbeatTrace(t *testing.T) {
	t.Parallel()
	w := newBusyHeartbeat(t)
	x, got := w.runCompleted(t)
	assert.Truef(t, strings.HasPrefix(x.TraceID, "hb_"), "trace id is %s", x.TraceID)
	want := []string{
		"self_heal success", "heal_skill success", "heal_skill success",
		"follow_through skipped",
		"advance_plan success", "model_call success", "look success",
		"model_call success", "advance_step success", "model_call success", "look success", "advance_step success",
		"model_call success", "look success", "advance_step success", "model_call success", "model_call success",
		"run_automations success", "run_automation success", "look success", "run_automation success", "model_call success",
		"model_call success",
		"reflect success", "model_call success", "model_call success",
		"save_memories success", "save_memory success", "save_memory success", "save_memory success", "save_memory success",
	}
	assert.NoDiff(t, want, w.traceLines(t, x.TraceID))
	pgtest.Equal(t, w.pool, 0, `select count(*) from agent_activity where trace_id <> $1 and trace_id like 'hb%'`,
		x.TraceID)
	assert.Truef(t, len(got.Phases) == 6 && strings.Contains(x.ResultSummary, "3 of 3 steps done") &&
		strings.Contains(x.ResultSummary, "2 of 3 skills taken out of service"), "summary is %q, %v", x.ResultSummary,
		got.Phases)
	pgtest.Equal(t, w.pool, 4, `select count(*) from agent_memory where trace_id = $1`, x.TraceID)
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_memory where key = 'lesson two' and category = 'lesson'
		and expires_at > clock_timestamp()`)
	pgtest.Equal(t, w.pool, "completed", `select status from agent_objectives where name = 'tidy'`)
	pgtest.Equal(t, w.pool, 2, `select count(*) from agent_automation_runs where status = 'success' and trace_id = $1`,
		x.TraceID)
}

func TestHealReportReachesModelAndLedger(t *testing.T) {
	t.Parallel()
	w := newBusyHeartbeat(t)
	var log bytes.Buffer
	w.surface.Logger = slog.New(slog.NewTextHandler(&log, nil))
	x, _ := w.runCompleted(t)
	got := log.String()
	assert.Truef(t, strings.Count(got, `msg="healing report"`) == 1 && strings.Contains(got, "disabled=2") &&
		strings.Contains(got, "fetch_prices is now disabled and cannot be called"), "the log has no healing report: %s", got)
	for n, prompt := range w.prompts() {
		assert.Truef(t, strings.Contains(prompt, "fetch_prices is now disabled and cannot be called") &&
			strings.Contains(prompt, "post_report is now disabled"), "request %d has no healing report: %s", n, prompt)
	}
	first := w.model.Requests()[0].Messages // the report is data
	data, _, _ := strings.Cut(first[1].Content, "[End of context]")
	assert.Truef(t, !strings.Contains(first[0].Content, "503") && strings.Contains(data, "503"), "messages %+v", first)
	for _, r := range w.model.Requests() {
		for _, tool := range r.Tools {
			assert.True(t, tool.Function.Name != "fetch_prices", "a healed skill is offered")
		}
	}
	output := pgtest.Value[json.RawMessage](t, w.pool, `
		select output from agent_activity where trace_id = $1 and skill_name = 'heal_skill'
		  and input ->> 'skill' = 'fetch_prices'`, x.TraceID)
	var healed struct {
		Reason   string
		Evidence struct {
			Streak   int
			Failures []any
		}
	}
	err := json.Unmarshal(output, &healed)
	assert.Truef(t, err == nil && healed.Evidence.Streak == 3 && len(healed.Evidence.Failures) == 3 &&
		strings.Contains(healed.Reason, "503"), "evidence is %s (%v)", output, err)
}

func TestHealingIsNewsForReflection(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.addFailingSkill(t, "fetch_prices")
	w.setReplies(map[string][]modeltest.Reply{"Reflect": {modeltest.Text("ok")}})
	w.surface.Heal.Failures = 4
	w.runCompleted(t) // its reflection covers the failures
	w.surface.Heal.Failures = 3
	x, _ := w.runCompleted(t)
	prompts := w.prompts()
	assert.Truef(t, len(prompts) == 2 && strings.Contains(prompts[1], "fetch_prices is now disabled"),
		"no prompt has the healing report: %s in %q", w.traceLines(t, x.TraceID), prompts)
	w.runCompleted(t)
	assert.Equal(t, 2, len(w.model.Requests()))
}

func TestIdleHeartbeatCallsNoModel(t *testing.T) {
	t.Parallel()
	idle := []string{
		"self_heal success", "follow_through skipped", "advance_plan skipped", "run_automations skipped", "reflect skipped",
		"save_memories skipped",
	}
	t.Run("from the first to the tenth", func(t *testing.T) {
		w := newTestHeartbeat(t)
		for n := range 10 {
			x, _ := w.runCompleted(t)
			assert.Equal(t, "", cmp.Diff(idle, w.traceLines(t, x.TraceID)), n)
		}
		assert.Equal(t, 0, len(w.model.Requests()))
	})
	t.Run("after a full one", func(t *testing.T) {
		w := newBusyHeartbeat(t)
		w.runCompleted(t)
		requests := len(w.model.Requests())
		for range 3 {
			x, _ := w.runCompleted(t)
			assert.NoDiff(t, idle, w.traceLines(t, x.TraceID))
		}
		assert.Equal(t, 0, len(w.model.Requests())-requests)
	})
}

func TestReflectionIgnoresOwnErrors(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.builtins["broken"] = func(context.Context, skills.Call) (any, error) { return nil, errors.New("it is broken") }
	w.addSkill(t, skills.Definition{Name: "broken"})
	w.addAutomation(t, automations.Definition{Name: "a", Skill: "broken"})
	w.setReplies(map[string][]modeltest.Reply{"Reflect": {modeltest.ToolCall("nope", `{}`), modeltest.Text("ok")}})
	w.runCompleted(t)
	requests := len(w.model.Requests())
	w.runCompleted(t)
	total := len(w.model.Requests())
	assert.Truef(t, requests == 2 && total == requests, "asked %d times, then %d more", requests, total-requests)
}

func TestSkillAutomationCallsNoModel(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.addAutomation(t, automations.Definition{Name: "a", Skill: "look"})
	x, _ := w.runCompleted(t)
	want := []string{
		"self_heal success", "follow_through skipped", "advance_plan skipped", "run_automations success",
		"run_automation success",
		"look success", "reflect skipped", "save_memories skipped",
	}
	assert.NoDiff(t, want, w.traceLines(t, x.TraceID))
	assert.Equal(t, 0, len(w.model.Requests()))
}

func TestPhasesWithoutModel(t *testing.T) {
	t.Parallel()
	w := newBusyHeartbeat(t)
	w.setReplies(nil)
	w.model.Handle(func(int, request) modeltest.Reply { return modeltest.Status(503, 0) })
	x, got := w.run(t)
	require.Truef(t, x.Status == executions.Failed && strings.Contains(postgres.Deref(x.ErrorMessage), "advance_plan: ") &&
		strings.Contains(postgres.Deref(x.ErrorMessage), "; reflect: "), "the heartbeat is %s: %s", x.Status,
		postgres.Deref(x.ErrorMessage))
	want := []string{
		"self_heal success", "follow_through skipped", "advance_plan error", "run_automations success", "reflect error",
		"save_memories skipped",
	}
	assert.NoDiff(t, want, phases(w.traceLines(t, x.TraceID)))
	assert.Equal(t, 6, len(got.Phases), got.Phases)
	assert.Truef(t, strings.HasPrefix(got.Phases["advance_plan"], "failed: "), "phases %v", got.Phases)
	assert.Equal(t, 1, w.calls.Of("look"), "calls of look")
	states := pgtest.Value[[]string](t, w.pool, `select array_agg(status order by status) from agent_automation_runs`)
	assert.NoDiff(t, []string{"error", "success"}, states)
}

func TestNotesOfFailedPhase(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.addObjective(t, objectives.Definition{Name: "first", Goal: "a", Priority: 1, Steps: []string{"x"}})
	w.addObjective(t, objectives.Definition{Name: "second", Goal: "b", Priority: 2, Steps: []string{"x"}})
	w.setReplies(map[string][]modeltest.Reply{
		"Objective first":  {rememberTool("from the first"), modeltest.Text("ok")},
		"Objective second": {rememberTool("from the second"), modeltest.Status(400, 0)},
	})
	x, _ := w.run(t)
	assert.Equal(t, executions.Failed, x.Status)
	pgtest.Equal(t, w.pool, 2, `select count(*) from agent_memory`)
}

func TestModelReadsMemoryError(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.addObjective(t, objectives.Definition{Name: "o", Goal: "a", Steps: []string{"x"}})
	w.setReplies(map[string][]modeltest.Reply{"Objective o": {
		modeltest.ToolCall("remember", `{"key":"nul","value":"a\u0000b"}`).
			AndCall("remember", fmt.Sprintf(`{"key":%q,"value":1}`, strings.Repeat("é", 200))).
			AndCall("remember", `{"key":"a/b\u0000","value":1}`).
			AndCall("remember", `{"key":" ","value":1}`).
			AndCall("remember", `{"key":"good","value":"C:\\u0000"}`),
		modeltest.Text("ok"),
	}})
	w.runCompleted(t)
	keys := pgtest.Value[[]string](t, w.pool, `select array_agg(key) from agent_memory`)
	assert.Truef(t, len(keys) == 1 && keys[0] == "good", "memories are %q", keys)
	messages := w.model.Requests()[1].Messages[3:8]
	for n, m := range messages {
		assert.Equal(t, n < 4, strings.Contains(strings.ToLower(m.Content), "invalid_params"), n, m.Content)
	}
}

func TestHeartbeatTools(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	builtin := func(context.Context, skills.Call) (any, error) { return nil, nil }
	for name, scope := range map[string]string{
		"outer": skills.ScopeExternal, "any": skills.ScopeBoth,
		"off": skills.ScopeInternal,
	} {
		w.builtins[name] = builtin
		w.addSkill(t, skills.Definition{Name: name, Scope: scope})
	}
	pgtest.Exec(t, w.pool, `update agent_skills set enabled = false, disabled_by = 'admin' where name = 'off'`)
	w.addObjective(t, objectives.Definition{Name: "o", Goal: "a", Steps: []string{"x"}})
	w.addAutomation(t, automations.Definition{Name: "p", Prompt: "Task p."})
	w.replyNothing()
	w.runCompleted(t)
	want := map[string]string{
		"Objective o": "add_steps any complete_step fail_step look remember", "Task p": "any look remember",
		"Reflect": "remember",
	}
	for _, r := range w.model.Requests() {
		var names []string
		for _, tool := range r.Tools {
			names = append(names, tool.Function.Name)
		}
		for word, tools := range want {
			assert.Truef(t, !strings.Contains(r.Messages[1].Content, word) || strings.Join(names, " ") == tools,
				"%s is offered %q, want %q", word, names, tools)
		}
	}
}

// An idle heartbeat reads the log of 7 days at most, also if the last reflection is older, and sums no spend.
func TestReflectionReadsSevenDays(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	pgtest.Exec(t, w.pool, `
		insert into agent_activity (id, created_at, finished_at, trace_id, skill_name, kind, status)
		select lanekeeper.agent_uuid7(r.at), r.at, r.at, 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', r.skill, r.kind, 'success'
		  from (select now() - interval '20 days' as at, 'reflect' as skill, 'phase' as kind
		        union all
		        select now() - interval '8 days' - n * interval '1 minute', 'look', 'call' from generate_series(1, 5000) n
		        union all
		        select now() - n * interval '1 minute', 'model_call', 'model' from generate_series(1, 1500) n) r`)
	pgtest.Exec(t, w.pool, `analyze agent_activity`)
	recorded, recorder := pgtest.Recorded(t, w.pool)
	w.surface.Pool = recorded
	w.runCompleted(t)
	checked := 0
	for _, q := range recorder.Queries() {
		if strings.Contains(q.SQL, "heal_skill") && strings.Contains(q.SQL, "'reflect'") {
			rows, err := w.pool.Query(t.Context(), "explain (analyze, timing off, summary off) "+q.SQL, q.Args...)
			require.NoError(t, err)
			lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			plan := strings.Join(lines, "\n")
			for _, n := range regexp.MustCompile(`(?:actual rows=|by Filter: )(\d+)`).FindAllStringSubmatch(plan, -1) {
				read, err := strconv.Atoi(n[1])
				assert.Truef(t, err == nil && read < 2000, "the reflection reads too much:\n%s", plan)
			}
			checked++
		}
		assert.Truef(t, !strings.Contains(q.SQL, "total_tokens"), "an idle heartbeat sums the spend:\n%s", q.SQL)
	}
	assert.Equal(t, 1, checked)
}
