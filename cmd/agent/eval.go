package main

import (
	"cmp"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/runner"
	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func (c *cli) evalCommand() *cobra.Command {
	return group("eval", "Try agents on suites of cases, and compare versions",
		c.evalRunCommand(), c.evalCounterfactualCommand(), c.evalShadowCommand(), c.evalListCommand(), c.evalShowCommand(),
		c.evalAddCommand(), c.evalLabelCommand(), c.evalLabelsCommand())
}

// evalOptions are the flags of agent eval run.
type evalOptions struct {
	runner.Options
	concurrent             int
	against, resume, junit string
	candidate              string
	prune                  bool
}

// defaultConcurrency is enough for 100 cases in 5 trials within a minute, with a model that answers in 200 ms.
const defaultConcurrency = 8

func (c *cli) evalRunCommand() *cobra.Command {
	var o evalOptions
	cmd := &cobra.Command{
		Use: "run [SUITE...]", Short: "Run suites, or all of them",
		Long: `Run the trials of suites in this process and print the results of each case. Skills are answered by the stubs of the
case, memory and approvals by its script. A trial has no effect outside itself.

Exit codes: 0 passed, 1 failed, 3 undecided because the budget was used up. With --against the comparison decides: 1 for
worse, 3 for undecided, else 0. --resume continues an interrupted run; answered model calls are not paid again.

--candidate DIR tries the workspace in DIR as if it were applied, and applies nothing. If a suite
with gate: passes, agent apply DIR passes its gate.`,
		Example: "  agent eval run\n  agent eval run returns --model gpt-5-mini --against last\n" +
			"  agent eval run --candidate ./workspace\n  agent eval run --junit evals.xml",
		Args: positionalArgs(0, -1, "names of suites"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(cmd, args); err != nil {
				return err
			}
			return c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app.App) error {
				return c.runEvals(ctx, s, a, args, o)
			})
		},
	}
	cmd.Flags().StringVar(&o.Model, "model", "", "try this model instead of the agent's")
	cmd.Flags().IntVar(&o.Trials, "trials", 0, "trials of each case instead of the suite's")
	cmd.Flags().StringVar(&o.against, "against", "", "compare with this run, or with the last one before")
	o.flags(cmd.Flags())
	return cmd
}

// flags are those of the commands that play runs.
func (o *evalOptions) flags(flags *pflag.FlagSet) {
	flags.StringVar(&o.candidate, "candidate", "", "try the workspace in this folder, without applying it")
	flags.BoolVar(&o.prune, "prune", false, "with --candidate: try it as after apply --prune")
	flags.IntVar(&o.concurrent, "concurrency", defaultConcurrency, "trials at once")
	flags.StringVar(&o.resume, "resume", "", "continue this run")
	flags.StringVar(&o.junit, "junit", "", "also write the result to this file, as JUnit XML")
}

// check checks the flags of a command that plays runs.
func (o *evalOptions) check(cmd *cobra.Command, args []string) (err error) {
	if o.resume != "" {
		cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
			if f.Changed && !slices.Contains([]string{"resume", "concurrency", "junit", "against"}, f.Name) {
				err = usageError("--resume continues one run as it is; leave out --%s", f.Name)
			}
		})
		if len(args) > 0 {
			return usageError("--resume continues one run as it is; leave out the suites")
		}
	}
	trials := cmd.Flags().Lookup("trials")
	n, bad := strconv.Atoi(trials.Value.String())
	switch {
	case err != nil:
		return err
	case cmd.Flags().Changed("candidate") && o.candidate == "", o.prune && o.candidate == "":
		return usageError("--candidate needs the folder of a workspace, and --prune needs --candidate")
	case o.concurrent < 1 || o.concurrent > 100 || trials.Changed && (bad != nil || n < 1 || n > 100):
		return usageError("--concurrency and --trials must be 1 to 100")
	}
	return nil
}

