package main

import (
	"context"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/trace"
)

func (c *cli) selfhealCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "selfheal",
		Short: "Take failing skills out of service, now",
		Long: `Look at the calls of the last days and take skills out of service that keep failing, with their automations.
Every heartbeat does this too. AGENT_SELFHEAL_FAILURES, _WINDOW, _RATE, _RATE_CALLS and _COOLDOWN set the rule.`,
		Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			report, err := heal(cmd.Context(), s)
			if err != nil {
				return err
			}
			return c.print(report, func(w io.Writer) error {
				fmt.Fprintf(w, "%d %s checked, %d taken out of service\n", report.Checked, plural("skill", report.Checked), len(report.Healed))
				for _, h := range report.Healed {
					fmt.Fprintf(w, "  %s: %s\n", h.Skill, h.Reason)
					for _, a := range h.AutomationsPaused {
						fmt.Fprintf(w, "    automation %s paused\n", a)
					}
				}
				return nil
			})
		}),
	}
}

// heal runs self-heal with a row for each healed skill, in one transaction.
func heal(ctx context.Context, s *session) (selfheal.Report, error) {
	var report selfheal.Report
	ctx = trace.With(ctx, trace.Span{TraceID: trace.New(trace.Operate), Surface: trace.Operate, Agent: admin})
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var err error
		if report, err = selfheal.Run(ctx, tx, healPolicy(s.config)); err != nil {
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
