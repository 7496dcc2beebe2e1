package runner_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/runner"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// testRunner is a runner with a database, an agent, skills and a scripted model.
type testRunner struct {
	pool      *pgxpool.Pool
	model     *modeltest.Server
	runner    *runner.Runner
	realCalls atomic.Int32 // calls that reached a real skill
}

func newTestRunner(t *testing.T) *testRunner {
	t.Helper()
	w := &testRunner{pool: pgtest.DB(t), model: modeltest.New(t)}
	_, err := agents.Put(t.Context(), w.pool, agents.Definition{
		Name: "sales", Default: true, Instructions: "You are Nora.", Pinned: []string{"policy/returns"},
	})
	require.NoError(t, err)
	_, err = builtins.Put(t.Context(), w.pool)
	require.NoError(t, err)
	own := map[string]skills.Builtin{}
	for name, trust := range map[string]string{"check_order": skills.TrustAuto, "refund": skills.TrustApprove} {
		own[name] = func(context.Context, skills.Call) (any, error) {
			w.realCalls.Add(1)
			return "real", nil
		}
		_, err := skills.Put(t.Context(), w.pool, skills.Definition{
			Name: name, Description: name, Handler: "builtin:" + name, Scope: skills.ScopeBoth, Trust: trust,
			Parameters: map[string]any{
				"type": "object", "required": []any{"order"},
				"properties": map[string]any{"order": map[string]any{"type": "integer"}},
			},
		}, skills.SourceWorkspace)
		require.NoError(t, err)
	}
	client, err := models.New(models.Config{
		BaseURL: w.model.URL(), Model: "gpt-4o-mini", Logger: slog.New(slog.DiscardHandler),
		Retry: models.Retry{Attempts: 1},
	})
	require.NoError(t, err)
	directory := &agents.Directory{Settings: agents.Settings{Name: "agent", Model: "gpt-4o-mini"}}
	all := builtins.New(w.pool, directory, nil)
	maps.Copy(all, own)
	registry, err := skills.New(skills.Options{Builtins: all, Pool: w.pool})
	require.NoError(t, err)
	both := []string{skills.ScopeInternal, skills.ScopeExternal}
	w.runner = &runner.Runner{
		Pool: w.pool, Engine: enginetest.New(t, w.pool), Model: client, Skills: registry, Agents: directory,
		Budget: reason.Budget{Iterations: 6}, Logger: slog.New(slog.DiscardHandler),
		Surfaces: map[string]runner.Surface{
			"chat": {Rules: "Be kind.", Scopes: []string{skills.ScopeExternal}}, "operate": {Rules: "Obey.", Scopes: both},
		},
	}
	require.NoError(t, w.runner.Register())
	testkit.Run(t, w.runner.Engine.KeepAlive)
	return w
}

// run stores a suite and plays it to its end.
func (w *testRunner) run(t *testing.T, d evals.Definition, o runner.Options) evals.Report {
	t.Helper()
	run := w.start(t, d, o)
	require.NoError(t, w.runner.Work(t.Context(), run, 4, func(evals.Trial) {}))
	return w.report(t, run)
}

func (w *testRunner) start(t *testing.T, d evals.Definition, o runner.Options) evals.Run {
	t.Helper()
	_, err := evals.Put(t.Context(), w.pool, d)
	require.NoError(t, err)
	s, err := evals.Get(t.Context(), w.pool, d.Name)
	require.NoError(t, err)
	run, err := w.runner.Start(t.Context(), s, o)
	require.NoError(t, err)
	return run
}

func (w *testRunner) report(t *testing.T, run evals.Run) evals.Report {
	t.Helper()
	run, err := evals.GetRun(t.Context(), w.pool, run.ID)
	require.NoError(t, err)
	report, err := evals.NewReport(t.Context(), w.pool, run)
	require.NoError(t, err)
	return report
}

// script lets the model answer by the last message of the user and the tool results after it.
func (w *testRunner) script(answer func(prompt string, results []string) modeltest.Reply) {
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		prompt, results := "", []string{}
		for _, m := range req.Messages {
			switch m.Role {
			case openai.ChatMessageRoleUser:
				prompt, results = m.Content, nil
			case openai.ChatMessageRoleTool:
				results = append(results, m.Content)
			}
		}
		return answer(prompt, results)
	})
}

func userMessage(text string) []evals.Message { return []evals.Message{{User: text}} }

