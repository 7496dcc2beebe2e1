package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/selfheal/faults"
	"github.com/lanekeeper/lanekeeper/trace"
)

func (c *cli) selfhealCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "selfheal",
		Short: "Disable failing skills now",
		Long: `Disable skills that keep failing, and pause their automations. Every heartbeat does this too.
AGENT_SELFHEAL_FAILURES, _WINDOW, _RATE, _RATE_CALLS and _COOLDOWN set the rule.`,
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, _ []string, s *session) error {
			report, err := heal(cmd.Context(), s)
			if err != nil {
				return err
			}
			return c.print(report, func(w io.Writer) {
				fmt.Fprintf(w, "%d %s checked, %d taken out of service\n", report.Checked, plural("skill", report.Checked),
					len(report.Healed))
				for _, h := range report.Healed {
					fmt.Fprintf(w, "  %s: %s\n", h.Skill, h.Reason)
					for _, a := range h.AutomationsPaused {
						fmt.Fprintf(w, "    automation %s paused\n", a)
					}
					fmt.Fprintf(w, "    keep it as a case: agent eval add --outage %s\n", h.Skill)
				}
			})
		}),
	}
	cmd.AddCommand(c.selfhealReportCommand())
	return cmd
}

// heal runs self-heal and records each disabled skill in one transaction.
func heal(ctx context.Context, s *session) (selfheal.Report, error) {
	var report selfheal.Report
	ctx = trace.With(ctx, trace.Span{TraceID: trace.New(trace.Operate), Surface: trace.Operate, Agent: admin})
	err := pgx.BeginFunc(ctx, s.Pool, func(tx pgx.Tx) error {
		var err error
		if report, err = selfheal.Run(ctx, tx, app.HealPolicy(s.config)); err != nil {
			return err
		}
		for _, h := range report.Healed {
			_, err := activity.Note(ctx, tx, activity.Entry{Skill: "heal_skill", Input: map[string]string{"skill": h.Skill}},
				activity.Outcome{Output: h})
			if err != nil {
				return err
			}
		}
		return nil
	})
	return report, err
}

// healReport compares the rule with "3 in a row".
type healReport struct {
	Source   string          `json:"source"`
	Traces   int             `json:"traces"`
	Unjudged int             `json:"unjudged"`
	Rules    []faults.Result `json:"rules"`
}

func (c *cli) selfhealReportCommand() *cobra.Command {
	var set string
	var since time.Time
	cmd := &cobra.Command{
		Use: "report", Short: "Measure the rule of self-heal on labelled traces of faults",
		Long: `Replay labelled traces of faults through the rule of self-heal, with its settings, and through "3 in a row".
Print how many alarms were right (precision), how many faults were found in time (recall), after how many calls, and
how many alarms were false. Intervals are those of Wilson, 95 %. Nothing is changed.

The set of this release is public: selfheal/faults. --set replays another file of that form. --since replays the alarms
of this installation: an alarm was false if a person enabled the skill during its cool-down.`,
		Example: "  agent selfheal report\n  agent selfheal report --since 30d",
		Args:    positionalArgs(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if set != "" && !since.IsZero() {
				return usageError("--set and --since exclude each other")
			}
			if !since.IsZero() {
				return c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
					return c.reportHealing(cmd.Context(), s, s.config, set, since)
				})(cmd, args)
			}
			if err := c.loadDevDotEnv(); err != nil {
				return err
			}
			cfg, _, err := c.settings()
			if err != nil {
				return err
			}
			return c.reportHealing(cmd.Context(), nil, cfg, set, since)
		},
	}
	cmd.Flags().StringVar(&set, "set", "", "replay this file (JSONL) instead of the set of this release")
	sinceFlag(cmd.Flags(), &since, "since", "", "replay the alarms of this installation in the last")
	return cmd
}

// reportHealing prints the report. Only a report with since reads the database.
func (c *cli) reportHealing(ctx context.Context, s *session, cfg config.Config, set string, since time.Time) error {
	var r healReport
	var err error
	policy := app.HealPolicy(cfg)
	var traces []faults.Trace
	switch {
	case !since.IsZero():
		r.Source = "alarms since " + formatTime(since)
		traces, r.Unjudged, err = faults.History(ctx, s.Pool, policy, since)
	case set != "":
		r.Source = set
		traces, err = c.readFaults(set)
	default:
		r.Source = "the set of this release"
		traces, err = faults.Embedded()
	}
	if err != nil {
		return err
	}
	traces = faults.CountedOnly(traces)
	r.Traces = len(traces)
	for _, rule := range []faults.Rule{faults.SelfHeal(policy), faults.ThreeInARow()} {
		r.Rules = append(r.Rules, faults.Evaluate(rule, traces))
	}
	return c.print(r, func(w io.Writer) { writeHealReport(w, r) })
}

func (c *cli) readFaults(path string) ([]faults.Trace, error) {
	text, err := c.readInput(path)
	if err != nil {
		return nil, err
	}
	return faults.Read(bytes.NewReader(text))
}

func writeHealReport(w io.Writer, r healReport) {
	fmt.Fprintf(w, "%s: %d %s\n", printable(r.Source), r.Traces, plural("trace", r.Traces))
	if r.Unjudged > 0 {
		fmt.Fprintf(w, "not judged yet: %d more %s\n", r.Unjudged, plural("alarm", r.Unjudged))
	}
	heading := []string{"", "TRACES", "PRECISION", "95 %", "RECALL", "95 %", "DELAY", "FALSE", "PER 1000"}
	for _, rule := range r.Rules {
		scores := append([]faults.Score{}, rule.Shapes...)
		for _, part := range []*faults.Score{rule.Tuned, rule.Held} {
			if part != nil {
				scores = append(scores, *part)
			}
		}
		scores = append(scores, rule.All)
		heading[0] = rule.Rule
		fmt.Fprintln(w)
		writeRows(w, "no trace", heading, scores, func(s faults.Score) []string {
			row := []string{
				s.Name, fmt.Sprint(s.Traces), "", "", "", "", "", fmt.Sprint(s.FalseAlarms), fmt.Sprintf("%.1f", s.PerThousand),
			}
			if s.Precision.Value != nil {
				row[2], row[3] = fmt.Sprintf("%.2f", *s.Precision.Value), interval(s.Precision)
			}
			if s.Recall.Value != nil {
				row[4], row[5] = fmt.Sprintf("%.2f", *s.Recall.Value), interval(s.Recall)
			}
			if s.Detected > 0 {
				row[6] = fmt.Sprintf("%g", s.Delay)
			}
			return row
		})
	}
}

func interval(r faults.Rate) string { return fmt.Sprintf("%.2f–%.2f", r.Low, r.High) }
