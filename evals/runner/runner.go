// Package runner plays the trials of evals.
//
// A trial is one execution of the flow "eval", under a trace of the surface eval. It runs the reasoning loop for the
// pinned version of an agent inside a [reason.Sandbox]: skills are stubs, memory is in the process, approvals are
// scripted, and the case sets the time. A call without a stub is refused, and the trial has diverged. The database
// rejects rows of such a trace in outboxes, events, waits, memory and documents.
//
// A trial of a recorded turn gets the recorded results (counterfactual.go). The first call that is not recorded ends
// the trial.
//
// Each model call reserves its estimated worst case in the budget of the run ([models.Client.Quote]), across concurrent
// trials. If the budget is used up, a trial is undecided.
//
// A trial survives its process, like every execution: answered model calls are not repeated. Another process continues
// a run with [Runner.Work].
package runner

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/offline"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Flow is the beginning of the flow name of trials. The setup of the process follows, so no process with another model
// server, key or limit plays the trial.
const Flow = "eval"

// ErrOtherSetup reports a run that only processes with another setup can play.
var ErrOtherSetup = errors.New(
	"the run began with another model server, key, price or limit; go on with the same settings")

// Surface has the rules and the scopes of the skills of a surface.
type Surface struct {
	Rules  string
	Scopes []string
}

// Runner plays trials. All fields but Setup are required. It is safe for concurrent use.
type Runner struct {
	Pool     *pgxpool.Pool
	Engine   *executions.Engine
	Model    *models.Client
	Skills   *skills.Registry // checks arguments; no call reaches it
	Agents   *agents.Directory
	Budget   reason.Budget
	Logger   *slog.Logger
	Surfaces map[string]Surface // by name
	Version  string             // of this program
	Setup    string             // identifies the settings of the model calls
}

// flow is the flow of the trials that this process plays.
func (r *Runner) flow() string {
	if r.Setup == "" {
		return Flow
	}
	return Flow + ":" + r.Setup
}

// Installation returns the inputs of subjects that are not in the database. It does not use r.Model.
func (r *Runner) Installation(model string) evals.Installation {
	in := evals.Installation{
		Agents: r.Agents, Model: model, Offline: model == offline.Model, Runtime: r.Version, Setup: r.Setup,
		Scopes: map[string][]string{},
	}
	for name, surface := range r.Surfaces {
		in.Scopes[name] = surface.Scopes
	}
	return in
}

// trial is the input of the flow.
type trial struct {
	Run   string `json:"run"`
	Case  string `json:"case"`
	Trial int    `json:"trial"`

	Judge  *evals.JudgeRule `json:"judge,omitempty"` // if set, the execution judges the labelled Answer instead of a trial
	Answer string           `json:"answer,omitempty"`
}

// Register registers the flow.
func (r *Runner) Register() error {
	return r.Engine.Register(r.flow(), func(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
		var in trial
		if err := json.Unmarshal(raw, &in); err != nil {
			return executions.Result{}, fmt.Errorf("read input: %w", err)
		}
		if in.Judge != nil {
			return r.playLabel(ctx, in)
		}
		return r.play(ctx, in)
	})
}

// play runs one trial and stores its verdict.
func (r *Runner) play(ctx context.Context, in trial) (executions.Result, error) {
	data, err := r.readTrial(ctx, in)
	if err != nil {
		return executions.Result{}, err
	}
	run, subject, recorded := data.run, data.subject, data.recorded
	c, ok := subject.Suite.Definition.Case(in.Case)
	if recorded != nil {
		c, ok = recorded.Case(in.Case), true
	}
	if !ok {
		return executions.Result{}, fmt.Errorf("eval %s has no case %q", run.Suite, in.Case)
	}
	start, err := executions.Now(ctx)
	if err != nil {
		return executions.Result{}, err
	}
	b := newEnvironment(c, recorded, start)
	outcome, failure := r.runTurn(ctx, run, subject, c, b)
	if executions.IsControl(failure) {
		return executions.Result{}, failure
	}
	ended, err := executions.Now(ctx)
	if err != nil {
		return executions.Result{}, err
	}
	x, _ := executions.Current(ctx)
	verdict := b.evaluate(c, outcome, failure, ended.Sub(start), x.Claim > 1)
	if verdict.Verdict == evals.Pass {
		list, err := r.judgeTrial(ctx, run, subject, data.calibrations, c, outcome.Text)
		if err != nil {
			return executions.Result{}, err
		}
		verdict.ApplyJudgements(c, list)
	}
	verdict.Case, verdict.Trial, verdict.TraceID = in.Case, in.Trial, x.TraceID
	_, err = executions.EndTx(ctx, "verdict", func(ctx context.Context, tx pgx.Tx) (evals.Verdict, error) {
		return verdict.Verdict, storeVerdict(ctx, tx, in.Run, verdict)
	}, func(v evals.Verdict) executions.Result {
		return executions.Result{Summary: fmt.Sprintf("%s: %s", in.Case, v), Value: map[string]any{"verdict": v}}
	})
	return executions.Result{}, err
}

