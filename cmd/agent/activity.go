package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

func (c *cli) activityCommand() *cobra.Command {
	return group("activity", "Query the activity log: recent actions, cost, slow and failing skills, audit",
		c.activityListCommand(), c.spendCommand(), c.slowestCommand(), c.failingCommand(), c.auditCommand())
}

func (c *cli) activityListCommand() *cobra.Command {
	var f activity.Filter
	var status string
	cmd := &cobra.Command{
		Use: "ls", Short: "List actions, newest first", Args: positionalArgs(0, 0, "no arguments"),
		Example: "  agent activity ls --status error --since 24h\n  agent activity ls --skill table_sizes --json",
		RunE: c.withReader(func(cmd *cobra.Command, _ []string, s *session) error {
			f.Status = activity.Status(status)
			rows, next, err := activity.Recent(cmd.Context(), s.Read, f)
			if err != nil {
				return err
			}
			decisions, err := activity.DecisionsOf(cmd.Context(), s.Read, rows)
			if err != nil {
				return err
			}
			return c.print(pageOf(rows, next), func(w io.Writer) { writeActivities(w, rows, decisions) })
		}),
	}
	surfaceFlag(cmd.Flags(), &f.Surface)
	statusFlag(cmd.Flags(), &status, "only this state", activity.Statuses()...)
	cmd.Flags().StringVar(&f.Skill, "skill", "", "only this skill")
	cmd.Flags().StringVar(&f.Lane, "lane", "", "only actions in this lane")
	cmd.Flags().StringVar(&f.TraceID, "trace", "", "only this trace")
	sinceFlag(cmd.Flags(), &f.Since, "since", "", "only the last")
	limitFlag(cmd.Flags(), &f.Limit, 30)
	cmd.Flags().StringVar(&f.Cursor, "cursor", "", "next_cursor of the previous page")
	return cmd
}

// writeActivities prints rows. The decision stands beside the status of an approval's row, which never changes.
func writeActivities(w io.Writer, rows []activity.Row, decisions map[string]activity.Decision) {
	writeRows(w, "no matching activity; `agent heartbeat` creates some",
		[]string{"TIME", "TRACE", "SKILL", "STATUS", "TOOK", "TOKENS", "ERROR"}, rows, func(r activity.Row) []string {
			return []string{
				formatTime(r.CreatedAt), r.TraceID, r.SkillName,
				strings.TrimSuffix(string(r.Status)+", "+decisions[r.ID].Status, ", "), formatMillis(r.DurationMS),
				fmt.Sprint(r.TokenUsage.TotalTokens),
				truncate(postgres.Deref(r.ErrorMessage), 60),
			}
		})
}

// reportCommand describes a command that lists the rows of a report.
type reportCommand[T any] struct {
	use, short, empty string
	heading           []string
	read              func(ctx context.Context, s *session, f activity.ReportFilter) ([]T, string, error)
	row               func(T) []string
}

// command builds the cobra command with the flags that all reports share.
func (r reportCommand[T]) command(c *cli) (*cobra.Command, *activity.ReportFilter) {
	var f activity.ReportFilter
	cmd := &cobra.Command{
		Use: r.use, Short: r.short, Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withReader(func(cmd *cobra.Command, _ []string, s *session) error {
			rows, next, err := r.read(cmd.Context(), s, f)
			if err != nil {
				return err
			}
			return printRows(c, rows, next, r.empty, r.heading, func(g T) []string {
				return r.row(g)
			})
		}),
	}
	sinceFlag(cmd.Flags(), &f.Since, "since", "7d", "how far to look back")
	cmd.Flags().StringVar(&f.Skill, "skill", "", "only this skill")
	cmd.Flags().StringVar(&f.Cursor, "cursor", "", "next_cursor of the previous page")
	limitFlag(cmd.Flags(), &f.Limit, 100)
	return cmd, &f
}

func (c *cli) spendCommand() *cobra.Command {
	by := string(activity.BySkill)
	cmd, f := reportCommand[activity.Spending]{
		use: "spend", short: "Tokens and money by skill, surface, model and day", empty: "no model calls in that time",
		heading: []string{"DAY", "SKILL", "SURFACE", "MODEL", "CALLS", "TOKENS", "COST", "UNKNOWN"},
		read: func(ctx context.Context, s *session, f activity.ReportFilter) ([]activity.Spending, string, error) {
			if by == string(activity.ByPurpose) && f.Skill != "" {
				return nil, "", usageError("--skill: %w", activity.ErrSkillOrPurpose)
			}
			if by == string(activity.ByPurpose) {
				return activity.SpendByPurpose(ctx, s.Read, f)
			}
			return activity.Spend(ctx, s.Read, f)
		},
		row: func(x activity.Spending) []string {
			return []string{
				x.Day, cmp.Or(x.Skill, x.Purpose, "-"), x.Surface, x.Model, fmt.Sprint(x.Calls), fmt.Sprint(x.Tokens),
				human.Cost(x.CostUSD, x.Tokens),
				unknownSpend(x.UnknownTokens, x.UnknownUSD),
			}
		},
	}.command(c)
	cmd.Long = `Show the cost of model calls by day (UTC). The cost of a call is split over the skills that its answer
calls. A call without skills counts for its surface, with SKILL -. The call counts once, for its most frequent skill.
--by purpose groups by the reason for the call: a phase of the heartbeat, a turn, an automation.`
	enumFlag(cmd.Flags(), &by, "by", "group the column SKILL by", string(activity.BySkill), string(activity.ByPurpose))
	surfaceFlag(cmd.Flags(), &f.Surface)
	cmd.Flags().StringVar(&f.Model, "model", "", "only this model")
	return cmd
}

