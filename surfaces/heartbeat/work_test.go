package heartbeat_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/automations/runner"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/trace"
)

// runWithoutLanes runs heartbeats concurrently. Without lanes, only the claims of the work exclude each other.
func (w *testHeartbeat) runWithoutLanes(t *testing.T, n int) []executions.Execution {
	t.Helper()
	runs := make([]executions.Execution, n)
	var group sync.WaitGroup
	for i := range runs {
		e, err := executions.New(w.pool, executions.Options{Keeper: lanes.NewKeeper(w.pool, lanes.Options{Disabled: true})})
		require.NoError(t, err)
		beat := *w.surface
		require.NoError(t, beat.Register(e))
		group.Go(func() {
			x, err := e.RunSync(context.WithoutCancel(t.Context()), executions.Spec{Flow: "heartbeat", Surface: trace.Heartbeat})
			assert.NoError(t, err)
			runs[i] = x
		})
	}
	group.Wait()
	for _, x := range runs {
		assert.Equal(t, executions.Completed, x.Status, postgres.Deref(x.ErrorMessage))
	}
	return runs
}

func TestDueRunOnceUnderRace(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	for n := range 3 {
		w.addAutomation(t, automations.Definition{Name: fmt.Sprintf("a%d", n), Skill: "look"})
	}
	w.runWithoutLanes(t, 4)
	assert.Equal(t, 3, w.calls.Of("look"))
	pgtest.Equal(t, w.pool, 3, `select count(*) from agent_automation_runs where status = 'success'`)
	pgtest.Equal(t, w.pool, 3, `select count(*) from agent_automations where next_run_at > clock_timestamp()`)
}

func TestHeldAutomationIsSkipped(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	w.addAutomation(t, automations.Definition{Name: "a", Skill: "look"})
	w.holdLane(t, "automation:"+pgtest.Value[string](t, w.pool, `select id::text from agent_automations`))
	x, _ := w.runCompleted(t)
	lines := strings.Join(w.traceLines(t, x.TraceID), ", ")
	assert.Truef(t, strings.Contains(lines, "run_automations success, run_automation skipped") && w.calls.Of("look") == 0,
		"the trace is %s", lines)
	pgtest.Equal(t, w.pool, "automations: a is run by another execution",
		`select output ->> 'summary' from agent_activity where skill_name = 'run_automations'`)
	pgtest.Equal(t, w.pool, 1,
		`select count(*) from agent_activity where status = 'skipped' and lane like 'automation:%'`)
	pgtest.Equal(t, w.pool, 0, `select count(*) from agent_automation_runs`)
}

func TestAutomationRetriesThenDead(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	w.surface.Heal.Failures = 99
	w.builtins["look"] = func(context.Context, skills.Call) (any, error) {
		return nil, &skills.CallError{Class: "timeout", Message: "no answer"}
	}
	w.addAutomation(t, automations.Definition{Name: "a", Skill: "look", MaxAttempts: 3})
	for attempt, want := range []string{"error 1", "error 2", "dead 3"} {
		x, got := w.runCompleted(t)
		require.Equal(t, want,
			pgtest.Value[string](t, w.pool, `select status || ' ' || attempt from agent_automation_runs`), attempt+1)
		assert.Truef(t, strings.Contains(got.Phases["run_automations"], "a failed: no answer"), "summary is %v", got.Phases)
		pgtest.Equal(t, w.pool, "timeout", `select error_class from agent_activity where skill_name = 'run_automation'
			and trace_id = $1`, x.TraceID)
		x, _ = w.runCompleted(t) // within the back-off
		pgtest.Equal(t, w.pool, 0,
			`select count(*) from agent_activity where skill_name = 'run_automation' and trace_id = $1`, x.TraceID)
		pgtest.Exec(t, w.pool, `update agent_automation_runs set retry_at = clock_timestamp() where retry_at is not null`)
	}
	x, _ := w.runCompleted(t)
	assert.True(t, strings.Contains(strings.Join(w.traceLines(t, x.TraceID), ","),
		"run_automations skipped"), "a dead run was tried again")
}