// trialData has the stored inputs of a trial.
type trialData struct {
	run          evals.Run
	subject      evals.Subject
	calibrations evals.Calibrations
	recorded     *evals.Recorded
}

// readTrial reads the inputs of a trial, which are fixed before its execution starts.
func (r *Runner) readTrial(ctx context.Context, in trial) (trialData, error) {
	return executions.RetryTransient(ctx, func(ctx context.Context) (g trialData, err error) {
		if g.run, err = evals.GetRun(ctx, r.Pool, in.Run); err != nil {
			return g, err
		}
		if g.subject, err = evals.ReadSubject(ctx, r.Pool, g.run); err != nil {
			return g, err
		}
		if g.run.Kind != evals.OfSuite {
			g.recorded, err = evals.RecordedTurn(ctx, r.Pool, g.run, in.Case)
		} else if in.Judge == nil {
			g.calibrations, err = evals.ReadCalibrations(ctx, r.Pool, in.Run, g.subject)
		}
		return g, err
	})
}

// runTurn plays the messages of a case.
func (r *Runner) runTurn(
	ctx context.Context, run evals.Run, subject evals.Subject, c evals.Case, b *environment,
) (reason.Outcome, error) {
	suite, sandbox := subject.Suite.Definition, b.sandbox()
	sandbox.World = r.world(subject)
	sandbox.Agent, sandbox.Version, sandbox.Model = run.Agent, run.AgentVersion, run.Model
	sandbox.Budget = runScope(run, subject)
	loop := &reason.Loop{
		Pool: r.Pool, Model: r.Model, Skills: r.Skills, Agents: r.Agents, Logger: r.Logger, Budget: r.Budget,
		Sandbox: sandbox,
	}
	if b.recorded != nil {
		return loop.Run(ctx, r.recordedTurn(loop, *b.recorded))
	}
	surface := r.Surfaces[suite.SurfaceName()]
	last := len(c.Messages) - 1
	t := reason.Turn{
		Purpose: Flow, System: surface.Rules, Scopes: surface.Scopes, Prompt: c.Messages[last].User, Approvals: reason.Park,
	}
	for _, m := range c.Messages[:last] {
		if m.User != "" {
			t.History = append(t.History, models.Message{Role: models.RoleUser, Content: m.User})
		} else {
			t.History = append(t.History, models.Message{Role: models.RoleAssistant, Content: m.Assistant})
		}
	}
	if _, delegates := c.Skills["delegate"]; delegates || suite.Surface == "operate" {
		t.Tools = []reason.Tool{loop.DelegateTool(r.Engine, surface.Scopes)}
	}
	return loop.Run(ctx, t)
}

// world returns the agents and skills of a trial, which replace the declared ones. It returns nil for a run of an early
// release.
func (r *Runner) world(s evals.Subject) *reason.World {
	if s.Agent.Name == "" {
		return nil
	}
	w := &reason.World{Agent: r.Agents.Of(s.Agent, s.Version), Skills: s.Skills}
	for _, d := range s.Delegates {
		w.Delegates = append(w.Delegates, r.Agents.Of(d, 1))
	}
	return w
}

// maxAnswer bounds the stored answer in bytes, and maxCalls the stored calls.
const (
	maxAnswer = 4000
	maxCalls  = 64 << 10
)

