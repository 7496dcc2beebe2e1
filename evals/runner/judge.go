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

// judge calls a judge about an answer until a majority of its votes is equal, or until all votes are used. The model
// calls are steps of the execution and reserve in the budget of the run.
func (r *Runner) judge(
	ctx context.Context, run evals.Run, s evals.Subject, j evals.JudgeRule, answer string,
) (evals.Judgement, error) {
	verdict := evals.Judgement{}
	verdict.Model, verdict.Same = s.JudgeModel(j)
	majority := j.VoteCount()/2 + 1
	reasons := map[bool]string{}
	for range j.VoteCount() {
		pass, why, outcome, err := r.askJudge(ctx, run, s, verdict.Model, j.Rubric, answer)
		if err != nil {
			return verdict, err
		}
		verdict.Tokens += int64(outcome.Usage.TotalTokens)
		verdict.CostUSD += outcome.CostUSD
		if outcome.Ended != reason.Answered {
			verdict.Why = why
			if outcome.Ended == reason.EndedEval {
				break
			}
			continue
		}
		reasons[pass] = why
		if verdict.Votes++; pass {
			verdict.Passes++
		}
		if max(verdict.Passes, verdict.Votes-verdict.Passes) >= majority {
			break
		}
	}
	if max(verdict.Passes, verdict.Votes-verdict.Passes) < majority {
		verdict.Why = "the judge gave no verdict: " + verdict.Why
		return verdict, nil
	}
	verdict.Decided, verdict.Pass = true, verdict.Passes >= majority
	verdict.Why = redact.Text(reasons[verdict.Pass], 500)
	return verdict, nil
}

// askJudge calls a judge once. If the model fails, o.Ended is not [reason.Answered], and the vote does not count.
func (r *Runner) askJudge(
	ctx context.Context, run evals.Run, s evals.Subject, model, rubric, answer string,
) (pass bool, why string, o reason.Outcome, err error) {
	x, _ := executions.Current(ctx)
	quoted, err := json.Marshal(answer)
	if err != nil {
		return false, "", o, fmt.Errorf("quote the answer: %w", err)
	}
	sandbox := newEnvironment(evals.Case{}, nil, x.CreatedAt).sandbox()
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
		return false, err.Error(), o, nil //nolint:nilerr // a failed vote has a reason and does not pass
	case o.Ended != reason.Answered:
		return false, o.Text, o, nil
	}
	var verdict struct {
		Reason string
		Pass   bool
	}
	if err := json.Unmarshal([]byte(o.Text), &verdict); err != nil {
		return false, "", o, fmt.Errorf("read the verdict of a judge: %w", err) // impossible: the answer has the form
	}
	return verdict.Pass, verdict.Reason, o, nil
}

// judgeTrial calls the judges of a case about a trial that meets all other expectations.
func (r *Runner) judgeTrial(
	ctx context.Context, run evals.Run, s evals.Subject, calibrations evals.Calibrations, c evals.Case, answer string,
) ([]evals.Judgement, error) {
	judges := c.Judges()
	list := []evals.Judgement{}
	for _, index := range slices.Sorted(maps.Keys(judges)) {
		judgement, err := r.judge(ctx, run, s, judges[index], redact.Text(answer, maxAnswer))
		if err != nil {
			return nil, err
		}
		judgement.Expect, judgement.Calibrated = index, calibrations.Find(s, judges[index]).Calibrated
		list = append(list, judgement)
	}
	return list, nil
}

// calibrateJudges calls the judges concurrently about labelled answers without a verdict, before the trials. It does
// not call a judge with too few labels. It stores the calibrations with the run, so later labels change no verdict. If
// ctx ends meanwhile, it stores none.
func (r *Runner) calibrateJudges(ctx context.Context, run evals.Run, s evals.Subject, concurrent int) error {
	calibrations, err := evals.ReadCalibrations(ctx, r.Pool, run.ID, s)
	if err != nil || calibrations.Frozen || len(calibrations.List) == 0 {
		return err
	}
	var group errgroup.Group
	group.SetLimit(max(concurrent, 1))
	for _, j := range s.Suite.Definition.UniqueJudges() {
		c, missing, err := evals.ReadCalibration(ctx, r.Pool, s, j)
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

// judgeLabel starts and runs the execution that judges a labelled answer. If the execution fails, the answer has no
// verdict.
func (r *Runner) judgeLabel(
	ctx context.Context, run evals.Run, s evals.Subject, j evals.JudgeRule, l evals.JudgeLabel,
) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // the trials report the timeout
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
	err = r.runUntil(ctx, x.ID, func() (bool, error) {
		ended, err := executions.Get(ctx, r.Pool, x.ID)
		return ended.CompletedAt != nil, err
	})
	if errors.Is(err, errTimeout) {
		_, err = r.Engine.Cancel(context.WithoutCancel(ctx), x.ID, "eval", errTimeout.Error())
	}
	return err
}

// playLabel is the durable function for a labelled answer.
func (r *Runner) playLabel(ctx context.Context, in trial) (executions.Result, error) {
	data, err := r.readTrial(ctx, in)
	if err != nil {
		return executions.Result{}, err
	}
	judgement, err := r.judge(ctx, data.run, data.subject, *in.Judge, in.Answer)
	if err != nil {
		return executions.Result{}, err
	}
	judge, about := evals.JudgeKey(judgement.Model, *in.Judge, in.Answer)
	_, err = executions.EndTx(ctx, "verdict", func(ctx context.Context, tx pgx.Tx) (bool, error) {
		return judgement.Pass, evals.PutJudgement(ctx, tx, in.Run, judge, about, judgement)
	}, func(pass bool) executions.Result {
		return executions.Result{Summary: fmt.Sprintf("judge %s: %t", judgement.Model, pass), Value: judgement}
	})
	return executions.Result{}, err
}

// runScope returns the budget of a run, including its judges. A candidate shares the budget of its control.
func runScope(run evals.Run, s evals.Subject) budgets.Scope {
	return budgets.Scope{
		Name: "eval:" + cmp.Or(run.ControlID, run.ID), Limit: budgets.Limit{USD: s.Suite.Definition.Budget.CostUSD},
	}
}
