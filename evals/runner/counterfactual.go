package runner

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/models/offline"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Counterfactual plays recorded turns of an agent with a candidate, and with the present agent as the control.
type Counterfactual struct {
	Agent     string
	Since     time.Duration // maximum age of the recorded turns
	Sample    int           // maximum number of turns
	Model     string        // model of the candidate; empty means that of the agent
	Version   int           // version of the candidate's agent; 0 means the current one
	Trials    int           // of each turn
	Margin    float64
	BudgetUSD float64 // for control and candidate together; 0 means no limit
	Timeout   time.Duration
	// Candidate returns the subject of a workspace that is not applied; nil means the applied workspace.
	Candidate func(ctx context.Context, in evals.Installation, s evals.Suite) (evals.Subject, error)
}

// ErrNoTurn reports an agent without recorded turns that can be played.
var ErrNoTurn = errors.New("no recorded turn can be played")

// Plan is a counterfactual that is not stored yet, with its estimated cost.
type Plan struct {
	Sample    evals.Sample
	Control   evals.Subject
	Candidate evals.Subject
	Run       evals.Run // of the candidate
	Calls     int       // model calls of both runs
	USD       float64   // estimated cost of the models with a price
	Priced    bool      // every model has a price
}

// Plan draws the sample of a counterfactual. It stores nothing.
func (r *Runner) Plan(ctx context.Context, c Counterfactual) (p Plan, err error) {
	all, err := r.Agents.List(ctx, r.Pool)
	if err != nil {
		return p, err
	}
	agent, err := agents.Find(all, c.Agent)
	if err != nil {
		return p, err
	}
	filter := sampleFilter(all, agent)
	filter.Since, filter.Size = c.Since, c.Sample
	cases, sample, err := evals.DrawSample(ctx, r.Pool, filter)
	if err != nil {
		return p, err
	}
	if len(cases) == 0 {
		return p, fmt.Errorf("%w: %d of %s%s", ErrNoTurn, sample.Size, agent.Name, formatSkipped(sample.Skipped))
	}
	r.nameModels(agent, sample)
	p.Sample = sample
	p.Run = evals.Run{Kind: evals.OfCounterfactual, Trials: c.Trials, Candidate: c.Candidate != nil}
	suite := evals.Suite{Version: 1, Source: p.Run.Kind, Definition: evals.Definition{
		Agent: agent.Name, Surface: "operate", Trials: c.Trials, Cases: cases, ApplyGate: &evals.Gate{Margin: c.Margin},
		Budget: evals.Budget{CostUSD: c.BudgetUSD, Timeout: c.Timeout.String()},
	}}
	if err := r.readSubjects(ctx, c, suite, &p); err != nil {
		return p, err
	}
	r.estimate(&p)
	if c.BudgetUSD > 0 && !p.Priced {
		return p, fmt.Errorf("plan a counterfactual of %s: %w", agent.Name, ErrUnpriced)
	}
	return p, nil
}

// readSubjects reads the subjects of control and candidate. The suite has the surface with all skills, and each turn
// offers its own skills.
func (r *Runner) readSubjects(ctx context.Context, c Counterfactual, s evals.Suite, p *Plan) (err error) {
	in := r.Installation(r.Model.Model())
	if p.Control, err = in.Subject(ctx, r.Pool, s); err != nil {
		return err
	}
	if c.Candidate != nil {
		p.Candidate, err = c.Candidate(ctx, in, s)
	} else {
		p.Candidate, err = in.SubjectAt(ctx, r.Pool, s, c.Version)
	}
	p.Control.Model = evals.RecordedModel
	if err != nil {
		return err
	}
	return r.overrideModel(&p.Candidate, c.Model)
}

// sampleFilter selects the turns of one of the agents.
func sampleFilter(all []agents.Agent, a agents.Agent) evals.SampleFilter {
	filter := evals.SampleFilter{Agent: a.Name, All: a.Default}
	for _, other := range all {
		if other.Name != a.Name {
			filter.Others = append(filter.Others, other.Name)
		}
	}
	return filter
}

// nameModels replaces the recorded names of models by the names that the agent's settings use.
func (r *Runner) nameModels(a agents.Agent, s evals.Sample) {
	for name, turn := range s.Turns {
		turn.Model = configuredName(a, turn.Model, r.Model.Model())
		s.Turns[name] = turn
	}
}

// configuredName returns the configured name of a model. The server may have recorded a dated version of the name.
func configuredName(a agents.Agent, model, fallback string) string {
	for _, name := range append([]string{a.Model, fallback}, a.Fallback...) {
		version, dated := strings.CutPrefix(model, name+"-20")
		if name != "" && (model == name || dated && len(version) >= 2) {
			return name
		}
	}
	return model
}

func formatSkipped(skipped map[string]int) string {
	var text strings.Builder
	for _, why := range slices.Sorted(maps.Keys(skipped)) {
		fmt.Fprintf(&text, "; %d: %s", skipped[why], why)
	}
	return text.String()
}

