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
// in the window, the rule needs a failure of a second caller, or a tripped rate without that caller. Package faults
// measures the rule on a public labelled set.
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
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// By is the actor in disabled_by of agent_skills and agent_automations.
const By = "self_heal"

// Policy holds the rule's numbers. The zero value is invalid; see Default.
type Policy struct {
	Failures  int           // consecutive failures that disable a skill
	Window    time.Duration // maximum age of the calls that count
	Rate      float64       // failure rate that disables a skill; above 0, at most 1
	RateCalls int           // number of newest calls for the rate
	Cooldown  time.Duration // from disabling to the trial
}

// Default is the policy of a fresh installation.
func Default() Policy {
	return Policy{Failures: 3, Window: 72 * time.Hour, Rate: 0.5, RateCalls: 20, Cooldown: 24 * time.Hour}
}

// Validate returns an error that names every invalid number.
func (p Policy) Validate() error {
	var problems []error
	check := func(wrong bool, text string) {
		if wrong {
			problems = append(problems, errors.New(text))
		}
	}
	check(p.Failures < 1, "failures must be at least 1")
	check(p.Window <= 0, "the window must be longer than 0")
	check(!(p.Rate > 0 && p.Rate <= 1), "the rate must be above 0 and at most 1")
	check(p.RateCalls < 1, "the number of calls for the rate must be at least 1")
	check(p.Cooldown < 0, "the cool-down must not be negative")
	if len(problems) == 0 {
		return nil
	}
	return fmt.Errorf("self-heal policy: %w", errors.Join(problems...))
}

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

// measured has the counts of an enabled skill and the rule's decision. explain sets Failures and Classes.
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

// measure counts the calls of one enabled skill, or of all if skill is empty.
func measure(ctx context.Context, db postgres.DB, p Policy, skill string) ([]measured, error) {
	return postgres.Rows[measured](ctx, db, "measure skills", measureSQL, pgx.QueryExecModeCacheDescribe, postgres.Strict{
		"skill": skill, "window": p.Window,
	})
}

// Bounds of the calls that the rule reads.
const (
	ownCalls   = 200 // in addition to those that the policy needs
	otherCalls = 1000
)

// decide applies the rule. It reads the calls only if enough calls failed.
func (m *measured) decide(ctx context.Context, db postgres.DB, p Policy) error {
	if m.Errors == 0 || m.Errors < p.Failures && float64(m.Errors) < p.Rate*float64(p.RateCalls) {
		return nil
	}
	calls, err := postgres.Rows[Call](ctx, db, "read calls of skill "+m.Skill, callsSQL, pgx.QueryExecModeCacheDescribe,
		postgres.Strict{
			"skill": m.Skill, "window": p.Window, "own": max(p.Failures, p.RateCalls) + ownCalls, "others": otherCalls,
		})
	m.Decided = p.Decide(m.Skill, m.Since, calls)
	return err
}

// explain reads the failures and counts their classes.
func (m *measured) explain(ctx context.Context, db postgres.DB, p Policy) error {
	err := db.QueryRow(ctx, evidenceSQL, postgres.Strict{
		"skill": m.Skill, "since": m.Since, "most": max(p.Failures, 10),
	}).Scan(&m.Classes, &m.Failures)
	if err != nil {
		return fmt.Errorf("read failures of skill %s: %w", m.Skill, err)
	}
	return nil
}

// evidence returns the data with which an admin can verify the decision.
func (m measured) evidence(p Policy) Evidence {
	e := Evidence{
		Rule: "streak", Streak: m.Decided.Streak, Calls: m.Calls, Errors: m.Errors, Window: p.Window.String(),
		Since: m.Since.UTC(), Classes: m.Classes, Failures: m.Failures,
	}
	if !m.Decided.ByStreak {
		e.Rule = "rate"
	}
	if m.Calls > 0 {
		e.Rate = float64(m.Errors) / float64(m.Calls)
	}
	return e
}

