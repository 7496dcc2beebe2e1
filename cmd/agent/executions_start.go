package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

type startOptions struct {
	spec    executions.Spec
	input   string
	chatKey string
	reason  string
	wait    bool
}

func (c *cli) executionsStartCommand() *cobra.Command {
	b := startOptions{spec: executions.Spec{Surface: trace.Flow}}
	cmd := &cobra.Command{
		Use: "start FLOW", Short: "Start an execution of a flow",
		Args: positionalArgs(1, 1, "a flow's name; see agent flows ls"),
		Long: `Start an execution of a flow: a workspace flow, a Go flow, or external (external:NAME) for an external worker.
A process that runs agent serve or agent dev runs it. --wait prints its status on stderr until it ends, and exits with 1
unless it completed; an interrupt ends the waiting, not the execution.`,
		Example: "  agent executions start onboarding --input '{\"candidate\": \"Ana\"}' --thread ana --wait\n" +
			"  agent executions start external:import --on-lost hand_on --input @order.json",
		RunE: func(cmd *cobra.Command, args []string) error {
			b.spec.Flow = args[0]
			if b.input != "" {
				text, err := c.readJSON(b.input)
				if err != nil {
					return err
				}
				b.spec.Input = text
			}
			if b.spec.Priority < 0 || b.spec.Priority > 4 {
				return usageError("--priority %d: use 1 (first) to 4 (last)", b.spec.Priority)
			}
			if err := b.spec.Labels.Validate(); err != nil {
				return usageError("--label: %s", err)
			}
			if b.chatKey != "" && b.spec.ThreadID == "" {
				return usageError("--chat-key needs --thread: name the thread to open to the key")
			}
			if !slices.Contains([]string{"", "resume", "fail", "hand_on"}, b.spec.OnLost) {
				return usageError("--on-lost: %q is not one of resume, fail, hand_on", b.spec.OnLost)
			}
			return c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
				return c.startExecution(cmd.Context(), s, b)
			})(cmd, args)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&b.input, "input", "", "the input: JSON, @file, or - for standard input")
	flags.StringVar(&b.spec.ThreadID, "thread", "", "the thread of its messages")
	flags.StringVar(&b.chatKey, "chat-key", "", "a chat key that gets access to the thread under its id")
	flags.BoolVar(&b.wait, "wait", false, "wait until it has ended")
	flags.StringVar(&b.spec.OnLost, "on-lost", "", "when its worker is lost: resume (default) or fail; for "+
		"external fail (default) or hand_on")
	flags.IntVar(&b.spec.Priority, "priority", 0, "1 first to 4 last; default 2")
	labelFlag(flags, &b.spec.Labels)
	flags.StringVar(&b.reason, "reason", "", "reason for the audit log")
	flags.StringVar(&b.spec.DedupeKey, "key", "", "idempotency key, shared by all flows: start it once, however often "+
		"the command runs")
	return cmd
}

// reservedFlows maps flows of this program to the commands that start them.
var reservedFlows = map[string]string{
	"heartbeat": "agent heartbeat", "operate": "agent operate", "chat": "agent chat",
	"automation": "agent automations run NAME",
	"skill_call": "agent skills call NAME", "webhook": "agent webhooks replay ID",
	"chat_relay": "agent chat", "chat_summary": "agent chat", "delegate": "agent operate",
	"mcp.call": "agent skills call NAME", "eval": "agent eval run",
}

// startExecution starts an execution for the admin, after it has validated flow, input and thread. For a used
// idempotency key it prints the earlier execution, which must have the same flow and input.
func (c *cli) startExecution(ctx context.Context, s *session, b startOptions) error {
	if command := reservedFlows[executions.ReservedName(b.spec.Flow)]; command != "" {
		return &exitError{exitUsage, hint(fmt.Errorf("flow %s cannot be started directly", b.spec.Flow), "use %s", command)}
	}
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	if err := startable(ctx, a, &b.spec); err != nil {
		return err
	}
	acting, err := a.Loop.Agents.Default(ctx, s.Pool)
	if err != nil {
		return err
	}
	b.spec.Agent = acting.Name
	if b.chatKey != "" {
		if err := checkGrantee(ctx, s, threads.Key(b.chatKey)); err != nil {
			return err
		}
	}
	if id := b.spec.ThreadID; id != "" { // a flow may create its thread
		if err := b.openThread(ctx, s, id); err != nil {
			return err
		}
	}
	x, created, err := a.Engine.StartByAdmin(executions.WithLockTimeout(ctx, postgres.LockRetryTimeout), b.spec, b.reason)
	if err != nil {
		return err
	}
	verb := "started"
	if !created {
		verb = "was already started:"
		if err := b.checkEarlier(x); err != nil {
			return err
		}
	}
	if b.wait {
		return c.waitForEnd(ctx, s, x, verb)
	}
	return c.print(map[string]any{"id": x.ID, "trace_id": x.TraceID, "status": x.Status, "created": created},
		func(w io.Writer) { fmt.Fprintf(w, "%s %s\ntrace %s\n", verb, x.ID, x.TraceID) })
}