// ordersSuite returns a suite with a case for each verdict.
func ordersSuite() evals.Definition {
	notDue := map[string][]evals.Stub{"check_order": {{
		When: map[string]any{"order": 7}, Returns: map[string]any{"due": false},
	}}}
	return evals.Definition{Name: "orders", Agent: "sales", Trials: 2, Cases: []evals.Case{
		{
			Name: "good", Now: "2026-11-24T10:00:00Z", Messages: userMessage("order 7?"), Skills: notDue,
			Memory: map[string]any{"policy/returns": "14 days"},
			Expect: []evals.Expectation{
				{Called: &evals.Called{Skill: "check_order", Args: map[string]any{"order": 7}, Times: 1}},
				{NotCalled: []string{"refund"}},
				{Answer: &evals.Answer{Contains: "not due", MaxWords: 5}},
				{Within: &evals.Within{Iterations: 2, Latency: "1h"}},
			},
		},
		{
			Name: "bad", Messages: userMessage("order 7?"), Skills: notDue,
			Expect: []evals.Expectation{{Answer: &evals.Answer{Lacks: "due"}}},
		},
		{
			Name: "diverged", Messages: userMessage("order 8?"), Skills: notDue,
			Expect: []evals.Expectation{{Answer: &evals.Answer{Contains: "not due"}}},
		},
		{
			Name: "denied", Messages: userMessage("refund 7"),
			Expect: []evals.Expectation{{ApprovalAsked: "refund"}, {Exact: []string{}}},
		},
		{
			Name: "approved", Messages: userMessage("refund 7"), Approvals: map[string]string{"refund": evals.Approve},
			Skills: map[string][]evals.Stub{"refund": {{Returns: "done"}}},
			Expect: []evals.Expectation{{ApprovalAsked: "refund"}, {Exact: []string{"refund"}}},
		},
		{Name: "broken", Messages: userMessage("crash"), Expect: []evals.Expectation{{Exact: []string{}}}},
	}}
}

// replyAsAgent is the script of the agent.
func replyAsAgent(prompt string, results []string) modeltest.Reply {
	switch {
	case strings.Contains(prompt, "crash"):
		return modeltest.Status(400, 0)
	case len(results) > 0:
		return modeltest.Text("It is not due.")
	case strings.Contains(prompt, "refund"):
		return modeltest.ToolCall("refund", `{"order":7}`)
	case strings.Contains(prompt, "order 8"):
		return modeltest.ToolCall("check_order", `{"order":8}`)
	}
	return modeltest.ToolCall("check_order", `{"order":7}`)
}

func TestMatchingStubsAnswerInTurn(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.script(func(_ string, results []string) modeltest.Reply {
		if len(results) < 3 {
			return modeltest.ToolCall("check_order", fmt.Sprintf(`{"order":%d}`, 7+len(results)))
		}
		return modeltest.Text(strings.Join(results, " "))
	})
	report := w.run(t, evals.Definition{Name: "orders", Agent: "sales", Trials: 1, Cases: []evals.Case{{
		Name: "in turn", Messages: userMessage("orders?"),
		Skills: map[string][]evals.Stub{"check_order": {{Returns: "first"}, {Returns: "second"}}},
		Expect: []evals.Expectation{{Answer: &evals.Answer{Regex: `^"first" "second" "second"$`}}},
	}}}, runner.Options{})
	assert.Truef(t, report.Status == evals.Passed, "the run is %s: %q", report.Status, report.Cases[0].Reasons)
}

func TestTrialVerdicts(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.script(replyAsAgent)
	report := w.run(t, ordersSuite(), runner.Options{})
	want := map[string]evals.Verdict{
		"good": evals.Pass, "bad": evals.Fail, "diverged": evals.Diverged, "denied": evals.Pass, "approved": evals.Pass,
		"broken": evals.Error,
	}
	assert.Equal(t, 12, len(report.TrialRows), "trials")
	for _, trial := range report.TrialRows {
		assert.Truef(t, trial.Verdict == want[trial.Case],
			"%s is %s, want %s: %v", trial.Case, trial.Verdict, want[trial.Case], trial.Reasons)
		assert.Truef(t, strings.HasPrefix(trial.TraceID, "ev_"), "%s has the trace %q", trial.Case, trial.TraceID)
	}
	pgtest.Equal(t, w.pool, 1, `
		select count(*)::int from agent_audit where actor = 'admin' and act = 'run_eval'`)
	assert.Truef(t, report.Status == evals.Failed && w.realCalls.Load() == 0,
		"the run is %s, and %d calls reached a real skill", report.Status, w.realCalls.Load())
	pinned := 0
	for _, r := range w.model.Requests() {
		system := r.Messages[0].Content
		assert.Truef(t, strings.Contains(system, "You are Nora.") && strings.HasPrefix(system, "Be kind."),
			"the system message is %q", system)
		if strings.Contains(system, "14 days") {
			pinned++
			assert.Contains(t, r.Messages[1].Content, "order 7?", "Tuesday 2026-11-24 10:00")
		}
	}
	assert.Equal(t, 4, pinned, "requests with the memory of the case")
}

