package api

import (
	"context"
	"errors"
	"net/http"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/runner"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// EvalStarter stores runs of suites. Package evals/runner implements it.
type EvalStarter interface {
	Start(ctx context.Context, s evals.Suite, o runner.Options) (evals.Run, error)
}

// newEvalRun requests a run of a suite.
type newEvalRun struct {
	Suite  string `json:"suite"`
	Model  string `json:"model,omitempty" doc:"default the agent's"`
	Trials int    `json:"trials,omitempty" doc:"default the suite's"`
}

func (b newEvalRun) check() error {
	switch {
	case b.Suite == "" || !isPrintableText(b.Suite) || !isPrintableText(b.Model) || len(b.Model) > maxText:
		return problem.BadBody("suite is missing; it is one of GET /v1/evals")
	case b.Trials < 0 || b.Trials > 100:
		return problem.BadBody("trials is %d; it can be 1 to 100", b.Trials)
	}
	return nil
}

type newEvalLabel evals.NewLabel

func (b newEvalLabel) check() error {
	if !uuidForm.MatchString(b.Run) || b.Case == "" || !isPrintableText(b.Case) || !isPrintableText(b.Note) {
		return problem.BadBody("run and case are required: a run's id, and the name of a case of its suite")
	}
	return nil
}

// evalNotFound returns the problem for an unknown eval, run or trial.
func evalNotFound(err error, format string, args ...any) error {
	if errors.Is(err, evals.ErrNotFound) {
		return problem.New(http.StatusNotFound, format, args...)
	}
	return err
}

// evalError maps errors of package evals to problems.
func evalError(err error) error {
	switch {
	case errors.Is(err, evals.ErrLabel):
		return problem.BadBody("%s", evals.ErrLabel)
	case errors.Is(err, evals.ErrTrial):
		return problem.BadBody("%s", evals.ErrTrial)
	case errors.Is(err, evals.ErrNoAnswer):
		return problem.New(http.StatusConflict, "%s", evals.ErrNoAnswer)
	case errors.Is(err, runner.ErrOffline):
		return problem.BadBody("model cannot be chosen: %s", runner.ErrOffline)
	case errors.Is(err, runner.ErrUnpriced):
		return problem.New(http.StatusConflict, "%s", runner.ErrUnpriced).Kind("unpriced-model", "Model without a price")
	}
	return err
}

func (s *server) listEvals(r request) (response, error) {
	list, err := evals.ListWithRuns(r.Context(), s.pool)
	if err != nil {
		return response{}, err
	}
	return response{body: pageOf(list, "")}, nil
}

func (s *server) listEvalRuns(r request) (response, error) {
	runs, err := readPage("eval runs", r.query, func(run evals.Run) string { return run.ID },
		func(before string, limit int) ([]evals.Run, error) {
			return evals.RunsBefore(r.Context(), s.pool, r.query["suite"], before, limit)
		})
	return response{body: runs}, err
}

// getEvalRun reports a run. On request it compares the run with another run.
func (s *server) getEvalRun(r request) (response, error) {
	id, err := pathUUID(r, "a run")
	if err != nil {
		return response{}, err
	}
	run, err := evals.GetRun(r.Context(), s.pool, id)
	if err != nil {
		return response{}, evalNotFound(err, "no run %s", id)
	}
	caller, newReport := principals.From(r.Context()), evals.NewBriefReport
	if r.query["calls"] == "true" {
		if !mayReadThreads(caller) {
			return response{}, missingScope(caller, string(principals.ThreadsRead))
		}
		newReport = evals.NewReport
	}
	report, err := newReport(r.Context(), s.pool, run)
	if !mayReadThreads(caller) {
		report.HideTexts()
	}
	against := r.query["against"]
	if err != nil || against == "" {
		return response{body: report}, err
	}
	other, err := evals.GetRun(r.Context(), s.pool, against)
	if err == nil && other.Suite != run.Suite {
		return response{}, problem.BadParameter("parameter against is a run of %s, not of %s", other.Suite, run.Suite)
	}
	if err != nil {
		return response{}, evalNotFound(err, "against: no run %s", against)
	}
	subject, err := evals.ReadSubject(r.Context(), s.pool, run)
	if err == nil {
		err = report.CompareWith(r.Context(), s.pool, other, subject.Suite.Definition.Margin())
	}
	return response{body: report}, err
}

// startEvalRun stores a run, which servers play.
func (s *server) startEvalRun(r request) (response, error) {
	body := r.body.(newEvalRun)
	if s.evals == nil {
		return response{}, problem.New(http.StatusServiceUnavailable, "this process plays no evals")
	}
	suite, err := evals.Get(r.Context(), s.pool, body.Suite)
	if err != nil {
		return response{}, evalNotFound(err, "no eval %.100q; see GET /v1/evals", body.Suite)
	}
	run, err := s.evals.Start(r.Context(), suite, runner.Options{Model: body.Model, Trials: body.Trials, Background: true})
	return response{body: run, status: http.StatusCreated}, evalError(err)
}

func (s *server) labelEval(r request) (response, error) {
	body := r.body.(newEvalLabel)
	label, done, err := evals.PutLabel(r.Context(), s.pool, evals.NewLabel(body))
	err = evalNotFound(err, "no trial %d of case %.100q in run %s", max(body.Trial, 1), body.Case, body.Run)
	if !mayReadThreads(principals.From(r.Context())) {
		label.Answer = ""
	}
	return response{body: label, trace: done.TraceID}, evalError(err)
}

// mayReadThreads reports whether the caller may read answers, which may quote users.
func mayReadThreads(caller *principals.Caller) bool {
	return caller == nil || caller.May(principals.ThreadsRead)
}

func (s *server) listEvalLabels(r request) (response, error) {
	labels, err := evals.Labels(r.Context(), s.pool, r.query["suite"], r.query["run"], "", maxEvalLabels)
	return response{body: pageOf(labels, "")}, err
}

// maxEvalLabels bounds the listed labels.
const maxEvalLabels = 10_000

// evalRoutes returns the routes of suites, their runs and people's labels.
func (s *server) evalRoutes() []route {
	suite := textParam("suite", "Name of a suite")
	against := param{name: "against", about: "Compare with this run of the suite", check: checkUUID}
	calls := enumParam("calls", "Whether trials have their answers, calls and judgements; false by default. true needs "+
		"the scope threads:read", "true", "false")
	run := param{name: "run", about: "Id of a run", check: checkUUID}
	return []route{
		{
			method: "GET", path: "/v1/evals", response: page[evals.Listed]{}, handle: s.listEvals,
			about: "Suites of evals by name, each with its newest run.",
		}, {
			method: "GET", path: "/v1/evals/runs", response: page[evals.Run]{}, handle: s.listEvalRuns,
			params: listParams(suite), about: "Runs of suites, newest first.",
		}, {
			method: "POST", path: "/v1/evals/runs", body: newEvalRun{}, response: evals.Run{}, status: http.StatusCreated,
			handle: s.startEvalRun, conflicts: true, notFound: true,
			about: "Start a run of a suite, which servers play in the background. 409 for a budget in dollars and a model " +
				"without a price.",
		}, {
			method: "GET", path: "/v1/evals/runs/{id}", response: evals.Report{}, handle: s.getEvalRun,
			params: []param{against, calls},
			about: "One run: its cases with intervals and pass^k, its trials with reasons and traces, cost, the A/A control, " +
				"and the comparison with another run. Reasons need the scope threads:read.",
		}, {
			method: "GET", path: "/v1/evals/labels", response: page[evals.Label]{}, handle: s.listEvalLabels,
			params: []param{suite, run}, about: "Labels of answers, newest first, at most 10,000.",
		}, {
			method: "POST", path: "/v1/evals/labels", body: newEvalLabel{}, response: evals.Label{}, handle: s.labelEval,
			safeToRetry: true, conflicts: true, notFound: true,
			about: "Say whether the answer of a trial is good or bad; none withdraws your label. 409 for a trial without " +
				"an answer.",
		},
	}
}
