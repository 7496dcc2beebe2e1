package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/runner"
	"github.com/lanekeeper/lanekeeper/evals/stats"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/workspace"
)

func (c *cli) evalCounterfactualCommand() *cobra.Command {
	var o evalOptions
	var of runner.Counterfactual
	cmd := &cobra.Command{
		Use: "counterfactual", Short: "Play recorded turns with another model or version, and compare",
		Long: `Draw a sample of the agent's recorded turns and play them twice: with the agent as it is and the recorded
models (the control), and with the candidate. Recorded results answer the calls, matched by skill and arguments, so no
call has an effect.

A trial passes when it makes the recorded calls, with the same arguments and in the same order, and answers. The first
call that is not recorded ends it as diverged, which never passes. The sample is the same at each call.

Exit codes: 0 better or not worse, 1 worse, 3 undecided. If the control follows less than half of the recorded turns,
the candidate is not played, and the comparison is undecided.`,
		Example: "  agent eval counterfactual --model gpt-5-mini\n" +
			"  agent eval counterfactual --agent sales --agent-version 3 --since 30d --sample 100 --budget 2",
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := o.check(cmd, args); err != nil {
				return err
			}
			if err := checkCandidate(cmd, of, o.resume != "" || o.candidate != ""); err != nil {
				return err
			}
			return c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app.App) error {
				return c.runCounterfactual(ctx, s, a, of, o)
			})
		},
	}
	flags := cmd.Flags()
	candidateFlags(flags, &of, 0)
	spanFlag(flags, &of.Since, "since", "7d", "how far back the sample reaches")
	flags.IntVar(&of.Sample, "sample", 50, "recorded turns")
	flags.IntVar(&of.Trials, "trials", 1, "trials of each turn")
	spanFlag(flags, &of.Timeout, "timeout", "1h", "time limit of both runs; open trials are undecided then")
	o.flags(flags)
	return cmd
}

// candidateFlags adds the flags that select the candidate and limit its runs.
func candidateFlags(flags *pflag.FlagSet, of *runner.Counterfactual, budget float64) {
	flags.StringVar(&of.Agent, "agent", "", "the agent instead of the default one")
	flags.StringVar(&of.Model, "model", "", "the candidate's model")
	flags.IntVar(&of.Version, "agent-version", 0, "the candidate's version of the agent")
	flags.Float64Var(&of.Margin, "margin", 0.05, "a loss of the mean pass rate that counts as not worse")
	flags.Float64Var(&of.BudgetUSD, "budget", budget,
		"dollars that control and candidate may cost together; 0 for no limit")
}

// checkCandidate checks the flags of candidateFlags. named reports a candidate that other flags name.
func checkCandidate(cmd *cobra.Command, of runner.Counterfactual, named bool) error {
	switch version := cmd.Flags().Changed("agent-version"); {
	case version && of.Version < 1:
		return usageError("--agent-version must be 1 or more")
	case !(of.Margin >= 0 && of.Margin < 1) || !(of.BudgetUSD >= 0 && of.BudgetUSD <= math.MaxFloat64): // NaN too
		return usageError("--margin must be from 0 to less than 1, and --budget a number that is not negative")
	case of.Model == "" && !version && !named:
		return usageError("name the candidate: --model or --agent-version%s",
			map[bool]string{true: ", or --candidate"}[cmd.Flags().Lookup("candidate") != nil])
	}
	return nil
}

// runCounterfactual plans a counterfactual, prints its estimated cost, and plays it.
func (c *cli) runCounterfactual(
	ctx context.Context, s *session, a *app.App, of runner.Counterfactual, o evalOptions,
) error {
	if of.Sample < 1 || of.Sample > 500 {
		return usageError("--sample must be 1 to 500")
	}
	if err := c.checkJUnit(o.junit); err != nil {
		return err
	}
	var run evals.Run
	err := refusePaused(ctx, s)
	switch {
	case err != nil:
	case o.resume == "":
		run, err = c.planCounterfactual(ctx, s, a, of, o)
	default:
		if run, err = findRun(ctx, s, o.resume); err == nil && run.Kind != evals.OfCounterfactual {
			err = hint(fmt.Errorf("run %s is no counterfactual", run.ID), "see agent eval show %s", run.ID)
		}
	}
	if err != nil {
		return errors.Join(err, c.writeJUnit(o.junit, nil))
	}
	return c.playRuns(ctx, s, a, []startRun{stored(run)}, o)
}