func TestMemoryOfCaseIsIsolated(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.script(func(prompt string, results []string) modeltest.Reply {
		switch len(results) {
		case 0:
			return modeltest.ToolCall("memory_write", `{"category":"note","key":"ana","value":"likes oak"}`)
		case 1:
			return modeltest.ToolCall("recall", `{"query":"oak"}`)
		}
		return modeltest.Text(results[1])
	})
	d := evals.Definition{Name: "memory", Agent: "sales", Surface: "operate", Trials: 1, Cases: []evals.Case{{
		Name: "note", Messages: userMessage("Ana likes oak"),
		Expect: []evals.Expectation{{MemoryWritten: "note/ana"}, {Answer: &evals.Answer{Contains: "likes oak"}}},
	}}}
	report := w.run(t, d, runner.Options{})
	assert.Truef(t, report.Status == evals.Passed, "the run is %s: %v", report.Status, report.TrialRows)
	pgtest.Equal(t, w.pool, 0, `select count(*)::int from agent_memory`)
}

// The memory of the case rejects what the memory of production rejects.
func TestWriteOfUnreadKeyIsRejected(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	write := modeltest.ToolCall("memory_write", `{"category":"note","key":"ana","value":"likes oak"}`)
	forget := modeltest.ToolCall("memory_forget", `{"category":"note","key":"ana"}`)
	var replies []modeltest.Reply
	w.script(func(_ string, results []string) modeltest.Reply {
		if len(results) == len(replies) {
			return modeltest.Text(results[len(results)-1])
		}
		return replies[len(results)]
	})
	d := evals.Definition{Name: "memory", Agent: "sales", Surface: "operate", Trials: 1, Cases: []evals.Case{{
		Name: "note", Messages: userMessage("Ana likes oak"), Memory: map[string]any{"note/ana": "likes pine"},
		Expect: []evals.Expectation{{MemoryWritten: "note/ana"}},
	}}}
	recall := modeltest.ToolCall("recall", `{"query":"pine"}`)
	for _, test := range []struct {
		replies []modeltest.Reply
		want    string
		answer  string
	}{
		{[]modeltest.Reply{write}, evals.Failed, "likes pine"},
		{[]modeltest.Reply{forget, recall}, evals.Failed, "likes pine"},
		{[]modeltest.Reply{write, write}, evals.Passed, `"revision":2`},
		{[]modeltest.Reply{recall, write}, evals.Passed, `"revision":2`},
		{[]modeltest.Reply{recall, forget, write}, evals.Passed, `"revision":1`},
	} {
		replies = test.replies
		report := w.run(t, d, runner.Options{})
		assert.Equal(t, test.want, report.Status, len(replies))
		assert.Contains(t, report.TrialRows[0].Answer, test.answer)
	}
}

func TestConcurrentTrialsStayWithinBudget(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		most := max(req.MaxTokens, req.MaxCompletionTokens) //nolint:staticcheck // the field of most servers
		return modeltest.Text("Hello.").WithUsage(100, min(4000, most), 0)
	})
	d := evals.Definition{
		Name: "costly", Agent: "sales", Trials: 20, Budget: evals.Budget{CostUSD: 0.01},
		Cases: []evals.Case{{
			Name: "hello", Messages: userMessage("hello"),
			Expect: []evals.Expectation{{Answer: &evals.Answer{Contains: "hello"}}},
		}},
	}
	report := w.run(t, d, runner.Options{})
	c := report.Cases[0]
	assert.Truef(t, report.Status == evals.Undecided && c.Passed != 0 && c.Undecided != 0 && report.CostUSD <= 0.01,
		"the run is %s with %d passed, %d undecided, for $%.4f of $0.01: %v", report.Status, c.Passed, c.Undecided,
		report.CostUSD, c.Reasons)
	pgtest.Equal(t, w.pool, 0, `select count(*)::int from agent_budgets where scope like 'day:%'`)
}

