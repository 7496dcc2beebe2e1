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
	// shadowPoll is the pause between polls for the end of a shadow, and for completed turns while there are some.
	shadowPoll = 5 * time.Second
	// idlePoll is the pause between polls for completed turns after one that found none.
	idlePoll = 30 * time.Second
	// longestTurn bounds the duration of a sampled turn.
	longestTurn = 24 * time.Hour
	// maxShadow bounds the turns of a shadow.
	maxShadow = 500
)

// StartShadow stores a shadow, which servers play until it ends: a counterfactual that gets a share of the turns as
// they complete. One turn is played at a time.
func (r *Runner) StartShadow(
	ctx context.Context, c Counterfactual, share float64, lasts time.Duration,
) (evals.Run, error) {
	who, err := r.Agents.Find(ctx, r.Pool, c.Agent)
	if err != nil {
		return evals.Run{}, err
	}
	p := Planned{
		Run:    evals.Run{Kind: evals.OfShadow, Trials: 1, Background: true, Candidate: c.Candidate != nil},
		Sample: evals.Sample{Skipped: map[string]int{}, Turns: map[string]evals.Recorded{}},
	}
	suite := evals.Suite{Version: 1, Source: evals.OfShadow, Definition: evals.Definition{
		Agent: who.Name, Surface: "operate", Trials: 1, Cases: []evals.Case{}, ApplyGate: &evals.Gate{Margin: c.Margin},
		Budget: evals.Budget{CostUSD: c.BudgetUSD, Timeout: lasts.String()},
	}}
	if err := r.subjects(ctx, c, suite, &p); err != nil {
		return evals.Run{}, err
	}
	if c.BudgetUSD > 0 && (!r.Model.PricedModel(p.Candidate.Model) || !r.Model.PricedModel(r.played(who.Model))) {
		return evals.Run{}, fmt.Errorf("start a shadow of %s: %w", who.Name, ErrUnpriced)
	}
	return r.store(ctx, p, func(tx postgres.DB, run evals.Run) error {
		return evals.PutShadow(ctx, tx, run.ID, share, lasts)
	})
}

// workShadow plays turns as they complete, until the shadow ends or its budget is used up.
func (r *Runner) workShadow(ctx context.Context, run evals.Run, onTrial func(evals.Trial)) error {
	control, err := evals.GetRun(ctx, r.Pool, run.ControlID)
	if err != nil {
		return err
	}
	var next time.Time
	for {
		shadow, err := evals.GetShadow(ctx, r.Pool, run.ID)
		if err != nil {
			return err
		}
		if over := shadow.Over || shadow.Turns >= maxShadow; over || !time.Now().Before(next) {
			found, err := r.extend(ctx, run, shadow)
			if err != nil {
				return err
			}
			next = time.Now().Add(pauseAfter(found, shadow))
			spent, err := r.playOpen(ctx, []evals.Run{control, run}, onTrial)
			if err != nil {
				return err
			}
			if over || spent {
				if err := r.decide(ctx, control, nil); err != nil {
					return err
				}
				return r.decide(ctx, run, nil)
			}
		}
		if !sleep.For(ctx, shadowPoll) {
			return context.Cause(ctx)
		}
	}
}

// pauseAfter is the pause after a poll with that number of turns.
func pauseAfter(found int, s evals.Shadow) time.Duration {
	if found == 0 && s.Upto.After(s.SeenAt) {
		return idlePoll
	}
	return 0
}

// extend adds the turns that have completed since the last poll, and returns their number.
func (r *Runner) extend(ctx context.Context, run evals.Run, s evals.Shadow) (found int, err error) {
	if s.Turns >= maxShadow || !s.Upto.After(s.SeenAt) {
		return 0, nil
	}
	all, err := r.Agents.List(ctx, r.Pool)
	if err != nil {
		return 0, err
	}
	who, err := agents.Find(all, run.Agent)
	if err != nil {
		return 0, err
	}
	of := sampleOf(all, who)
	of.Since, of.Size, of.Share = s.Upto.Sub(s.SeenAt)+longestTurn, maxShadow-s.Turns, s.Share
	of.After, of.Upto = &s.SeenAt, &s.Upto
	_, sample, err := evals.Draw(ctx, r.Pool, of)
	if err != nil {
		return 0, err
	}
	r.nameModels(who, sample)
	return sample.Size, evals.Extend(ctx, r.Pool, run, sample, s)
}

// playOpen plays the open trials of runs, one at a time. spent reports that the budget was used up.
func (r *Runner) playOpen(ctx context.Context, runs []evals.Run, onTrial func(evals.Trial)) (spent bool, err error) {
	for _, run := range runs {
		trials, err := evals.BriefTrials(ctx, r.Pool, run.ID, "")
		if err != nil {
			return false, err
		}
		for _, t := range trials {
			if t.Verdict == "" {
				if t, err = r.await(ctx, run, t); err != nil {
					return false, err
				}
				onTrial(t)
			}
			spent = spent || t.Verdict == evals.UndecidedTrial
		}
	}
	return spent, nil
}
