package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
)

func (c *cli) executionsCommand() *cobra.Command {
	return group("executions", "See, start, cancel, fork and replay durable runs",
		c.executionsListCommand(), c.executionsShowCommand(), c.executionsStartCommand(), c.executionsCancelCommand(),
		c.executionsEventCommand(), c.executionsForkCommand(), c.executionsRetryCommand(), c.executionsReplayCommand(),
		c.executionsStatusCommand(), c.executionsWaitingCommand(), c.executionsStuckCommand())
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
	actingFlag(cmd.Flags(), &f.Agent)
	traceFlag(cmd.Flags(), &f.TraceIDs)
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

// listExecutions reads a page as it may be shown, and where the next begins: a row more tells whether there is one.
func listExecutions(ctx context.Context, s *session, f executions.Filter) (page []executions.Execution, next string, err error) {
	limit := f.Limit
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
	Waits       []executions.WaitingRow `json:"waits"` // the one that is open
	Children    []executions.Relative   `json:"children"`
	Forks       []executions.Relative   `json:"forks"`
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
			shown := shownExecution{
				Execution: x.Redacted(), Checkpoints: make([]executions.Checkpoint, len(recorded)), Waits: openWaits(x.Redacted()),
				Children: []executions.Relative{}, Forks: []executions.Relative{},
			}
			for i, p := range recorded {
				shown.Checkpoints[i] = p.Redacted()
			}
			relatives, err := executions.Relatives(cmd.Context(), s.pool, x.ID)
			if err != nil {
				return err
			}
			for _, r := range relatives {
				if r.Fork {
					shown.Forks = append(shown.Forks, r)
				} else {
					shown.Children = append(shown.Children, r)
				}
			}
			return c.print(shown, func(w io.Writer) error { return writeExecution(w, shown) })
		}),
	}
}

// openWaits is what an execution waits for.
func openWaits(x executions.Execution) []executions.WaitingRow {
	if x.Status != executions.Waiting || x.WaitingUntil == nil {
		return []executions.WaitingRow{}
	}
	return []executions.WaitingRow{{
		ID: x.ID, TraceID: x.TraceID, Surface: x.Surface, Agent: x.Agent, Flow: x.Flow, WaitingFor: deref(x.WaitingFor),
		WaitingKey: deref(x.WaitingKey), WaitingUntil: *x.WaitingUntil, WaitingData: x.WaitingData,
		Waited: time.Since(x.UpdatedAt).Seconds(),
	}}
}

// notFoundHint says where ids are listed.
func notFoundHint(err error) error {
	if errors.Is(err, executions.ErrNotFound) {
		return hint(err, "see agent executions ls")
	}
	return err
}

func writeExecution(w io.Writer, x shownExecution) error {
	until := ""
	if x.WaitingUntil != nil {
		until = when(*x.WaitingUntil)
	}
	version := ""
	if x.FlowVersion != nil {
		version = fmt.Sprint(*x.FlowVersion)
	}
	lines := [][2]string{
		{"execution", x.ID},
		{"flow", x.Flow},
		{"version", version},
		{"parent", deref(x.ParentID)},
		{"thread", deref(x.ThreadID)},
		{"forked from", deref(x.ForkedFrom)},
		{"from step", deref(x.ForkedStep)},
		{"status", string(x.Status)},
		{"trace", x.TraceID},
		{"surface", x.Surface},
		{"created", when(x.CreatedAt)},
		{"claim", fmt.Sprint(x.Claim)},
		{"attempt", fmt.Sprint(x.Attempt)},
		{"worker", deref(x.ClaimedBy)},
		{"waits for", deref(x.WaitingFor)},
		{"key", deref(x.WaitingKey)},
		{"until", until},
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
	for _, r := range x.Children {
		fmt.Fprintf(w, "%-13s %s %s %s\n", "child", r.ID, printable(r.Flow), r.Status)
	}
	for _, r := range x.Forks {
		fmt.Fprintf(w, "%-13s %s %s %s\n", "fork", r.ID, r.Status, printable(r.From))
	}
	fmt.Fprintln(w)
	rows := make([][]string, len(x.Checkpoints))
	for i, p := range x.Checkpoints {
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
ended changes nothing. One that another transaction has locked is cancelled when that ends; what may be in the way is said.`,
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
	if !status.Ended() {
		detail, err := executions.CancelDetail(ctx, s.pool)
		if err != nil {
			return err
		}
		return c.print(map[string]any{"id": id, "status": status, "cancel_requested": true, "detail": detail}, func(w io.Writer) error {
			_, err := fmt.Fprintf(w, "cancel of %s requested: %s\n", id, detail)
			return err
		})
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
