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
	return group("retention", "Say how long to keep what is over, and take away what is older",
		c.retentionShowCommand(), c.retentionSetCommand(), c.retentionRunCommand())
}

func (c *cli) retentionShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show", Short: "Show how long each kind of rows is kept", Args: args(0, 0, "no arguments"),
		Long: `Show how long each kind of rows is kept after it is over, and how many have gone. What is not finished is never touched. In
SQL: select * from agent_retention.`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := retention.Show(cmd.Context(), s.pool)
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, p := range got {
					last := ""
					if p.EndedAt != nil {
						last = when(*p.EndedAt)
					}
					rows[i] = []string{p.Kind, p.Keep, p.Least, fmt.Sprint(p.Removed), last, p.About}
				}
				return table(w, "no policies", []string{"KIND", "KEEP", "AT LEAST", "REMOVED", "LAST PASS", "WHAT"}, rows)
			})
		}),
	}
}

func (c *cli) retentionSetCommand() *cobra.Command {
	var reason string
	keep := map[string]string{}
	cmd := &cobra.Command{
		Use: "set KIND=TIME…", Short: "Change how long kinds of rows are kept", Args: args(1, 20, "policies such as activity=90d executions=30d"),
		Long: `Change how long kinds of rows are kept after they are over: a span of time such as 90d, or forever. agent serve takes away what is
older, from its next pass on, within the hour. The change is recorded. In SQL: select set_agent_retention('{"activity": "90 days"}').`,
		Example: `  agent retention set activity=90d executions=30d events=30d
  agent retention set messages=forever --reason "they are our only copy"`,
		PreRunE: func(cmd *cobra.Command, args []string) error {
			for _, arg := range args {
				kind, span, ok := strings.Cut(arg, "=")
				if _, twice := keep[kind]; !ok || kind == "" || span == "" || twice {
					return &exitError{exitUsage, seeHelp(fmt.Errorf("%q is not KIND=TIME, once per kind, such as activity=90d", arg), cmd)}
				}
				keep[kind] = span
			}
			return nil
		},
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := retention.Set(cmd.Context(), s.pool, keep, admin, reason)
			if errors.Is(err, retention.ErrInvalid) {
				return &exitError{exitUsage, hint(err, "see agent retention show")}
			}
			if err != nil {
				return err
			}
			return c.print(got, func(w io.Writer) error {
				said := "it was so already"
				if got.Changed {
					said = "changed; trace " + got.TraceID
				}
				_, err := fmt.Fprintln(w, said)
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}

func (c *cli) retentionRunCommand() *cobra.Command {
	var o retention.Options
	var reason string
	cmd := &cobra.Command{
		Use: "run [KIND…]", Short: "Take away now what is older than it is to be kept", Args: args(0, 20, "kinds, or nothing for all"),
		Long: `Make a pass now, as agent serve does every hour, over everything that is old. It may be stopped at any moment and run beside
others; nobody waits for it. With --dry-run it only counts.`,
		RunE: c.withSession(func(cmd *cobra.Command, kinds []string, s *session) error {
			o.Anew = true
			if len(kinds) > 0 {
				o.Kinds = kinds
			}
			got, err := retain(cmd.Context(), s, o, reason)
			if errors.Is(err, retention.ErrInvalid) {
				return &exitError{exitUsage, hint(err, "see agent retention show")}
			}
			if err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error { return writeRetention(w, got, o.DryRun) })
		}),
	}
	cmd.Flags().BoolVar(&o.DryRun, "dry-run", false, "only count what would go")
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}

// retain makes a pass, which is recorded unless it only counts.
func retain(ctx context.Context, s *session, o retention.Options, reason string) (got []retention.Done, err error) {
	if o.DryRun {
		return retention.Run(ctx, s.pool, o)
	}
	kinds := cmp.Or(strings.Join(o.Kinds, ", "), "all")
	err = activity.RecordAround(ctx, s.pool, activity.Act{Name: "run_retention", Reason: reason, Input: map[string]any{"kinds": kinds}}, func() (any, error) {
		var err error
		got, err = retention.Run(ctx, s.pool, o)
		return got, err
	})
	return got, err
}

// writeRetention shows what a pass did to a person.
func writeRetention(w io.Writer, done []retention.Done, dry bool) error {
	heading := []string{"KIND", "KEEP", "REMOVED", "PARTITIONS", "LATER"}
	if dry {
		heading = []string{"KIND", "KEEP", "WOULD GO", "PARTITIONS", "LATER"}
	}
	rows := make([][]string, len(done))
	for i, d := range done {
		rows[i] = []string{d.Kind, d.Keep, fmt.Sprint(d.Removed), strings.Join(d.Partitions, " "), d.Later}
	}
	return table(w, "everything is kept for ever; see agent retention set --help", heading, rows)
}