func TestFailingAutomationDoesNotBlockOthers(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	for _, d := range []automations.Definition{
		{Name: "a", Skill: "look"},
		{Name: "b", Skill: "gone"},
		{Name: "c", Skill: "look"},
		{Name: "d", Skill: "off"},
	} {
		w.addAutomation(t, d)
	}
	w.addSkill(t, skills.Definition{Name: "off"})
	w.builtins["off"] = func(context.Context, skills.Call) (any, error) {
		t.Error("a disabled skill was called")
		return nil, nil
	}
	_, err := skills.Disable(t.Context(), w.pool, "off", "admin", "not now", nil)
	require.NoError(t, err)
	pgtest.Exec(t, w.pool, `update agent_automations set cron = '0 0 30 2 *', next_run_at = next_run_at - interval '1 hour'
		where name = 'a'`)
	x, got := w.runCompleted(t)
	text := got.Phases["run_automations"]
	assert.Contains(t, text, "a failed: ", "b failed: ", "c succeeded")
	assert.Truef(t, !strings.Contains(text, "d failed"), "an automation that is paused with its skill ran: %q", text)
	pgtest.Equal(t, w.pool, 2, `select count(*) from agent_activity where skill_name = 'run_automation'
		and status = 'error' and trace_id = $1`, x.TraceID)
	assert.Equal(t, 1, w.calls.Of("look"))
}