func TestDollarBudgetNeedsPrice(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	d := ordersSuite()
	d.Budget.CostUSD = 1
	_, err := evals.Put(t.Context(), w.pool, d)
	require.NoError(t, err)
	s, err := evals.Get(t.Context(), w.pool, d.Name)
	require.NoError(t, err)
	_, err = w.runner.Start(t.Context(), s, runner.Options{Model: "no-such-model"})
	assert.Error(t, err, "the run started")
}

func TestInterruptedRunRepeatsNoModelCall(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	ctx, interrupt := context.WithCancel(t.Context())
	var mu sync.Mutex
	answered := map[string]int{}
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		mu.Lock()
		defer mu.Unlock()
		last := req.Messages[len(req.Messages)-1]
		if last.Role == openai.ChatMessageRoleTool {
			answered["second"]++
			return modeltest.Text("It is not due.")
		}
		if answered["first"]++; answered["first"] == 3 {
			interrupt()
		}
		return modeltest.ToolCall("check_order", `{"order":7}`)
	})
	d := ordersSuite()
	d.Cases, d.Trials = d.Cases[:1], 6
	run := w.start(t, d, runner.Options{})
	require.Error(t, w.runner.Work(ctx, run, 2, func(evals.Trial) {}), "the run was not interrupted")
	pgtest.Equal(t, w.pool, evals.Running, `select status from agent_eval_runs where id = $1`, run.ID)
	require.NoError(t, w.runner.Work(t.Context(), run, 2, func(evals.Trial) {}))
	report := w.report(t, run)
	assert.Truef(t, report.Status == evals.Passed && report.Cases[0].Passed == 6,
		"the run is %s with %d passed: %v", report.Status, report.Cases[0].Passed, report.Cases[0].Reasons)
	// A request in flight at the interrupt may be repeated. An answered one is not.
	assert.Truef(t, answered["first"] <= 8 && answered["second"] <= 8, "6 trials made %v requests", answered)
	pgtest.Equal(t, w.pool, 0, `
		select count(*)::int from (select execution_id, step from agent_activity where kind = 'model' and status = 'success'
		   group by 1, 2 having count(*) > 1) twice`)
}

// The time in which no process plays a trial is not its latency.
func TestInterruptedTrialDoesNotFailByItsLatency(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	ctx, interrupt := context.WithCancel(t.Context())
	w.script(func(string, []string) modeltest.Reply {
		interrupt()
		return modeltest.Text("It is not due.")
	})
	d := ordersSuite()
	d.Cases, d.Trials = d.Cases[:1], 1
	d.Cases[0].Expect = []evals.Expectation{{Within: &evals.Within{Latency: "1ms"}}}
	run := w.start(t, d, runner.Options{})
	require.Error(t, w.runner.Work(ctx, run, 1, func(evals.Trial) {}), "the run was not interrupted")
	require.NoError(t, w.runner.Work(t.Context(), run, 1, func(evals.Trial) {}))
	report := w.report(t, run)
	assert.Equal(t, evals.Undecided, report.Status, report.Cases[0].Reasons)
	assert.Equal(t, evals.Failed, w.run(t, d, runner.Options{}).Status, "a run that was not interrupted")
}

// A call whose process died counts at its worst case, as in the ledger.
func TestInterruptedCallCostsItsWorstCase(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var calls atomic.Int32
	w.script(func(string, []string) modeltest.Reply {
		if calls.Add(1) == 1 {
			interrupt()
			return modeltest.Hang()
		}
		return modeltest.Text("It is not due.").WithUsage(1000, 10, 0)
	})
	d := ordersSuite()
	d.Cases, d.Trials = d.Cases[:1], 1
	run := w.start(t, d, runner.Options{})
	require.Error(t, w.runner.Work(ctx, run, 1, func(evals.Trial) {}), "the run was not interrupted")
	require.NoError(t, w.runner.Work(t.Context(), run, 1, func(evals.Trial) {}))
	pgtest.Equal(t, w.pool, true, `
		select t.cost_usd = round(b.cost_usd, 6) and t.tokens = b.tokens and b.unknown_tokens > 0
		  from agent_eval_trials t join agent_budgets b on b.scope = 'eval:' || t.run_id`)
}

