package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/retention"
)

func (c *cli) retentionCommand() *cobra.Command {
	return group("retention", "Set how long to keep finished rows, and prune older ones",
		c.retentionShowCommand(), c.retentionSetCommand(), c.retentionRunCommand())
}

func (c *cli) retentionShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show", Short: "Show the retention of each kind of rows", Args: positionalArgs(0, 0, "no arguments"),
		Long: `Show how long finished rows of each kind are kept, and how many were pruned. Unfinished rows are never pruned.
In SQL: select * from agent_retention.`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			policies, err := retention.Show(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			return printRows(c, policies, "", "no policies",
				[]string{"KIND", "KEEP", "AT LEAST", "REMOVED", "LAST PASS", "WHAT"}, func(p retention.Policy) []string {
					last := ""
					if p.EndedAt != nil {
						last = formatTime(*p.EndedAt)
					}
					return []string{p.Kind, p.Keep, p.MinKeep, fmt.Sprint(p.Removed), last, p.About}
				})
		}),
	}
}

func (c *cli) retentionSetCommand() *cobra.Command {
	var reason string
	keep := map[string]string{}
	cmd := &cobra.Command{
		Use: "set KIND=TIME…", Short: "Set the retention of kinds of rows",
		Args: positionalArgs(1, 20, "policies such as activity=90d executions=30d"),
		Long: `Set how long finished rows are kept: a duration such as 90d, or forever. agent serve prunes older rows every
hour, and activity that is kept for 60 days or longer by whole months. The change is recorded. In SQL: select
set_agent_retention('{"activity": "90 days"}').`,
		Example: `  agent retention set activity=90d executions=30d events=30d
  agent retention set messages=forever --reason "they are our only copy"`,
		PreRunE: func(cmd *cobra.Command, args []string) error {
			for _, arg := range args {
				kind, span, ok := strings.Cut(arg, "=")
				if _, twice := keep[kind]; !ok || kind == "" || span == "" || twice {
					return &exitError{exitUsage, helpHint(fmt.Errorf("%q is not KIND=TIME, once per kind, such as activity=90d", arg),
						cmd)}
				}
				keep[kind] = span
			}
			return nil
		},
		RunE: c.withPromptSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := retention.Set(cmd.Context(), s.Pool, keep, actor(cmd.Context()), reason)
			if errors.Is(err, retention.ErrInvalid) {
				return &exitError{exitUsage, hint(err, "see agent retention show")}
			}
			if err != nil {
				return err
			}
			return c.print(got, func(w io.Writer) {
				result := "already set"
				if got.Changed {
					result = "changed; trace " + got.TraceID
				}
				fmt.Fprintln(w, result)
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}

func (c *cli) retentionRunCommand() *cobra.Command {
	var o retention.Options
	var reason string
	cmd := &cobra.Command{
		Use: "run [KIND…]", Short: "Prune expired rows now", Args: positionalArgs(0, 20, "kinds, or nothing for all"),
		Long: `Prune all expired rows now, as agent serve does every hour. It can be interrupted, and delays other
work by a fraction of a second at most. --dry-run only counts.`,
		RunE: c.withSession(func(cmd *cobra.Command, kinds []string, s *session) error {
			o.Restart = true
			if len(kinds) > 0 {
				o.Kinds = kinds
			}
			results, err := pruneNow(cmd.Context(), s, o, reason)
			if errors.Is(err, retention.ErrInvalid) {
				return &exitError{exitUsage, hint(err, "see agent retention show")}
			}
			if err != nil {
				return err
			}
			return c.print(pageOf(results, ""), func(w io.Writer) { writeRetention(w, results, o.DryRun) })
		}),
	}
	cmd.Flags().BoolVar(&o.DryRun, "dry-run", false, "only count the rows")
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}

// pruneNow runs a retention pass and records it, unless it only counts.
func pruneNow(
	ctx context.Context, s *session, o retention.Options, reason string,
) (results []retention.Result, err error) {
	if o.DryRun {
		return retention.Run(ctx, s.Pool, o)
	}
	kinds := cmp.Or(strings.Join(o.Kinds, ", "), "all")
	err = activity.RecordAround(ctx, s.Pool, activity.Act{
		Name: "run_retention", Reason: reason,
		Input: map[string]any{"kinds": kinds},
	}, func() (any, error) {
		var err error
		results, err = retention.Run(ctx, s.Pool, o)
		return results, err
	})
	return results, err
}

func writeRetention(w io.Writer, done []retention.Result, dry bool) {
	heading := []string{"KIND", "KEEP", "REMOVED", "PARTITIONS", "LATER"}
	if dry {
		heading = []string{"KIND", "KEEP", "WOULD REMOVE", "PARTITIONS", "LATER"}
	}
	writeRows(w, "all rows are kept for ever; see agent retention set --help",
		heading, done, func(d retention.Result) []string {
			return []string{d.Kind, d.Keep, fmt.Sprint(d.Removed), strings.Join(d.Partitions, " "), d.Later}
		})
}
