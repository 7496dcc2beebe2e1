package evals

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// The gate of apply. A suite with gate: lets an apply that changes its agent or its cases pass only after a run of the
// exact result of the apply: the same cases, agent, skills and model, played by the same version of this program. The
// newest finished run counts. All its trials must have passed, or it must be decided and not worse than the newest run
// of the present agent, on the cases that both have. With pass_rate, a mean pass rate suffices unless the run is worse.
//
// The stricter of the gates before and after an apply counts. So an apply cannot loosen its own gate.

// Refusal is the refusal of an apply by a suite.
type Refusal struct {
	Suite string   `json:"suite"`
	Why   string   `json:"why"`
	Cases []string `json:"cases"` // the cases that did not pass
	Run   string   `json:"run"`   // the newest run of the new version; empty for none
}

func (r Refusal) String() string {
	text := r.Suite + ": " + r.Why
	if len(r.Cases) > 0 {
		text += ": " + strings.Join(r.Cases, ", ")
	}
	return text
}

// GateError reports the suites that refuse an apply.
type GateError struct{ Refusals []Refusal }

func (e *GateError) Error() string {
	lines := make([]string, len(e.Refusals))
	for i, r := range e.Refusals {
		lines[i] = r.String()
	}
	return "evals refuse this apply: " + strings.Join(lines, "; ")
}

// Suites returns the names of the refusing suites for which a new run could change the decision.
func (e *GateError) Suites() []string {
	var names []string
	for _, r := range e.Refusals {
		if r.Why != reasonRemoved {
			names = append(names, r.Suite)
		}
	}
	return names
}

const (
	reasonNoRun   = "it has not run against this workspace"
	reasonRemoved = "it is removed together with a change of its agent; make these changes one after the other"
)

// CheckGate returns the refusals of an apply. before and after are the subjects of the suites before and after the
// apply. db shows the state after the apply.
func (in Installation) CheckGate(
	ctx context.Context, db postgres.DB, before, after map[string]Subject,
) ([]Refusal, error) {
	var refusals []Refusal
	names := maps.Clone(before)
	maps.Copy(names, after)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		subjectBefore, existedBefore := before[name]
		subjectAfter, existsAfter := after[name]
		gate := stricter(subjectBefore.Suite.Definition.ApplyGate, subjectAfter.Suite.Definition.ApplyGate)
		if gate == nil {
			continue
		}
		refusal, err := Refusal{}, error(nil)
		switch {
		case !existsAfter:
			refusal, err = in.checkRemoved(ctx, db, subjectBefore)
		case !existedBefore || subjectBefore.AgentDigest() != subjectAfter.AgentDigest() ||
			subjectBefore.SuiteDigest() != subjectAfter.SuiteDigest():
			refusal, err = checkSuite(ctx, db, subjectBefore, subjectAfter, *gate)
			if err == nil && refusal.Why == "" && in.Offline {
				refusal, err = in.checkOffline(ctx, db, name)
			}
		}
		if err != nil {
			return nil, err
		}
		if refusal.Why != "" {
			refusal.Suite = name
			refusals = append(refusals, refusal)
		}
	}
	return refusals, nil
}

// stricter combines the gates before and after an apply.
func stricter(a, b *Gate) *Gate {
	if a == nil || b == nil {
		return cmp.Or(a, b)
	}
	return &Gate{Margin: min(a.Margin, b.Margin), PassRate: stricterRate(a.PassRate, b.PassRate)}
}

// stricterRate returns the higher of two rates. The rate 0 is the strictest, because it requires all trials to pass.
func stricterRate(a, b float64) float64 {
	if a == 0 || b == 0 {
		return 0
	}
	return max(a, b)
}

// checkOffline refuses an apply if only the offline model passed the suite, and another model has played it before.
func (in Installation) checkOffline(ctx context.Context, db postgres.DB, suite string) (Refusal, error) {
	models, err := postgres.Names(ctx, db, "read the models of eval "+suite, `
		select model from agent_eval_runs where suite = @suite and kind = 'suite' and model not in ('', @offline)
		 order by id desc limit 1`, postgres.Strict{"suite": suite, "offline": in.Model})
	if err != nil || len(models) == 0 {
		return Refusal{}, err
	}
	return Refusal{Why: "only the offline model passed it, and its runs before had " + models[0] +
		"; give this command the settings of the model"}, nil
}

// checkRemoved refuses the removal of a suite together with a change of its agent.
func (in Installation) checkRemoved(ctx context.Context, db postgres.DB, old Subject) (Refusal, error) {
	now, err := in.Subject(ctx, db, old.Suite)
	switch {
	case errors.Is(err, agents.ErrNotFound):
		return Refusal{}, nil // the apply also removes the agent
	case err != nil:
		return Refusal{}, err
	case now.AgentDigest() != old.AgentDigest():
		return Refusal{Why: reasonRemoved}, nil
	}
	return Refusal{}, nil
}

