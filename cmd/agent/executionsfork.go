package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/models"
)

func (c *cli) executionsForkCommand() *cobra.Command {
	var f executions.ForkSpec
	var input, reason string
	cmd := &cobra.Command{
		Use: "fork ID", Short: "Start anew from a step of an execution", Args: executionID,
		Long: `Start an execution, under a trace of its own, that begins with what another had recorded before a step, and does the rest
anew. The other is not touched, whatever state it is in. agent executions show ID lists the steps; a name within a phase or
branch is written with slashes (phase/step), and naming a phase, a loop or a branch begins it anew from its start.

Without --from everything that was recorded is kept. With another input, a recorded step that worked on the old one is a
contradiction, and the error names it. What runs it is a process that runs agent serve.`,
		Example: "  agent executions fork 0198… --from evaluate\n  agent executions fork 0198… --from ask --input '{\"tone\": \"warm\"}'",
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("input") {
				text, err := c.readJSON(input)
				if err != nil {
					return err
				}
				f.Input = text
			}
			return c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
				f.ID = args[0]
				a, err := c.app(s, nil)
				if err != nil {
					return err
				}
				var got executions.Execution
				input, output := map[string]any{"execution": f.ID, "from": f.From, "reason": reason}, map[string]any{}
				_, err = actSaying(cmd.Context(), s, "fork_execution", input, output, func(tx pgx.Tx, _ string) (_ bool, err error) {
					got, err = a.engine.Fork(cmd.Context(), tx, f)
					return forked(got, output), err
				})
				return c.printFork(got, f.From, forkHint(err, args[0]))
			})(cmd, args)
		},
	}
	cmd.Flags().StringVar(&f.From, "from", "", "the step to begin anew with")
	cmd.Flags().StringVar(&input, "input", "", "another input: JSON, @file, or - for standard input")
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	cmd.Flags().BoolVar(&f.Latest, "latest", false, "the current version of the flow, not the one the other began with")
	return cmd
}

func (c *cli) executionsRetryCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "retry ID", Short: "Try an execution again from where it failed", Args: executionID,
		Long: `Fork an execution that failed, timed out or was cancelled, so that what ended it is done anew: the step that failed, within
its phase; the wait that timed out; the child whose failure was passed on. One that was cancelled goes on after what it had
recorded. The failed one stays as it is.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			a, err := c.app(s, nil)
			if err != nil {
				return err
			}
			var got executions.Execution
			from := ""
			input, output := map[string]any{"execution": args[0], "reason": reason}, map[string]any{}
			_, err = actSaying(cmd.Context(), s, "retry_execution", input, output, func(tx pgx.Tx, _ string) (_ bool, err error) {
				got, from, err = a.engine.Retry(cmd.Context(), tx, args[0])
				return forked(got, output), err
			})
			return c.printFork(got, from, forkHint(err, args[0]))
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}

// forked says in the row of the act which execution began.
func forked(x executions.Execution, output map[string]any) bool {
	output["execution_id"], output["trace_id"] = x.ID, x.TraceID
	return true
}

// forkHint says what to do about a fork that was refused.
func forkHint(err error, id string) error {
	switch {
	case errors.Is(err, executions.ErrNoStep):
		return hint(err, "see agent executions show %s", id)
	case errors.Is(err, executions.ErrNotFailed):
		return hint(err, "agent executions fork %s --from STEP begins anew from any step", id)
	}
	return notFoundHint(err)
}

func (c *cli) printFork(x executions.Execution, from string, err error) error {
	if err != nil {
		return err
	}
	return c.print(map[string]any{
		"id": x.ID, "trace_id": x.TraceID, "status": x.Status, "forked_from": x.ForkedFrom, "from": from,
	}, func(w io.Writer) error {
		where := "after all that was recorded"
		if from != "" {
			where = "from " + printable(from)
		}
		_, err := fmt.Fprintf(w, "started %s %s\ntrace %s\n", x.ID, where, x.TraceID)
		return err
	})
}

func (c *cli) executionsReplayCommand() *cobra.Command {
	return &cobra.Command{
		Use: "replay ID", Short: "Run an execution's code against its record, without doing anything", Args: executionID,
		Long: `Call the flow with the results that an execution has recorded, in this process, without a model, without a network and
without a write: nothing that is not recorded can happen. Both digests are over steps, outputs, status and result. When the
code of today does something else than the record says, the first step that differs is named, and the exit code is 1.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			// Code that reasons reckons what a call would cost before it comes to the call's record. This one is not asked.
			unasked, err := models.New(models.Config{Model: "unasked"})
			if err != nil {
				return err
			}
			a, err := c.app(s, unasked)
			if err != nil {
				return err
			}
			got, err := a.engine.Replay(cmd.Context(), args[0])
			if errors.Is(err, executions.ErrUnknownFlow) {
				return hint(err, "what a worker outside did is not code of this program")
			}
			if err != nil {
				return notFoundHint(err)
			}
			if err := c.print(got, func(w io.Writer) error { return writeReplay(w, got) }); err != nil {
				return err
			}
			if !got.Equal {
				return &exitError{exitFailed, nil}
			}
			return nil
		}),
	}
}

func writeReplay(w io.Writer, r executions.Replayed) error {
	fmt.Fprintf(w, "%s of %s, %d steps\n", printable(string(r.Status)), printable(r.Flow), r.Steps)
	if r.EndedAt != "" {
		fmt.Fprintf(w, "the record ends at %s\n", printable(r.EndedAt))
	}
	fmt.Fprintf(w, "record %s\nreplay %s\n", r.Digest, r.ReplayDigest)
	if d := r.Divergence; d != nil {
		_, err := fmt.Fprintf(w, "differs at %s: %s\n", printable(d.Step), printable(d.Message))
		return err
	}
	_, err := fmt.Fprintln(w, "equal")
	return err
}

// maxInput is the largest input that is read, in bytes.
const maxInput = 16 << 20

// readJSON reads a JSON value from an argument: the value itself, @file, or - for standard input.
func (c *cli) readJSON(text string) (json.RawMessage, error) {
	raw := []byte(text)
	if text == "-" || len(text) > 1 && text[0] == '@' {
		from := c.in
		if text != "-" {
			file, err := os.Open(text[1:])
			if err != nil {
				return nil, usageError("read input: %w", err)
			}
			defer file.Close()
			from = file
		}
		var err error
		if raw, err = io.ReadAll(io.LimitReader(from, maxInput+1)); err != nil {
			return nil, usageError("read input: %w", err)
		}
		if len(raw) > maxInput {
			return nil, usageError("read input: more than %d bytes", maxInput)
		}
	}
	if raw = bytes.TrimSpace(raw); !json.Valid(raw) {
		return nil, usageError(`that is not JSON: %.60q; write for example '{"name": "Ana"}', @file, or - for standard input`, raw)
	}
	return raw, nil
}

// goFlows names the flows that this program has in Go code.
func (c *cli) goFlows(_ context.Context, s *session) ([]string, error) {
	a, err := c.app(s, nil)
	if err != nil {
		return nil, err
	}
	return a.engine.Flows(), nil
}
