package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// evalCasePage shows two trials of a case side by side, and takes labels.
func (room *Room) evalCasePage() page {
	return page{
		path: "/evals/runs/{id}/cases/{case}", name: "evalcase", open: room.openEvalCase,
		parts: []part{
			{name: "trials", interval: 2 * time.Second, load: room.caseTrials},
			{name: "sides", interval: 2 * time.Second, load: room.caseSides},
			{name: "judges", interval: 5 * time.Second, load: room.caseJudges},
			{name: "label", interval: 2 * time.Second, load: room.caseLabel},
			{name: "case", load: room.caseDefinition},
		},
	}
}

// evalCaseSubject is the subject of the page.
type evalCaseSubject struct {
	evalRunSubject
	Case    string
	Subject evals.Subject
	Defined *evals.Case   // nil when the run's suite lacks the case
	Steps   []caseStep    // the trials of the run; trials of this case are adjacent
	Trials  []evals.Trial // of this case
	Trial   int
	Other   int // trial of Against, or of the run itself; 0 for none
}

// caseStep is a trial of a run, in the order of the keys j and k.
type caseStep struct {
	Case  string
	Trial int
}

func (room *Room) openEvalCase(ctx context.Context, req *pageRequest) (string, error) {
	subject := evalCaseSubject{Case: req.path("case")}
	var err error
	if subject.evalRunSubject, err = room.readEvalRun(ctx, req); err != nil {
		return "", err
	}
	all, err := evals.BriefTrials(ctx, room.Read, subject.Run.ID, "")
	if err != nil {
		return "", err
	}
	subject.setTrials(all)
	if len(subject.Trials) == 0 {
		return "", notFound("the run has no case %.100q", subject.Case)
	}
	if err := subject.chooseTrials(req); err != nil {
		return "", err
	}
	subject.Subject, err = evals.ReadSubject(ctx, room.Read, subject.Run)
	if err != nil && !errors.Is(err, evals.ErrNotFound) {
		return "", err
	}
	if c, ok := subject.Subject.Suite.Definition.Case(subject.Case); ok {
		subject.Defined = &c
	}
	req.Subject = subject
	return "Case " + cut(80, subject.Case), nil
}

// setTrials stores the trials of the case, and the order of all trials.
func (s *evalCaseSubject) setTrials(all []evals.Trial) {
	var names []string
	byCase := map[string][]caseStep{}
	for _, t := range all {
		if byCase[t.Case] == nil {
			names = append(names, t.Case)
		}
		byCase[t.Case] = append(byCase[t.Case], caseStep{t.Case, t.Trial})
		if t.Case == s.Case {
			s.Trials = append(s.Trials, t)
		}
	}
	for _, name := range names {
		s.Steps = append(s.Steps, byCase[name]...)
	}
}