// runEvals runs suites one after the other.
func (c *cli) runEvals(ctx context.Context, s *session, a *app.App, names []string, o evalOptions) error {
	if err := c.checkJUnit(o.junit); err != nil {
		return err
	}
	if o.against != "" && o.against != "last" { // before anything is paid
		if _, err := findRun(ctx, s, o.against); err != nil {
			return err
		}
	}
	runs, err := c.startEvals(ctx, s, a, names, o)
	if err != nil {
		return err
	}
	return c.workEvals(ctx, s, a, runs, o)
}

// checkJUnit creates the file before anything is paid. A remote caller's file is created at the end.
func (c *cli) checkJUnit(name string) error {
	if _, far := c.out.(*callerStream); far || name == "" {
		return nil
	}
	if err := c.writeFile(name, nil, true); err != nil {
		return &exitError{exitUsage, err}
	}
	return nil
}

// workEvals plays runs one after the other, and reports them.
func (c *cli) workEvals(ctx context.Context, s *session, a *app.App, runs []evals.Run, o evalOptions) error {
	reports := make([]evals.Report, 0, len(runs))
	for i, run := range runs {
		c.onInterrupt(strings.Join(notOver(runs[i:]), "\n"))
		report, err := c.workEval(ctx, s, a, run, o)
		if ctx.Err() != nil {
			c.infof("%s", strings.Join(notOver(runs[i:]), "\n"))
		}
		if err != nil {
			return err
		}
		reports = append(reports, report)
	}
	if o.junit != "" {
		text, err := junit(reports)
		if err == nil {
			err = c.writeFile(o.junit, text, true)
		}
		if err != nil {
			return err
		}
	}
	if err := c.print(pageOf(reports, ""), func(w io.Writer) { writeReports(w, reports) }); err != nil {
		return err
	}
	return evalExit(reports)
}

// notOver explains how unfinished runs continue.
func notOver(runs []evals.Run) (lines []string) {
	for _, r := range runs {
		lines = append(lines, fmt.Sprintf("run %s has not ended; %s continues it", r.ID, resumeCommand(r)))
	}
	return lines
}

// startEvals stores the runs of suites; all suites without names.
func (c *cli) startEvals(
	ctx context.Context, s *session, a *app.App, names []string, o evalOptions,
) ([]evals.Run, error) {
	if o.resume != "" {
		run, err := findRun(ctx, s, o.resume)
		if run.Kind == evals.OfShadow {
			return nil, hint(fmt.Errorf("run %s is a shadow, which servers play", run.ID), "see agent eval show %s", run.ID)
		}
		return []evals.Run{run}, err
	}
	if o.candidate != "" {
		return c.startCandidates(ctx, s, a, names, o)
	}
	suites, err := evals.List(ctx, s.Pool)
	if err != nil {
		return nil, err
	}
	if len(names) > 0 {
		suites = nil
		for _, name := range names {
			suite, err := evals.Get(ctx, s.Pool, name)
			if errors.Is(err, evals.ErrNotFound) {
				return nil, errNoSuite(name)
			}
			if err != nil {
				return nil, err
			}
			suites = append(suites, suite)
		}
	}
	if len(suites) == 0 {
		return nil, errNoEval()
	}
	var runs []evals.Run
	for _, suite := range suites {
		run, err := a.Evals.Start(ctx, suite, o.Options)
		if err != nil {
			return nil, evalError(err)
		}
		runs = append(runs, run)
	}
	return runs, nil
}

func errNoSuite(name string) error {
	return hint(fmt.Errorf("there is no eval %.100q", name), "see agent eval ls")
}

func errNoEval() error {
	return hint(errors.New("there is no eval"), "declare one as kind: eval in the workspace, see docs/evals.md")
}

// evalError adds the exit code and the next step to an error of a run.
func evalError(err error) error {
	switch {
	case errors.Is(err, runner.ErrUnpriced), errors.Is(err, runner.ErrOffline), errors.Is(err, runner.ErrOtherSetup):
		return &exitError{exitUsage, err}
	case errors.Is(err, runner.ErrNoTurn):
		return hint(err, "raise --since, or see agent trace ls")
	case errors.Is(err, agents.ErrNotFound):
		return hint(err, "see agent agents ls")
	}
	return err
}

