// Package selfheal takes skills that keep failing out of service, with the evidence, and lets them back.
//
// The rule, over the calls of the last 72 hours of each enabled skill: 3 or more failures in a row up to
// now, or a failure rate of 0.5 or more over at least 20 calls. Why two: a streak is noticed within three
// calls, but one lucky call hides it, and a skill that fails 19 times of 25 may never fail thrice in a
// row; a rate sees that, but says nothing about few calls. 72 hours hold enough of a skill that runs a
// few times a day and forget last week's outage. All five numbers are settable (Policy).
//
// What counts is said once, by the view agent_skill_calls: a call with its retries is one row; skipped
// calls count neither way; a model's bad arguments, a stall, a cancel and a lost process are not the
// skill's failures; and nothing before the skill was last enabled counts, so it is not disabled again
// for what it was disabled for. A rate per error class decides nothing of its own (a class cannot fail
// more often than all classes together); the classes are counted to say what is wrong.
//
// A tripped skill is disabled by "self_heal", which pauses its enabled automations, in one transaction
// that first locks the skill and then measures it again. So two heals at once disable it once, and a
// success or an admin's re-enabling that came in between is seen. What an admin disabled is not touched.
//
// After a cool-down of 24 hours Run offers the skill for a trial (trial_at). The runtime shows the skills
// of Trials to its model beside the enabled ones, and lets an automation that was paused for its own skill
// try it when its next time has come, or with a run that has waited. It asks Admit right before it calls
// one, which lets one call through, and tells After, or Settle, how it ended: a success re-enables the
// skill and restores its automations, a failure starts the cool-down anew. A call that was let through and
// is never settled, because its process died, makes room for another after the skill's timeout and 15 minutes.
package selfheal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// By is who disables: the value of disabled_by in agent_skills and agent_automations.
const By = "self_heal"

// Policy is the rule's numbers. The zero value is not one; see Default.
type Policy struct {
	Failures  int           // in a row, that disable
	Window    time.Duration // how far back calls count
	Rate      float64       // of failures, that disables; above 0, at most 1
	RateCalls int           // fewest calls for the rate to mean something
	Cooldown  time.Duration // from disabling to the trial
}

// Default is the policy of a fresh installation.
func Default() Policy {
	return Policy{Failures: 3, Window: 72 * time.Hour, Rate: 0.5, RateCalls: 20, Cooldown: 24 * time.Hour}
}

// Validate names every number that cannot be meant.
func (p Policy) Validate() error {
	var bad []error
	complain := func(wrong bool, text string) {
		if wrong {
			bad = append(bad, errors.New(text))
		}
	}
	complain(p.Failures < 1, "failures must be at least 1")
	complain(p.Window <= 0, "the window must be longer than nothing")
	complain(!(p.Rate > 0 && p.Rate <= 1), "the rate must be above 0 and at most 1")
	complain(p.RateCalls < 1, "the calls for a rate must be at least 1")
	complain(p.Cooldown < 0, "the cool-down cannot be negative")
	if len(bad) == 0 {
		return nil
	}
	return fmt.Errorf("self-heal policy: %w", errors.Join(bad...))
}

// Run measures every enabled skill, disables those that trip the rule, each in a transaction of its own
// (a savepoint when db is a transaction), and offers a trial to those whose cool-down has passed. It may
// run at any time and many times at once. It writes no activity: the report has what the caller needs
// for one row per healed skill. On an error the report holds what was done before it.
func Run(ctx context.Context, db postgres.Beginner, p Policy) (Report, error) {
	report := Report{Healed: []Healed{}, Trials: []Trial{}}
	if err := p.Validate(); err != nil {
		return report, err
	}
	measures, err := measure(ctx, db, p, "")
	if err != nil {
		return report, fmt.Errorf("self-heal: %w", err)
	}
	report.Checked = len(measures)
	for _, m := range measures {
		if !m.tripped() {
			continue
		}
		healed, done, err := heal(ctx, db, p, m.Skill)
		if err != nil {
			return report, fmt.Errorf("self-heal: %w", err)
		}
		if done {
			report.Healed = append(report.Healed, healed)
		}
	}
	if err := offer(ctx, db, p); err != nil {
		return report, err
	}
	report.Trials, err = Trials(ctx, db)
	return report, err
}

// heal disables one skill, unless it no longer trips the rule.
func heal(ctx context.Context, db postgres.Beginner, p Policy, skill string) (healed Healed, done bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		m, still, err := lock(ctx, tx, p, skill)
		if err != nil || !still {
			return err
		}
		healed = Healed{Skill: m.Skill, SkillID: m.SkillID, Evidence: m.evidence(p), AutomationsPaused: []string{}}
		healed.Reason = m.reason()
		healed.Evidence.Reason = healed.Reason
		if done, err = skills.Disable(ctx, tx, skill, By, healed.Reason, healed.Evidence); err != nil || !done {
			return err
		}
		healed.AutomationsPaused, err = automations.PausedFor(ctx, tx, skill)
		return err
	})
	return healed, done && err == nil, err
}

// lock takes the skill's row and measures again what is true now that nobody else can change it.
func lock(ctx context.Context, tx pgx.Tx, p Policy, skill string) (measured, bool, error) {
	tag, err := tx.Exec(ctx, `select 1 from agent_skills where name = @skill and enabled for no key update`,
		postgres.Strict{"skill": skill})
	if err != nil {
		return measured{}, false, fmt.Errorf("lock skill %s: %w", skill, err)
	}
	if tag.RowsAffected() == 0 {
		return measured{}, false, nil
	}
	again, err := measure(ctx, tx, p, skill)
	if err != nil || len(again) == 0 {
		return measured{}, false, err
	}
	return again[0], again[0].tripped(), nil
}
