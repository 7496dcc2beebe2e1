package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/models"
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

func (c *cli) executionsStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Count what is pending, running and waiting, with the mean age", Args: args(0, 0, "no arguments"),
		Long: "Count what is pending, running and waiting, with the mean age. In SQL: select * from agent_executions_by_status.",
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := executions.CountByStatus(cmd.Context(), s.pool)
			if err != nil {
				return err
			}
			if err := c.tellPause(cmd.Context(), s); err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, r := range got {
					rows[i] = []string{string(r.Status), fmt.Sprint(r.Count), seconds(r.AvgAgeSeconds)}
				}
				return table(w, "nothing", []string{"STATUS", "COUNT", "MEAN AGE"}, rows)
			})
		}),
	}
}

func (c *cli) executionsWaitingCommand() *cobra.Command {
	var kind string
	var limit int
	cmd := &cobra.Command{
		Use: "waiting", Short: "List what waits, the nearest deadline first", Args: args(0, 0, "no arguments"),
		Long: "List what waits, the nearest deadline first. In SQL: select * from agent_executions_waiting.",
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			return c.listWaiting(cmd, s, kind, false, limit, "nothing waits")
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
		Use: "stuck", Short: "List what waits although its deadline has passed", Args: args(0, 0, "no arguments"),
		Long: `List what waits although its deadline has passed and that nobody has touched for an hour. There should be nothing: some process
has to run agent serve. In SQL: select * from agent_executions_stuck.`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			return c.listWaiting(cmd, s, "", true, limit, "nothing is stuck")
		}),
	}
	limitFlag(cmd.Flags(), &limit, 50)
	return cmd
}

func (c *cli) listWaiting(cmd *cobra.Command, s *session, kind string, stuck bool, limit int, empty string) error {
	got, err := executions.ListWaiting(cmd.Context(), s.pool, kind, stuck, limit)
	if err != nil {
		return err
	}
	for i := range got {
		got[i] = got[i].Redacted()
	}
	return c.print(listing(got, ""), func(w io.Writer) error {
		rows := make([][]string, len(got))
		for i, r := range got {
			rows[i] = []string{r.ID, r.Flow, r.WaitingFor, clipped(r.WaitingKey, 40), when(r.WaitingUntil), seconds(r.Waited), r.TraceID}
		}
		return table(w, empty, []string{"EXECUTION", "FLOW", "WAITS FOR", "KEY", "UNTIL", "SINCE", "TRACE"}, rows)
	})
}