func TestStalledPromptAutomationRetries(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.addAutomation(t, automations.Definition{Name: "p", Prompt: "Task p."})
	nope := modeltest.ToolCall("nope", `{}`)
	w.setReplies(map[string][]modeltest.Reply{"Task p": {nope, nope, nope}})
	x, _ := w.runCompleted(t)
	pgtest.Equal(t, w.pool, "error", `select status from agent_automation_runs`)
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_activity where error_class = 'stall' and trace_id = $1`,
		x.TraceID)
}

// The heartbeat of the default agent also makes the approved calls of an agent without a heartbeat.
func TestAutomationNeedsApproval(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	w.surface.Loop.Agents = &agents.Directory{}
	for _, d := range []agents.Definition{{Name: "house", Default: true}, {Name: "sales"}} {
		_, err := agents.Put(t.Context(), w.pool, d)
		require.NoError(t, err)
	}
	w.builtins["drop"] = func(ctx context.Context, _ skills.Call) (any, error) {
		span, _ := trace.From(ctx)
		w.calls.Add(span.Agent)
		return "dropped", nil
	}
	w.addSkill(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove})
	w.addAutomation(t, automations.Definition{Name: "a", Skill: "drop", Agent: "sales"})
	x, _ := w.runCompleted(t)
	require.Equal(t, 0, w.calls.Of("sales"))
	lines := strings.Join(w.traceLines(t, x.TraceID), ", ")
	assert.Truef(t, strings.Contains(lines,
		"run_automation pending_approval, drop pending_approval"), "the trace is %s", lines)
	pending, err := approvals.Pending(t.Context(), w.pool, 5)
	require.Truef(t, err == nil && len(pending) == 1, "pending are %+v, %v", pending, err)
	assert.Equal(t, "sales", pending[0].Agent)
	_, err = approvals.Decide(t.Context(), w.pool, pending[0].ID, true, "admin", "")
	require.NoError(t, err)
	x, _ = w.runCompleted(t)
	lines = strings.Join(w.traceLines(t, x.TraceID), ", ")
	assert.Truef(t, strings.Contains(lines,
		"follow_through success, drop success") && w.calls.Of("sales") == 1, "the trace is %s", lines)
}

func TestRunSaysWhyItsApprovalClosed(t *testing.T) {
	t.Parallel()
	for change, want := range map[string]string{
		`select decide_agent_approval(id, false, 'ana', 'too dear') from agent_approvals`: "rejected by ana: too dear",
		`update agent_skills set revision = 2 where name = 'drop'`:                        "not called: the skill drop was changed",
	} {
		w := newTestHeartbeat(t)
		w.replyNothing()
		w.addSkill(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove})
		w.addAutomation(t, automations.Definition{Name: "a", Skill: "drop"})
		w.runCompleted(t)
		awaits := pgtest.Value[string](t, w.pool, `select error_message from agent_automation_runs`)
		require.True(t, strings.HasPrefix(awaits, "skill drop awaits approval "), awaits)
		pgtest.Exec(t, w.pool, change)
		got := pgtest.Value[string](t, w.pool, `select status || ' ' || error_message from agent_automation_runs`)
		assert.Contains(t, got, "skipped "+want, awaits[len("skill drop awaits "):])
	}
}

// newPayer returns a heartbeat with the skill pay and two agents: house, the default, and sales. Every prompt of sales
// asks for pay.
func newPayer(t *testing.T) (*testHeartbeat, []agents.Agent) {
	t.Helper()
	w := newTestHeartbeat(t)
	w.builtins["pay"] = func(_ context.Context, c skills.Call) (any, error) {
		w.calls.Add(string(c.Args))
		return "receipt 7", nil
	}
	w.addSkill(t, skills.Definition{Name: "pay", Trust: skills.TrustApprove, Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"eur": map[string]any{"type": "integer"}},
	}})
	return w, w.declare(t, agents.Definition{Name: "house"},
		agents.Definition{Name: "sales", Heartbeat: &agents.Heartbeat{Prompt: "Pay the rent."}})
}

// decide decides the pending approval.
func (w *testHeartbeat) decide(t *testing.T, approve bool, reason string) {
	t.Helper()
	pending, err := approvals.Pending(t.Context(), w.pool, 5)
	require.Truef(t, err == nil && len(pending) == 1, "pending are %+v, %v", pending, err)
	_, err = approvals.Decide(t.Context(), w.pool, pending[0].ID, approve, "admin", reason)
	require.NoError(t, err)
}

// newApprovedPayment is newPayer with an approved payment of 55, which no heartbeat has made.
func newApprovedPayment(t *testing.T) (*testHeartbeat, []agents.Agent) {
	t.Helper()
	w, all := newPayer(t)
	w.setReplies(map[string][]modeltest.Reply{"Pay the rent": {modeltest.ToolCall("pay", `{"eur":55}`)}})
	w.runAgent(t, all[1])
	w.decide(t, true, "")
	w.replyNothing()
	return w, all
}

func TestAgentsHeartbeatRunsItsApprovedCalls(t *testing.T) {
	t.Parallel()
	w, all := newApprovedPayment(t)
	other := agents.Definition{Name: "press", Heartbeat: &agents.Heartbeat{}}
	_, err := agents.Put(t.Context(), w.pool, other)
	require.NoError(t, err)
	press, err := w.surface.Loop.Agents.Find(t.Context(), w.pool, "press")
	require.NoError(t, err)
	w.runAgent(t, press)
	assert.Equal(t, 0, w.calls.Of(`{"eur": 55}`))
	x := w.runAgent(t, all[1])
	assert.Equal(t, 1, w.calls.Of(`{"eur": 55}`))
	assert.Contains(t, strings.Join(w.traceLines(t, x.TraceID), ", "), "follow_through success, pay success")
}

func TestTwoHeartbeatsMakeAnApprovedCallOnce(t *testing.T) {
	t.Parallel()
	w, all := newApprovedPayment(t)
	row, err := w.pool.Begin(t.Context()) // holds both at the approval's use
	require.NoError(t, err)
	defer row.Rollback(context.WithoutCancel(t.Context()))
	pgtest.Exec(t, row, `select from agent_approvals for update`)
	var group errgroup.Group
	for _, a := range []agents.Agent{all[0], all[1]} {
		e := w.engine(t, false)
		group.Go(func() error {
			_, err := e.RunSync(context.WithoutCancel(t.Context()), heartbeat.SpecOf(a))
			return err
		})
	}
	pgtest.AwaitBlocked(t, w.pool, 2, "use_agent_approval")
	require.NoError(t, row.Rollback(t.Context()))
	require.NoError(t, group.Wait())
	assert.Equal(t, 1, w.calls.Of(`{"eur": 55}`))
	pgtest.Equal(t, w.pool, "consumed", `select string_agg(status, ' ') from agent_approvals`)
	pgtest.Equal(t, w.pool, 1, `select count(*) from agent_activity where skill_name = 'pay' and status = 'success'`)
}

func TestPromptHasDecidedCalls(t *testing.T) {
	t.Parallel()
	w, all := newPayer(t)
	last := func() string {
		prompts := w.prompts()
		return prompts[len(prompts)-1]
	}
	ask := func(args string) {
		w.setReplies(map[string][]modeltest.Reply{"Pay the rent": {modeltest.ToolCall("pay", args)}})
		w.runAgent(t, all[1])
	}
	ask(`{"eur":55}`)
	w.decide(t, true, "")
	ask(`{"eur":77}`)
	assert.Contains(t, last(), `- pay {"eur":55}: approved, success, result "receipt 7"`)
	w.decide(t, false, "not\nthis month")
	w.replyNothing()
	w.runAgent(t, all[1])
	assert.Contains(t, last(), `- pay {"eur":77}: rejected, reason "not\nthis month"`)
	assert.Truef(t, !strings.Contains(last(), "55"), "the prompt is %s", last())
	w.runAgent(t, all[1])
	assert.Truef(t, !strings.Contains(last(), "pay"), "the prompt is %s", last())
}

// The default agent's heartbeat makes the call slowly. The first prompt after the call has its result.
func TestPromptHasSlowCallAfterItsEnd(t *testing.T) {
	t.Parallel()
	w, all := newApprovedPayment(t)
	began, ended := make(chan struct{}), make(chan struct{})
	w.builtins["pay"] = func(ctx context.Context, _ skills.Call) (any, error) {
		close(began)
		<-ended
		return "receipt 7", ctx.Err()
	}
	var group errgroup.Group
	e := w.engine(t, false)
	group.Go(func() error {
		_, err := e.RunSync(context.WithoutCancel(t.Context()), heartbeat.SpecOf(all[0]))
		return err
	})
	<-began
	w.runAgent(t, all[1])
	close(ended)
	require.NoError(t, group.Wait())
	prompts := w.prompts()
	assert.Truef(t, !strings.Contains(prompts[len(prompts)-1], "55"), "prompts %q", prompts)
	w.runAgent(t, all[1])
	prompts = w.prompts()
	assert.Contains(t, prompts[len(prompts)-1], `- pay {"eur":55}: approved, success, result "receipt 7"`)
}

// newHeartbeatWithApprovals returns a heartbeat with the skill drop and two approved calls of it.
func newHeartbeatWithApprovals(t *testing.T) *testHeartbeat {
	t.Helper()
	w := newTestHeartbeat(t)
	w.replyNothing()
	w.builtins["drop"] = func(_ context.Context, c skills.Call) (any, error) {
		w.calls.Add(string(c.Args))
		return "dropped", nil
	}
	w.addSkill(t, skills.Definition{Name: "drop", Trust: skills.TrustApprove, Parameters: map[string]any{
		"type": "object", "properties": map[string]any{"n": map[string]any{"type": "integer"}},
	}})
	for n := range 2 {
		args := fmt.Sprintf(`{"n": %d}`, n)
		hash, err := approvals.Hash([]byte(args))
		require.NoError(t, err)
		pgtest.Exec(t, w.pool, `
			insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, status, expires_at)
			values ('op_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'drop', 1, $1, $2, 'approved',
			  clock_timestamp() + interval '1 day')`, args, hash)
	}
	return w
}

func TestApprovedCallRunsOnceUnderRace(t *testing.T) {
	t.Parallel()
	w := newHeartbeatWithApprovals(t)
	w.runWithoutLanes(t, 4)
	for n := range 2 {
		assert.Equal(t, 1, w.calls.Of(fmt.Sprintf(`{"n": %d}`, n)), n)
	}
	pgtest.Equal(t, w.pool, 2, `select count(*) from agent_approvals where status = 'consumed'`)
	pgtest.Equal(t, w.pool, 2, `select count(*) from agent_activity where skill_name = 'drop'`)
}

func TestInvalidApprovalDoesNotRun(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"rejected": `update agent_approvals set status = 'rejected'`,
		"expired":  `update agent_approvals set expires_at = clock_timestamp()`,
		"changed":  `update agent_skills set revision = 2 where name = 'drop'`,
		"disabled": `update agent_skills set enabled = false, disabled_by = 'admin' where name = 'drop'`,
	} {
		t.Run(name, func(t *testing.T) {
			w := newHeartbeatWithApprovals(t)
			pgtest.Exec(t, w.pool, change)
			x, _ := w.runCompleted(t)
			lines := strings.Join(w.traceLines(t, x.TraceID), ", ")
			assert.Truef(t, strings.Contains(lines, "follow_through skipped") && !strings.Contains(lines, "drop"),
				"the trace is %s", lines)
		})
	}
}

func TestForeignStepsAreRejected(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	_, foreignSteps := w.addObjective(t, objectives.Definition{
		Name: "zz foreign", Goal: "b", Priority: 9,
		Steps: []string{"theirs"},
	})
	pgtest.Exec(t, w.pool, `update agent_objectives set due_at = clock_timestamp() + interval '1 day'
		where name = 'zz foreign'`)
	_, ownSteps := w.addObjective(t, objectives.Definition{Name: "own", Goal: "a", Steps: []string{"mine"}})
	w.setReplies(map[string][]modeltest.Reply{"Objective own": {
		completeStep(foreignSteps[0]).AndCall("fail_step", `{"step_id":"`+foreignSteps[0]+`","reason":"x"}`), completeStep("no id"),
		lookAndComplete(ownSteps[0]), completeStep(ownSteps[0]), modeltest.Text("ok"),
	}})
	w.runCompleted(t)
	pgtest.Equal(t, w.pool, "mine done 1, theirs pending 0", `select string_agg(title || ' ' || status || ' ' || attempts,
		', ' order by title) from agent_objective_steps`)
	for n, want := range map[int]string{
		1: "there is no pending step", 2: "there is no pending step", 3: "done",
		4: "there is no pending step",
	} {
		messages := w.model.Requests()[n].Messages
		last := messages[len(messages)-1].Content
		assert.Truef(t, strings.Contains(last, want), "after reply %d the model got %s", n, last)
	}
}

func TestPlanAndCompleteInOneTurn(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.addObjective(t, objectives.Definition{Name: "plan", Goal: "a"})
	w.model.Handle(func(_ int, req request) modeltest.Reply {
		last := req.Messages[len(req.Messages)-1]
		switch {
		case !strings.Contains(req.Messages[1].Content, "Objective plan"):
			return modeltest.Text("ok")
		case len(req.Messages) == 2:
			return modeltest.ToolCall("add_steps", `{"titles":["one","two"]}`)
		case last.Name == "complete_step":
			return modeltest.Text("ok")
		}
		_, rest, _ := strings.Cut(last.Content, `"id":"`)
		id, _, _ := strings.Cut(rest, `"`)
		return lookAndComplete(id)
	})
	_, got := w.runCompleted(t)
	states := pgtest.Value[string](t, w.pool, `select string_agg(title || ' ' || status, ', ' order by position)
		from agent_objective_steps`)
	if states != "one done, two pending" || !strings.Contains(got.Phases["advance_plan"], "plan: 1 of 2 steps done") {
		t.Errorf("steps are %s, summary %v", states, got.Phases)
	}
}

