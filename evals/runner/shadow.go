package runner

import (
	"context"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/sleep"
)

const (
	// shadowPoll is the pause between polls for the end of a shadow. It is also the pause between polls for completed
	// turns if the last poll found some.
	shadowPoll = 5 * time.Second
	// idlePoll is the pause between polls for completed turns if the last poll found none.
	idlePoll = 30 * time.Second
	// longestTurn bounds the duration of a sampled turn.
	longestTurn = 24 * time.Hour
	// maxShadow bounds the turns of a shadow.
	maxShadow = 500
)

// StartShadow stores a shadow: a counterfactual with a share of the turns as they complete. Servers play the shadow
// until it ends, one turn at a time.
func (r *Runner) StartShadow(
	ctx context.Context, c Counterfactual, share float64, duration time.Duration,
) (evals.Run, error) {
	agent, err := r.Agents.Find(ctx, r.Pool, c.Agent)
	if err != nil {
		return evals.Run{}, err
	}
	p := Plan{
		Run:    evals.Run{Kind: evals.OfShadow, Trials: 1, Background: true, Candidate: c.Candidate != nil},
		Sample: evals.Sample{Skipped: map[string]int{}, Turns: map[string]evals.Recorded{}},
	}
	suite := evals.Suite{Version: 1, Source: evals.OfShadow, Definition: evals.Definition{
		Agent: agent.Name, Surface: "operate", Trials: 1, Cases: []evals.Case{}, ApplyGate: &evals.Gate{Margin: c.Margin},
		Budget: evals.Budget{CostUSD: c.BudgetUSD, Timeout: duration.String()},
	}}
	if err := r.readSubjects(ctx, c, suite, &p); err != nil {
		return evals.Run{}, err
	}
	if c.BudgetUSD > 0 && (!r.Model.PricedModel(p.Candidate.Model) || !r.Model.PricedModel(r.playedModel(agent.Model))) {
		return evals.Run{}, fmt.Errorf("start a shadow of %s: %w", agent.Name, ErrUnpriced)
	}
	return r.storeRuns(ctx, p, func(tx postgres.DB, run evals.Run) error {
		return evals.PutShadow(ctx, tx, run.ID, share, duration)
	})
}

// workShadow plays turns as they complete, until the shadow ends or its budget is used up.
func (r *Runner) workShadow(ctx context.Context, run evals.Run, onTrial func(evals.Trial)) error {
	control, err := evals.GetRun(ctx, r.Pool, run.ControlID)
	if err != nil {
		return err
	}
	var nextPoll time.Time
	for {
		shadow, err := evals.GetShadow(ctx, r.Pool, run.ID)
		if err != nil {
			return err
		}
		if ended := shadow.Over || shadow.Turns >= maxShadow; ended || !time.Now().Before(nextPoll) {
			found, err := r.extend(ctx, run, shadow)
			if err != nil {
				return err
			}
			nextPoll = time.Now().Add(pauseAfter(found, shadow))
			spent, err := r.playUndecided(ctx, []evals.Run{control, run}, onTrial)
			if err != nil {
				return err
			}
			if ended || spent {
				if err := r.finishRun(ctx, control, nil); err != nil {
					return err
				}
				return r.finishRun(ctx, run, nil)
			}
		}
		if !sleep.For(ctx, shadowPoll) {
			return context.Cause(ctx)
		}
	}
}

// pauseAfter returns the pause after a poll that found a number of turns.
func pauseAfter(found int, s evals.Shadow) time.Duration {
	if found == 0 && s.VisibleUntil.After(s.SeenAt) {
		return idlePoll
	}
	return 0
}

// extend adds the turns that have completed since the last poll, and returns their number.
func (r *Runner) extend(ctx context.Context, run evals.Run, s evals.Shadow) (found int, err error) {
	if s.Turns >= maxShadow || !s.VisibleUntil.After(s.SeenAt) {
		return 0, nil
	}
	all, err := r.Agents.List(ctx, r.Pool)
	if err != nil {
		return 0, err
	}
	agent, err := agents.Find(all, run.Agent)
	if err != nil {
		return 0, err
	}
	filter := sampleFilter(all, agent)
	filter.Since, filter.Size, filter.Share = s.VisibleUntil.Sub(s.SeenAt)+longestTurn, maxShadow-s.Turns, s.Share
	filter.After, filter.Until = &s.SeenAt, &s.VisibleUntil
	_, sample, err := evals.DrawSample(ctx, r.Pool, filter)
	if err != nil {
		return 0, err
	}
	r.nameModels(agent, sample)
	return sample.Size, evals.Extend(ctx, r.Pool, run, sample, s)
}

// playUndecided plays the trials without a verdict, one at a time. spent reports that the budget is used up.
func (r *Runner) playUndecided(
	ctx context.Context, runs []evals.Run, onTrial func(evals.Trial),
) (spent bool, err error) {
	for _, run := range runs {
		trials, err := evals.BriefTrials(ctx, r.Pool, run.ID, "")
		if err != nil {
			return false, err
		}
		for _, t := range trials {
			if t.Verdict == "" {
				if t, err = r.playTrial(ctx, run, t); err != nil {
					return false, err
				}
				onTrial(t)
			}
			spent = spent || t.Verdict == evals.UndecidedTrial
		}
	}
	return spent, nil
}