// unknownSpend formats usage that the provider may have billed without reporting it. The other columns include it.
func unknownSpend(tokens int64, usd float64) string {
	switch {
	case tokens == 0 && usd == 0:
		return ""
	case usd == 0:
		return human.Counted(tokens, "token")
	}
	return human.Counted(tokens, "token") + ", " + human.Money(usd)
}

func (c *cli) slowestCommand() *cobra.Command {
	cmd, _ := reportCommand[activity.Slow]{
		use: "slowest", short: "Skills by the duration of their calls", empty: "no skill calls in that time",
		heading: []string{"SKILL", "CALLS", "P50 MS", "P95 MS", "MAX MS", "SLOWEST TRACE"},
		read: func(ctx context.Context, s *session, f activity.ReportFilter) ([]activity.Slow, string, error) {
			return activity.Slowest(ctx, s.Read, f)
		},
		row: func(x activity.Slow) []string {
			most := ""
			if x.MaxMS != nil {
				most = fmt.Sprint(*x.MaxMS)
			}
			return []string{
				x.Skill, fmt.Sprint(x.Calls), fmt.Sprintf("%.0f", x.P50MS), fmt.Sprintf("%.0f", x.P95MS),
				most, x.SlowestTraceID,
			}
		},
	}.command(c)
	return cmd
}

func (c *cli) failingCommand() *cobra.Command {
	cmd, _ := reportCommand[activity.Failure]{
		use: "failing", short: "Skills by how often their calls fail", empty: "no failed skill calls in that time",
		heading: []string{"SKILL", "STATE", "CALLS", "ERRORS", "RATE", "IN A ROW", "LAST ERROR", "LAST TRACE"},
		read: func(ctx context.Context, s *session, f activity.ReportFilter) ([]activity.Failure, string, error) {
			return activity.Failing(ctx, s.Read, f)
		},
		row: func(x activity.Failure) []string {
			return []string{
				x.Skill, x.State, fmt.Sprint(x.Calls), fmt.Sprint(x.Errors), human.Percent(x.Rate), fmt.Sprint(x.Streak),
				truncate(x.LastError, 60), x.LastTrace,
			}
		},
	}.command(c)
	return cmd
}

func (c *cli) auditCommand() *cobra.Command {
	var f activity.Filter
	cmd := &cobra.Command{
		Use: "audit", Short: "List the audit log, newest first: actor, action, object, reason, result",
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withReader(func(cmd *cobra.Command, _ []string, s *session) error {
			result, err := activity.Audit(cmd.Context(), s.Read, f)
			if err != nil {
				return err
			}
			return c.print(pageOf(result.Rows, result.Next), func(w io.Writer) {
				writeAudit(w, result.Rows)
				if result.Next != "" {
					fmt.Fprintln(w, "\nmore: --cursor", result.Next)
				}
			})
		}),
	}
	sinceFlag(cmd.Flags(), &f.Since, "since", "24h", "start of the period, as an age")
	sinceFlag(cmd.Flags(), &f.Until, "until", "", "end of the period, as an age; default now")
	surfaceFlag(cmd.Flags(), &f.Surface)
	cmd.Flags().StringVar(&f.Skill, "skill", "", "only this skill, phase or action")
	cmd.Flags().StringVar(&f.TraceID, "trace", "", "only this trace")
	cmd.Flags().StringVar(&f.Cursor, "cursor", "", "next_cursor of the previous page")
	limitFlag(cmd.Flags(), &f.Limit, activity.MaxLimit)
	return cmd
}

func writeAudit(w io.Writer, rows []activity.AuditEntry) {
	writeRows(w, "no actions in that time",
		[]string{"TIME", "WHO", "KIND", "WHAT", "OBJECT", "WHY", "ON BEHALF OF", "RESULT", "ERROR", "COST", "TRACE"}, rows,
		func(r activity.AuditEntry) []string {
			return []string{
				formatTime(r.At), r.Actor, string(r.Kind), r.Act, truncate(r.Object, 90), truncate(cmp.Or(r.Reason, r.Origin), 60),
				truncate(r.OnBehalfOf, 40), string(r.Status),
				truncate(r.Error, 40), human.Cost(r.CostUSD, r.Tokens), r.TraceID,
			}
		})
}
