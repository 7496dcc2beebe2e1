package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/runner"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func (c *cli) evalCommand() *cobra.Command {
	return group("eval", "Try agents on suites of cases, and compare versions",
		c.evalRunCommand(), c.evalCounterfactualCommand(), c.evalShadowCommand(), c.evalListCommand(), c.evalShowCommand(),
		c.evalAddCommand(), c.evalLabelCommand(), c.evalLabelsCommand())
}

func (c *cli) evalRunCommand() *cobra.Command {
	var o evalOptions
	cmd := &cobra.Command{
		Use: "run [SUITE...]", Short: "Run suites, or all of them",
		Long: `Run the trials of suites in this process and print the results of each case. Skills are answered by the stubs
of the case, memory and approvals by its script. A trial has no effect outside itself.

Exit codes: 0 passed, 1 failed, 3 undecided or not ended. With --against the comparison decides: 1 for
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

// readTimeout bounds the read of a run that an error has interrupted.
const readTimeout = 5 * time.Second

// flags are those of the commands that play runs.
func (o *evalOptions) flags(flags *pflag.FlagSet) {
	flags.StringVar(&o.candidate, "candidate", "", "try the workspace in this folder, without applying it")
	flags.BoolVar(&o.prune, "prune", false, "with --candidate: try it as after apply --prune")
	flags.IntVar(&o.concurrent, "concurrency", defaultConcurrency, "trials at once")
	flags.StringVar(&o.resume, "resume", "", "continue this run")
	flags.StringVar(&o.junit, "junit", "", "also write the result to this file, as JUnit XML")
}

// check validates the flags of a command that plays runs.
func (o *evalOptions) check(cmd *cobra.Command, args []string) error {
	if err := o.checkResume(cmd, args); err != nil {
		return err
	}
	trials := cmd.Flags().Lookup("trials") // of evalOptions, or of runner.Counterfactual
	n, err := strconv.Atoi(trials.Value.String())
	switch {
	case cmd.Flags().Changed("candidate") && o.candidate == "", o.prune && o.candidate == "":
		return usageError("--candidate needs the folder of a workspace, and --prune needs --candidate")
	case o.concurrent < 1 || o.concurrent > 100 || trials.Changed && (err != nil || n < 1 || n > 100):
		return usageError("--concurrency and --trials must be 1 to 100")
	}
	return nil
}

// checkResume rejects suites, and flags that would change the run, beside --resume.
func (o *evalOptions) checkResume(cmd *cobra.Command, args []string) (err error) {
	if o.resume == "" {
		return nil
	}
	if len(args) > 0 {
		return usageError("--resume continues one run as it is; leave out the suites")
	}
	cmd.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
		if f.Changed && !slices.Contains([]string{"resume", "concurrency", "junit", "against"}, f.Name) {
			err = usageError("--resume continues one run as it is; leave out --%s", f.Name)
		}
	})
	return err
}

// runEvals runs suites one after the other, each once, in the given order.
func (c *cli) runEvals(ctx context.Context, s *session, a *app.App, names []string, o evalOptions) error {
	if err := c.checkJUnit(o.junit); err != nil {
		return err
	}
	if o.against != "" && o.against != "last" { // an unknown run is an error before any model call is billed
		if _, err := findRun(ctx, s, o.against); err != nil {
			return errors.Join(err, c.writeJUnit(o.junit, nil))
		}
	}
	var once []string
	for _, name := range names {
		if !slices.Contains(once, name) {
			once = append(once, name)
		}
	}
	starts, err := c.prepareRuns(ctx, s, a, once, o)
	if err != nil {
		return errors.Join(err, c.writeJUnit(o.junit, nil))
	}
	return c.playRuns(ctx, s, a, starts, o)
}

// refusePaused returns an error while the agent is paused: no trial would begin.
func refusePaused(ctx context.Context, s *session) error {
	p, err := executions.CurrentPause(ctx, s.Pool)
	if err == nil && p.Paused {
		err = &exitError{exitUndecided, &executions.PausedError{Pause: p}}
	}
	return err
}

// checkJUnit creates or empties the file, so that an error shows before any model call is billed. A remote caller's
// file is created at the end.
func (c *cli) checkJUnit(name string) error {
	if _, remote := c.out.(*callerStream); remote || name == "" {
		return nil
	}
	if err := c.writeFile(name, nil, true); err != nil {
		return &exitError{exitUsage, err}
	}
	return nil
}

// writeJUnit writes reports to the file of --junit, if it is set.
func (c *cli) writeJUnit(name string, reports []evals.Report) error {
	if name == "" {
		return nil
	}
	text, err := junit(reports)
	if err != nil {
		return err
	}
	return c.writeFile(name, text, true)
}

// startRun stores a run, or returns a stored one.
type startRun func(context.Context) (evals.Run, error)

func stored(run evals.Run) startRun {
	return func(context.Context) (evals.Run, error) { return run, nil }
}

// playRuns plays runs and prints their reports at the end. After an error it prints none, and writes what is known to
// the file of --junit.
func (c *cli) playRuns(ctx context.Context, s *session, a *app.App, starts []startRun, o evalOptions) error {
	reports, err := c.playEach(ctx, s, a, starts, o)
	if err = errors.Join(err, c.writeJUnit(o.junit, reports)); err != nil {
		return err
	}
	if err := c.print(pageOf(reports, ""), func(w io.Writer) { writeReports(w, reports) }); err != nil {
		return err
	}
	return worstExit(reports)
}

// playEach starts each run after the one before has ended, and plays its trials. An error ends it; then the last report
// is that of the run that has not ended, if it can be read.
func (c *cli) playEach(
	ctx context.Context, s *session, a *app.App, starts []startRun, o evalOptions,
) (reports []evals.Report, err error) {
	reports = []evals.Report{}
	for i, start := range starts {
		run, err := start(ctx)
		if err != nil {
			return reports, evalError(err)
		}
		resume := fmt.Sprintf("run %s has not ended; %s continues it", run.ID, resumeCommand(run))
		if later := len(starts) - i - 1; later > 0 {
			resume += fmt.Sprintf("; not begun: %d %s", later, plural("suite", later))
		}
		c.onInterrupt(resume)
		report, err := c.playRun(ctx, s, a, run, o)
		if err == nil {
			reports = append(reports, report)
			continue
		}
		detached, cancel := context.WithTimeout(context.WithoutCancel(ctx), readTimeout)
		defer cancel()
		report, readErr := c.reportEval(detached, s, run.ID, "")
		if readErr == nil {
			reports = append(reports, report)
		}
		if readErr == nil && report.FinishedAt != nil { // for example, there is no run to compare with
			return reports, err
		}
		c.infof("%s", resume)
		if exitCode(ctx, err) == exitFailed { // no trial failed by it
			err = &exitError{exitUndecided, err}
		}
		return reports, err
	}
	return reports, nil
}

// prepareRuns checks a run of each suite, or finds the run to resume. Without names it takes all suites.
func (c *cli) prepareRuns(
	ctx context.Context, s *session, a *app.App, names []string, o evalOptions,
) ([]startRun, error) {
	if err := refusePaused(ctx, s); err != nil {
		return nil, err
	}
	if o.resume != "" {
		run, err := findRun(ctx, s, o.resume)
		if run.Kind == evals.OfShadow {
			return nil, hint(fmt.Errorf("run %s is a shadow, which servers play", run.ID), "see agent eval show %s", run.ID)
		}
		return []startRun{stored(run)}, err
	}
	subjects, err := c.findSubjects(ctx, s, names, o)
	if err != nil {
		return nil, err
	}
	starts := make([]startRun, len(subjects))
	for i, subject := range subjects {
		if _, err := a.Evals.Check(subject, o.Options); err != nil {
			return nil, evalError(err)
		}
		starts[i] = func(ctx context.Context) (evals.Run, error) {
			return a.Evals.StartSubject(ctx, subject, o.Options, o.candidate != "")
		}
	}
	return starts, nil
}

// findSubjects returns the subjects of the named suites, or of all without names.
func (c *cli) findSubjects(
	ctx context.Context, s *session, names []string, o evalOptions,
) (subjects []evals.Subject, err error) {
	if o.candidate != "" {
		return c.findCandidates(ctx, s, names, o)
	}
	suites, err := findSuites(ctx, s, names)
	if err != nil {
		return nil, err
	}
	for _, suite := range suites {
		subject, err := app.EvalInstallation(s.config, buildVersion()).Subject(ctx, s.Pool, suite)
		if err != nil {
			return nil, evalError(err)
		}
		subjects = append(subjects, subject)
	}
	return subjects, nil
}

// findSuites reads the named suites, or all without names.
func findSuites(ctx context.Context, s *session, names []string) (suites []evals.Suite, err error) {
	if len(names) == 0 {
		suites, err = evals.List(ctx, s.Pool)
		if err == nil && len(suites) == 0 {
			err = errNoSuites()
		}
		return suites, err
	}
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
	return suites, nil
}

// evalError adds the exit code and the advice to an error of a run.
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

// findCandidates returns the named suites of a folder with their candidates, or all without names.
func (c *cli) findCandidates(
	ctx context.Context, s *session, names []string, o evalOptions,
) (subjects []evals.Subject, err error) {
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
		return nil, errNoSuites()
	}
	for _, name := range names {
		subject, known := all[name]
		if !known {
			return nil, fmt.Errorf("%s has no eval %.100q%s", o.candidate, name, suggestion(name, slices.Sorted(maps.Keys(all))))
		}
		subjects = append(subjects, subject)
	}
	return subjects, nil
}

// playRun plays the trials of one run, and returns its report. On a terminal it shows the progress.
func (c *cli) playRun(
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