func TestObjectiveBackoff(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.addObjective(t, objectives.Definition{Name: "stuck", Goal: "a", Steps: []string{"x"}})
	w.setReplies(map[string][]modeltest.Reply{"Objective stuck": {
		modeltest.Text("I cannot."),
		modeltest.Text("Still not."),
	}})
	// A run without progress does not count if others have reserved the limit of the day.
	w.surface.Loop.Limits = budgets.Limits{Day: budgets.Limit{Tokens: 50_000}, MaxWait: time.Millisecond}
	enginetest.ReserveDay(t, w.pool, 50_000, 49_000, 990)
	w.runCompleted(t)
	o, err := objectives.Get(t.Context(), w.pool, "stuck")
	assert.Truef(t, err == nil && o.IdleRuns == 0 && len(w.model.Requests()) == 0, "objective is %+v, %v", o, err)
	w.surface.Loop.Limits = budgets.Limits{}
	w.runCompleted(t)
	o, err = objectives.Get(t.Context(), w.pool, "stuck")
	assert.Truef(t, err == nil && o.IdleRuns == 1 && o.Status == objectives.Active, "objective is %+v, %v", o, err)
	requests := len(w.model.Requests())
	assert.True(t, requests != 0, "the model was not asked at all")
	w.runCompleted(t)
	n := len(w.model.Requests())
	assert.Truef(t, n == requests, "the next heartbeat asked the model %d times", n-requests)
	pgtest.Exec(t, w.pool, `update agent_objectives set goal = 'b'`)
	w.runCompleted(t)
	assert.True(t, len(w.model.Requests()) != requests, "an edited objective was not worked on")
}

