package engineroom

import (
	"context"
	"errors"
	"net/url"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

const (
	// maxSuites bounds the suites on a page.
	maxSuites = 50
	// suiteRuns bounds the runs of a suite in a row, and matrixRuns the runs on its own page. One more run serves the
	// comparison.
	suiteRuns, matrixRuns = 5, 8
	// maxCaseRows bounds the cases in a table, and maxTrialRows the trials.
	maxCaseRows, maxTrialRows = 200, 500
	// maxLabelRows bounds the listed labels.
	maxLabelRows = 50
)

// evalsPage lists the suites with their newest runs.
func (room *Room) evalsPage() page {
	return page{
		path: "/evals", name: "evals", navLabel: "Evals", title: "Evals",
		parts: []part{
			{name: "list", interval: 5 * time.Second, load: room.listSuites},
			{name: "recorded", interval: 5 * time.Second, refreshOnActivity: true, load: room.recordedRuns},
		},
	}
}

// suitePage shows the cases of a suite in its newest runs.
func (room *Room) suitePage() page {
	return page{
		path: "/evals/{suite}", name: "suite", open: room.openSuite,
		parts: []part{
			{name: "facts", load: func(_ context.Context, req *pageRequest) (any, error) {
				return req.Subject, nil
			}}, // holds a form
			{name: "matrix", interval: 5 * time.Second, load: room.suiteMatrix},
			{name: "labels", load: room.suiteLabels},
		},
	}
}

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

// passes counts the passed trials. The page shows it with the 95 % interval as a text and a drawing.
type passes struct {
	Passed, Trials, Open int
	Rate                 stats.Interval
}

func passesOf(c evals.CaseResult) passes { return passes{c.Passed, c.Trials, c.Undecided, c.Rate} }

func passesOfRun(r evals.Report) (p passes) {
	for _, c := range r.Cases {
		p.Passed, p.Trials, p.Open = p.Passed+c.Passed, p.Trials+c.Trials, p.Open+c.Undecided
	}
	p.Rate = stats.Wilson(p.Passed, p.Trials)
	return p
}

// From and Width place the interval in a drawing of 100, and At the rate.
func (p passes) From() string  { return formatSVG(100 * p.Rate.Low) }
func (p passes) Width() string { return formatSVG(100 * (p.Rate.High - p.Rate.Low)) }
func (p passes) At() string {
	return formatSVG(min(98, max(0, 100*stats.Count{Passed: p.Passed, Trials: p.Trials}.Rate()-1)))
}

// shownRun is a run in a list, compared with the run before it.
type shownRun struct {
	evals.Report
	Passes passes
}

// ControlDiffers reports whether the control repeats less than half of its own recorded turns.
func (r shownRun) ControlDiffers() bool {
	return r.ControlRun != nil && r.ControlRun.Coverage.Played > 2*r.ControlRun.Coverage.Followed
}

// Answer is the comparison of a run of a suite with the run before; empty for none.
func (r shownRun) Answer() string {
	if r.Comparison == nil || r.Kind != evals.OfSuite && r.ControlID != "" {
		return ""
	}
	return string(r.Comparison.Answer)
}

// comparedRuns returns the shown runs of a suite, newest first, each compared with the previous run. margin is the
// accepted loss.
func comparedRuns(list []evals.Report, limit int, margin float64) []shownRun {
	rows := make([]shownRun, 0, limit)
	for i, r := range list {
		if len(rows) == limit {
			break
		}
		if i+1 < len(list) && r.FinishedAt != nil {
			r.Compare(list[i+1], margin)
		}
		rows = append(rows, shownRun{r, passesOfRun(r)})
	}
	return rows
}

// suiteRow is a suite in the list.
type suiteRow struct {
	Name, About, Agent string
	Version, Cases     int
	Margin             float64
	Runs               []shownRun `db:"-"`
}

// Missing is the number of the columns without a run; 0 for none.
func (s suiteRow) Missing() int { return suiteRuns - max(1, len(s.Runs)) }

// listSuites reads the current suites by name, with their newest runs.
func (room *Room) listSuites(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := postgres.Rows[suiteRow](ctx, room.Read, "list evals", `
		select e.name, e.version, left(coalesce(e.definition ->> 'description', ''), 300) as about,
		       left(coalesce(e.definition ->> 'agent', ''), 100) as agent,
		       case when jsonb_typeof(e.definition -> 'cases') = 'array' then jsonb_array_length(e.definition -> 'cases')
		         else 0 end as cases,
		       case when jsonb_typeof(e.definition -> 'gate' -> 'margin') = 'number'
		            then (e.definition -> 'gate' ->> 'margin')::float8 else 0 end as margin
		  from agent_evals e where e.current order by e.name limit @limit + 1`, postgres.Strict{"limit": maxSuites})
	if err != nil {
		return nil, err
	}
	list, more := firstN(list, maxSuites)
	names := make([]string, len(list))
	for i, s := range list {
		names[i] = s.Name
	}
	runs, err := evals.RunsOfSuites(ctx, room.Read, names, suiteRuns+1)
	if err != nil {
		return nil, err
	}
	reports, err := evals.Summaries(ctx, room.Read, runs)
	if err != nil {
		return nil, err
	}
	for i, s := range list {
		suiteReports := slices.DeleteFunc(slices.Clone(reports), func(r evals.Report) bool { return r.Suite != s.Name })
		list[i].Runs = comparedRuns(suiteReports, suiteRuns, s.Margin)
	}
	return map[string]any{"Suites": list, "More": more}, nil
}

// maxRecordedRuns bounds the listed runs of recorded turns.
const maxRecordedRuns = 10

// recordedRuns lists the newest counterfactuals and shadows, compared with their controls.
func (room *Room) recordedRuns(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := evals.RecordedRuns(ctx, room.Read, maxRecordedRuns)
	if err != nil {
		return nil, err
	}
	reports, err := evals.Outcomes(ctx, room.Read, list)
	rows := make([]shownRun, len(reports))
	for i, r := range reports {
		rows[i] = shownRun{r, passesOfRun(r)}
	}
	return rows, err
}

// openSuite finds the suite.
func (room *Room) openSuite(ctx context.Context, req *pageRequest) (string, error) {
	suite, err := evals.Get(ctx, room.Read, req.path("suite"))
	if errors.Is(err, evals.ErrNotFound) {
		return "", notFound("there is no eval %.100q; see /evals", req.path("suite"))
	}
	req.Subject = suite
	return "Eval " + suite.Name, err
}

// matrixRow is a case in the runs of a suite.
type matrixRow struct {
	Case  string
	Cells []*evals.CaseResult // by run; nil where the run lacks the case
}

// suiteMatrix reads the cases of a suite in its newest runs. Present cases come first, in their order.
func (room *Room) suiteMatrix(ctx context.Context, req *pageRequest) (any, error) {
	suite, _ := req.Subject.(evals.Suite)
	runs, err := evals.Runs(ctx, room.Read, suite.Name, matrixRuns+1)
	if err != nil {
		return nil, err
	}
	reports, err := evals.Summaries(ctx, room.Read, runs)
	if err != nil {
		return nil, err
	}
	shown := comparedRuns(reports, matrixRuns, suite.Definition.Margin())
	names := []string{}
	for _, c := range suite.Definition.Cases {
		names = append(names, c.Name)
	}
	for _, r := range shown {
		for _, c := range r.Cases {
			if !slices.Contains(names, c.Case) {
				names = append(names, c.Case)
			}
		}
	}
	names, more := firstN(names, maxCaseRows)
	rows := make([]matrixRow, len(names))
	for i, name := range names {
		rows[i] = matrixRow{Case: name, Cells: make([]*evals.CaseResult, len(shown))}
		for j, r := range shown {
			if k := slices.IndexFunc(r.Cases, func(c evals.CaseResult) bool { return c.Case == name }); k >= 0 {
				rows[i].Cells[j] = &r.Cases[k]
			}
		}
	}
	return map[string]any{"Suite": suite, "Runs": shown, "Rows": rows, "More": more}, nil
}

func (room *Room) suiteLabels(ctx context.Context, req *pageRequest) (any, error) {
	suite, _ := req.Subject.(evals.Suite)
	list, err := evals.Labels(ctx, room.Read, suite.Name, "", "", maxLabelRows+1)
	list, more := firstN(list, maxLabelRows)
	if !req.mayReadThreads {
		for i := range list {
			list[i].Answer, list[i].Note = "", ""
		}
	}
	return map[string]any{"Suite": suite, "Labels": list, "More": more}, err
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

// otherRuns lists the runs to compare with.
func (room *Room) otherRuns(ctx context.Context, req *pageRequest) (any, error) {
	subject, _ := req.Subject.(evalRunSubject)
	list, err := evals.Runs(ctx, room.Read, subject.Run.Suite, 30)
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

// trialRows reads the trials of a run, of one case if named.
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
		q.Set("trial", formatSVG(float64(trial)))
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

func (room *Room) findEvals(ctx context.Context, q findQuery) ([]hit, error) {
	return room.hitsOf(ctx, `
		select e.name as id, e.name as title, left(coalesce(e.definition ->> 'description', ''), 300) as about,
		       coalesce(r.status, '') as state, r.created_at as at
		  from (select * from agent_evals x where x.current order by x.name limit @window) e
		  left join lateral (select r.status, r.created_at from agent_eval_runs r where r.suite = e.name
		    order by r.id desc limit 1) r on true
		 where e.name ilike @like or left(e.definition ->> 'description', 1000) ilike @like
		 order by e.name ilike @like desc, e.name limit @limit`,
		postgres.Strict{"like": q.like, "window": maxNames, "limit": hitsShown + 1}, pathWithID("/evals/"))
}

func (room *Room) findEvalRuns(ctx context.Context, q findQuery) ([]hit, error) {
	if !q.isID {
		return nil, nil
	}
	ids, err := room.matchUUIDs(ctx, "agent_eval_runs", q.id, hitsShown+1)
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	return room.hitsOf(ctx, `
		select r.id::text, r.suite as title, left(r.agent || ' with ' || r.model, 300) as about, r.status as state,
		       r.created_at as at
		  from agent_eval_runs r where r.id = any (@ids::uuid[]) order by r.id desc`, postgres.Strict{"ids": ids},
		pathWithID("/evals/runs/"))
}