// readCandidate reads the folder of --candidate.
func (c *cli) readCandidate(
	ctx context.Context, s *session, o evalOptions,
) (files workspace.Workspace, options workspace.Options, err error) {
	if files, err = readWorkspace(o.candidate, c.sentFolder()); err != nil {
		return files, options, err
	}
	if files.GoFlows, err = c.goFlows(ctx, s); err != nil {
		return files, options, err
	}
	if o.prune {
		options.Prune = workspace.PruneAll
	}
	return files, options, c.checkSentWorkspace(ctx, s, files)
}

// startCandidates stores runs of the suites of a folder; all of them without names.
func (c *cli) startCandidates(
	ctx context.Context, s *session, a *app.App, names []string, o evalOptions,
) ([]evals.Run, error) {
	files, options, err := c.readCandidate(ctx, s, o)
	if err != nil {
		return nil, err
	}
	all, err := workspace.Candidates(ctx, s.Pool, files, options, app.EvalInstallation(s.config, buildVersion()))
	if err != nil {
		return nil, err
	}
	if len(names) == 0 {
		names = slices.Sorted(maps.Keys(all))
	}
	if len(names) == 0 {
		return nil, errNoEval()
	}
	var runs []evals.Run
	for _, name := range names {
		subject, is := all[name]
		if !is {
			return nil, fmt.Errorf("%s has no eval %.100q%s", o.candidate, name, suggestion(name, slices.Sorted(maps.Keys(all))))
		}
		run, err := a.Evals.StartCandidate(ctx, subject, o.Options)
		if err != nil {
			return nil, evalError(err)
		}
		runs = append(runs, run)
	}
	return runs, nil
}

// findRun reads a run by its id.
func findRun(ctx context.Context, s *session, id string) (evals.Run, error) {
	if !uuidForm.MatchString(id) {
		err := hint(fmt.Errorf("%.60q is not the id (uuid) of a run", id), "see agent eval ls --runs")
		return evals.Run{}, &exitError{exitUsage, err}
	}
	run, err := evals.GetRun(ctx, s.Pool, id)
	if errors.Is(err, evals.ErrNotFound) {
		err = hint(fmt.Errorf("there is no run %s", id), "see agent eval ls --runs")
	}
	return run, err
}

// workEval plays the trials of a run, and reports it.
func (c *cli) workEval(
	ctx context.Context, s *session, a *app.App, run evals.Run, o evalOptions,
) (report evals.Report, err error) {
	var mu sync.Mutex
	done := map[evals.Verdict]int{}
	if terminal(c.err) {
		c.infof("%s with %s, run %s", run.Suite, run.Model, run.ID)
	}
	err = a.Evals.Work(ctx, run, o.concurrent, func(t evals.Trial) {
		mu.Lock()
		defer mu.Unlock()
		done[t.Verdict]++
		if terminal(c.err) {
			fmt.Fprintf(c.err, "\r%d passed, %d did not", done[evals.Pass], total(done)-done[evals.Pass])
		}
	})
	if terminal(c.err) && total(done) > 0 {
		fmt.Fprintln(c.err)
	}
	if err != nil {
		return report, evalError(err)
	}
	return c.reportEval(ctx, s, run.ID, o.against)
}

func total[K comparable](counts map[K]int) (n int) {
	for _, count := range counts {
		n += count
	}
	return n
}

// reportEval reports a run, and compares it if asked.
func (c *cli) reportEval(ctx context.Context, s *session, id, against string) (evals.Report, error) {
	run, err := findRun(ctx, s, id)
	if err != nil {
		return evals.Report{}, err
	}
	report, err := evals.NewReport(ctx, s.Pool, run)
	if err != nil {
		return report, err
	}
	if who := principals.From(ctx); who != nil && !who.May(principals.ThreadsRead) {
		report.HideTexts()
	}
	if against == "" {
		return report, nil
	}
	other, err := evals.Run{}, error(nil)
	if against == "last" {
		if other, err = evals.Baseline(ctx, s.Pool, run); errors.Is(err, evals.ErrNotFound) {
			err = hint(fmt.Errorf("%s has no earlier run to compare with", run.Suite), "leave out --against the first time")
		}
	} else {
		other, err = findRun(ctx, s, against)
	}
	if err != nil {
		return report, err
	}
	if other.Suite != run.Suite {
		return report, usageError("run %s is of %s, not of %s", other.ID, other.Suite, run.Suite)
	}
	subject, err := evals.ReadSubject(ctx, s.Pool, run)
	if err != nil {
		return report, err
	}
	return report, report.CompareWith(ctx, s.Pool, other, subject.Suite.Definition.Margin())
}

