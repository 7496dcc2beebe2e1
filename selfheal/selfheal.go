// Package selfheal disables skills that keep failing, with evidence, and re-enables them after a successful trial.
//
// The rule covers the calls of the last 72 hours of each enabled skill: 3 or more consecutive failures up to now, or a
// failure rate of at least 0.5 over the newest 20 calls. A streak needs only three calls, but a single success ends it:
// a skill with 19 failures in 25 calls may never fail three times in a row. A rate finds such a skill, but needs more
// calls. A window of 72 hours covers a skill that runs a few times a day, and excludes an outage of last week. [Policy]
// sets all five numbers.
//
// Failures with evidence of another cause do not count ([Policy.Decide]). One cause is an outage: failures of three or
// more skills that worked before, without a success of any skill between. Another cause is a single caller: one thread
// (or trace) has all failures of a streak or most failures of a rate. If the skill then worked for three other callers
// in the window, it stays enabled until a second caller fails, or until the rate trips without the first. Package
// faults measures the rule on a public labelled set.
//
// The view agent_skill_calls defines the calls that count. A call with its retries is one row. Skipped calls do not
// count. A model's invalid arguments, a stall, a cancellation and a lost process are no failures of the skill. Calls
// before the last enabling do not count. Error classes only explain the failure: no class fails more often than all
// together.
//
// For a tripped skill, one transaction locks the skill, measures it again, disables it as "self_heal", and pauses its
// automations. So concurrent runs disable the skill once, and take account of a success or an enabling in the meantime.
// Self-heal does not change a skill that an admin disabled.
//
// After a cool-down of 24 hours, Run offers the skill for a trial (trial_at). The runtime offers the skills of [Trials]
// to its model. An automation that was paused for the skill may also try it when due. The runtime calls [Admit] before
// the call, which admits one call, and reports the outcome with [After] or [Settle]. A success enables the skill and
// resumes its automations; a failure restarts the cool-down. An admitted call without a settlement expires after the
// skill's timeout plus 15 minutes.
package selfheal

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// By is the actor in disabled_by of agent_skills and agent_automations.
const By = "self_heal"

// Run measures every enabled skill and disables those that trip the rule, each in its own transaction (a savepoint when
// db is a transaction). It offers a trial to skills after their cool-down. Concurrent runs are safe. Run writes no
// activity: the caller writes it from the report. After an error the report holds the completed changes.
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
		if err := m.decide(ctx, db, p); err != nil {
			return report, fmt.Errorf("self-heal: %w", err)
		}
		if !m.Decided.Tripped() {
			continue
		}
		healed, disabled, err := heal(ctx, db, p, m.Skill)
		if err != nil {
			return report, fmt.Errorf("self-heal: %w", err)
		}
		if disabled {
			report.Healed = append(report.Healed, healed)
		}
	}
	if err := offerTrials(ctx, db, p); err != nil {
		return report, err
	}
	report.Trials, err = Trials(ctx, db)
	return report, err
}

// heal disables one skill if the skill still trips the rule.
func heal(ctx context.Context, db postgres.Beginner, p Policy, skill string) (healed Healed, disabled bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		m, tripped, err := lockAndMeasure(ctx, tx, p, skill)
		if err != nil || !tripped {
			return err
		}
		healed = Healed{Skill: m.Skill, SkillID: m.SkillID, Evidence: m.evidence(p), AutomationsPaused: []string{}}
		healed.Reason = m.reason(p)
		healed.Evidence.Reason = healed.Reason
		if disabled, err = skills.Disable(ctx, tx, skill, By, healed.Reason, healed.Evidence); err != nil || !disabled {
			return err
		}
		healed.AutomationsPaused, err = automations.PausedFor(ctx, tx, skill)
		return err
	})
	return healed, disabled && err == nil, err
}

// lockAndMeasure locks the skill's row and measures again.
func lockAndMeasure(ctx context.Context, tx pgx.Tx, p Policy, skill string) (measured, bool, error) {
	tag, err := tx.Exec(ctx, `select 1 from agent_skills where name = @skill and enabled for no key update`,
		postgres.Strict{"skill": skill})
	if err != nil {
		return measured{}, false, fmt.Errorf("lock skill %s: %w", skill, err)
	}
	if tag.RowsAffected() == 0 {
		return measured{}, false, nil
	}
	measures, err := measure(ctx, tx, p, skill)
	if err != nil || len(measures) == 0 {
		return measured{}, false, err
	}
	m := measures[0]
	if err := m.decide(ctx, tx, p); err != nil || !m.Decided.Tripped() {
		return m, false, err
	}
	return m, true, m.explain(ctx, tx, p)
}

//go:embed measure.sql
var measureSQL string

//go:embed calls.sql
var callsSQL string

//go:embed evidence.sql
var evidenceSQL string

// measured has the counts of an enabled skill's newest calls, and the rule's decision. explain counts all calls, and
// sets Failures and Classes.
type measured struct {
	Skill    string
	SkillID  string
	Calls    int
	Errors   int
	Since    time.Time
	Failures []Failure      `db:"-"`
	Classes  map[string]int `db:"-"`
	Decided  Decision       `db:"-"`
}

// measure counts the newest calls of one enabled skill, or of all if skill is empty.
func measure(ctx context.Context, db postgres.DB, p Policy, skill string) ([]measured, error) {
	return postgres.Rows[measured](ctx, db, "measure skills", measureSQL, pgx.QueryExecModeCacheDescribe, postgres.Strict{
		"skill": skill, "window": p.Window, "own": p.newest(),
	})
}

// Bounds of the calls that the rule reads.
const (
	ownCalls   = 200 // in addition to those that the policy needs
	otherCalls = 1000
)

// newest is the number of a skill's calls that the rule reads.
func (p Policy) newest() int { return max(p.Failures, p.RateCalls) + ownCalls }

// decide applies the rule. It reads the calls only if enough calls failed.
func (m *measured) decide(ctx context.Context, db postgres.DB, p Policy) error {
	if m.Errors == 0 || m.Errors < p.Failures && float64(m.Errors) < p.Rate*float64(p.RateCalls) {
		return nil
	}
	calls, err := postgres.Rows[Call](ctx, db, "read calls of skill "+m.Skill, callsSQL, pgx.QueryExecModeCacheDescribe,
		postgres.Strict{
			"skill": m.Skill, "window": p.Window, "own": p.newest(), "others": otherCalls,
		})
	m.Decided = p.Decide(m.Skill, m.Since, calls)
	return err
}

// explain counts the calls, and reads the failures with their classes.
func (m *measured) explain(ctx context.Context, db postgres.DB, p Policy) error {
	err := db.QueryRow(ctx, evidenceSQL, postgres.Strict{
		"skill": m.Skill, "since": m.Since, "most": max(p.Failures, 10),
	}).Scan(&m.Calls, &m.Errors, &m.Classes, &m.Failures)
	if err != nil {
		return fmt.Errorf("read failures of skill %s: %w", m.Skill, err)
	}
	return nil
}