// A restart of the database fails no run.
func TestRunWaitsForUnavailableDatabase(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.script(replyAsAgent)
	d := ordersSuite()
	d.Cases = d.Cases[:1]
	run := w.start(t, d, runner.Options{})
	pgtest.Exec(t, w.pool, `create sequence failures`)
	pgtest.Exec(t, w.pool, `
		create function shut_down() returns trigger language plpgsql as $$
		begin
		  if nextval('failures') <= 3 then
		    raise 'terminating connection due to administrator command' using errcode = '57P01';
		  end if;
		  return new;
		end $$`)
	pgtest.Exec(t, w.pool, `
		create trigger shut_down before insert or update on agent_executions for each row execute function shut_down()`)
	require.NoError(t, w.runner.Work(t.Context(), run, 1, func(evals.Trial) {}))
	assert.Equal(t, evals.Passed, w.report(t, run).Status)
}

func TestRunTimeout(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Hang() })
	d := ordersSuite()
	d.Cases, d.Budget.Timeout = d.Cases[:1], "1s"
	report := w.run(t, d, runner.Options{})
	assert.Truef(t, report.Status == evals.Undecided && report.Cases[0].Undecided == 2,
		"the run is %s: %+v", report.Status, report.Cases)
	pgtest.Until(t, w.pool, 0, `select count(*)::int from agent_executions where completed_at is null`)
}

func TestCompareWithEarlierRun(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	w.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		if req.Model == "gpt-4.1" {
			return modeltest.Text("no")
		}
		return modeltest.Text("yes")
	})
	d := evals.Definition{Name: "yes", Agent: "sales", Trials: 1, ApplyGate: &evals.Gate{Margin: 0.05}}
	for name := range strings.SplitSeq("abcdefgh", "") {
		d.Cases = append(d.Cases, evals.Case{
			Name: name, Messages: userMessage(name), Expect: []evals.Expectation{{Answer: &evals.Answer{Expr: `answer == "yes"`}}},
		})
	}
	first := w.run(t, d, runner.Options{})
	for model, want := range map[string]string{"": "not worse", "gpt-4.1": "worse"} {
		report := w.run(t, d, runner.Options{Model: model})
		require.NoError(t, report.CompareWith(t.Context(), w.pool, first.Run, d.Margin()))
		got := string(report.Comparison.Answer)
		assert.Truef(t, got == want, "the model %q is %s, want %s: %+v", model, got, want, report.Comparison)
	}
}

// trialTables are the tables that a trial may write: its execution, its log, and the results of evals.
var trialTables = []string{
	"agent_executions", "agent_checkpoints", "agent_activity", "agent_activity_open", "agent_prompts",
	"agent_prompt_parts",
	"agent_budgets", "agent_budget_reservations", "agent_eval_runs", "agent_eval_trials", "agent_evals", "agent_workers",
	"agent_activity_uncounted", "agent_status_changes", "agent_claims_lost",
}

func TestTrialIsIsolated(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	pgtest.Exec(t, w.pool, `
		insert into agent_webhook_targets (name, url, secrets, events) values ('t', 'https://example.com', '{s}', '{*}');
		insert into agent_automations (name, trigger, event, skill_name) values ('a', 'event', 'AGENT_COMPLETED', 'check_order')`)
	calls := []modeltest.Reply{
		modeltest.ToolCall("memory_write", `{"key":"k","value":"v"}`),
		modeltest.ToolCall("memory_forget", `{"key":"k"}`),
		modeltest.ToolCall("objective_propose", `{"name":"o","goal":"g","steps":["s"]}`),
		modeltest.ToolCall("automation_propose", `{"name":"x","description":"d","cron":"0 8 * * *","prompt":"p"}`),
		modeltest.ToolCall("refund", `{"order":1}`),
		modeltest.ToolCall("delegate", `{"task":"do it"}`),
		modeltest.ToolCall("check_order", `{"order":1}`),
		modeltest.ToolCall("no_such_skill", `{}`),
		modeltest.Text("Done."),
	}
	w.runner.Budget.Iterations = len(calls)
	w.script(func(_ string, results []string) modeltest.Reply { return calls[min(len(results), len(calls)-1)] })
	d := evals.Definition{Name: "attack", Agent: "sales", Surface: "operate", Trials: 1, Cases: []evals.Case{{
		Name: "all", Messages: userMessage("go"), Expect: []evals.Expectation{{Answer: &evals.Answer{Contains: "done"}}},
	}}}
	run := w.start(t, d, runner.Options{})
	before := tableDigests(t, w.pool)
	require.NoError(t, w.runner.Work(t.Context(), run, 1, func(evals.Trial) {}))
	report := w.report(t, run)
	if got := report.TrialRows[0]; got.Verdict != evals.Diverged || strings.Count(string(got.Calls), `"skill"`) != len(calls)-1 {
		t.Errorf("the trial is %s with the calls %s", got.Verdict, got.Calls)
	}
	for table, sum := range tableDigests(t, w.pool) {
		assert.Equal(t, before[table], sum, "the trial changed", table)
	}
	assert.True(t, w.realCalls.Load() == 0, "a call reached a real skill")
	// Statistics count a trial only as spend of the surface eval.
	pgtest.Equal(t, w.pool, 0, `select count(*)::int from agent_skill_calls`)
	pgtest.Equal(t, w.pool, 0, `
		select count(*)::int from agent_activity_measured
		 where trace_id like 'ev\_%' and (kind <> 'model' or telling or led_to <> '{}')`)
	pgtest.Equal(t, w.pool, "eval", `select string_agg(distinct surface || skill, ',') from agent_spend`)
}

