package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
)

func (c *cli) executionsCommand() *cobra.Command {
	return group("executions", "See and cancel durable runs",
		c.executionsListCommand(), c.executionsShowCommand(), c.executionsCancelCommand())
}

func (c *cli) executionsListCommand() *cobra.Command {
	var f executions.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List executions, newest first", Args: args(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, next, err := listExecutions(cmd.Context(), s, f)
			if err != nil {
				return err
			}
			return c.print(listing(got, next), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, x := range got {
					about := x.ResultSummary
					if x.Status == executions.Waiting {
						about = "waits for " + deref(x.WaitingFor) + " " + deref(x.WaitingKey)
					}
					if x.ErrorMessage != nil {
						about = *x.ErrorMessage
					}
					rows[i] = []string{x.ID, x.Flow, string(x.Status), when(x.CreatedAt), x.TraceID, clipped(about, 60)}
				}
				return table(w, "no execution matches; `agent heartbeat` makes one",
					[]string{"EXECUTION", "FLOW", "STATUS", "CREATED", "TRACE", "ABOUT"}, rows)
			})
		}),
	}
	statusFlag(cmd.Flags(), &f.Status, "only this state", statusWords()...)
	surfaceFlag(cmd.Flags(), &f.Surface)
	cmd.Flags().StringVar(&f.Flow, "flow", "", "only this flow")
	traceFlag(cmd.Flags(), &f.TraceID)
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

// listExecutions reads a page as it may be shown, and where the next begins: a row more tells whether there is one.
func listExecutions(ctx context.Context, s *session, f executions.Filter) (page []executions.Execution, next string, err error) {
	limit := min(f.Limit, activity.MaxLimit-1)
	f.Limit = limit + 1
	page, err = executions.List(ctx, s.pool, f)
	if err == nil && len(page) > limit {
		page, next = page[:limit], page[limit-1].ID
	}
	for i := range page {
		page[i] = page[i].Redacted()
	}
	return page, next, err
}

// shownExecution is an execution with what it has recorded.
type shownExecution struct {
	executions.Execution
	Checkpoints []executions.Checkpoint `json:"checkpoints"`
}

func (c *cli) executionsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one execution with its checkpoints", Args: executionID,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			x, err := executions.Get(cmd.Context(), s.pool, args[0])
			if err != nil {
				return notFoundHint(err)
			}
			recorded, err := executions.Checkpoints(cmd.Context(), s.pool, x.ID)
			if err != nil {
				return err
			}
			points := make([]executions.Checkpoint, len(recorded))
			for i, p := range recorded {
				points[i] = p.Redacted()
			}
			x = x.Redacted()
			return c.print(shownExecution{x, points}, func(w io.Writer) error { return writeExecution(w, x, points) })
		}),
	}
}

// notFoundHint says where ids are listed.
func notFoundHint(err error) error {
	if errors.Is(err, executions.ErrNotFound) {
		return hint(err, "see agent executions ls")
	}
	return err
}

func writeExecution(w io.Writer, x executions.Execution, points []executions.Checkpoint) error {
	lines := [][2]string{
		{"execution", x.ID},
		{"flow", x.Flow},
		{"status", string(x.Status)},
		{"trace", x.TraceID},
		{"surface", x.Surface},
		{"created", when(x.CreatedAt)},
		{"claim", fmt.Sprint(x.Claim)},
		{"attempt", fmt.Sprint(x.Attempt)},
		{"worker", deref(x.ClaimedBy)},
		{"waits for", deref(x.WaitingFor)},
		{"key", deref(x.WaitingKey)},
		{"result", x.ResultSummary},
		{"error", deref(x.ErrorMessage)},
		{"failed step", deref(x.FailedStep)},
		{"cancelled by", deref(x.CancelledBy)},
		{"reason", deref(x.CancelReason)},
	}
	for _, l := range lines {
		if l[1] != "" {
			fmt.Fprintf(w, "%-13s %s\n", l[0], printable(l[1]))
		}
	}
	fmt.Fprintln(w)
	rows := make([][]string, len(points))
	for i, p := range points {
		state := "ok"
		if p.Failed {
			state = "failed"
		}
		rows[i] = []string{when(p.CreatedAt), p.Step, state, fmt.Sprint(p.Claim), clipped(string(p.Output), 80)}
	}
	return table(w, "no checkpoints", []string{"RECORDED", "STEP", "STATE", "CLAIM", "RESULT"}, rows)
}

func (c *cli) executionsCancelCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "cancel ID", Short: "End an execution now", Args: executionID,
		Long: `End an execution now, whatever it does: a step in flight is stopped, its lanes are freed. Cancelling one that has
ended changes nothing.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.cancel(cmd.Context(), s, args[0], reason)
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "cancelled from the command line", "why, for the record")
	return cmd
}

func (c *cli) cancel(ctx context.Context, s *session, id, reason string) error {
	status, err := executions.Cancel(ctx, s.pool, id, "admin", reason)
	if err != nil {
		return notFoundHint(err)
	}
	return c.print(map[string]any{"id": id, "status": status}, func(w io.Writer) error {
		if status != executions.Cancelled {
			_, err := fmt.Fprintf(w, "%s had ended already: %s\n", id, status)
			return err
		}
		_, err := fmt.Fprintf(w, "cancelled %s\n", id)
		return err
	})
}
