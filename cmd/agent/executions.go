package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

func (c *cli) executionsCommand() *cobra.Command {
	return group("executions", "List, start, cancel, fork and replay executions",
		c.executionsListCommand(), c.executionsShowCommand(), c.executionsStartCommand(), c.executionsCancelCommand(),
		c.executionsEventCommand(), c.executionsForkCommand(), c.executionsRetryCommand(), c.executionsReplayCommand(),
		c.executionsStatusCommand(), c.executionsWaitingCommand(), c.executionsStuckCommand())
}

func (c *cli) executionsListCommand() *cobra.Command {
	var f executions.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List executions, newest first", Args: positionalArgs(0, 0, "no arguments"),
		Example: "  agent executions ls --status failed --since 24h\n  agent executions ls --since 8h --until 6h --json",
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			page, next, err := listExecutions(cmd.Context(), s, f)
			if err != nil {
				return err
			}
			empty := "no matching executions"
			if cmd.Flags().NFlag() == 0 {
				empty = "no executions; `agent heartbeat` starts one"
			}
			return printRows(c, page, next, empty,
				[]string{"EXECUTION", "FLOW", "STATUS", "CREATED", "TRACE", "ABOUT"}, func(x executions.Execution) []string {
					about := x.ResultSummary
					if x.Status == executions.Waiting {
						about = "waits for " + postgres.Deref(x.WaitingFor) + " " + postgres.Deref(x.WaitingKey)
					}
					if x.ErrorMessage != nil {
						about = *x.ErrorMessage
					}
					return []string{x.ID, x.Flow, string(x.Status), formatTime(x.CreatedAt), x.TraceID, truncate(about, 60)}
				})
		}),
	}
	statusFlag(cmd.Flags(), &f.Status, "only this state", executions.Statuses()...)
	surfaceFlag(cmd.Flags(), &f.Surface)
	cmd.Flags().StringVar(&f.Flow, "flow", "", "only this flow")
	actingFlag(cmd.Flags(), &f.Agent)
	cmd.Flags().StringVar(&f.Label, "label", "", "only with this label: name=value, or a value")
	traceFlag(cmd.Flags(), &f.TraceIDs)
	sinceFlag(cmd.Flags(), &f.Since, "since", "", "only those created within the last")
	sinceFlag(cmd.Flags(), &f.Until, "until", "", "only those created before the last")
	cursorFlag(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 20)
	return cmd
}

// listExecutions returns a page, redacted, and the cursor of the next page.
func listExecutions(
	ctx context.Context, s *session, f executions.Filter,
) (page []executions.Execution, next string, err error) {
	page, next, err = readPage(ctx, s, executions.List, &f, &f.Limit,
		func(x executions.Execution) string { return x.ID })
	for i := range page {
		page[i] = page[i].Redacted(ctx)
	}
	return page, next, err
}

// shownExecution is the JSON result of agent executions show.
type shownExecution struct {
	executions.Execution
	Labels      executions.Labels       `json:"labels"`
	Checkpoints []executions.Checkpoint `json:"checkpoints"`
	Waits       []executions.WaitingRow `json:"waits"` // the open wait
	Children    []executions.Relative   `json:"children"`
	Forks       []executions.Relative   `json:"forks"`
}

func (c *cli) executionsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one execution with its checkpoints", Args: executionID,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			x, err := executions.Get(cmd.Context(), s.Pool, args[0])
			if err != nil {
				return notFoundHint(err)
			}
			recorded, err := executions.Checkpoints(cmd.Context(), s.Pool, x.ID)
			if err != nil {
				return err
			}
			labels, err := executions.LabelsOf(cmd.Context(), s.Pool, []string{x.ID})
			if err != nil {
				return err
			}
			visible := x.Redacted(cmd.Context())
			waits, err := openWaits(cmd.Context(), s, visible)
			if err != nil {
				return err
			}
			shown := shownExecution{
				Labels: labels[x.ID].Redacted(), Execution: visible, Waits: waits,
				Checkpoints: make([]executions.Checkpoint, len(recorded)), Children: []executions.Relative{},
				Forks: []executions.Relative{},
			}
			for i, p := range recorded {
				shown.Checkpoints[i] = p.Redacted(cmd.Context())
			}
			relatives, err := executions.Relatives(cmd.Context(), s.Pool, x.ID)
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
			return c.print(shown, func(w io.Writer) { writeExecution(w, shown) })
		}),
	}
}