// The objectives of a heartbeat share a budget. The limits of an agent bound its own turns alone, and an objective for
// which nothing is left is not delayed.
func TestObjectivesShareBudget(t *testing.T) {
	t.Parallel()
	for used, want := range map[int]string{150_000: "done 0", 199_800: "pending 0"} {
		t.Run(fmt.Sprint(used), func(t *testing.T) {
			t.Parallel()
			w := newTestHeartbeat(t)
			w.declare(t, agents.Definition{Name: "house"},
				agents.Definition{Name: "sales", Limits: agents.Limits{Tokens: 60_000}})
			_, first := w.addObjective(t, objectives.Definition{
				Name: "first", Goal: "a", Agent: "house", Priority: 1, Steps: []string{"look"},
			})
			_, second := w.addObjective(t, objectives.Definition{
				Name: "second", Goal: "b", Agent: "sales", Priority: 2, Steps: []string{"look"},
			})
			w.setReplies(map[string][]modeltest.Reply{
				"Objective first":  {lookAndComplete(first[0]).WithUsage(100, used, 0), modeltest.Text("ok")},
				"Objective second": {lookAndComplete(second[0]), modeltest.Text("ok")},
			})
			w.runCompleted(t)
			pgtest.Equal(t, w.pool, want, `
				select s.status || ' ' || o.idle_runs from agent_objectives o
				  join agent_objective_steps s on s.objective_id = o.id where o.name = 'second'`)
		})
	}
}

