package main

import (
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

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// begun is what `executions start` is told.
type begun struct {
	spec    executions.Spec
	input   string
	chatKey string
	reason  string
	wait    bool
}

func (c *cli) executionsStartCommand() *cobra.Command {
	b := begun{spec: executions.Spec{Surface: trace.Flow}}
	cmd := &cobra.Command{
		Use: "start FLOW", Short: "Start an execution of a flow", Args: args(1, 1, "a flow's name; see agent flows ls"),
		Long: `Start an execution of a flow: one of the workspace, one of this program, or external (external:NAME) for a worker outside. A
process that runs agent serve runs it. With --wait the command stays until it has ended, says on standard error what becomes of it,
and exits with 1 when it did not succeed; an interrupt ends the waiting, not the execution.`,
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
				return usageError("--priority: %d is not from 1 (first) to 4 (last)", b.spec.Priority)
			}
			if b.chatKey != "" && b.spec.ThreadID == "" {
				return usageError("--chat-key is of no use without --thread: name the thread that the key may speak in")
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
	flags.StringVar(&b.spec.ThreadID, "thread", "", "the thread that it speaks in")
	flags.StringVar(&b.chatKey, "chat-key", "", "the name of a chat key that may speak in the thread, and calls it by its id")
	flags.BoolVar(&b.wait, "wait", false, "stay until it has ended")
	flags.StringVar(&b.spec.OnLost, "on-lost", "", "when its worker is lost: resume (standard), fail (standard for external), hand_on")
	flags.IntVar(&b.spec.Priority, "priority", 0, "1 first to 4 last; standard 2")
	flags.StringVar(&b.reason, "reason", "", "why, for the record")
	flags.StringVar(&b.spec.DedupeKey, "key", "", "start it once for this key, however often the command is run")
	return cmd
}

// reservedFlows are started by other commands, which give them what they need.
var reservedFlows = map[string]string{
	"heartbeat": "agent heartbeat", "operate": "agent operate", "chat": "agent chat", "automation": "agent automations run NAME",
	"skill_call": "agent skills call NAME", "webhook": "agent webhooks replay ID",
	"chat_relay": "agent chat", "chat_summary": "agent chat", "delegate": "agent operate", "mcp.call": "agent skills call NAME",
}

func (c *cli) startExecution(ctx context.Context, s *session, b begun) error {
	if command := reservedFlows[b.spec.Flow]; command != "" {
		return &exitError{exitUsage, hint(fmt.Errorf("flow %s is not started by itself", b.spec.Flow), "use %s", command)}
	}
	a, err := c.app(s, nil)
	if err != nil {
		return err
	}
	if err := startable(ctx, a, &b.spec); err != nil {
		return err
	}
	b.spec.Agent = s.config.Name
	if id := b.spec.ThreadID; id != "" { // a flow may begin a conversation
		if err := b.openThread(ctx, s, id); err != nil {
			return err
		}
	}
	x, created, err := a.engine.StartByAdmin(executions.WithLockTimeout(ctx, postgres.LockPatience), b.spec, b.reason)
	if err != nil {
		return err
	}
	if b.wait {
		return c.awaitExecution(ctx, s, x)
	}
	return c.print(map[string]any{"id": x.ID, "trace_id": x.TraceID, "status": x.Status, "created": created}, func(w io.Writer) error {
		verb := "started"
		if !created {
			verb = "had been started already:"
		}
		_, err := fmt.Fprintf(w, "%s %s\ntrace %s\n", verb, x.ID, x.TraceID)
		return err
	})
}

// openThread makes sure that the flow may speak in its thread, and lets the chat key in that is named.
func (b begun) openThread(ctx context.Context, s *session, id string) error {
	err := postgres.InTx(ctx, s.pool, func(tx pgx.Tx) error {
		err := threads.OpenForFlow(ctx, tx, id, b.spec.Flow, "", b.spec.Agent)
		if err == nil && b.chatKey != "" {
			_, err = threads.Let(ctx, tx, id, threads.Key(b.chatKey), id, commandLine)
		}
		return err
	})
	switch {
	case errors.Is(err, threads.ErrInvalid):
		return usageError("--thread: %s", threads.ErrInvalid)
	case errors.Is(err, threads.ErrNotFound):
		return hint(fmt.Errorf("thread %q: %w", id, threads.ErrNotFound), "a visitor's thread has to be opened to the flow: agent threads open %s --flow %s", id, b.spec.Flow)
	case errors.Is(err, threads.ErrTaken):
		return usageError("--chat-key: the key %s has a thread %q of its own; choose another --thread", b.chatKey, id)
	}
	return err
}

// startable says why a flow cannot be started with an input, and what a worker outside means for it.
func startable(ctx context.Context, a *app, spec *executions.Spec) error {
	if executions.IsExternal(spec.Flow) {
		if spec.OnLost == "resume" {
			return usageError("--on-lost: resume is for runs of this program's own; a worker outside's can fail or hand_on")
		}
		if spec.OnLost == "" {
			spec.OnLost = "fail"
		}
		return nil
	}
	known, err := a.engine.HasFlow(ctx, spec.Flow)
	if err != nil {
		return err
	}
	if !known {
		names, err := startableFlows(ctx, a)
		if err != nil {
			return err
		}
		meant := ""
		if near := nearest.To(spec.Flow, names); near != "" {
			meant = fmt.Sprintf("; did you mean %q?", near)
		}
		return &exitError{exitUsage, hint(fmt.Errorf("there is no flow %q%s", spec.Flow, meant), "see agent flows ls")}
	}
	input, _ := spec.Input.(json.RawMessage)
	if err := flows.CheckStart(ctx, a.pool, spec.Flow, input); err != nil {
		return &exitError{exitUsage, hint(err, "see agent flows show %s", spec.Flow)}
	}
	return nil
}

// startableFlows are the names of the flows that can be started.
func startableFlows(ctx context.Context, a *app) ([]string, error) {
	all, err := flows.List(ctx, a.pool, flows.Filter{Limit: 500})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, f := range all {
		names = append(names, f.Name)
	}
	for _, name := range a.engine.Flows() {
		if reservedFlows[name] == "" {
			names = append(names, name)
		}
	}
	return append(names, executions.External), nil
}

// lookAgain is how long the command that waits for an execution pauses between two looks, at most.
const lookAgain = time.Second

// awaitExecution tells what becomes of an execution until it has ended.
func (c *cli) awaitExecution(ctx context.Context, s *session, x executions.Execution) error {
	if !c.json {
		c.say("started %s, trace %s", x.ID, x.TraceID)
	}
	said := ""
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, lookAgain) {
		now, err := executions.Get(ctx, s.pool, x.ID)
		if err != nil {
			return err
		}
		if now.Status.Ended() {
			return c.reportEnd(now)
		}
		if is := standing(now); is != said && !c.json {
			said, pause = is, 20*time.Millisecond
			c.say("%s", is)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// standing says in a line how an execution stands.
func standing(x executions.Execution) string {
	if x.Status == executions.Waiting {
		return "waits for " + printable(strings.TrimSpace(awaited(x)))
	}
	if x.Status == executions.Pending {
		return "pending: a process that runs agent serve takes it up"
	}
	return string(x.Status)
}

// reportEnd shows how an execution ended; one that did not succeed is a failure.
func (c *cli) reportEnd(x executions.Execution) error {
	x = x.Redacted()
	if x.Status != executions.Completed {
		why := deref(x.ErrorMessage)
		if x.Status == executions.Cancelled {
			why = deref(x.CancelReason)
		}
		return &traced{hint(fmt.Errorf("%s of %s: %s: %s", x.ID, x.Flow, x.Status, why), "see agent trace %s; agent executions retry %s tries again",
			x.TraceID, x.ID), x.TraceID}
	}
	return c.print(x, func(w io.Writer) error {
		_, err := fmt.Fprintf(w, "%s %s\ntrace %s\n", x.Status, printable(x.ResultSummary), x.TraceID)
		return err
	})
}

func (c *cli) executionsEventCommand() *cobra.Command {
	var data, id string
	events := []string{"MESSAGE_RECEIVED", "DOCUMENT_UPLOADED", "SIGNATURE_COMPLETED", "TEST_COMPLETED", "EVENT_COMPLETED"}
	cmd := &cobra.Command{
		Use: "event NAME KEY", Short: "Raise an event, for whoever waits for it", Args: args(2, 2, "an event's name and its key"),
		Long: `Raise an event and resume every execution that waits for it; one that nobody waits for is kept for the first that will. The
key says which wait is meant: of MESSAGE_RECEIVED the thread, of DOCUMENT_UPLOADED, SIGNATURE_COMPLETED and TEST_COMPLETED the request
(agent requests ls), of EVENT_COMPLETED what the flow named. Of MESSAGE_RECEIVED the data has the content, which is put into the thread.`,
		Example: "  agent executions event EVENT_COMPLETED invoice-7 --data '{\"paid\": true}' --id bank-42\n" +
			"  agent executions event MESSAGE_RECEIVED ana --data '{\"content\": \"yes\"}'\n" +
			"  agent executions event DOCUMENT_UPLOADED 0198… --data '{\"document\": \"cv\", \"url\": \"https://…\"}'",
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains(events, args[0]) {
				return usageError("%q is not an event that comes from outside: %s", args[0], strings.Join(events, ", "))
			}
			text, err := c.readJSON(data)
			if err != nil {
				return err
			}
			if args[1] == "" {
				return usageError("the key is empty: say which wait is meant")
			}
			return c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
				got, err := c.raiseEvent(cmd.Context(), s, args[0], args[1], text, id)
				if err != nil {
					return err
				}
				return c.printDelivered(got)
			})(cmd, args)
		},
	}
	cmd.Flags().StringVar(&data, "data", "{}", "what the event says: JSON, @file, or - for standard input")
	cmd.Flags().StringVar(&id, "id", "", "makes it count once, however often it is raised")
	return cmd
}

// raiseEvent delivers an event, and records who raised it, in one transaction.
func (c *cli) raiseEvent(
	ctx context.Context, s *session, event, key string, data json.RawMessage, id string,
) (got executions.Delivered, err error) {
	a, err := c.app(s, nil)
	if err != nil {
		return got, err
	}
	output := map[string]any{}
	what := fmt.Sprintf("the wait for %s %.300q", event, key)
	switch {
	case event == "MESSAGE_RECEIVED":
		what = fmt.Sprintf("thread %q, or the message id,", key)
	case id != "":
		what = fmt.Sprintf("event id %.300q", id)
	}
	raised := activity.Act{Name: "raise_event", Within: true, Input: map[string]any{"event": event, "key": key, "id": id}}
	err = new(postgres.KeyedTx).Try(ctx, what, func(ctx context.Context) error {
		_, err := activity.Record(ctx, s.pool, raised, func(tx pgx.Tx, _ string) (_ any, err error) {
			if event == "MESSAGE_RECEIVED" {
				got, err = receiveMessage(ctx, a, tx, key, data, id)
			} else {
				got, err = a.engine.Deliver(ctx, tx, event, key, data, id)
			}
			output["event_id"], output["resumed"] = got.EventID, got.Resumed
			return output, err
		})
		return err
	})
	err = postgres.ExplainLock(ctx, s.pool, err, what, "agent_events", "agent_executions", "agent_threads", "agent_locks")
	if postgres.IsCode(err, "22023", "22P02") {
		return got, &exitError{exitUsage, err}
	}
	return got, err
}

// printDelivered says which executions an event has resumed.
func (c *cli) printDelivered(got executions.Delivered) error {
	resumed := append([]string{}, got.Resumed...)
	return c.print(map[string]any{"event_id": got.EventID, "resumed": resumed}, func(w io.Writer) error {
		if len(resumed) == 0 {
			_, err := fmt.Fprintf(w, "event %s: nobody waits for it now; it is kept for the first that will\n", got.EventID)
			return err
		}
		_, err := fmt.Fprintf(w, "event %s: resumed %s\n", got.EventID, strings.Join(resumed, ", "))
		return err
	})
}

// receiveMessage puts a message into a thread, which raises the event.
func receiveMessage(ctx context.Context, a *app, tx pgx.Tx, thread string, data json.RawMessage, id string) (executions.Delivered, error) {
	var said map[string]any
	if err := json.Unmarshal(data, &said); err != nil {
		return executions.Delivered{}, usageError(`--data: an object is needed, such as {"content": "yes"}`)
	}
	content, _ := said["content"].(string)
	if content == "" {
		return executions.Delivered{}, usageError(`--data: of a message the content is needed, such as {"content": "yes"}`)
	}
	delete(said, "content")
	arrived, err := threads.Receive(ctx, a.engine, tx, threads.Incoming{ThreadID: thread, Content: content, Data: said, ID: id})
	if errors.Is(err, threads.ErrNotFound) {
		err = hint(fmt.Errorf("thread %q: %w", thread, err), "see agent threads ls")
	}
	return executions.Delivered{EventID: arrived.EventID, Resumed: arrived.Resumed}, err
}