// tableDigests returns a digest of each table except trialTables.
func tableDigests(t *testing.T, pool *pgxpool.Pool) map[string]string {
	t.Helper()
	sums := map[string]string{}
	for _, table := range pgtest.Column[string](t, pool, `
		select c.relname from pg_class c where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p')
		   and not c.relispartition order by 1`) {
		if !slices.Contains(trialTables, table) {
			sums[table] = pgtest.Value[string](t, pool, `select coalesce(md5(string_agg(x::text, '' order by x::text)), '') from `+table+` x`)
		}
	}
	return sums
}

func TestTrialsRunConcurrently(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	var running atomic.Int32
	var once sync.Once
	full := make(chan struct{})
	w.script(func(string, []string) modeltest.Reply {
		switch n := running.Add(1); {
		case n == 3:
			once.Do(func() { close(full) })
		case n > 3:
			t.Errorf("%d of 3 trials at once", n)
		}
		select {
		case <-full:
		case <-time.After(pgtest.Timeout):
			once.Do(func() { close(full); t.Error("3 trials never ran at once") })
		}
		time.Sleep(20 * time.Millisecond)
		running.Add(-1)
		return modeltest.Text("Hello.")
	})
	d := evals.Definition{Name: "many", Agent: "sales", Trials: 40, Cases: []evals.Case{{
		Name: "hello", Messages: userMessage("hello"),
		Expect: []evals.Expectation{{Answer: &evals.Answer{Contains: "hello"}}},
	}}}
	run := w.start(t, d, runner.Options{})
	require.NoError(t, w.runner.Work(t.Context(), run, 3, func(evals.Trial) {}))
	assert.Equal(t, evals.Passed, w.report(t, run).Status)
	var input struct{ Trial int }
	raw := pgtest.Value[string](t, w.pool, `select input::text from agent_executions order by id limit 1`)
	err := json.Unmarshal([]byte(raw), &input)
	assert.Truef(t, err == nil && input.Trial != 0, "the input is %s: %v", raw, err)
}

// A process with another model server, key or limit plays no trial of a run, and claims none of its executions.
func TestRunNeedsSameSetup(t *testing.T) {
	t.Parallel()
	w := newTestRunner(t)
	started := make(chan struct{}, 100)
	w.model.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply {
		started <- struct{}{}
		return modeltest.Text("It is not due.").Slowly(time.Minute)
	})
	run := w.start(t, ordersSuite(), runner.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.runner.Work(ctx, run, 1, func(evals.Trial) {}) }()
	<-started

	otherModel := modeltest.New(t)
	otherModel.Handle(func(int, openai.ChatCompletionRequest) modeltest.Reply { return modeltest.Text("No.") })
	client, err := models.New(models.Config{
		BaseURL: otherModel.URL(), Model: "gpt-4o-mini", Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	other := *w.runner
	other.Engine, other.Model, other.Setup = enginetest.New(t, w.pool), client, "0c0a"
	require.NoError(t, other.Register())
	testkit.Run(t, other.Engine.Run)
	cancel()
	<-ended
	err = other.Work(t.Context(), run, 1, func(evals.Trial) {})
	assert.ErrorIs(t, err, runner.ErrOtherSetup, "the other process resumes the run")
	time.Sleep(time.Second) // the other process polls for ready executions
	n := len(otherModel.Requests())
	assert.Truef(t, n == 0, "the other process made %d model calls", n)
}