func TestHeldObjectiveIsSkipped(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	o, _ := w.addObjective(t, objectives.Definition{Name: "o", Goal: "a", Steps: []string{"x"}})
	w.holdLane(t, "objective:"+o.ID)
	x, _ := w.runCompleted(t)
	want := []string{
		"self_heal success", "follow_through skipped", "advance_plan success", "advance_objective skipped",
		"run_automations skipped", "reflect skipped", "save_memories skipped",
	}
	assert.NoDiff(t, want, w.traceLines(t, x.TraceID))
	assert.Equal(t, 0, len(w.model.Requests()))
}

func TestTrialSkillReturnsToService(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.addFailingSkill(t, "fetch")
	w.addAutomation(t, automations.Definition{Name: "a", Skill: "fetch"})
	w.replyNothing()
	w.runCompleted(t)
	require.True(t, w.calls.Of("fetch") == 0 && !pgtest.Value[bool](t, w.pool, `select enabled from agent_automations`),
		"the skill was not taken out of service, or its automation not paused")
	pgtest.Exec(t, w.pool, `update agent_skills set disabled_at = disabled_at - interval '25 hours' where name = 'fetch'`)
	w.addObjective(t, objectives.Definition{Name: "o", Goal: "a", Steps: []string{"x"}})
	w.setReplies(map[string][]modeltest.Reply{"Objective o": {modeltest.ToolCall("fetch", `{}`), modeltest.Text("ok")}})
	x, _ := w.runCompleted(t)
	assert.Contains(t, w.prompts()[len(w.prompts())-1], "fetch is on trial")
	lines := strings.Join(w.traceLines(t, x.TraceID), ", ")
	assert.Truef(t, strings.Contains(lines, "settle_trial success") && w.calls.Of("fetch") >= 1, "the trace is %s", lines)
	assert.True(t, pgtest.Value[bool](t, w.pool, `select enabled from agent_skills where name = 'fetch'`) &&
		pgtest.Value[bool](t, w.pool, `select enabled from agent_automations`),
		"the skill or its automation is not back in service")
}

