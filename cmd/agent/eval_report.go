package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/principals"
)

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
							human.Cost(t.CostUSD, t.Tokens), t.TraceID, trialReasons(t),
						}
					})
			})
		}),
	}
	cmd.Flags().StringVar(&against, "against", "", "compare with this run, or with the last one before")
	return cmd
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

// worstExit returns the exit code of the worst report: failed or worse, undecided, or nil.
func worstExit(reports []evals.Report) error {
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
	defer writeResumeHint(w, r.Run)
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
		fmt.Fprintf(w, "%s: %+.2f (%.2f to %.2f) against run %s of %s version %d, agent %s version %d, model %s\n",
			r.Comparison.Answer, r.Comparison.Difference, r.Difference.Low, r.Difference.High, r.Against.ID, r.Suite,
			r.Against.Version, r.Against.Agent, r.Against.AgentVersion, printable(r.Against.Model))
	}
	if r.Control.Answer == stats.Better || r.Control.Answer == stats.Worse {
		fmt.Fprintln(w, "warning: the even trials of this run differ from its odd ones; do not trust a comparison")
	}
}

func passK(c evals.CaseResult) string {
	if c.K == 0 {
		return ""
	}
	return fmt.Sprintf("%.2f (k=%d)", c.PassK, c.K)
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

// trialReasons joins the reasons of a trial and the verdicts of its judges.
func trialReasons(t evals.Trial) string {
	all := slices.Clone(t.Reasons)
	for _, j := range t.Judgements {
		all = append(all, j.String())
	}
	return printable(strings.Join(all, "; "))
}

// writeResumeHint prints how to resume an interrupted run.
func writeResumeHint(w io.Writer, r evals.Run) {
	if r.Status == evals.Interrupted && !r.Control() {
		fmt.Fprintln(w, "interrupted; "+resumeCommand(r)+" continues the run")
	}
}

// resumeCommand returns the command that resumes a run.
func resumeCommand(r evals.Run) string {
	if r.Kind == evals.OfCounterfactual {
		return "agent eval counterfactual --resume " + r.ID
	}
	return "agent eval run --resume " + r.ID
}
