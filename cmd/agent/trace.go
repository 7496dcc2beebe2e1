package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
)

func (c *cli) traceCommand() *cobra.Command {
	var withPrompts bool
	cmd := &cobra.Command{
		Use:   "trace ID | last | ls",
		Short: "Show one run as a tree",
		Long: `Show all actions of one run as a tree: durations, tokens, cost, errors.

ID is a trace id in any form: hb_01JD…, the ULID alone, or the 32 hex digits that tracing tools show. The id of an
execution shows the execution's trace.`,
		Example: "  agent trace last\n  agent trace last --surface heartbeat\n  agent trace hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE " +
			"--json",
		Args: positionalArgs(1, 1, "a trace id, last, or ls"),
		RunE: c.withReader(func(cmd *cobra.Command, args []string, s *session) error {
			id, err := traceArgument(cmd.Context(), s, args[0])
			if err != nil {
				return err
			}
			if withPrompts {
				return c.showPrompts(cmd.Context(), s, id)
			}
			return c.showTrace(cmd.Context(), s, id)
		}),
	}
	promptsFlag(cmd, &withPrompts)
	cmd.AddCommand(c.traceLastCommand(), c.traceListCommand())
	return cmd
}

// traceArgument returns the trace of an execution for the execution's id, and another argument as it is.
func traceArgument(ctx context.Context, s *session, id string) (string, error) {
	if strings.Count(id, "-") != 4 {
		return id, nil
	}
	x, err := executions.Get(ctx, s.Read, id)
	if errors.Is(err, executions.ErrNotFound) {
		return "", hint(err, "see agent executions ls, or agent trace ls")
	}
	return x.TraceID, err
}

// readTrace reads a trace for a command.
func readTrace(ctx context.Context, s *session, id string) (activity.Trace, error) {
	story, err := activity.TraceOf(ctx, s.Read, id)
	if errors.Is(err, activity.ErrNotFound) {
		err = hint(err, "see agent trace ls")
	}
	return story, err
}

func (c *cli) showTrace(ctx context.Context, s *session, id string) error {
	story, err := readTrace(ctx, s, id)
	if err != nil {
		return err
	}
	return c.tryPrint(story, func(w io.Writer) error { return activity.WriteStory(w, story, c.colour()) })
}

// newestTrace returns the newest trace of a surface, or of all surfaces.
func newestTrace(ctx context.Context, s *session, surface string) (string, error) {
	newest, _, err := activity.Traces(ctx, s.Read, activity.TraceFilter{
		Surface: surface, WithoutEvals: surface == "", Limit: 1,
	})
	if err != nil {
		return "", err
	}
	if len(newest) == 0 {
		return "", hint(errors.New("no trace yet"), "`agent heartbeat` creates one")
	}
	return newest[0].TraceID, nil
}

func (c *cli) traceLastCommand() *cobra.Command {
	var surface string
	var withPrompts bool
	cmd := &cobra.Command{
		Use: "last", Short: "Show the newest trace that is no trial of an eval", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withReader(func(cmd *cobra.Command, _ []string, s *session) error {
			newest, err := newestTrace(cmd.Context(), s, surface)
			if err != nil {
				return err
			}
			if withPrompts {
				return c.showPrompts(cmd.Context(), s, newest)
			}
			return c.showTrace(cmd.Context(), s, newest)
		}),
	}
	promptsFlag(cmd, &withPrompts)
	surfaceFlag(cmd.Flags(), &surface)
	return cmd
}

func (c *cli) traceListCommand() *cobra.Command {
	var f activity.TraceFilter
	cmd := &cobra.Command{
		Use: "ls", Short: "List traces, newest first", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withReader(func(cmd *cobra.Command, _ []string, s *session) error {
			page, next, err := activity.Traces(cmd.Context(), s.Read, f)
			if err != nil {
				return err
			}
			return printRows(c, page, next, "no matching traces; `agent heartbeat` creates one",
				[]string{"TRACE", "FLOW", "STATUS", "STARTED", "TOOK", "ACTIONS", "ERRORS", "TOKENS", "COST"},
				func(t activity.TraceSummary) []string {
					return []string{
						t.TraceID, t.Flow, t.Status, formatTime(t.StartedAt), formatMillis(t.DurationMS), fmt.Sprint(t.Activities),
						fmt.Sprint(t.Errors), fmt.Sprint(t.Tokens), human.Cost(t.CostUSD, t.Tokens),
					}
				})
		}),
	}
	surfaceFlag(cmd.Flags(), &f.Surface)
	actingFlag(cmd.Flags(), &f.Agent)
	statusFlag(cmd.Flags(), &f.Status, "only traces in this state", executions.Statuses()...)
	sinceFlag(cmd.Flags(), &f.Since, "since", "", "only traces started within the last")
	limitFlag(cmd.Flags(), &f.Limit, 20)
	cmd.Flags().StringVar(&f.Cursor, "cursor", "", "next_cursor of the previous page")
	return cmd
}
