package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"strings"
	"syscall"
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
ls), the exit code is 1, and a process that runs agent serve resumes the turn. The exit code is also 1 for a turn
without an answer: the model stalled, or a limit of tokens, money, time or model calls was reached.`,
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
			if c.host == nil && !watch { // a closed pipe must not end the process with the lane held
				signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
			}
			err := c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app.App) error {
				if watch {
					return c.watchOperate(ctx, a)
				}
				return c.operate(ctx, s, a, operateOptions{id, agent, wait}, args)
			})
			if file, ok := errors.AsType[*fs.PathError](err); ok && errors.Is(file, syscall.EPIPE) {
				return &exitError{exitPipe, nil}
			}
			return err
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
func (c *cli) operate(ctx context.Context, s *session, a *app.App, opts operateOptions, args []string) (err error) {
	admin, err := a.Operate.Session(opts.id, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, admin.Close(ctx)) }()
	if err := admin.SetAgent(ctx, opts.agent); err != nil {
		return err
	}
	o := &operator{cli: c, s: s, app: a, admin: admin}
	fromConsole := len(args) > 0 && c.host != nil && c.sent.Asks // a line of a remote console
	if fromConsole && strings.HasPrefix(args[0], "/") {
		// A slash command needs no lane. A decision acquires the lane if it is free: then this process resumes the turn
		// that waited for the decision, and shows it.
		if isDecision(args[0]) {
			if err := admin.Hold(ctx, false); err != nil && !errors.Is(err, lanes.ErrBusy) {
				return err
			}
		}
		return o.runCallersLine(ctx, args[0])
	}
	if err := c.acquireLane(ctx, a, admin, opts.wait); err != nil {
		return err
	}
	switch {
	case fromConsole:
		return o.runCallersLine(ctx, args[0])
	case len(args) > 0:
		return o.runOnce(ctx, args[0])
	case !c.json && terminal(c.in) && terminal(c.out):
		return o.interact(ctx)
	}
	return o.runLines(ctx)
}

// isDecision reports whether a line decides an approval.
func isDecision(line string) bool {
	name, _, _ := strings.Cut(line, " ")
	return slashScopes[name] == principals.ApprovalsDecide
}

// acquireLane acquires the lane operate, or reports its holder.
func (c *cli) acquireLane(ctx context.Context, a *app.App, admin *operate.Session, wait bool) error {
	if c.host != nil && c.sent.Asks {
		if err := waitForDetach(ctx, a, admin); err != nil {
			return err
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

// A turn ends within a moment after its console disconnects. Another console may hold the session's lane for long.
const (
	detachTimeout = 3 * time.Second
	detachPoll    = 50 * time.Millisecond
)

// waitForDetach waits until the previous line of a remote console has released the lane, for at most detachTimeout.
// Each line of such a console is a command of its own.
func waitForDetach(ctx context.Context, a *app.App, admin *operate.Session) error {
	for began := time.Now(); time.Since(began) < detachTimeout; {
		holder, err := a.Operate.Holder(ctx)
		if err != nil || holder.SessionID != admin.ID() {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(detachPoll):
		}
	}
	return nil
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