// storeVerdict stores the verdict of a trial, unless the trial has one. It adds the worst case of the calls of lost
// claims to the cost.
func storeVerdict(ctx context.Context, db postgres.DB, run string, t evals.Trial) error {
	reasons := make([]string, len(t.Reasons))
	for i, why := range t.Reasons {
		reasons[i] = redact.Text(why, 1000)
	}
	_, err := db.Exec(ctx, `
		with lost as (
		  select a.purpose = @judge as judge, a.cost_usd as usd,
		         lanekeeper.agent_tokens(a.token_usage, 'total_tokens') as tokens
		    from agent_activity a
		   where a.trace_id = @trace_id and a.kind = 'model' and a.status = 'unknown' and a.error_class = 'interrupted')
		update agent_eval_trials
		   set verdict = @verdict, reasons = @reasons, answer = @answer, calls = @calls, iterations = @iterations,
		       tokens = @tokens + (select coalesce(sum(tokens), 0) from lost where not judge),
		       cost_usd = @cost_usd + (select coalesce(sum(usd), 0) from lost where not judge),
		       duration_ms = @duration_ms, trace_id = @trace_id, judgements = @judgements,
		       judge_tokens = @judge_tokens + (select coalesce(sum(tokens), 0) from lost where judge),
		       judge_usd = @judge_usd + (select coalesce(sum(usd), 0) from lost where judge),
		       finished_at = clock_timestamp()
		 where run_id = @run and case_name = @case and trial = @trial and verdict is null`,
		postgres.Strict{
			"verdict": t.Verdict, "reasons": reasons, "answer": redact.Text(t.Answer, maxAnswer),
			"calls": t.Calls, "iterations": t.Iterations, "tokens": t.Tokens, "cost_usd": t.CostUSD,
			"duration_ms": t.DurationMS, "trace_id": t.TraceID, "run": run, "case": t.Case, "trial": t.Trial,
			"judge": evals.PurposeJudge, "judgements": append([]evals.Judgement{}, t.Judgements...),
			"judge_tokens": t.JudgeTokens, "judge_usd": t.JudgeUSD,
		})
	if err != nil {
		return fmt.Errorf("store verdict: %w", err)
	}
	return nil
}

// Options modify a run. Zero values mean the values of the suite.
type Options struct {
	Model  string
	Trials int
	// Background leaves the trials to servers, see [Runner.Serve].
	Background bool
}

// ErrUnpriced reports a budget in dollars for a model without a price.
var ErrUnpriced = errors.New("the budget is in dollars, and the model has no price; set AGENT_PRICES")

// ErrOffline reports a request for another model in a process that has only the offline model.
var ErrOffline = errors.New("the offline model answers for every model; set OPENAI_BASE_URL or OPENAI_API_KEY, or name " +
	"no model")

// overrideModel sets the model of a subject, unless model is empty.
func (r *Runner) overrideModel(s *evals.Subject, model string) error {
	switch {
	case model == "":
	case r.Model.Model() == offline.Model && model != offline.Model:
		return fmt.Errorf("try %.100s: %w", model, ErrOffline)
	default:
		s.Model = model
	}
	return nil
}

// Start stores a run of the applied workspace. [Runner.Work] plays it.
func (r *Runner) Start(ctx context.Context, s evals.Suite, o Options) (evals.Run, error) {
	subject, err := r.Installation(r.Model.Model()).Subject(ctx, r.Pool, s)
	if err != nil {
		return evals.Run{}, err
	}
	return r.StartSubject(ctx, subject, o, false)
}

// StartSubject stores a run of a subject. candidate says that the subject's workspace is not applied.
func (r *Runner) StartSubject(
	ctx context.Context, subject evals.Subject, o Options, candidate bool,
) (evals.Run, error) {
	subject, err := r.Check(subject, o)
	if err != nil {
		return evals.Run{}, err
	}
	run := evals.Run{
		Kind: evals.OfSuite, Trials: cmp.Or(o.Trials, subject.Suite.Definition.TrialCount()), Candidate: candidate,
		Background: o.Background,
	}
	return r.insert(ctx, r.Pool, run, subject)
}

// Check returns a subject with the model of o, or an error if no run of it can start.
func (r *Runner) Check(subject evals.Subject, o Options) (evals.Subject, error) {
	if err := r.overrideModel(&subject, o.Model); err != nil {
		return evals.Subject{}, err
	}
	return subject, r.checkPrices(subject)
}

// insert stores a run of a subject with its trials, and records the caller.
func (r *Runner) insert(
	ctx context.Context, db postgres.Beginner, run evals.Run, subject evals.Subject,
) (evals.Run, error) {
	return r.insertForSkill(ctx, db, run, subject, "")
}