// evalExit is the exit code of reports: that of the worst one.
func evalExit(reports []evals.Report) error {
	code := 0
	for _, r := range reports {
		switch {
		case r.Comparison != nil && r.Comparison.Answer == stats.Worse, r.Comparison == nil && r.Status == evals.Failed:
			code = exitFailed
		case code == 0 && (r.Comparison != nil && r.Comparison.Answer == stats.Undecided ||
			r.Comparison == nil && r.Status != evals.Passed):
			code = exitUndecided
		}
	}
	if code == 0 {
		return nil
	}
	return &exitError{code, nil}
}

func writeReports(w io.Writer, reports []evals.Report) {
	for i, r := range reports {
		if i > 0 {
			fmt.Fprintln(w)
		}
		writeEvalReport(w, r)
	}
}

func writeEvalReport(w io.Writer, r evals.Report) {
	defer writeContinue(w, r.Run)
	if r.ControlRun != nil {
		writeCounterfactual(w, r)
		return
	}
	fmt.Fprintf(w, "%s version %d, agent %s version %d, model %s, run %s%s\n\n", r.Suite, r.Version, r.Agent,
		r.AgentVersion, printable(r.Model), r.ID, map[bool]string{true: ", not applied"}[r.Candidate])
	writeRows(w, "no case", []string{"CASE", "PASSED", "95 %", "PASS^K", "COST", "TRACE", "WHY"}, r.Cases,
		func(c evals.CaseResult) []string {
			return []string{
				c.Case, fmt.Sprintf("%d/%d", c.Passed, c.Trials), fmt.Sprintf("%.2f–%.2f", c.Rate.Low, c.Rate.High), passK(c),
				human.Cost(c.CostUSD, c.Tokens), c.TraceID, strings.Join(c.Reasons, "; "),
			}
		})
	fmt.Fprintf(w, "\n%s, %s, %s tokens\n", r.State(), human.Cost(r.CostUSD, r.Tokens), human.Count(r.Tokens))
	for _, j := range r.Judges {
		writeJudge(w, j)
	}
	if r.JudgeUSD > 0 {
		fmt.Fprintf(w, "judges of trials: %s besides\n", human.Money(r.JudgeUSD))
	}
	if r.CalibrationTokens > 0 {
		fmt.Fprintf(w, "calibration of judges: %s besides\n", human.Money(r.CalibrationUSD))
	}
	if r.Comparison != nil {
		fmt.Fprintf(w, "%s: %+.2f (%.2f to %.2f) against run %s of version %d, %s\n", r.Comparison.Answer,
			r.Comparison.Difference, r.Difference.Low, r.Difference.High, r.Against.ID, r.Against.Version,
			printable(r.Against.Model))
	}
	if r.Control.Answer == stats.Better || r.Control.Answer == stats.Worse {
		fmt.Fprintln(w, "warning: the even trials of this run differ from its odd ones; do not trust a comparison")
	}
}

// writeContinue prints how to continue an interrupted run.
func writeContinue(w io.Writer, r evals.Run) {
	if r.Status == evals.Interrupted && !r.Control() {
		fmt.Fprintln(w, "interrupted; "+resumeCommand(r)+" continues the run")
	}
}

// resumeCommand continues a run.
func resumeCommand(r evals.Run) string {
	if r.Kind == evals.OfCounterfactual {
		return "agent eval counterfactual --resume " + r.ID
	}
	return "agent eval run --resume " + r.ID
}

// whyTrial has the reasons of a trial, and its judges' verdicts.
func whyTrial(t evals.Trial) string {
	all := slices.Clone(t.Reasons)
	for _, j := range t.Judgements {
		all = append(all, j.String())
	}
	return printable(strings.Join(all, "; "))
}