// planCounterfactual prints the estimated cost of a counterfactual and stores it.
func (c *cli) planCounterfactual(
	ctx context.Context, s *session, a *app.App, of runner.Counterfactual, o evalOptions,
) (evals.Run, error) {
	switch {
	case of.Version > 0 && o.candidate != "":
		return evals.Run{}, usageError("--agent-version and --candidate exclude each other")
	case o.candidate != "":
		files, options, err := c.readCandidate(ctx, s, o)
		if err != nil {
			return evals.Run{}, err
		}
		of.Candidate = func(ctx context.Context, in evals.Installation, suite evals.Suite) (evals.Subject, error) {
			return workspace.CandidateOf(ctx, s.Pool, files, options, in, suite)
		}
	}
	p, err := a.Evals.Plan(ctx, of)
	if err != nil {
		return evals.Run{}, evalError(err)
	}
	price := "about " + human.Money(p.USD)
	if !p.Priced {
		price += ", without the models that have no price"
	}
	c.infof("%d recorded turns, %d of them playable; about %d model calls for control and candidate, %s",
		p.Sample.Size, len(p.Sample.Turns), p.Calls, price)
	return a.Evals.Store(ctx, p)
}

// writeCounterfactual writes the comparison of a run with its control, and the turns that either did not follow.
func writeCounterfactual(w io.Writer, r evals.Report) {
	control, c := r.ControlRun, r.Coverage
	fmt.Fprintf(w, "%s of agent %s: version %d with %s, run %s%s\n", r.Kind, r.Agent, r.AgentVersion, printable(r.Model),
		r.ID, map[bool]string{true: ", not applied"}[r.Candidate])
	fmt.Fprintf(w, "control: version %d with the recorded models, run %s\n\n", control.AgentVersion, control.ID)
	fmt.Fprintf(w, "sample     %d recorded turns, %d can be played%s\n", c.Sampled, c.Sampled-total(c.Skipped),
		counted(c.Skipped))
	fmt.Fprintf(w, "control    follows %d of %d (%.2f–%.2f), %d decided%s\n", control.Coverage.Followed,
		control.Coverage.Played, control.Rate.Low, control.Rate.High, control.Coverage.Decided,
		divergedAt(control.Coverage.Diverged))
	rate := stats.Wilson(c.Followed, c.Played)
	fmt.Fprintf(w, "candidate  follows %d of %d (%.2f–%.2f), %d decided%s\n\n", c.Followed, c.Played, rate.Low, rate.High,
		c.Decided, divergedAt(c.Diverged))
	others := slices.DeleteFunc(slices.Clone(r.Cases), func(one evals.CaseResult) bool {
		return one.Passed == one.Trials && len(one.Reasons) == 0
	})
	if len(others) > 0 {
		writeRows(w, "", []string{"RECORDED TURN", "PASSED", "TRACE", "WHY"}, others[:min(len(others), maxShownTurns)],
			func(one evals.CaseResult) []string {
				return []string{
					one.Case, fmt.Sprintf("%d/%d", one.Passed, one.Trials), one.TraceID, strings.Join(one.Reasons, "; "),
				}
			})
		if len(others) > maxShownTurns {
			fmt.Fprintf(w, "… and %d others; see agent eval show %s --json\n", len(others)-maxShownTurns, r.ID)
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintf(w, "%s: %+.2f (%.2f to %.2f) against the control, %s + %s\n", r.Comparison.Answer, r.Comparison.Difference,
		r.Difference.Low, r.Difference.High, human.Money(control.CostUSD), human.Money(r.CostUSD))
	if 2*control.Coverage.Followed < control.Coverage.Played {
		fmt.Fprintln(w, "warning: the agent as it is does not follow its own recorded turns; nothing can be compared")
	}
}

// maxShownTurns bounds the table of turns.
const maxShownTurns = 20

// counted lists counts by reason.
func counted(by map[string]int) string {
	var text strings.Builder
	for _, why := range slices.Sorted(maps.Keys(by)) {
		fmt.Fprintf(&text, "; %d: %s", by[why], why)
	}
	return text.String()
}

// divergedAt lists the skills of the first calls that were not recorded, most frequent first.
func divergedAt(by map[string]int) string {
	if len(by) == 0 {
		return ""
	}
	names := slices.SortedFunc(maps.Keys(by), func(x, y string) int {
		return cmp.Or(cmp.Compare(by[y], by[x]), strings.Compare(x, y))
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %d", printable(name), by[name])
	}
	return ", diverged at " + strings.Join(names, ", ")
}