// insertForSkill is insert for a run that starts because enabledSkill was enabled again.
func (r *Runner) insertForSkill(
	ctx context.Context, db postgres.Beginner, run evals.Run, subject evals.Subject, enabledSkill string,
) (evals.Run, error) {
	run.Suite, run.Version, run.Model = subject.Suite.Name, subject.Suite.Version, subject.Model
	run.Agent, run.AgentVersion = subject.Agent.Name, subject.Version
	names := make([]string, len(subject.Suite.Definition.Cases))
	for i, c := range subject.Suite.Definition.Cases {
		names[i] = c.Name
	}
	act := activity.Act{Name: "run_eval", Input: map[string]any{
		"eval": run.Suite, "agent": run.Agent, "model": run.Model, "trials": run.Trials, "cases": len(names),
	}}
	err := r.recordStart(ctx, db, act, enabledSkill, func(tx pgx.Tx) (any, error) {
		err := tx.QueryRow(ctx, `
			with run as (
			  insert into agent_eval_runs (kind, control_id, suite, version, agent, agent_version, model, trials, subject,
			         agent_digest, suite_digest, runtime, candidate, served_until)
			  values (@kind, nullif(@control, '')::uuid, @suite, @version, @agent, @agent_version, @model, @trials, @subject,
			         @agent_digest, @suite_digest, @runtime, @candidate, case when @background then clock_timestamp() end)
			  returning id, created_at),
			trials as (
			  insert into agent_eval_trials (run_id, case_name, trial, position)
			  select r.id, c.name, t, c.n
			    from run r, generate_series(1, @trials::int) t, unnest(@cases::text[]) with ordinality c (name, n))
			select id::text, created_at from run`, postgres.Strict{
			"kind": run.Kind, "control": run.ControlID, "suite": run.Suite, "version": run.Version, "agent": run.Agent,
			"agent_version": run.AgentVersion, "model": run.Model, "trials": run.Trials, "cases": names,
			"subject": subject, "agent_digest": subject.AgentDigest(), "suite_digest": subject.SuiteDigest(),
			"runtime": subject.Runtime, "candidate": run.Candidate, "background": run.Background,
		}).Scan(&run.ID, &run.CreatedAt)
		return map[string]string{"run": run.ID}, err
	})
	run.Status = evals.Running
	return run, err
}

// checkPrices returns an error if the budget is in dollars and a model of the agent or of a judge has no price.
func (r *Runner) checkPrices(s evals.Subject) error {
	d := s.Suite.Definition
	if d.Budget.CostUSD == 0 {
		return nil
	}
	names := []string{s.Model}
	for _, j := range d.UniqueJudges() {
		model, _ := s.JudgeModel(j)
		names = append(names, model)
	}
	for _, model := range names {
		if !r.Model.PricedModel(model) {
			return fmt.Errorf("run eval %s with %s: %w", s.Suite.Name, model, ErrUnpriced)
		}
	}
	return nil
}

// spec returns the execution of a trial. Its key makes the execution unique among all processes.
func (r *Runner) spec(run evals.Run, t evals.Trial) executions.Spec {
	return executions.Spec{
		Flow: r.flow(), Surface: trace.Eval, Agent: run.Agent, Priority: 4,
		Input:     trial{Run: run.ID, Case: t.Case, Trial: t.Trial},
		DedupeKey: fmt.Sprintf("eval %s %d %s", run.ID, t.Trial, t.Case),
	}
}

// remainingTime returns the remaining time of a run, by the database's clock. The time starts with the first call. For
// a run that no server plays, it starts again with each call.
func (r *Runner) remainingTime(ctx context.Context, run evals.Run, d evals.Definition) (time.Duration, error) {
	var seconds float64
	err := r.Pool.QueryRow(ctx, `
		with started as (
		  update agent_eval_runs set began_at = clock_timestamp()
		   where id = @id and finished_at is null and (began_at is null or served_until is null) returning began_at)
		select extract(epoch from
		         coalesce((select s.began_at from started s), r.began_at, r.created_at) + @timeout::interval
		         - clock_timestamp())::float8
		  from agent_eval_runs r where r.id = @id`,
		postgres.Strict{"id": run.ID, "timeout": d.Timeout()}).Scan(&seconds)
	if err != nil {
		return 0, fmt.Errorf("begin run %s: %w", run.ID, err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}