// checkEarlier rejects an earlier execution of the key with other input. The database rejects one of another flow.
func (b startOptions) checkEarlier(x executions.Execution) error {
	input, given := b.spec.Input.(json.RawMessage)
	if !given {
		input = json.RawMessage("{}")
	}
	if exactjson.Equal(x.Input, input) {
		return nil
	}
	return hint(fmt.Errorf("idempotency key %q already started execution %s with other input", b.spec.DedupeKey, x.ID),
		"use another key")
}

// openThread gives the flow, and the named chat key, access to the thread.
func (b startOptions) openThread(ctx context.Context, s *session, id string) error {
	prompt, err := s.prompt(ctx)
	if err != nil {
		return err
	}
	defer prompt.Pool.Close()
	err = postgres.InTx(ctx, prompt.Pool, func(tx pgx.Tx) error {
		err := threads.OpenForFlow(ctx, tx, id, b.spec.Flow, "", b.spec.Agent)
		if err == nil && b.chatKey != "" {
			_, err = threads.Grant(ctx, tx, id, threads.Key(b.chatKey), id, grantor(ctx))
		}
		return err
	})
	switch {
	case errors.Is(err, threads.ErrInvalid):
		return usageError("--thread: %s", threads.ErrInvalid)
	case errors.Is(err, threads.ErrNotFound):
		return hint(fmt.Errorf("thread %q: %w", id, threads.ErrNotFound), "open a visitor's thread to the flow: agent "+
			"threads open %s --flow %s", id, b.spec.Flow)
	case errors.Is(err, threads.ErrTaken):
		return usageError("--chat-key: the key %s already has a thread %q; choose another --thread", b.chatKey, id)
	}
	return err
}

// startable validates flow, input, thread and on_lost before the start.
func startable(ctx context.Context, a *app.App, spec *executions.Spec) error {
	if executions.CanClaim(spec.Flow) {
		if spec.OnLost == "resume" {
			return usageError("--on-lost: external executions accept fail or hand_on, not resume")
		}
		spec.OnLost = cmp.Or(spec.OnLost, "fail")
		return nil
	}
	if spec.OnLost == "hand_on" && !executions.IsExternal(spec.Flow) {
		return usageError("--on-lost: only external executions accept hand_on; use resume or fail")
	}
	known, err := a.Engine.HasFlow(ctx, spec.Flow)
	if err != nil {
		return err
	}
	if !known {
		names, err := startableFlows(ctx, a)
		if err != nil {
			return err
		}
		return hint(fmt.Errorf("there is no flow %q%s", spec.Flow, suggestion(spec.Flow, names)), "see agent flows ls")
	}
	input, _ := spec.Input.(json.RawMessage)
	if err := flows.CheckStart(ctx, a.Pool, spec.Flow, input); err != nil {
		return &exitError{exitUsage, hint(err, "see agent flows show %s", spec.Flow)}
	}
	err = flows.CheckThread(ctx, a.Pool, spec.Flow, spec.ThreadID)
	if errors.Is(err, flows.ErrNoThread) {
		err = &exitError{exitUsage, hint(err, "name one with --thread ID; a new ID begins a thread")}
	}
	return err
}

func startableFlows(ctx context.Context, a *app.App) ([]string, error) {
	all, err := flows.List(ctx, a.Pool, flows.Filter{Limit: maxFlows})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, f := range all {
		names = append(names, f.Name)
	}
	inGo, err := a.Engine.Flows(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range inGo {
		if reservedFlows[executions.ReservedName(name)] == "" {
			names = append(names, name)
		}
	}
	return append(names, executions.External), nil
}

const maxPollInterval = time.Second

// waitForEnd polls an execution and prints its status until it has ended.
func (c *cli) waitForEnd(ctx context.Context, s *session, x executions.Execution, verb string) error {
	if !c.json {
		c.infof("%s %s, trace %s", verb, x.ID, x.TraceID)
	}
	note := ""
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, maxPollInterval) {
		now, err := executions.Get(ctx, s.Pool, x.ID)
		if err != nil {
			return &tracedError{fmt.Errorf("wait for execution %s: %w", x.ID, err), x.TraceID}
		}
		if now.Status.Ended() {
			return c.printEnded(ctx, now)
		}
		if text := statusText(now); text != note && !c.json {
			note, pause = text, 20*time.Millisecond
			c.infof("%s", text)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

func statusText(x executions.Execution) string {
	if x.Status == executions.Waiting {
		return "waits for " + printable(strings.TrimSpace(waitText(x)))
	}
	if x.Status == executions.Pending {
		return "pending until agent serve or agent dev claims it"
	}
	return string(x.Status)
}

// printEnded prints the result of an execution. Any status but completed is an error.
func (c *cli) printEnded(ctx context.Context, x executions.Execution) error {
	x = x.Redacted(ctx)
	if x.Status != executions.Completed {
		why := postgres.Deref(x.ErrorMessage)
		if x.Status == executions.Cancelled {
			why = postgres.Deref(x.CancelReason)
		}
		next := "; agent executions retry " + x.ID + " tries again"
		if strings.Contains(why, flows.NoThread) {
			next = ""
		}
		return &tracedError{hint(fmt.Errorf("%s of %s: %s: %s", x.ID, x.Flow, x.Status, why), "see agent trace %s%s",
			x.TraceID, next), x.TraceID}
	}
	return c.printf(x, "%s %s\ntrace %s\n", x.Status, printable(x.ResultSummary), x.TraceID)
}