// If only automations use a skill on trial, the next scheduled run is the trial, without a model call.
func TestScheduledRunIsTrial(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.addFailingSkill(t, "fetch")
	w.addAutomation(t, automations.Definition{Name: "a", Skill: "fetch"})
	w.addAutomation(t, automations.Definition{Name: "b", Skill: "fetch"})
	w.replyNothing()
	w.runCompleted(t)
	due := `update agent_automations set next_run_at = clock_timestamp() - interval '1 second'`
	pgtest.Exec(t, w.pool, due)
	w.runCompleted(t)
	require.Equal(t, 0, w.calls.Of("fetch"))
	pgtest.Exec(t, w.pool, `update agent_skills set disabled_at = disabled_at - interval '25 hours' where name = 'fetch'`)
	x, _ := w.runCompleted(t)
	lines := strings.Join(w.traceLines(t, x.TraceID), ", ")
	assert.Truef(t, strings.Contains(lines, "settle_trial success") && w.calls.Of("fetch") >= 1, "the trace is %s", lines)
	assert.True(t, pgtest.Value[bool](t, w.pool, `select bool_and(enabled) from agent_automations`) &&
		pgtest.Value[bool](t, w.pool, `select enabled from agent_skills where name = 'fetch'`),
		"the skill or an automation is not back in service")
}

// Due event runs wait while the skill is disabled. One of them is the trial, and the others follow.
func TestEventRunIsTrial(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	w.addFailingSkill(t, "fetch")
	for _, name := range []string{"a", "b"} {
		d := automations.Definition{Name: name, Event: "E", Skill: "fetch", MaxAttempts: 1}
		_, err := automations.Put(t.Context(), w.pool, d)
		require.NoError(t, err)
	}
	pgtest.Exec(t, w.pool, `select raise_agent_event('E', 'k', '{}', null, '')`)
	w.runCompleted(t)
	require.Equal(t, 0, w.calls.Of("fetch"))
	pgtest.Exec(t, w.pool, `update agent_skills set disabled_at = disabled_at - interval '25 hours' where name = 'fetch'`)
	x, _ := w.runCompleted(t)
	pgtest.Equal(t, w.pool, 2, `select count(*) from agent_automation_runs where status = 'success' and trace_id = $1`,
		x.TraceID)
	assert.True(t, pgtest.Value[bool](t, w.pool, `select bool_and(enabled) from agent_automations`) &&
		pgtest.Value[bool](t, w.pool, `select enabled from agent_skills where name = 'fetch'`),
		"the skill or an automation is not back in service")
}