// checkSuite returns the refusal of an apply by the newest run of the suite, or an empty Refusal.
func checkSuite(ctx context.Context, db postgres.DB, old, now Subject, gate Gate) (Refusal, error) {
	run, err := newestRun(ctx, db, now, now.SuiteDigest())
	if errors.Is(err, ErrNotFound) {
		return Refusal{Why: reasonNoRun}, nil
	}
	if err != nil {
		return Refusal{}, err
	}
	trials, err := Trials(ctx, db, run.ID)
	if err != nil {
		return Refusal{}, err
	}
	cases := summarize(trials)
	refusal := Refusal{Run: run.ID, Cases: failedCases(cases)}
	if run.Status == Passed {
		return Refusal{}, nil
	}
	if run.Status == Undecided || slices.ContainsFunc(cases, func(c CaseResult) bool { return c.Undecided > 0 }) {
		refusal.Why = "not all trials were decided in run " + run.ID
		return refusal, nil
	}
	compared, err := compareWithCurrent(ctx, db, old, now, cases, gate.Margin)
	switch {
	case err != nil:
		return Refusal{}, err
	case compared.Answer == stats.Better, compared.Answer == stats.NotWorse:
		return Refusal{}, nil
	case compared.Answer == stats.Worse:
		refusal.Why = fmt.Sprintf("worse than the present version by %.2f in run %s", -compared.Difference, run.ID)
	case gate.PassRate > 0 && meanRate(cases) >= gate.PassRate:
		return Refusal{}, nil
	default:
		refusal.Why = fmt.Sprintf("a pass rate of %.2f, below %s, in run %s", meanRate(cases), gate.requiredRate(), run.ID)
	}
	return refusal, nil
}

// requiredRate returns the pass rate that the gate requires, as a text.
func (g Gate) requiredRate() string {
	if g.PassRate > 0 {
		return fmt.Sprintf("pass_rate %.2f", g.PassRate)
	}
	return "1.00"
}

// newestRun returns the newest finished run of a subject's agent, or [ErrNotFound]. With a digest of cases, it returns
// a run of these cases by this version of the program, with enough trials. Without one, it returns any decided run.
func newestRun(ctx context.Context, db postgres.DB, s Subject, cases string) (Run, error) {
	rows, err := db.Query(ctx, `
		select `+runColumns+` from agent_eval_runs
		 where kind = 'suite' and suite = @suite and agent_digest = @agent and finished_at is not null
		   and (@cases = '' and status in ('passed', 'failed')
		     or suite_digest = @cases and runtime = @runtime and trials >= @trials)
		 order by id desc limit 1`, postgres.Strict{
		"suite": s.Suite.Name, "agent": s.AgentDigest(), "cases": cases, "runtime": s.Runtime,
		"trials": s.Suite.Definition.TrialCount(),
	})
	return postgres.CollectOne(rows, err, ErrNotFound, "find a run of eval "+s.Suite.Name, pgx.RowToStructByPos[Run])
}

// compareWithCurrent compares results with the newest run of the current agent, on the cases that are equal in both.
func compareWithCurrent(
	ctx context.Context, db postgres.DB, old, now Subject, cases []CaseResult, margin float64,
) (stats.Comparison, error) {
	none := stats.Comparison{Answer: stats.Undecided}
	if old.Suite.Name == "" || old.AgentDigest() == now.AgentDigest() {
		return none, nil
	}
	run, err := newestRun(ctx, db, old, "")
	if errors.Is(err, ErrNotFound) {
		return none, nil
	}
	if err != nil {
		return none, err
	}
	oldSubject, err := ReadSubject(ctx, db, run)
	if err != nil {
		return none, err
	}
	trials, err := Trials(ctx, db, run.ID)
	if err != nil {
		return none, err
	}
	earlier := map[string]stats.Count{}
	for _, c := range summarize(trials) {
		oldCase, _ := oldSubject.Suite.Definition.Case(c.Case)
		newCase, exists := now.Suite.Definition.Case(c.Case)
		if exists && digest(oldCase) == digest(newCase) {
			earlier[c.Case] = stats.Count{Passed: c.Passed, Trials: c.Trials}
		}
	}
	var pairs []stats.Pair
	for _, c := range cases {
		pairs = append(pairs, stats.Pair{Old: earlier[c.Case], New: stats.Count{Passed: c.Passed, Trials: c.Trials}})
	}
	return stats.Compare(pairs, stats.Plan{Margin: margin}), nil
}

// failedCases lists the cases that did not pass in all trials.
func failedCases(cases []CaseResult) (list []string) {
	for _, c := range cases {
		if c.Passed < c.Trials+c.Undecided {
			list = append(list, fmt.Sprintf("%s (%d/%d)", c.Case, c.Passed, c.Trials+c.Undecided))
		}
	}
	return list
}

// meanRate is the mean of the cases' pass rates.
func meanRate(cases []CaseResult) float64 {
	if len(cases) == 0 {
		return 0
	}
	sum := 0.0
	for _, c := range cases {
		sum += stats.Count{Passed: c.Passed, Trials: c.Trials}.Rate()
	}
	return sum / float64(len(cases))
}
