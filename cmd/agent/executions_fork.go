package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/models"
)

func (c *cli) executionsForkCommand() *cobra.Command {
	var f executions.ForkSpec
	var input, reason string
	cmd := &cobra.Command{
		Use: "fork ID", Short: "Start a new execution from a step of another", Args: executionID,
		Long: `Start a new execution with a new trace. It copies the checkpoints before a step and runs the rest. The
original stays unchanged. agent executions show ID lists the steps. Nested names use slashes (phase/step); naming a
phase, a loop or a branch restarts it. Without --from all checkpoints are copied. With a new input, a copied step that
depends on the old one fails with an error. A process that runs agent serve or agent dev runs the execution.`,
		Example: "  agent executions fork 0198… --from evaluate\n  agent executions fork 0198… --from ask --input " +
			"'{\"tone\": \"warm\"}'",
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("input") {
				text, err := c.readJSON(input)
				if err != nil {
					return err
				}
				f.Input = text
			}
			return c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
				f.ID = args[0]
				a, err := c.app(s, nil)
				if err != nil {
					return err
				}
				details := map[string]any{"execution": f.ID, "from": f.From, "reason": reason}
				return c.fork(cmd.Context(), s, "fork_execution", f.ID, details,
					func(ctx context.Context, tx pgx.Tx) (executions.Execution, string, error) {
						x, err := a.Engine.Fork(ctx, tx, f)
						return x, f.From, err
					})
			})(cmd, args)
		},
	}
	cmd.Flags().StringVar(&f.From, "from", "", "the first step to run again")
	cmd.Flags().StringVar(&input, "input", "", "a new input: JSON, @file, or - for standard input")
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	cmd.Flags().BoolVar(&f.Latest, "latest", false, "use the current version of the flow instead of the original's")
	return cmd
}

func (c *cli) executionsRetryCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "retry ID", Short: "Retry an execution from its failure", Args: executionID,
		Long: `Fork a failed, timed out or cancelled execution. The fork repeats the failed step, the expired wait or the
failed child. A cancelled execution continues after its last checkpoint. The original stays unchanged.`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			a, err := c.app(s, nil)
			if err != nil {
				return err
			}
			details := map[string]any{"execution": args[0], "reason": reason}
			return c.fork(cmd.Context(), s, "retry_execution", args[0], details,
				func(ctx context.Context, tx pgx.Tx) (executions.Execution, string, error) {
					return a.Engine.Retry(ctx, tx, args[0])
				})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}

// fork forks the execution with an id by fn, records the change with details, and prints the new execution. fn returns
// it with the first step that it runs.
func (c *cli) fork(
	ctx context.Context, s *session, action, id string, details map[string]any,
	fn func(ctx context.Context, tx pgx.Tx) (executions.Execution, string, error),
) error {
	var x executions.Execution
	var from string
	result := map[string]any{}
	_, err := recordChangeWith(ctx, s, action, details, result, func(tx pgx.Tx, _ string) (_ bool, err error) {
		x, from, err = fn(ctx, tx)
		result["execution_id"], result["trace_id"] = x.ID, x.TraceID
		return true, err
	})
	if err != nil {
		return forkHint(err, id)
	}
	return c.printFork(x, from)
}

// forkHint adds advice to the error of a rejected fork.
func forkHint(err error, id string) error {
	switch {
	case errors.Is(err, executions.ErrNoStep):
		return hint(err, "see agent executions show %s", id)
	case errors.Is(err, executions.ErrNotFailed):
		return hint(err, "agent executions fork %s --from STEP restarts from any step", id)
	}
	return notFoundHint(err)
}

func (c *cli) printFork(x executions.Execution, from string) error {
	return c.print(map[string]any{
		"id": x.ID, "trace_id": x.TraceID, "status": x.Status, "forked_from": x.ForkedFrom, "from": from,
	}, func(w io.Writer) {
		where := "after the last checkpoint"
		if from != "" {
			where = "from " + printable(from)
		}
		fmt.Fprintf(w, "started %s %s\ntrace %s\n", x.ID, where, x.TraceID)
	})
}

func (c *cli) executionsReplayCommand() *cobra.Command {
	return &cobra.Command{
		Use: "replay ID", Short: "Replay an execution against its checkpoints, without side effects", Args: executionID,
		Long: `Run the code of the flow in this process. Its steps return their recorded results, so no model and no skill
is called, and nothing is written. Both digests cover steps, outputs, status and result. If the current code differs
from the record, the command names the first different step, and the exit code is 1.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			// Reasoning code estimates a call's cost before it reads the record, so replay needs a model client. It
			// sends no request.
			offlineClient, err := models.New(models.Config{Model: "offline"})
			if err != nil {
				return err
			}
			a, err := c.app(s, offlineClient)
			if err != nil {
				return err
			}
			comparison, err := a.Engine.Replay(cmd.Context(), args[0])
			if errors.Is(err, executions.ErrUnknownFlow) {
				return hint(err, "the program that ran it has the code that a replay needs")
			}
			if err != nil {
				return notFoundHint(err)
			}
			if err := c.print(comparison, func(w io.Writer) { writeReplay(w, comparison) }); err != nil {
				return err
			}
			if !comparison.Equal {
				return &exitError{exitFailed, nil}
			}
			return nil
		}),
	}
}

func writeReplay(w io.Writer, r executions.Replayed) {
	fmt.Fprintf(w, "%s of %s, %d %s\n", printable(string(r.Status)), printable(r.Flow), r.Steps,
		plural("step", r.Steps))
	if r.EndedAt != "" {
		fmt.Fprintf(w, "the record ends at %s\n", printable(r.EndedAt))
	}
	fmt.Fprintf(w, "record %s\nreplay %s\n", r.Digest, r.ReplayDigest)
	if d := r.Divergence; d != nil {
		fmt.Fprintf(w, "differs at %s: %s\n", cmp.Or(printable(d.Step), "the start"), printable(d.Message))
		return
	}
	fmt.Fprintln(w, "equal")
}