func TestHealIsOneTransaction(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.addFailingSkill(t, "fetch")
	w.replyNothing()
	pgtest.Exec(t, w.pool, `
		create function refuse_heal_row() returns trigger language plpgsql as $$
		begin if new.skill_name = 'heal_skill' then raise exception 'no room'; end if; return new; end $$;
		create trigger refuse_heal_row before insert on agent_activity for each row execute function refuse_heal_row()`)
	x, _ := w.run(t)
	assert.Truef(t, x.Status == executions.Failed && strings.Contains(postgres.Deref(x.ErrorMessage), "self_heal: "),
		"the heartbeat is %s: %s", x.Status, postgres.Deref(x.ErrorMessage))
	assert.True(t, pgtest.Value[bool](t, w.pool, `select enabled from agent_skills where name = 'fetch'`),
		"a skill was disabled without evidence in the ledger")
	assert.Equal(t, 6, len(phases(w.traceLines(t, x.TraceID))))
}

// A heartbeat runs due event runs if no dispatcher does, and none runs twice.
func TestEventRunsAreCreatedOnce(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	w.replyNothing()
	for i := range 4 {
		d := automations.Definition{Name: fmt.Sprint("on event ", i), Event: "E", Skill: "look"}
		_, err := automations.Put(t.Context(), w.pool, d)
		require.NoError(t, err)
		w.addAutomation(t, automations.Definition{Name: fmt.Sprint("scheduled ", i), Skill: "look"})
	}
	pgtest.Exec(t, w.pool, `select raise_agent_event('E', 'k', '{}', null, '')`)
	e := w.engine(t, true)
	r := &runner.Runner{
		Pool: w.pool, Loop: w.surface.Loop, Engine: e, Logger: slog.New(slog.DiscardHandler),
		Agent: "agent",
	}
	require.NoError(t, r.Register())
	var group sync.WaitGroup
	for range 2 {
		group.Go(func() {
			_, err := r.Dispatch(t.Context())
			assert.NoError(t, err)
		})
		group.Go(func() { w.run(t) })
	}
	group.Wait()
	pgtest.Until(t, w.pool, 8, `select count(*) from agent_automation_runs where status = 'success'`)
	if n := pgtest.Value[int](t, w.pool, `select count(*) from agent_automation_runs`); n != 8 || w.calls.Of("look") != 8 {
		t.Errorf("%d runs, %d calls, want 8 of each", n, w.calls.Of("look"))
	}
}

// The model claims success without evidence.
func TestStepNeedsEvidence(t *testing.T) {
	t.Parallel()
	w := newTestHeartbeat(t)
	_, steps := w.addObjective(t, objectives.Definition{Name: "o", Goal: "a", Steps: []string{"first", "second"}})
	w.setReplies(map[string][]modeltest.Reply{"Objective o": {
		completeStep(steps[0]), modeltest.ToolCall("look", `{}`), completeStep(steps[0]), completeStep(steps[1]),
		modeltest.Text("Both done."),
	}})
	w.runCompleted(t)
	pgtest.Equal(t, w.pool, "first done, second pending", `select string_agg(title || ' ' || status, ', '
		order by position) from agent_objective_steps`)
	for n, rejected := range map[int]bool{1: true, 3: false, 4: true} {
		var words []string
		for _, m := range w.model.Requests()[n].Messages {
			words = append(words, m.Content)
		}
		last := strings.Join(words[len(words)-2:], " ")
		assert.Equal(t, rejected, strings.Contains(last, "Act first, then report"), n, last)
	}
	pgtest.Equal(t, w.pool, "look true", `select skill_name || ' ' || (given_by = '') from agent_objective_evidence`)
}
