package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/threads"
)

func (c *cli) operateCommand() *cobra.Command {
	var id, agent string
	var wait, watch bool
	cmd := &cobra.Command{
		Use:   "operate [MESSAGE]",
		Short: "Talk to the agent as its admin",
		Long: `Talk to the agent as its admin. MESSAGE runs one turn; a pipe runs one turn per line; a terminal is interactive
(/help lists commands). The answer goes to stdout; tool calls, approvals and the trace id go to stderr, except on a
terminal.

One admin works at a time and holds the lane operate; heartbeats yield. A second admin gets the holder's name and exit
code 75, can queue (--wait) or watch (--watch).

^C cancels the turn; ^D leaves. On a terminal it asks for each approval: y approves exactly the shown call, an empty
line leaves it open, and any other text rejects it with that reason. Elsewhere the approval stays open (agent approvals
ls), the exit code is 1, and a process that runs agent serve resumes the turn. The exit code is also 1 for a turn without
an answer: the model stalled, or a limit of tokens, money, time or model calls was reached.`,
		Example: "  agent operate\n  agent operate 'how large are the tables?'\n  agent operate --session ses_… 'and the " +
			"indexes?' --json",
		Args: messageArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			if watch && (len(args) > 0 || wait || id != "" || agent != "") {
				return usageError("--watch excludes a message, --wait, --agent and --session")
			}
			if id != "" && threads.CheckID(id) != nil {
				return usageError("--session: %w", threads.ErrInvalid)
			}
			c.talks = true
			return c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app.App) error {
				if watch {
					return c.watchOperate(ctx, a)
				}
				return c.operate(ctx, s, a, operateOptions{id, agent, wait}, args)
			})
		},
	}
	cmd.Flags().StringVar(&id, "session", "", "continue this session")
	cmd.Flags().StringVar(&agent, "agent", "", "talk to this agent instead of the session's or the default one")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until the lane operate is free")
	cmd.Flags().BoolVar(&watch, "watch", false, "watch the current admin, read only, until ^C")
	return cmd
}

type operateOptions struct {
	id, agent string
	wait      bool
}

// operate runs turns from the argument, the terminal or the pipe.
func (c *cli) operate(ctx context.Context, s *session, a *app.App, which operateOptions, args []string) (err error) {
	admin, err := a.Operate.Session(which.id, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, admin.Close(ctx)) }()
	if err := admin.SetAgent(ctx, which.agent); err != nil {
		return err
	}
	o := &operator{cli: c, s: s, app: a, admin: admin}
	calls := len(args) > 0 && c.host != nil && c.sent.Asks // a line of a remote console
	if calls && strings.HasPrefix(args[0], "/") {
		// A command needs no lane. With it, this process resumes the turn that waited for a decision, and shows it.
		if decides(args[0]) {
			if err := admin.Hold(ctx, false); err != nil && !errors.Is(err, lanes.ErrBusy) {
				return err
			}
		}
		return o.runCallersLine(ctx, args[0])
	}
	if err := c.acquireLane(ctx, a, admin, which.wait); err != nil {
		return err
	}
	switch {
	case calls:
		return o.runCallersLine(ctx, args[0])
	case len(args) > 0:
		return o.runOnce(ctx, args[0])
	case !c.json && terminal(c.in) && terminal(c.out):
		return o.interact(ctx)
	}
	return o.runLines(ctx)
}

// decides reports whether a line decides an approval.
func decides(line string) bool {
	name, _, _ := strings.Cut(line, " ")
	return slashScopes[name] == principals.ApprovalsDecide
}

// A turn ends within a moment after its console leaves. Another console may hold the session's lane for long.
const (
	leavingLimit = 3 * time.Second
	leavingPoll  = 50 * time.Millisecond
)

// acquireLane acquires the lane operate, or reports its holder.
func (c *cli) acquireLane(ctx context.Context, a *app.App, admin *operate.Session, wait bool) error {
	for began := time.Now(); c.host != nil && c.sent.Asks && time.Since(began) < leavingLimit; {
		holder, err := a.Operate.Holder(ctx)
		if err != nil {
			return err
		}
		if holder.SessionID != admin.ID() {
			break
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(leavingPoll):
		}
	}
	err := admin.Hold(ctx, false)
	busy, ok := errors.AsType[*lanes.BusyError](err)
	if !ok {
		return err
	}
	explanation := errors.New(a.Operate.Explain(ctx, busy))
	if !wait {
		a.Operate.RecordSkipped(ctx, admin.ID(), busy)
		return &exitError{exitBusy, hint(explanation, "wait with --wait, or watch with --watch")}
	}
	c.infof("%s; waiting …", printable(explanation.Error()))
	if err = admin.Hold(ctx, true); errors.Is(err, lanes.ErrBusy) {
		return &exitError{exitBusy, err}
	}
	return err
}

// watchOperate prints another admin's turns until ctx ends.
func (c *cli) watchOperate(ctx context.Context, a *app.App) error {
	show := c.newEventPrinter()
	if err := a.Operate.Watch(ctx, show.print); err != nil {
		return err
	}
	if show.err != nil {
		return fmt.Errorf("print events: %w", show.err)
	}
	return nil
}