// chooseTrials selects the shown trials. The default is the first failed trial beside the first trial with another
// verdict.
func (s *evalCaseSubject) chooseTrials(req *pageRequest) error {
	number := func(name string) (int, error) {
		text := req.Query.Get(name)
		if text == "" {
			return 0, nil
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 1000 {
			return 0, problem.BadParameter("%s is %.60q; it is the number of a trial", name, text)
		}
		return n, nil
	}
	var err error
	if s.Trial, err = number("trial"); err != nil {
		return err
	}
	if s.Other, err = number("other"); err != nil {
		return err
	}
	if s.Trial == 0 {
		s.Trial = s.Trials[max(0, slices.IndexFunc(s.Trials, hasFailed))].Trial
	}
	i := slices.IndexFunc(s.Trials, func(t evals.Trial) bool { return t.Trial == s.Trial })
	if i < 0 {
		return notFound("the case has no trial %d in this run", s.Trial)
	}
	if s.Other == 0 && s.Against != nil {
		s.Other = 1
	}
	if s.Other == 0 && s.Trials[i].Verdict != "" {
		other := slices.IndexFunc(s.Trials, func(t evals.Trial) bool {
			return t.Verdict != "" && t.Verdict != s.Trials[i].Verdict
		})
		if other >= 0 {
			s.Other = s.Trials[other].Trial
		}
	}
	return nil
}

func hasFailed(t evals.Trial) bool { return t.Verdict != "" && t.Verdict != evals.Pass }

// neighborURL returns the address of the trial by steps further; empty past the ends.
func (s *evalCaseSubject) neighborURL(by int) string {
	i := slices.Index(s.Steps, caseStep{s.Case, s.Trial}) + by
	if i < 0 || i >= len(s.Steps) {
		return ""
	}
	return casePath(s.Run.ID, s.Steps[i].Case, s.Steps[i].Trial, s.Against)
}

func (room *Room) caseTrials(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(evalCaseSubject)
	rows, _, err := room.trialRows(ctx, subject.evalRunSubject, subject.Case)
	return map[string]any{
		"About": subject, "Trials": rows, "Previous": subject.neighborURL(-1), "Next": subject.neighborURL(1),
	}, err
}

// comparedTrial is one of the two trials that the page compares.
type comparedTrial struct {
	evals.Trial
	Run    evals.Run
	steps  []evals.Call
	Answer shownValue
}

// comparisonRow shows a call of both trials, or their answers. Differs marks the first difference.
type comparisonRow struct {
	Label       string
	Left, Right comparisonCell
	Differs     bool
	What        string     // names the difference
	Lines       []diffLine // difference of the arguments or answers
}

// comparisonCell is a call of one trial. Skill is empty if the trial has no such call.
type comparisonCell struct {
	Skill, State string
	Args         string
	Answer       bool
}

// trialComparison is two trials side by side, or a single trial.
type trialComparison struct {
	Prompt      string
	Left        *comparedTrial
	Right       *comparedTrial // nil for none
	Rows        []comparisonRow
	Same        bool // the trials do not differ
	Undecidable bool // one trial has no verdict yet
}

// caseSides reads the trial and the compared trial. The other side stays empty if its run lacks the case or the trial.
func (room *Room) caseSides(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(evalCaseSubject)
	shown := trialComparison{}
	if c := subject.Defined; c != nil && len(c.Messages) > 0 {
		shown.Prompt = redact.Text(c.Messages[len(c.Messages)-1].User, maxShownText)
	}
	left, err := room.readComparedTrial(ctx, subject.Run, subject.Case, subject.Trial)
	if err != nil {
		return nil, err
	}
	shown.Left = &left
	if subject.Other > 0 {
		run := subject.Run
		if subject.Against != nil {
			run = *subject.Against
		}
		right, err := room.readComparedTrial(ctx, run, subject.Case, subject.Other)
		switch {
		case errors.Is(err, evals.ErrNotFound): // the compared run lacks the case or the trial
		case err != nil:
			return nil, err
		default:
			shown.Right = &right
		}
	}
	shown.compare()
	return shown, nil
}

func (room *Room) readComparedTrial(ctx context.Context, run evals.Run, caseName string, trial int) (comparedTrial,
	error,
) {
	t, err := evals.GetTrial(ctx, room.Read, run.ID, caseName, trial)
	s := comparedTrial{Trial: t, Run: run, Answer: shownText(t.Answer, int64(len(t.Answer)))}
	if json.Unmarshal(t.Calls, &s.steps) != nil {
		s.steps = nil
	}
	return s, err
}

// maxComparedCalls bounds the compared calls.
const maxComparedCalls = 100

// compare makes the rows, and marks the first difference: a call, its arguments, or the answer.
func (c *trialComparison) compare() {
	calls := len(c.Left.steps)
	if c.Right != nil {
		calls = max(calls, len(c.Right.steps))
		c.Undecidable = c.Left.Verdict == "" || c.Right.Verdict == ""
	}
	same := c.Right != nil && !c.Undecidable
	for i := range min(calls, maxComparedCalls) {
		row := comparisonRow{Label: fmt.Sprintf("call %d", i+1), Left: c.Left.cell(i)}
		if c.Right != nil {
			row.Right = c.Right.cell(i)
		}
		if same && row.Left != row.Right {
			same = false
			row.setDifference()
		}
		c.Rows = append(c.Rows, row)
	}
	answer := comparisonRow{
		Label: "answer", Left: comparisonCell{Answer: true},
		Right: comparisonCell{Answer: c.Right != nil},
	}
	if same && c.Left.Trial.Answer != c.Right.Trial.Answer {
		same, answer.Differs, answer.What = false, true, "the answer"
		answer.Lines, _ = compare(c.Left.Answer.Text, c.Right.Answer.Text)
	}
	c.Rows = append(c.Rows, answer)
	c.Same = same
}

// setDifference marks the differences.
func (r *comparisonRow) setDifference() {
	r.Differs = true
	switch l, o := r.Left, r.Right; {
	case l.Skill == "" || o.Skill == "":
		r.What = "only one calls"
	case l.Skill != o.Skill:
		r.What = "another skill"
	case l.Args != o.Args:
		r.What = "the arguments"
		r.Lines, _ = compare(l.Args, o.Args)
	default:
		r.What = "how the call ended"
	}
}

// cell returns a call of a trial; empty past the last call.
func (s *comparedTrial) cell(i int) comparisonCell {
	if i >= len(s.steps) {
		return comparisonCell{}
	}
	c := s.steps[i]
	cell := comparisonCell{Skill: c.Skill, State: c.Approval, Args: shownJSON(string(c.Args), int64(len(c.Args))).Text}
	if c.Refused {
		cell.State = "refused"
	}
	return cell
}

// shownJudgement is a judge's verdict about a trial, with the judge's current agreement with people.
type shownJudgement struct {
	evals.Judgement
	Rubric      string
	Calibration *evals.Calibration // nil when the suite lacks the judge
}

// Verdict is the judge's verdict as a state.
func (j shownJudgement) Verdict() string {
	switch {
	case !j.Decided:
		return "undecided"
	case j.Pass:
		return "pass"
	}
	return "fail"
}

// caseJudges reads the judges' verdicts about the trial, and how far each judge agrees with people.
func (room *Room) caseJudges(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(evalCaseSubject)
	trial, err := evals.GetTrial(ctx, room.Read, subject.Run.ID, subject.Case, subject.Trial)
	if err != nil {
		return nil, err
	}
	list := make([]shownJudgement, len(trial.Judgements))
	for i, j := range trial.Judgements {
		list[i] = shownJudgement{Judgement: j}
		if subject.Defined == nil {
			continue
		}
		rule, ok := subject.Defined.Judges()[j.Expect]
		if !ok {
			continue
		}
		c, _, err := evals.ReadCalibration(ctx, room.Read, subject.Subject, rule)
		if err != nil {
			return nil, err
		}
		list[i].Rubric, list[i].Calibration = rule.Rubric, &c
	}
	return map[string]any{"Judges": list, "Trial": subject.Trial}, nil
}

// caseLabel reads the labels of the trial, for the form.
func (room *Room) caseLabel(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(evalCaseSubject)
	trial, err := evals.GetTrial(ctx, room.Read, subject.Run.ID, subject.Case, subject.Trial)
	if err != nil {
		return nil, err
	}
	labels, err := evals.Labels(ctx, room.Read, "", subject.Run.ID, subject.Case, maxTrialRows)
	return map[string]any{
		"Run": subject.Run, "Trial": trial, "Labels": labelsOf(labels, trial), "Here": req.URL,
		"Answered": trial.Answer != "",
	}, err
}

func (room *Room) caseDefinition(_ context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(evalCaseSubject)
	if subject.Defined == nil {
		return shownValue{}, nil
	}
	text, err := subject.Defined.YAML()
	return shownText(text, int64(len(text))), err
}