// reason returns the evidence in words.
func (m measured) reason(p Policy) string {
	text := fmt.Sprintf("%d consecutive failures", m.Decided.Streak)
	if !m.Decided.ByStreak {
		text = fmt.Sprintf("%d of %d calls failed (%d %%)", m.Errors, m.Calls, 100*m.Errors/max(m.Calls, 1))
		if float64(m.Errors) < p.Rate*float64(m.Calls) {
			d := m.Decided
			text = fmt.Sprintf("%d of the last %d calls failed (%d %%)", d.Failed, d.Recent, 100*d.Failed/d.Recent)
		}
		if class, n := m.mostCommonClass(); class != "" && len(m.Classes) > 1 {
			text += fmt.Sprintf(", %d of them %s", n, class)
		}
	}
	if len(m.Failures) == 0 {
		return text
	}
	last := m.Failures[0]
	return text + ", last: " + cmp.Or(strings.Trim(last.ErrorClass+": "+oneLine(last.ErrorMessage, 200), ": "),
		"no message")
}

// mostCommonClass returns the most frequent error class. Of equally frequent classes, it returns the first by name.
func (m measured) mostCommonClass() (class string, n int) {
	for _, c := range slices.Sorted(maps.Keys(m.Classes)) {
		if m.Classes[c] > n {
			class, n = c, m.Classes[c]
		}
	}
	return class, n
}

// oneLine returns text without line breaks, of at most n runes.
func oneLine(s string, n int) string {
	runes := []rune(strings.Join(strings.Fields(s), " "))
	if len(runes) <= n {
		return string(runes)
	}
	return string(runes[:n-1]) + "…"
}

// Report is the outcome of a run.
type Report struct {
	Checked int      `json:"checked"` // enabled skills that were measured
	Healed  []Healed `json:"healed"`
	Trials  []Trial  `json:"trials"` // skills that may be tried once
}

// Healed is a skill that this run disabled.
type Healed struct {
	Skill             string   `json:"skill"`
	SkillID           string   `json:"skill_id"`
	Reason            string   `json:"reason"`
	Evidence          Evidence `json:"evidence"`
	AutomationsPaused []string `json:"automations_paused"`
}

// Evidence is the reason why a skill was disabled. It is stored with the skill until the skill is enabled.
type Evidence struct {
	Reason   string         `json:"reason"`
	Rule     string         `json:"rule"` // streak or rate: the tripped condition; streak if both
	Streak   int            `json:"streak"`
	Calls    int            `json:"calls"`
	Errors   int            `json:"errors"`
	Rate     float64        `json:"rate"`
	Window   string         `json:"window"`
	Since    time.Time      `json:"since"` // start of the window, or the last enabling if later
	Classes  map[string]int `json:"classes"`
	Failures []Failure      `json:"failures"` // newest first, at most ten or as many as trip the rule
}

// Failure is one failed call.
type Failure struct {
	ActivityID   string    `json:"activity_id"`
	TraceID      string    `json:"trace_id"`
	At           time.Time `json:"at"`
	ErrorClass   string    `json:"error_class"`
	ErrorMessage string    `json:"error_message"`
}

// Trial is a disabled skill that may be tried once.
type Trial struct {
	Skill       string    `json:"skill"`
	Reason      string    `json:"reason"` // why it was disabled
	OfferedAt   time.Time `json:"offered_at"`
	Taken       bool      `json:"taken"`       // a call was admitted and is not settled
	Automations []string  `json:"automations"` // paused for the skill
}

// Prompt returns the report for a heartbeat's prompt. It quotes error texts, because they come from services.
func (r Report) Prompt() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Self-heal checked %d skills.", r.Checked)
	if len(r.Healed) == 0 {
		b.WriteString(" None had to be taken out of service.")
	}
	for _, h := range r.Healed {
		fmt.Fprintf(&b, "\n- %s is now disabled and cannot be called. Reason: %q.", h.Skill, h.Reason)
		if len(h.AutomationsPaused) > 0 {
			fmt.Fprintf(&b, " Paused with it: %s.", quoted(h.AutomationsPaused))
		}
	}
	for _, t := range r.Trials {
		if t.Taken {
			continue
		}
		fmt.Fprintf(&b, "\n- %s is on trial: its next call decides whether it returns to service. It was disabled for %q.",
			t.Skill, t.Reason)
		if len(t.Automations) > 0 {
			fmt.Fprintf(&b, " Waiting for it: %s.", quoted(t.Automations))
		}
	}
	return b.String()
}

func quoted(names []string) string {
	list := make([]string, 0, len(names))
	for _, name := range names {
		list = append(list, fmt.Sprintf("%q", name))
	}
	return strings.Join(list, ", ")
}
