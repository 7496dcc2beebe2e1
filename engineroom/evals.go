package engineroom

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
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
func (p passes) From() string { return formatSVG(100 * p.Rate.Low) }

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

// Missing is the number of empty columns after the runs. The row of a suite without runs has one cell that says so.
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
