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

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/budgets"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/trace"
)

var judgeForm = reason.Form{
	Name: "verdict", Strict: true,
	Schema: `{"type":"object","additionalProperties":false,"required":["reason","pass"],
		"properties":{"reason":{"type":"string"},"pass":{"type":"boolean"}}}`,
}

// judgement asks a judge about an answer until most of its votes are equal. Its model calls are steps of the execution
// and reserve in the budget of the run.
func (r *Runner) judgement(
	ctx context.Context, run evals.Run, s evals.Subject, j evals.JudgeRule, answer string,
) (evals.Judgement, error) {
	got := evals.Judgement{}
	got.Model, got.Same = s.JudgeModel(j)
	most := j.VotesOf()/2 + 1
	reasons := map[bool]string{}
	for range j.VotesOf() {
		pass, why, outcome, err := r.vote(ctx, run, s, got.Model, j.Rubric, answer)
		if err != nil {
			return got, err
		}
		got.Tokens += int64(outcome.Usage.TotalTokens)
		got.CostUSD += outcome.CostUSD
		if outcome.Ended != reason.Answered {
			got.Why = why
			if outcome.Ended == reason.EndedEval {
				break
			}
			continue
		}
		reasons[pass] = why
		if got.Votes++; pass {
			got.Passes++
		}
		if max(got.Passes, got.Votes-got.Passes) >= most {
			break
		}
	}
	if max(got.Passes, got.Votes-got.Passes) < most {
		got.Why = "the judge gave no verdict: " + got.Why
		return got, nil
	}
	got.Decided, got.Pass = true, got.Passes >= most
	got.Why = redact.Text(reasons[got.Pass], 500)
	return got, nil
}

// vote asks a judge once. If the model fails, outcome.Ended is not [reason.Answered], and the vote does not count.
func (r *Runner) vote(
	ctx context.Context, run evals.Run, s evals.Subject, model, rubric, answer string,
) (pass bool, why string, o reason.Outcome, err error) {
	x, _ := executions.Current(ctx)
	quoted, err := json.Marshal(answer)
	if err != nil {
		return false, "", o, fmt.Errorf("quote the answer: %w", err)
	}
	sandbox := newBox(evals.Case{}, nil, x.CreatedAt).sandbox()
	sandbox.World = &reason.World{Agent: r.Agents.Of(agents.Definition{Name: "judge", Memory: agents.MemoryNone}, 1)}
	sandbox.Model, sandbox.Budget = model, runScope(run, s)
	loop := &reason.Loop{
		Pool: r.Pool, Model: r.Model, Skills: r.Skills, Agents: r.Agents, Logger: r.Logger, Sandbox: sandbox,
	}
	o, err = loop.Run(ctx, reason.Turn{
		Purpose: evals.PurposeJudge, System: evals.JudgeRules, Form: &judgeForm, Approvals: reason.Park,
		Budget: &reason.Budget{Iterations: 2},
		Prompt: "# Rubric\n\n" + rubric + "\n\n# Answer\n\n" + string(quoted),
	})
	switch {
	case executions.IsControl(err):
		return false, "", o, err
	case err != nil:
		o.Ended = "error"
		return false, err.Error(), o, nil //nolint:nilerr // a vote that failed has a reason, and is no yes
	case o.Ended != reason.Answered:
		return false, o.Text, o, nil
	}
	var verdict struct {
		Reason string
		Pass   bool
	}
	if err := json.Unmarshal([]byte(o.Text), &verdict); err != nil {
		return false, "", o, fmt.Errorf("read the verdict of a judge: %w", err) // its form was checked
	}
	return verdict.Pass, verdict.Reason, o, nil
}

