package evals

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Report has the results of a run.
type Report struct {
	Run
	Cases    []CaseResult  `json:"cases"`
	CostUSD  float64       `json:"cost_usd"`
	Tokens   int64         `json:"tokens"`
	JudgeUSD float64       `json:"judge_usd"` // besides CostUSD
	Judges   []Calibration `json:"judges,omitempty"`
	// The cost of calibrating the run's judges, besides CostUSD and JudgeUSD.
	CalibrationUSD    float64 `json:"calibration_usd,omitempty"`
	CalibrationTokens int64   `json:"calibration_tokens,omitempty"`

	Control    stats.Comparison  `json:"control"`              // A/A comparison of the run with itself
	Against    *Run              `json:"against,omitempty"`    // the compared run
	Comparison *stats.Comparison `json:"comparison,omitempty"` // this run with it
	Difference *stats.Interval   `json:"difference,omitempty"` // of the mean pass rates

	TrialRows []Trial `json:"trials_of_cases"`

	// Of a run of recorded turns:
	Coverage   *Coverage   `json:"coverage,omitempty"`
	ControlRun *ControlRun `json:"control_run,omitempty"`
}

// CaseResult has the results of a case. PassK is the chance that K trials all pass.
type CaseResult struct {
	Case      string         `json:"case"`
	Passed    int            `json:"passed"`
	Trials    int            `json:"trials"` // decided trials
	Undecided int            `json:"undecided"`
	Rate      stats.Interval `json:"rate"` // 95 %
	K         int            `json:"k"`
	PassK     float64        `json:"pass_k"`
	CostUSD   float64        `json:"cost_usd"`
	Tokens    int64          `json:"tokens"`
	JudgeUSD  float64        `json:"judge_usd"` // besides CostUSD
	Reasons   []string       `json:"reasons"`   // distinct reasons, at most maxReasons
	TraceID   string         `json:"trace_id"`  // of the first failed trial, or of the first trial
}

const maxReasons = 5

// ControlRun is the control of a run: the current agent, with the recorded models.
type ControlRun struct {
	Run
	Coverage Coverage       `json:"coverage"`
	Rate     stats.Interval `json:"rate"` // 95 % interval of the share of turns that it follows
	CostUSD  float64        `json:"cost_usd"`
}

// NewReport summarizes the trials of a run, and compares it with its control if it has one.
func NewReport(ctx context.Context, db postgres.DB, r Run) (Report, error) {
	trials, err := Trials(ctx, db, r.ID)
	if err != nil {
		return Report{}, err
	}
	return newReport(ctx, db, r, trials)
}

// NewBriefReport is NewReport without the answers, calls and judgements of the trials.
func NewBriefReport(ctx context.Context, db postgres.DB, r Run) (Report, error) {
	trials, err := BriefTrials(ctx, db, r.ID, "")
	if err != nil {
		return Report{}, err
	}
	return newReport(ctx, db, r, trials)
}

func newReport(ctx context.Context, db postgres.DB, r Run, trials []Trial) (Report, error) {
	report := ReportOf(r, trials)
	if r.Kind == OfSuite {
		return report, report.addJudges(ctx, db)
	}
	sample, err := readSample(ctx, db, r)
	coverage := countCoverage(sample, trials)
	report.Coverage = &coverage
	if err == nil && r.ControlID != "" {
		err = report.compareWithControl(ctx, db)
	}
	return report, err
}

// ReportOf summarizes a run by its trials, in the order of [Trials].
func ReportOf(r Run, trials []Trial) Report {
	report := Report{Run: r, TrialRows: trials, Cases: summarize(trials)}
	for _, c := range report.Cases {
		report.CostUSD += c.CostUSD
		report.Tokens += c.Tokens
		report.JudgeUSD += c.JudgeUSD
	}
	report.Control = stats.Control(passesByCase(trials, report.Cases))
	return report
}

// addJudges adds the calibrations of the judges.
func (r *Report) addJudges(ctx context.Context, db postgres.DB) error {
	subject, err := ReadSubject(ctx, db, r.Run)
	if err != nil {
		return err
	}
	c, err := ReadCalibrations(ctx, db, r.ID, subject)
	r.Judges, r.CalibrationUSD, r.CalibrationTokens = c.List, c.USD, c.Tokens
	return err
}

// Follows reports whether a control run follows at least half of the recorded turns that it played, and one at least.
func (r *Report) Follows() bool {
	return r.Coverage != nil && r.Coverage.Followed > 0 && 2*r.Coverage.Followed >= r.Coverage.Played
}

// compareWithControl compares a run with its control. If the control does not follow its turns, the answer "not worse"
// becomes "undecided".
func (r *Report) compareWithControl(ctx context.Context, db postgres.DB) error {
	run, err := GetRun(ctx, db, r.ControlID)
	if err != nil {
		return err
	}
	control, err := NewBriefReport(ctx, db, run)
	if err != nil {
		return err
	}
	suite, err := Version(ctx, db, run.Suite, run.Version)
	if err != nil {
		return err
	}
	r.ControlRun = &ControlRun{
		Run: run, Coverage: *control.Coverage, CostUSD: control.CostUSD,
		Rate: stats.Wilson(control.Coverage.Followed, control.Coverage.Played),
	}
	if err := r.CompareWith(ctx, db, run, suite.Definition.Margin()); err != nil {
		return err
	}
	r.requireFollowingControl(control.Follows())
	return nil
}

