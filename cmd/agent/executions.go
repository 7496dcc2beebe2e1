package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/models"
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
			got, next, err := listExecutions(cmd.Context(), s, f)
			if err != nil {
				return err
			}
			none := "no matching executions"
			if cmd.Flags().NFlag() == 0 {
				none = "no executions; `agent heartbeat` starts one"
			}
			return printRows(c, got, next, none,
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
	statusFlag(cmd.Flags(), &f.Status, "only this state", statusWords()...)
	surfaceFlag(cmd.Flags(), &f.Surface)
	cmd.Flags().StringVar(&f.Flow, "flow", "", "only this flow")
	actingFlag(cmd.Flags(), &f.Agent)
	cmd.Flags().StringVar(&f.Label, "label", "", "only with this label: name=value, or a value")
	traceFlag(cmd.Flags(), &f.TraceIDs)
	agoFlag(cmd.Flags(), &f.Since, "since", "", "only those created within the last")
	agoFlag(cmd.Flags(), &f.Until, "until", "", "only those created before the last")
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
			shown := shownExecution{
				Labels: labels[x.ID].Redacted(), Execution: visible, Waits: openWaits(visible),
				Checkpoints: make([]executions.Checkpoint, len(recorded)), Children: []executions.Relative{},
				Forks: []executions.Relative{},
			}
			for i, p := range recorded {
				shown.Checkpoints[i] = p.Redacted(cmd.Context(), x)
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

// openWaits returns the current wait of an execution, as a list of at most one.
func openWaits(x executions.Execution) []executions.WaitingRow {
	if x.Status != executions.Waiting || x.WaitingUntil == nil {
		return []executions.WaitingRow{}
	}
	return []executions.WaitingRow{{
		ID: x.ID, TraceID: x.TraceID, Surface: x.Surface, Agent: x.Agent, Flow: x.Flow,
		WaitingFor: postgres.Deref(x.WaitingFor),
		WaitingKey: postgres.Deref(x.WaitingKey), WaitingUntil: *x.WaitingUntil, WaitingData: x.WaitingData,
		Waited: time.Since(x.UpdatedAt).Seconds(),
	}}
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
		Long: `Cancel an execution now: stop its running step and release its lanes. Cancelling an ended execution changes nothing.
If another transaction locks the row, the cancel takes effect when that transaction ends. The command names a session
that may hold the lock.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.cancel(cmd.Context(), s, args[0], reason)
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "cancelled from the command line", "reason for the audit log")
	return cmd
}

func (c *cli) cancel(ctx context.Context, s *session, id, reason string) error {
	status, err := executions.Cancel(ctx, s.Pool, id, actor(ctx), reason)
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
		if status != executions.Cancelled {
			fmt.Fprintf(w, "%s had already ended: %s\n", id, status)
			return
		}
		fmt.Fprintf(w, "cancelled %s\n", id)
	})
}

func (c *cli) executionsForkCommand() *cobra.Command {
	var f executions.ForkSpec
	var input, reason string
	cmd := &cobra.Command{
		Use: "fork ID", Short: "Start a new execution from a step of another", Args: executionID,
		Long: `Start a new execution with a new trace. It copies the checkpoints before a step and runs the rest. The original stays
unchanged. agent executions show ID lists the steps. Nested names use slashes (phase/step); naming a phase, a loop or a
branch restarts it. Without --from all checkpoints are copied. With a new input, a copied step that depends on the old
one fails with an error. A process that runs agent serve runs the execution.`,
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
		Long: `Fork a failed, timed out or cancelled execution. The fork repeats the failed step, the expired wait or the failed child.
A cancelled execution continues after its last checkpoint. The original stays unchanged.`,
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
		Long: `Run the flow in this process with recorded results only: no model, no network, no writes. Both digests cover steps,
outputs, status and result. If the current code differs from the record, the command names the first different step, and
the exit code is 1.`,
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			// Reasoning code estimates a call's cost before it reads the record, so replay needs a model client. It
			// sends no request.
			unasked, err := models.New(models.Config{Model: "unasked"})
			if err != nil {
				return err
			}
			a, err := c.app(s, unasked)
			if err != nil {
				return err
			}
			got, err := a.Engine.Replay(cmd.Context(), args[0])
			if errors.Is(err, executions.ErrUnknownFlow) {
				return hint(err, "the program that ran it has the code that a replay needs")
			}
			if err != nil {
				return notFoundHint(err)
			}
			if err := c.print(got, func(w io.Writer) { writeReplay(w, got) }); err != nil {
				return err
			}
			if !got.Equal {
				return &exitError{exitFailed, nil}
			}
			return nil
		}),
	}
}

func writeReplay(w io.Writer, r executions.Replayed) {
	fmt.Fprintf(w, "%s of %s, %d steps\n", printable(string(r.Status)), printable(r.Flow), r.Steps)
	if r.EndedAt != "" {
		fmt.Fprintf(w, "the record ends at %s\n", printable(r.EndedAt))
	}
	fmt.Fprintf(w, "record %s\nreplay %s\n", r.Digest, r.ReplayDigest)
	if d := r.Divergence; d != nil {
		fmt.Fprintf(w, "differs at %s: %s\n", printable(d.Step), printable(d.Message))
		return
	}
	fmt.Fprintln(w, "equal")
}

// maxInput bounds the input in bytes.
const maxInput = 16 << 20

// readJSON reads a JSON value from an argument: the value itself, @file, or - for standard input.
func (c *cli) readJSON(text string) (json.RawMessage, error) {
	raw := []byte(text)
	if text == "-" || len(text) > 1 && text[0] == '@' {
		from := c.in
		if text != "-" {
			file, err := c.openFile(text[1:])
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
		return nil, usageError(`that is not JSON: %.60q; write for example '{"name": "Ana"}', @file, or - for standard input`,
			raw)
	}
	return raw, nil
}

// goFlows lists the flows in Go, of this program and of live processes.
func (c *cli) goFlows(ctx context.Context, s *session) ([]string, error) {
	a, err := c.app(s, nil)
	if err != nil {
		return nil, err
	}
	return a.Engine.Flows(ctx)
}

func (c *cli) executionsStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Count pending, running and waiting executions, with their mean age",
		Args: positionalArgs(0, 0, "no arguments"),
		Long: "Count pending, running and waiting executions, with their mean age. In SQL: select * from " +
			"agent_executions_by_status.",
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := executions.CountByStatus(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			if err := c.warnPaused(cmd.Context(), s); err != nil {
				return err
			}
			return printRows(c, got, "", "nothing", []string{"STATUS", "COUNT", "MEAN AGE"},
				func(r executions.StatusCount) []string {
					return []string{string(r.Status), fmt.Sprint(r.Count), human.Seconds(r.AvgAgeSeconds)}
				})
		}),
	}
}

func (c *cli) executionsWaitingCommand() *cobra.Command {
	var kind string
	var limit int
	cmd := &cobra.Command{
		Use: "waiting", Short: "List waiting executions, the nearest deadline first",
		Args: positionalArgs(0, 0, "no arguments"),
		Long: "List waiting executions, the nearest deadline first. In SQL: select * from agent_executions_waiting.",
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			return c.listWaiting(cmd, s, kind, false, limit, "no waiting executions")
		}),
	}
	wordFlag(cmd.Flags(), &kind, "for", "only this kind",
		"response", "agent", "document", "signature", "test", "event", "delay", "approval", "lane")
	limitFlag(cmd.Flags(), &limit, 50)
	return cmd
}

func (c *cli) executionsStuckCommand() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use: "stuck", Short: "List executions waiting past their deadline", Args: positionalArgs(0, 0, "no arguments"),
		Long: `List executions waiting past their deadline without an update for an hour. If there are any, check that agent serve
runs. In SQL: select * from agent_executions_stuck.`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			return c.listWaiting(cmd, s, "", true, limit, "no stuck executions")
		}),
	}
	limitFlag(cmd.Flags(), &limit, 50)
	return cmd
}

func (c *cli) listWaiting(cmd *cobra.Command, s *session, kind string, stuck bool, limit int, empty string) error {
	got, err := executions.ListWaiting(cmd.Context(), s.Pool, kind, stuck, limit)
	if err != nil {
		return err
	}
	for i := range got {
		got[i] = got[i].Redacted(cmd.Context())
	}
	return printRows(c, got, "", empty,
		[]string{"EXECUTION", "FLOW", "WAITS FOR", "KEY", "UNTIL", "SINCE", "TRACE"}, func(r executions.WaitingRow) []string {
			return []string{
				r.ID, r.Flow, r.WaitingFor, truncate(r.WaitingKey, 40), formatTime(r.WaitingUntil),
				human.Seconds(r.Waited), r.TraceID,
			}
		})
}
