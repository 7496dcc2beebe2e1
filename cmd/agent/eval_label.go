package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/principals"
)

func (c *cli) evalLabelCommand() *cobra.Command {
	l := evals.NewLabel{}
	cmd := &cobra.Command{
		Use: "label RUN CASE good|bad|none", Short: "Say whether the answer of a trial is good",
		Long: `Say whether the answer of a trial is good or bad; none withdraws your label. Judges are calibrated against the
labels of people. The Engine Room has a key for each label.`,
		Example: `  agent eval label 01a21abd-4de8-7876-b240-505ac1bc02d6 "refund not due" bad --trial 2 --note "no reason"`,
		Args:    positionalArgs(3, 3, "a run's id, a case, and good, bad or none"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			if l.Trial < 1 {
				return usageError("%s", evals.ErrTrial)
			}
			if _, err := findRun(cmd.Context(), s, args[0]); err != nil {
				return err
			}
			l.Run, l.Case, l.Word = args[0], args[1], args[2]
			ctx := cmd.Context()
			who := principals.From(ctx)
			if who == nil { // one person has one label, here and on the page without a login
				ctx = activity.WithActor(ctx, activity.Actor{Name: principals.Root, Via: "cli"})
			}
			stored, _, err := evals.PutLabel(ctx, s.Pool, l)
			switch {
			case errors.Is(err, evals.ErrLabel), errors.Is(err, evals.ErrTrial):
				return usageError("%s", err)
			case errors.Is(err, evals.ErrNotFound):
				return hint(fmt.Errorf("run %s has no trial %d of %.100q", l.Run, l.Trial, l.Case), "see agent eval show %s", l.Run)
			case errors.Is(err, evals.ErrNoAnswer):
				return hint(err, "see agent eval show %s", l.Run)
			case err != nil:
				return err
			}
			if who != nil && !who.May(principals.ThreadsRead) {
				stored.Answer = ""
			}
			return c.printf(stored, "trial %d of %q: %s\n", stored.Trial, stored.Case, l.Word)
		}),
	}
	cmd.Flags().IntVar(&l.Trial, "trial", 1, "the number of the trial")
	cmd.Flags().StringVar(&l.Note, "note", "", "why")
	return cmd
}

// maxLabels bounds the listed labels.
const maxLabels = 10_000

func (c *cli) evalLabelsCommand() *cobra.Command {
	var lines bool
	cmd := &cobra.Command{
		Use: "labels [SUITE]", Short: "List the labels of people, newest first, or print them for a judge with --jsonl",
		Example: "  agent eval labels\n  agent eval labels returns --jsonl > labels.jsonl",
		Args:    positionalArgs(0, 1, "at most one suite"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			labels, err := evals.Labels(cmd.Context(), s.Pool, cmp.Or(append(args, "")...), "", "", maxLabels)
			if err == nil && len(labels) == 0 {
				err = knownSuite(cmd.Context(), s, cmp.Or(append(args, "")...))
			}
			if err != nil {
				return err
			}
			if lines {
				return writeLabelLines(c.out, labels)
			}
			heading := []string{"EVAL", "CASE", "TRIAL", "LABEL", "BY", "WHEN", "RUN", "NOTE"}
			return printRows(c, labels, "", "no label; agent eval label or the Engine Room adds one", heading,
				func(l evals.Label) []string {
					return []string{
						l.Suite, l.Case, fmt.Sprint(l.Trial), l.Word, l.Principal, formatTime(l.CreatedAt), l.Run, l.Note,
					}
				})
		}),
	}
	cmd.Flags().BoolVar(&lines, "jsonl", false, "one JSON object a line, as the labels file of a judge has them")
	return cmd
}

// judgedLabel is a line of the labels file of a judge.
type judgedLabel struct {
	Answer string `json:"answer"`
	Pass   bool   `json:"pass"`
}

func writeLabelLines(w io.Writer, labels []evals.Label) error {
	out := json.NewEncoder(w)
	out.SetEscapeHTML(false)
	for _, l := range labels {
		if err := out.Encode(judgedLabel{l.Answer, l.Good}); err != nil {
			return fmt.Errorf("write labels: %w", err)
		}
	}
	return nil
}