// judgements asks the judges of a case about a trial that passed so far.
func (r *Runner) judgements(
	ctx context.Context, run evals.Run, s evals.Subject, by evals.Calibrations, c evals.Case, answer string,
) ([]evals.Judgement, error) {
	judges := c.Judges()
	list := []evals.Judgement{}
	for _, place := range slices.Sorted(maps.Keys(judges)) {
		got, err := r.judgement(ctx, run, s, judges[place], redact.Text(answer, maxAnswer))
		if err != nil {
			return nil, err
		}
		got.Expect, got.Calibrated = place, by.Of(s, judges[place]).Calibrated
		list = append(list, got)
	}
	return list, nil
}

// calibrate asks the judges about the labelled answers that they have not judged, beside each other, before the trials.
// It does not ask a judge with too few labels. The run keeps the calibrations, so later labels change no verdict.
func (r *Runner) calibrate(ctx context.Context, run evals.Run, s evals.Subject, concurrent int) error {
	if known, err := evals.ReadCalibrations(ctx, r.Pool, run.ID, s); err != nil || known.Frozen || len(known.List) == 0 {
		return err
	}
	var group errgroup.Group
	group.SetLimit(max(concurrent, 1))
	for _, j := range s.Suite.Definition.JudgesOf() {
		c, missing, err := evals.CalibrationOf(ctx, r.Pool, s, j)
		if err != nil {
			return errors.Join(err, group.Wait())
		}
		if c.Labels < evals.MinLabels {
			continue
		}
		for _, l := range missing {
			group.Go(func() error { return r.judgeLabel(ctx, run, s, j, l) })
		}
	}
	if err := group.Wait(); err != nil || ctx.Err() != nil {
		return err
	}
	return evals.FreezeCalibrations(ctx, r.Pool, run.ID, s)
}

// judgeLabel plays the execution that judges a labelled answer. A failed one leaves the answer without a verdict.
func (r *Runner) judgeLabel(
	ctx context.Context, run evals.Run, s evals.Subject, j evals.JudgeRule, l evals.JudgeLabel,
) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the trials find the time used up, too
	}
	model, _ := s.JudgeModel(j)
	judge, about := evals.JudgeKey(model, j, l.Answer)
	x, _, err := r.Engine.Start(ctx, r.Pool, executions.Spec{
		Flow: r.flow(), Surface: trace.Eval, Agent: run.Agent, Priority: 4,
		Input:     trial{Run: run.ID, Judge: &j, Answer: l.Answer},
		DedupeKey: strings.Join([]string{"eval", run.ID, "judge", judge, about}, " "),
	})
	if err != nil {
		return err
	}
	err = r.follow(ctx, x.ID, func() (bool, error) {
		ended, err := executions.Get(ctx, r.Pool, x.ID)
		return ended.CompletedAt != nil, err
	})
	if errors.Is(err, errTimeout) {
		_, err = r.Engine.Cancel(context.WithoutCancel(ctx), x.ID, "eval", errTimeout.Error())
	}
	return err
}

// playLabel runs the execution of a labelled answer.
func (r *Runner) playLabel(ctx context.Context, in trial) (executions.Result, error) {
	given, err := r.read(ctx, in)
	if err != nil {
		return executions.Result{}, err
	}
	got, err := r.judgement(ctx, given.run, given.subject, *in.Judge, in.Answer)
	if err != nil {
		return executions.Result{}, err
	}
	judge, about := evals.JudgeKey(got.Model, *in.Judge, in.Answer)
	_, err = executions.EndTx(ctx, "verdict", func(ctx context.Context, tx pgx.Tx) (bool, error) {
		return got.Pass, evals.PutJudgement(ctx, tx, in.Run, judge, about, got)
	}, func(pass bool) executions.Result {
		return executions.Result{Summary: fmt.Sprintf("judge %s: %t", got.Model, pass), Value: got}
	})
	return executions.Result{}, err
}

// runScope bounds the spend of a run, including its judges.
func runScope(run evals.Run, s evals.Subject) budgets.Scope {
	return budgets.Scope{
		Name: "eval:" + cmp.Or(run.ControlID, run.ID), Limit: budgets.Limit{USD: s.Suite.Definition.Budget.CostUSD},
	}
}