// writeJudge prints a judge's agreement with people.
func writeJudge(w io.Writer, j evals.Calibration) {
	own := map[bool]string{true: ", the model that it judges"}[j.Same]
	if j.Judged > 0 {
		fmt.Fprintf(w, "judge %s%s: agrees with people on %d of %d answers (%.2f–%.2f), wrongly passes %.2f–%.2f, "+
			"wrongly fails %.2f–%.2f\n", printable(j.Model), own, j.Agreed, j.Judged, j.Agreement.Low, j.Agreement.High,
			j.FalsePass.Low, j.FalsePass.High, j.FalseFail.Low, j.FalseFail.High)
	}
	if !j.Calibrated {
		fmt.Fprintf(w, "judge %s%s: not calibrated, decides nothing: %s\n", printable(j.Model), own, j.Why)
	}
}

func passK(c evals.CaseResult) string {
	if c.K == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f (k=%d)", c.PassK, c.K)
}

// JUnit XML, as CI servers read it.
type (
	junitSuites struct {
		XMLName xml.Name     `xml:"testsuites"`
		Suites  []junitSuite `xml:"testsuite"`
	}
	junitSuite struct {
		Name     string      `xml:"name,attr"`
		Tests    int         `xml:"tests,attr"`
		Failures int         `xml:"failures,attr"`
		Errors   int         `xml:"errors,attr"`
		Skipped  int         `xml:"skipped,attr"`
		Cases    []junitCase `xml:"testcase"`
	}
	junitCase struct {
		Class   string        `xml:"classname,attr"`
		Name    string        `xml:"name,attr"`
		Seconds string        `xml:"time,attr,omitempty"`
		Failure *junitMessage `xml:"failure"`
		Error   *junitMessage `xml:"error"`
		Skipped *junitMessage `xml:"skipped"`
	}
	junitMessage struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
)

// junit renders the trials of reports: fail as failure, diverged and error as error, undecided as skipped.
func junit(reports []evals.Report) ([]byte, error) {
	var all junitSuites
	for _, r := range reports {
		suite := junitSuite{Name: r.Suite, Tests: len(r.TrialRows)}
		if r.ControlRun != nil {
			all.Suites = append(all.Suites, junitComparison(r))
			continue
		}
		for _, t := range r.TrialRows {
			one := junitCase{
				Class: r.Suite, Name: fmt.Sprintf("%s #%d", t.Case, t.Trial),
				Seconds: fmt.Sprintf("%.3f", float64(t.DurationMS)/1000),
			}
			message := &junitMessage{strings.Join(t.Reasons, "; "), "trace " + t.TraceID}
			switch t.Verdict {
			case evals.Pass:
			case evals.Fail:
				one.Failure = message
				suite.Failures++
			case evals.Diverged, evals.Error:
				one.Error = message
				suite.Errors++
			default:
				one.Skipped = message
				suite.Skipped++
			}
			suite.Cases = append(suite.Cases, one)
		}
		all.Suites = append(all.Suites, suite)
	}
	text, err := xml.MarshalIndent(all, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("render JUnit: %w", err)
	}
	return append([]byte(xml.Header), append(text, '\n')...), nil
}

// junitComparison renders the comparison with a control as one test. A single recorded turn fails nothing.
func junitComparison(r evals.Report) junitSuite {
	suite := junitSuite{Name: r.Kind + " of " + r.Agent, Tests: 1}
	one := junitCase{Class: suite.Name, Name: "not worse than the control"}
	message := &junitMessage{
		fmt.Sprintf("%s: %+.2f (%.2f to %.2f)", r.Comparison.Answer, r.Comparison.Difference, r.Difference.Low,
			r.Difference.High), "run " + r.ID,
	}
	switch r.Comparison.Answer {
	case stats.Worse:
		one.Failure, suite.Failures = message, 1
	case stats.Undecided:
		one.Skipped, suite.Skipped = message, 1
	case stats.Better, stats.NotWorse:
	}
	suite.Cases = []junitCase{one}
	return suite
}