// openWaits returns the current wait of an execution, as a list of at most one. Like agent executions waiting, it
// measures the wait with the database's clock.
func openWaits(ctx context.Context, s *session, x executions.Execution) ([]executions.WaitingRow, error) {
	if x.Status != executions.Waiting || x.WaitingUntil == nil {
		return []executions.WaitingRow{}, nil
	}
	wait := executions.WaitingRow{
		ID: x.ID, TraceID: x.TraceID, Surface: x.Surface, Agent: x.Agent, Flow: x.Flow,
		WaitingFor: postgres.Deref(x.WaitingFor), WaitingKey: postgres.Deref(x.WaitingKey),
		WaitingUntil: *x.WaitingUntil, WaitingData: x.WaitingData,
	}
	err := s.Pool.QueryRow(ctx, `select extract(epoch from clock_timestamp() - @since::timestamptz)::float8`,
		postgres.Strict{"since": x.UpdatedAt}).Scan(&wait.Waited)
	if err != nil {
		return nil, fmt.Errorf("read the time of the database: %w", err)
	}
	return []executions.WaitingRow{wait}, nil
}

func notFoundHint(err error) error {
	if errors.Is(err, executions.ErrNotFound) {
		return hint(err, "see agent executions ls")
	}
	return err
}

func writeExecution(w io.Writer, x shownExecution) {
	until := ""
	if x.WaitingUntil != nil {
		until = formatTime(*x.WaitingUntil)
	}
	version := ""
	if x.FlowVersion != nil {
		version = fmt.Sprint(*x.FlowVersion)
	}
	lines := [][2]string{
		{"execution", x.ID},
		{"flow", x.Flow},
		{"version", version},
		{"parent", postgres.Deref(x.ParentID)},
		{"thread", postgres.Deref(x.ThreadID)},
		{"forked from", postgres.Deref(x.ForkedFrom)},
		{"from step", postgres.Deref(x.ForkedStep)},
		{"status", string(x.Status)},
		{"trace", x.TraceID},
		{"surface", x.Surface},
		{"agent", x.Agent},
		{"created", formatTime(x.CreatedAt)},
		{"claim", fmt.Sprint(x.Claim)},
		{"attempt", fmt.Sprint(x.Attempt)},
		{"worker", postgres.Deref(x.ClaimedBy)},
		{"waits for", postgres.Deref(x.WaitingFor)},
		{"key", postgres.Deref(x.WaitingKey)},
		{"until", until},
		{"result", x.ResultSummary},
		{"error", postgres.Deref(x.ErrorMessage)},
		{"failed step", postgres.Deref(x.FailedStep)},
		{"cancelled by", postgres.Deref(x.CancelledBy)},
		{"reason", postgres.Deref(x.CancelReason)},
	}
	for _, name := range slices.Sorted(maps.Keys(x.Labels)) {
		lines = append(lines, [2]string{"label", name + "=" + x.Labels[name]})
	}
	writeFields(w, "%-13s %s\n", lines)
	for _, r := range x.Children {
		fmt.Fprintf(w, "%-13s %s %s %s\n", "child", r.ID, printable(r.Flow), r.Status)
	}
	for _, r := range x.Forks {
		fmt.Fprintf(w, "%-13s %s %s %s\n", "fork", r.ID, r.Status, printable(r.From))
	}
	fmt.Fprintln(w)
	writeRows(w, "no checkpoints",
		[]string{"RECORDED", "STEP", "STATE", "CLAIM", "RESULT"}, x.Checkpoints, func(p executions.Checkpoint) []string {
			state := "ok"
			if p.Failed {
				state = "failed"
			}
			return []string{formatTime(p.CreatedAt), p.Step, state, fmt.Sprint(p.Claim), truncate(string(p.Output), 80)}
		})
}

func (c *cli) executionsCancelCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "cancel ID", Short: "Cancel an execution now", Args: executionID,
		Long: `Cancel an execution now: stop its running step and release its lanes. Cancelling an ended execution changes
nothing. If another transaction locks the row, the cancel takes effect when that transaction ends. The command names a
session that may hold the lock.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.cancel(cmd.Context(), s, args[0], reason)
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "cancelled from the command line", "reason for the audit log")
	return cmd
}

func (c *cli) cancel(ctx context.Context, s *session, id, reason string) error {
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	before, err := executions.Get(ctx, s.Pool, id)
	if err != nil {
		return notFoundHint(err)
	}
	status, err := a.Engine.Cancel(ctx, id, actor(ctx), reason)
	if err != nil {
		return notFoundHint(err)
	}
	if !status.Ended() {
		detail, err := executions.CancelDetail(ctx, s.Pool)
		if err != nil {
			return err
		}
		return c.printf(map[string]any{"id": id, "status": status, "cancel_requested": true, "detail": detail},
			"cancel of %s requested: %s\n", id, detail)
	}
	return c.print(map[string]any{"id": id, "status": status}, func(w io.Writer) {
		switch {
		case status != executions.Cancelled:
			fmt.Fprintf(w, "%s had already ended: %s\n", id, status)
		case before.Status == executions.Cancelled:
			fmt.Fprintf(w, "%s had already been cancelled by %s: %s\n", id, printable(postgres.Deref(before.CancelledBy)),
				printable(postgres.Deref(before.CancelReason)))
		default:
			fmt.Fprintf(w, "cancelled %s\n", id)
		}
	})
}