// requireFollowingControl changes "not worse" to "undecided" if the control does not follow its turns.
func (r *Report) requireFollowingControl(controlFollows bool) {
	if !controlFollows && r.Comparison.Answer == stats.NotWorse {
		r.Comparison.Answer = stats.Undecided
	}
}

// CompareControl compares the summary of a run of recorded turns with that of its control; see [Summaries].
func (r *Report) CompareControl(control Report, margin float64) {
	r.Compare(control, margin)
	played, followed := 0, 0
	for _, c := range control.Cases {
		if c.Trials > 0 {
			played++
			if c.Passed == c.Trials && c.Undecided == 0 {
				followed++
			}
		}
	}
	r.requireFollowingControl(followed > 0 && 2*followed >= played)
}

// CompareWith adds the comparison with another run, by the cases of the same name. margin is the accepted loss of the
// mean pass rate.
func (r *Report) CompareWith(ctx context.Context, db postgres.DB, other Run, margin float64) error {
	trials, err := BriefTrials(ctx, db, other.ID, "")
	if err == nil {
		r.Compare(ReportOf(other, trials), margin)
	}
	return err
}

// Compare adds the comparison with the report of another run.
func (r *Report) Compare(other Report, margin float64) {
	before := map[string]stats.Count{}
	for _, c := range other.Cases {
		before[c.Case] = stats.Count{Passed: c.Passed, Trials: c.Trials}
	}
	var pairs []stats.Pair
	for _, c := range r.Cases {
		pairs = append(pairs, stats.Pair{Old: before[c.Case], New: stats.Count{Passed: c.Passed, Trials: c.Trials}})
	}
	plan := stats.Plan{Margin: margin}
	compared, difference := stats.Compare(pairs, plan), stats.Difference(pairs, plan)
	r.Against, r.Comparison, r.Difference = &other.Run, &compared, &difference
}

// summarize groups trials by case, in the order of the suite.
func summarize(trials []Trial) []CaseResult {
	cases := []CaseResult{}
	for _, t := range trials {
		i := slices.IndexFunc(cases, func(c CaseResult) bool { return c.Case == t.Case })
		if i < 0 {
			i, cases = len(cases), append(cases, CaseResult{Case: t.Case, TraceID: t.TraceID, Reasons: []string{}})
		}
		cases[i].add(t)
	}
	for i := range cases {
		cases[i].estimate()
	}
	return cases
}

// estimate computes the interval and pass^k.
func (c *CaseResult) estimate() {
	c.Rate, c.K = stats.Wilson(c.Passed, c.Trials), min(c.Trials, 3)
	if c.K > 0 {
		c.PassK = stats.PassK(c.Passed, c.Trials, c.K)
	}
}

func (c *CaseResult) add(t Trial) {
	c.CostUSD += t.CostUSD
	c.Tokens += t.Tokens
	c.JudgeUSD += t.JudgeUSD
	switch t.Verdict {
	case Pass:
		c.Passed++
		c.Trials++
		return
	case Fail, Diverged, Error:
		if c.Trials == c.Passed {
			c.TraceID = t.TraceID
		}
		c.Trials++
	default:
		c.Undecided++
	}
	for _, why := range t.Reasons {
		if len(c.Reasons) < maxReasons && !slices.Contains(c.Reasons, why) {
			c.Reasons = append(c.Reasons, why)
		}
	}
}

// passesByCase lists for each case whether its decided trials passed, in order.
func passesByCase(trials []Trial, cases []CaseResult) [][]bool {
	all := make([][]bool, len(cases))
	for i, c := range cases {
		for _, t := range trials {
			if t.Case == c.Case && t.Verdict != "" && t.Verdict != UndecidedTrial {
				all[i] = append(all[i], t.Verdict == Pass)
			}
		}
	}
	return all
}

// State returns the result of a run as a short text. The result of a run of recorded turns is its comparison with the
// control.
func (r Report) State() string {
	switch {
	case r.FinishedAt == nil:
		return r.Status
	case len(r.Cases) == 0 && r.Kind != OfSuite:
		return "no turns"
	case len(r.Cases) == 0:
		return "no trials"
	case r.recorded() && r.Comparison != nil:
		return string(r.Comparison.Answer)
	}
	return r.Status
}

// HideTexts removes texts that may quote an answer, for readers without access to threads.
func (r *Report) HideTexts() {
	for i := range r.Cases {
		r.Cases[i].Reasons = []string{}
	}
	for i := range r.TrialRows {
		t := &r.TrialRows[i]
		t.Reasons, t.Answer, t.Calls, t.Judgements = []string{}, "", json.RawMessage("[]"), []Judgement{}
	}
}