// listedEval is a suite with its newest run.
type listedEval struct {
	Name    string     `json:"name"`
	Version int        `json:"version"`
	Agent   string     `json:"agent"`
	Cases   int        `json:"cases"`
	Trials  int        `json:"trials"`
	Last    *evals.Run `json:"last_run"`
}

func (c *cli) evalListCommand() *cobra.Command {
	var runs bool
	cmd := &cobra.Command{
		Use: "ls [SUITE]", Short: "List the suites, or with --runs their newest runs",
		Args: positionalArgs(0, 1, "at most one suite"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			suite := cmp.Or(append(args, "")...)
			if runs || suite != "" {
				return c.listRuns(cmd.Context(), s, suite)
			}
			suites, err := evals.List(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			listed := make([]listedEval, len(suites))
			for i, one := range suites {
				d := one.Definition
				listed[i] = listedEval{one.Name, one.Version, d.Agent, len(d.Cases), d.TrialCount(), nil}
				last, err := evals.Runs(cmd.Context(), s.Pool, one.Name, 1)
				if err != nil {
					return err
				}
				if len(last) > 0 {
					listed[i].Last = &last[0]
				}
			}
			return printRows(c, listed, "", "no eval; declare one as kind: eval in the workspace",
				[]string{"EVAL", "VERSION", "AGENT", "CASES", "TRIALS", "LAST RUN", "RESULT"}, func(e listedEval) []string {
					row := []string{e.Name, fmt.Sprint(e.Version), e.Agent, fmt.Sprint(e.Cases), fmt.Sprint(e.Trials), "", ""}
					if e.Last != nil {
						row[5], row[6] = e.Last.ID, e.Last.Status
					}
					return row
				})
		}),
	}
	cmd.Flags().BoolVar(&runs, "runs", false, "list the newest runs")
	return cmd
}

// knownSuite returns an error for the name of a suite that never existed.
func knownSuite(ctx context.Context, s *session, name string) error {
	if name == "" {
		return nil
	}
	_, err := evals.Version(ctx, s.Pool, name, 1)
	if errors.Is(err, evals.ErrNotFound) {
		return errNoSuite(name)
	}
	return err
}

func (c *cli) listRuns(ctx context.Context, s *session, suite string) error {
	runs, err := evals.Runs(ctx, s.Pool, suite, 50)
	if err == nil && len(runs) == 0 {
		err = knownSuite(ctx, s, suite)
	}
	if err != nil {
		return err
	}
	reports, err := evals.Outcomes(ctx, s.Pool, runs)
	if err != nil {
		return err
	}
	states := map[string]string{}
	for _, r := range reports {
		states[r.ID] = r.State()
	}
	heading := []string{"RUN", "EVAL", "VERSION", "AGENT", "MODEL", "TRIALS", "BEGAN", "RESULT"}
	return printRows(c, runs, "", "no run", heading,
		func(r evals.Run) []string {
			return []string{
				r.ID, r.Suite, fmt.Sprint(r.Version), fmt.Sprintf("%s %d", r.Agent, r.AgentVersion), r.Model, fmt.Sprint(r.Trials),
				formatTime(r.CreatedAt), states[r.ID],
			}
		})
}

func (c *cli) evalShowCommand() *cobra.Command {
	var against string
	cmd := &cobra.Command{
		Use: "show RUN", Short: "Show a run with its trials, and compare it with --against",
		Args: positionalArgs(1, 1, "a run's id"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			report, err := c.reportEval(cmd.Context(), s, args[0], against)
			if err != nil {
				return err
			}
			return c.print(report, func(w io.Writer) {
				writeEvalReport(w, report)
				fmt.Fprintln(w)
				writeRows(w, "no trial", []string{"CASE", "TRIAL", "VERDICT", "CALLS", "COST", "TRACE", "WHY"}, report.TrialRows,
					func(t evals.Trial) []string {
						return []string{
							t.Case, fmt.Sprint(t.Trial), cmp.Or(string(t.Verdict), "open"), fmt.Sprint(t.Iterations),
							human.Cost(t.CostUSD, t.Tokens), t.TraceID, whyTrial(t),
						}
					})
			})
		}),
	}
	cmd.Flags().StringVar(&against, "against", "", "compare with this run, or with the last one before")
	return cmd
}
