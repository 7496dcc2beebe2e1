package main

import (
	"cmp"
	"context"
	"fmt"
	"io"

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
		RunE: c.reading(func(cmd *cobra.Command, _ []string, s *session) error {
			f.Status = activity.Status(status)
			rows, next, err := activity.Recent(cmd.Context(), s.read, f)
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

// reportCommand is a command that lists lines of a report.
type reportCommand[T any] struct {
	use, short, empty string
	heading           []string
	read              func(ctx context.Context, s *session, f activity.ReportFilter) ([]T, string, error)
	row               func(T) []string
}

// command makes it, with the flags that every report has.
func (r reportCommand[T]) command(c *cli) (*cobra.Command, *activity.ReportFilter) {
	var f activity.ReportFilter
	cmd := &cobra.Command{
		Use: r.use, Short: r.short, Args: args(0, 0, "no arguments"),
		RunE: c.reading(func(cmd *cobra.Command, _ []string, s *session) error {
			got, next, err := r.read(cmd.Context(), s, f)
			if err != nil {
				return err
			}
			return c.print(listing(got, next), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, g := range got {
					rows[i] = r.row(g)
				}
				return table(w, r.empty, r.heading, rows)
			})
		}),
	}
	agoFlag(cmd.Flags(), &f.Since, "since", "7d", "how far to look back")
	cmd.Flags().StringVar(&f.Skill, "skill", "", "only this skill")
	cmd.Flags().StringVar(&f.Cursor, "cursor", "", "where the page before ended")
	limitFlag(cmd.Flags(), &f.Limit, 100)
	return cmd, &f
}

func (c *cli) spendCommand() *cobra.Command {
	by := string(activity.BySkill)
	cmd, f := reportCommand[activity.Spending]{
		use: "spend", short: "Tokens and money by skill, surface, model and day", empty: "no model was called in that time",
		heading: []string{"DAY", "SKILL", "SURFACE", "MODEL", "CALLS", "TOKENS", "COST", "UNKNOWN"},
		read: func(ctx context.Context, s *session, f activity.ReportFilter) ([]activity.Spending, string, error) {
			if by == string(activity.ByPurpose) && f.Skill != "" {
				return nil, "", usageError("--skill: %w", activity.ErrSkillOrPurpose)
			}
			if by == string(activity.ByPurpose) {
				return activity.SpendByPurpose(ctx, s.read, f)
			}
			return activity.Spend(ctx, s.read, f)
		},
		row: func(x activity.Spending) []string {
			return []string{
				x.Day, cmp.Or(x.Skill, x.Purpose, "-"), x.Surface, x.Model, fmt.Sprint(x.Calls), fmt.Sprint(x.Tokens), money(x.CostUSD),
				unknownSpend(x.UnknownTokens, x.UnknownUSD),
			}
		},
	}.command(c)
	cmd.Long = `What model calls cost, by whole days (UTC). A model call is charged to the skills that its answer calls, by the number of calls; one
that calls no skill is charged to its surface alone, and SKILL is - then. The call itself counts once, at the skill called most often. With
--by purpose the same sums are by what the model was called for: a phase of the heartbeat, a turn, an automation.`
	wordFlag(cmd.Flags(), &by, "by", "what stands under SKILL", string(activity.BySkill), string(activity.ByPurpose))
	surfaceFlag(cmd.Flags(), &f.Surface)
	cmd.Flags().StringVar(&f.Model, "model", "", "only this model")
	return cmd
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
	cmd, _ := reportCommand[activity.Slow]{
		use: "slowest", short: "Skills by how long their calls take", empty: "no skill was called in that time",
		heading: []string{"SKILL", "CALLS", "P50 MS", "P95 MS", "MAX MS", "SLOWEST TRACE"},
		read: func(ctx context.Context, s *session, f activity.ReportFilter) ([]activity.Slow, string, error) {
			return activity.Slowest(ctx, s.read, f)
		},
		row: func(x activity.Slow) []string {
			most := ""
			if x.MaxMS != nil {
				most = fmt.Sprint(*x.MaxMS)
			}
			return []string{x.Skill, fmt.Sprint(x.Calls), fmt.Sprintf("%.0f", x.P50MS), fmt.Sprintf("%.0f", x.P95MS), most, x.SlowestTraceID}
		},
	}.command(c)
	return cmd
}

func (c *cli) failingCommand() *cobra.Command {
	cmd, _ := reportCommand[activity.Failure]{
		use: "failing", short: "Skills by how often their calls fail", empty: "no skill failed in that time",
		heading: []string{"SKILL", "STATE", "CALLS", "ERRORS", "RATE", "IN A ROW", "LAST ERROR", "LAST TRACE"},
		read: func(ctx context.Context, s *session, f activity.ReportFilter) ([]activity.Failure, string, error) {
			return activity.Failing(ctx, s.read, f)
		},
		row: func(x activity.Failure) []string {
			return []string{
				x.Skill, x.State, fmt.Sprint(x.Calls), fmt.Sprint(x.Errors), percent(x.Rate), fmt.Sprint(x.Streak), clipped(x.LastError, 60), x.LastTrace,
			}
		},
	}.command(c)
	return cmd
}

func (c *cli) auditCommand() *cobra.Command {
	var f activity.Filter
	cmd := &cobra.Command{
		Use: "audit", Short: "Who did what, to which object, when, why, on whose behalf, with what result, newest first", Args: args(0, 0, "no arguments"),
		RunE: c.reading(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := activity.Audit(cmd.Context(), s.read, f)
			if err != nil {
				return err
			}
			return c.print(listing(got.Rows, got.Next), func(w io.Writer) error {
				if err := writeAudit(w, got.Rows); err != nil || got.Next == "" {
					return err
				}
				_, err := fmt.Fprintln(w, "\nmore: --cursor", got.Next)
				return err
			})
		}),
	}
	agoFlag(cmd.Flags(), &f.Since, "since", "24h", "from so long ago")
	agoFlag(cmd.Flags(), &f.Until, "until", "", "up to so long ago; now when not given")
	surfaceFlag(cmd.Flags(), &f.Surface)
	cmd.Flags().StringVar(&f.Skill, "skill", "", "only this skill, phase or lever")
	cmd.Flags().StringVar(&f.TraceID, "trace", "", "only this trace")
	cmd.Flags().StringVar(&f.Cursor, "cursor", "", "where the page before ended")
	limitFlag(cmd.Flags(), &f.Limit, activity.MaxLimit)
	return cmd
}

// writeAudit shows what was done to a person.
func writeAudit(w io.Writer, rows []activity.AuditEntry) error {
	lines := make([][]string, len(rows))
	for i, r := range rows {
		lines[i] = []string{
			when(r.At), r.Actor, string(r.Kind), r.Act, clipped(r.Object, 90), clipped(cmp.Or(r.Reason, r.Origin), 60), clipped(r.OnBehalfOf, 40), string(r.Status),
			clipped(r.Error, 40), money(r.CostUSD), r.TraceID,
		}
	}
	return table(w, "nothing was done in that time",
		[]string{"TIME", "WHO", "KIND", "WHAT", "OBJECT", "WHY", "ON BEHALF OF", "RESULT", "ERROR", "COST", "TRACE"}, lines)
}
