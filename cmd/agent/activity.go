package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
)

func (c *cli) activityCommand() *cobra.Command {
	return group("activity", "Query the activity log: recent actions, cost, slow and failing skills, audit",
		c.activityListCommand(), c.spendCommand(), c.slowestCommand(), c.failingCommand(), c.auditCommand())
}

func (c *cli) activityListCommand() *cobra.Command {
	var f activity.Filter
	var status string
	cmd := &cobra.Command{
		Use: "ls", Short: "List actions, newest first", Args: args(0, 0, "no arguments"),
		Example: "  agent activity ls --status error --since 24h\n  agent activity ls --skill table_sizes --json",
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			f.Status = activity.Status(status)
			rows, next, err := activity.Recent(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			return c.print(listing(rows, next), func(w io.Writer) error { return writeRows(w, rows) })
		}),
	}
	surfaceFlag(cmd.Flags(), &f.Surface)
	statusFlag(cmd.Flags(), &status, "only this state", "running", "success", "error", "pending_approval", "skipped", "unknown")
	cmd.Flags().StringVar(&f.Skill, "skill", "", "only this skill")
	cmd.Flags().StringVar(&f.Lane, "lane", "", "only what was done in this lane")
	cmd.Flags().StringVar(&f.TraceID, "trace", "", "only this trace")
	agoFlag(cmd.Flags(), &f.Since, "since", "", "only the last")
	limitFlag(cmd.Flags(), &f.Limit, 30)
	cmd.Flags().StringVar(&f.Cursor, "cursor", "", "where the page before ended")
	return cmd
}

// writeRows shows actions to a person.
func writeRows(w io.Writer, rows []activity.Row) error {
	lines := make([][]string, len(rows))
	for i, r := range rows {
		lines[i] = []string{
			when(r.CreatedAt), r.TraceID, r.SkillName, string(r.Status), span(r.DurationMS), fmt.Sprint(r.TokenUsage.TotalTokens),
			clipped(deref(r.ErrorMessage), 60),
		}
	}
	return table(w, "no activity matches; `agent heartbeat` makes some",
		[]string{"TIME", "TRACE", "SKILL", "STATUS", "TOOK", "TOKENS", "ERROR"}, lines)
}

// clipped shortens a text to at most n characters.
func clipped(text string, n int) string {
	if r := []rune(text); len(r) > n {
		return string(r[:n]) + "…"
	}
	return text
}

// report makes a command that looks back over a span of time.
func report[T any](c *cli, use, short, empty string, heading []string,
	read func(ctx context.Context, s *session, since time.Time) ([]T, error), row func(T) []string,
) *cobra.Command {
	var since time.Time
	cmd := &cobra.Command{
		Use: use, Short: short, Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := read(cmd.Context(), s, since)
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, g := range got {
					rows[i] = row(g)
				}
				return table(w, empty, heading, rows)
			})
		}),
	}
	agoFlag(cmd.Flags(), &since, "since", "7d", "how far to look back")
	return cmd
}

func (c *cli) spendCommand() *cobra.Command {
	return report(c, "spend", "Tokens and money by skill, surface, model and day", "no model was called in that time",
		[]string{"DAY", "SKILL", "SURFACE", "MODEL", "CALLS", "TOKENS", "COST", "UNKNOWN"},
		func(ctx context.Context, s *session, since time.Time) ([]activity.Spending, error) {
			return activity.Spend(ctx, s.pool, since, activity.ByDay)
		},
		func(x activity.Spending) []string {
			return []string{x.Period, x.Skill, x.Surface, x.Model, fmt.Sprint(x.Calls), fmt.Sprint(x.Tokens), money(x.CostUSD), unknownSpend(x.UnknownTokens, x.UnknownUSD)}
		})
}

// unknownSpend is what a provider may have billed and did not report, for people: a part of the columns before it.
func unknownSpend(tokens int64, usd float64) string {
	switch {
	case tokens == 0 && usd == 0:
		return ""
	case usd == 0:
		return fmt.Sprintf("%d tokens", tokens)
	}
	return fmt.Sprintf("%d tokens, %s", tokens, money(usd))
}

func (c *cli) slowestCommand() *cobra.Command {
	return report(c, "slowest", "Skills by how long their calls take", "no skill was called in that time",
		[]string{"SKILL", "CALLS", "P50 MS", "P95 MS", "MAX MS", "SLOWEST TRACE"},
		func(ctx context.Context, s *session, since time.Time) ([]activity.Slow, error) {
			return activity.Slowest(ctx, s.pool, since, 50)
		},
		func(x activity.Slow) []string {
			return []string{
				x.Skill, fmt.Sprint(x.Calls), fmt.Sprintf("%.0f", x.P50MS), fmt.Sprintf("%.0f", x.P95MS), fmt.Sprint(x.MaxMS), x.SlowestTraceID,
			}
		})
}

func (c *cli) failingCommand() *cobra.Command {
	return report(c, "failing", "Skills by how often their calls fail", "no skill failed in that time",
		[]string{"SKILL", "CALLS", "ERRORS", "RATE", "IN A ROW", "LAST ERROR", "LAST TRACE"},
		func(ctx context.Context, s *session, since time.Time) ([]activity.Failure, error) {
			return activity.Failing(ctx, s.pool, since, 50)
		},
		func(x activity.Failure) []string {
			return []string{
				x.Skill, fmt.Sprint(x.Calls), fmt.Sprint(x.Errors), percent(x.Rate), fmt.Sprint(x.Streak), clipped(x.LastError, 60), x.LastTrace,
			}
		})
}

func (c *cli) auditCommand() *cobra.Command {
	var since, until time.Time
	var limit int
	cmd := &cobra.Command{
		Use: "audit", Short: "Everything the agent did in a span of time, newest first", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			rows, err := activity.Audit(cmd.Context(), s.pool, since, until, limit)
			if err != nil {
				return err
			}
			return c.print(listing(rows, ""), func(w io.Writer) error { return writeRows(w, rows) })
		}),
	}
	agoFlag(cmd.Flags(), &since, "since", "24h", "from so long ago")
	agoFlag(cmd.Flags(), &until, "until", "", "up to so long ago; now when not given")
	limitFlag(cmd.Flags(), &limit, activity.MaxLimit)
	return cmd
}