// estimate adds the prices of the recorded tokens for both runs.
func (r *Runner) estimate(p *Plan) {
	p.Priced = true
	for _, turn := range p.Sample.Turns {
		p.Calls += 2 * turn.Iterations * p.Run.Trials
		for _, model := range []string{r.playedModel(turn.Model), p.Candidate.Model} {
			price, _ := r.Model.Price(model)
			p.Priced = p.Priced && r.Model.PricedModel(model)
			p.USD += float64(p.Run.Trials) *
				(float64(turn.PromptTokens)*price.Prompt + float64(turn.CompletionTokens)*price.Completion) / 1e6
		}
	}
}

// playedModel returns the model that answers for a recorded one. A process with the offline model always uses that.
func (r *Runner) playedModel(model string) string {
	if r.Model.Model() == offline.Model {
		return offline.Model
	}
	return model
}

// Store stores the runs of a counterfactual. [Runner.Work] plays the candidate's after the control's.
func (r *Runner) Store(ctx context.Context, p Plan) (evals.Run, error) {
	return r.storeRuns(ctx, p, func(postgres.DB, evals.Run) error { return nil })
}

// storeRuns stores the runs of control and candidate. extra adds to the transaction.
func (r *Runner) storeRuns(
	ctx context.Context, p Plan, extra func(tx postgres.DB, candidate evals.Run) error,
) (candidate evals.Run, err error) {
	err = postgres.InTx(ctx, r.Pool, func(tx pgx.Tx) error {
		suite := p.Control.Suite
		err := tx.QueryRow(ctx, `select @kind || '-' || right(lanekeeper.agent_uuid7()::text, 12)`,
			postgres.Strict{"kind": p.Run.Kind}).Scan(&suite.Name)
		if err != nil {
			return fmt.Errorf("name a %s: %w", p.Run.Kind, err)
		}
		suite.Definition.Name = suite.Name
		if suite, err = evals.PutSample(ctx, tx, suite, p.Sample); err != nil {
			return err
		}
		control, tested := p.Control, p.Candidate
		control.Suite, tested.Suite = suite, suite
		controlRun, err := r.insert(ctx, tx, evals.Run{Kind: p.Run.Kind, Trials: p.Run.Trials}, control)
		if err != nil {
			return err
		}
		run := p.Run
		run.ControlID = controlRun.ID
		if candidate, err = r.insert(ctx, tx, run, tested); err != nil {
			return err
		}
		return extra(tx, candidate)
	})
	return candidate, err
}

// recordedTurn returns the turn that repeats a recorded one.
func (r *Runner) recordedTurn(loop *reason.Loop, recorded evals.Recorded) reason.Turn {
	if s := loop.Sandbox; s.Model == evals.RecordedModel {
		s.Model = r.playedModel(recorded.Model)
	}
	t := reason.Turn{
		Purpose: Flow, System: recorded.Rules, Context: recorded.Context, History: recorded.History, Prompt: recorded.Prompt,
		Approvals: reason.Park,
	}
	switch recorded.Surface {
	case "chat":
		t.Scopes = r.Surfaces["chat"].Scopes
	case "operate":
		t.Scopes = r.Surfaces["operate"].Scopes
	case "heartbeat":
		if len(recorded.Skills) > 0 { // a phase without skills has tools only
			t.Scopes = []string{skills.ScopeInternal}
		}
	default: // the action of a webhook chose the skills
		if len(recorded.Skills) > 0 {
			t.Scopes = r.Surfaces["operate"].Scopes
			t = t.WithSkills(recorded.Skills...)
		}
	}
	for _, tool := range recorded.Tools {
		if tool.Function.Name == "delegate" {
			t.Tools = append(t.Tools, loop.DelegateTool(r.Engine, t.Scopes))
			continue
		}
		t.Tools = append(t.Tools, reason.Tool{
			Name: tool.Function.Name, Description: tool.Function.Description, Parameters: tool.Function.Parameters,
			Do: func(context.Context, json.RawMessage) (any, error) {
				return nil, &executions.StepError{Class: classNoStub, Message: "a tool of a recorded turn does nothing"}
			},
		})
	}
	return t
}

// workControl plays the control of a run. problem is why no comparison is possible, or "".
func (r *Runner) workControl(
	ctx context.Context, run evals.Run, concurrent int, onTrial func(evals.Trial),
) (problem string, err error) {
	control, err := evals.GetRun(context.WithoutCancel(ctx), r.Pool, run.ControlID)
	if err != nil {
		return "", err
	}
	if control.FinishedAt == nil {
		err := r.Work(ctx, control, concurrent, onTrial)
		if errors.Is(context.Cause(ctx), errTimeout) {
			return "", cmp.Or(r.finishRun(context.WithoutCancel(ctx), control, errTimeout), errTimeout)
		}
		if err != nil {
			return "", err
		}
	}
	report, err := evals.NewBriefReport(ctx, r.Pool, control)
	switch {
	case err != nil || report.Follows():
		return "", err
	case report.Coverage.Played == 0:
		return budgetUsedUp, nil
	}
	return noControl, nil
}

// Reasons why a trial has no verdict.
const (
	noControl    = "the control follows less than half of the recorded turns, so nothing could be compared"
	budgetUsedUp = "the budget of the run is used up"
)
