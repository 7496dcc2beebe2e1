package engineroom

import (
	"context"
	"errors"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// evalRunPage shows a run: its cases and its trials.
func (room *Room) evalRunPage() page {
	return page{
		path: "/evals/runs/{id}", name: "evalrun", open: room.openEvalRun,
		parts: []part{
			{name: "facts", interval: 2 * time.Second, load: room.evalRunFacts},
			{name: "against", load: room.otherRuns}, // holds a form
			{name: "cases", interval: 2 * time.Second, load: room.evalRunCases},
			{name: "trials", interval: 2 * time.Second, load: room.evalRunTrials},
		},
	}
}

// evalRunSubject is the subject of a run's page.
type evalRunSubject struct {
	Run     evals.Run
	Against *evals.Run
	Margin  float64
}

// ofControl reports whether the run plays recorded turns, so the page compares it only with its control.
func (s evalRunSubject) ofControl() bool {
	return s.Run.Kind != evals.OfSuite && (s.Against == nil || s.Against.ID == s.Run.ControlID)
}

// openEvalRun finds the run, and the run to compare with.
func (room *Room) openEvalRun(ctx context.Context, req *pageRequest) (string, error) {
	subject, err := room.readEvalRun(ctx, req)
	req.Subject = subject
	if subject.Run.Kind != evals.OfSuite {
		return capital(subject.Run.Kind) + " of " + cut(80, subject.Run.Agent), err
	}
	return "Run of " + cut(80, subject.Run.Suite), err
}

func (room *Room) readEvalRun(ctx context.Context, req *pageRequest) (subject evalRunSubject, err error) {
	if subject.Run, err = room.evalRun(ctx, req.path("id")); err != nil {
		return subject, err
	}
	definedBy, err := evals.ReadSubject(ctx, room.Read, subject.Run)
	if err != nil && !errors.Is(err, evals.ErrNotFound) {
		return subject, err
	}
	subject.Margin = definedBy.Suite.Definition.Margin()
	id, err := req.uuidFilter("against")
	if id == "" {
		id = subject.Run.ControlID
	}
	if err != nil || id == "" {
		return subject, err
	}
	other, err := room.evalRun(ctx, id)
	if err == nil && other.Suite != subject.Run.Suite {
		err = problem.BadParameter("against is a run of another suite")
	}
	subject.Against = &other
	return subject, err
}

// evalRun reads a run by its id.
func (room *Room) evalRun(ctx context.Context, id string) (evals.Run, error) {
	if !uuidPattern.MatchString(id) {
		return evals.Run{}, notFound("there is no run %.60q of an eval; see /evals", id)
	}
	run, err := evals.GetRun(ctx, room.Read, id)
	if errors.Is(err, evals.ErrNotFound) {
		err = notFound("there is no run %s of an eval; see /evals", id)
	}
	return run, err
}

// evalRunReport reads the run with its trials, and compares the run.
func (room *Room) evalRunReport(ctx context.Context, req *pageRequest) (evals.Report, *evals.Report, error) {
	subject, _ := req.Subject.(evalRunSubject)
	trials, err := evals.BriefTrials(ctx, room.Read, subject.Run.ID, "")
	if err != nil {
		return evals.Report{}, nil, err
	}
	report := evals.ReportOf(subject.Run, trials)
	if !req.mayReadThreads {
		report.HideTexts()
	}
	if subject.Against == nil {
		return report, nil, nil
	}
	others, err := evals.Summaries(ctx, room.Read, []evals.Run{*subject.Against})
	if err != nil {
		return report, nil, err
	}
	report.Compare(others[0], subject.Margin)
	return report, &others[0], nil
}

func (room *Room) evalRunFacts(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(evalRunSubject)
	var report evals.Report
	var err error
	if subject.ofControl() {
		report, err = evals.NewBriefReport(ctx, room.Read, subject.Run)
	} else {
		report, _, err = room.evalRunReport(ctx, req)
	}
	controlDiffers := report.Control.Answer == stats.Better || report.Control.Answer == stats.Worse
	return map[string]any{"Run": shownRun{report, passesOfRun(report)}, "Doubtful": controlDiffers}, err
}

// maxOtherRuns bounds the runs that the form offers for a comparison.
const maxOtherRuns = 30

// otherRuns lists the newest runs of the suite, for the form that chooses one to compare with.
func (room *Room) otherRuns(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(evalRunSubject)
	list, err := evals.Runs(ctx, room.Read, subject.Run.Suite, maxOtherRuns)
	list = slices.DeleteFunc(list, func(r evals.Run) bool { return r.ID == subject.Run.ID })
	return map[string]any{"Run": subject.Run, "Against": subject.Against, "Others": list}, err
}

// caseRow is a case of a run, beside the case of the compared run.
type caseRow struct {
	evals.CaseResult
	Passes passes
	Other  *passes
	Href   string
}

func (room *Room) evalRunCases(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(evalRunSubject)
	report, other, err := room.evalRunReport(ctx, req)
	if err != nil {
		return nil, err
	}
	list, more := firstN(report.Cases, maxCaseRows)
	rows := make([]caseRow, len(list))
	for i, c := range list {
		rows[i] = caseRow{CaseResult: c, Passes: passesOf(c), Href: casePath(report.ID, c.Case, 0, subject.Against)}
		if other == nil {
			continue
		}
		if k := slices.IndexFunc(other.Cases, func(o evals.CaseResult) bool { return o.Case == c.Case }); k >= 0 {
			p := passesOf(other.Cases[k])
			rows[i].Other = &p
		}
	}
	return map[string]any{"Rows": rows, "More": more, "Against": subject.Against, "Kind": subject.Run.Kind}, nil
}

// trialRow is a trial in a list, with its labels by people.
type trialRow struct {
	evals.Trial
	Labels []evals.Label
	Href   string
}

func (room *Room) evalRunTrials(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(evalRunSubject)
	rows, more, err := room.trialRows(ctx, subject, "")
	for i := range rows {
		if !req.mayReadThreads {
			rows[i].Reasons = nil
		}
	}
	return map[string]any{"Trials": rows, "More": more}, err
}

// trialRows reads the first maxTrialRows trials of a run, of one case if named, and whether there are more. It reads as
// many labels, so a trial with many labels can cost other trials theirs.
func (room *Room) trialRows(ctx context.Context, subject evalRunSubject, caseName string) ([]trialRow, bool, error) {
	trials, err := evals.BriefTrials(ctx, room.Read, subject.Run.ID, caseName)
	if err != nil {
		return nil, false, err
	}
	trials, more := firstN(trials, maxTrialRows)
	labels, err := evals.Labels(ctx, room.Read, "", subject.Run.ID, caseName, maxTrialRows)
	rows := make([]trialRow, len(trials))
	for i, t := range trials {
		rows[i] = trialRow{t, labelsOf(labels, t), casePath(subject.Run.ID, t.Case, t.Trial, subject.Against)}
	}
	return rows, more, err
}

// labelsOf returns the labels of a trial.
func labelsOf(all []evals.Label, t evals.Trial) []evals.Label {
	return slices.DeleteFunc(slices.Clone(all), func(l evals.Label) bool { return l.Case != t.Case || l.Trial != t.Trial })
}

// casePath returns the address of a case of a run. With a trial other than 0, it is the trial's address. With against,
// the page shows the compared run beside it.
func casePath(run, caseName string, trial int, against *evals.Run) string {
	q := url.Values{}
	if trial > 0 {
		q.Set("trial", strconv.Itoa(trial))
	}
	if against != nil {
		q.Set("against", against.ID)
	}
	path := "/evals/runs/" + run + "/cases/" + url.PathEscape(caseName)
	if len(q) > 0 {
		path += "?" + q.Encode()
	}
	return path
}
