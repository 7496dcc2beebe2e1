package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/threads"
)

func (c *cli) operateCommand() *cobra.Command {
	var id, agent string
	var wait, watch bool
	cmd := &cobra.Command{
		Use:   "operate [MESSAGE]",
		Short: "Talk with the agent as its admin",
		Long: `Talk with the agent as its admin: on a terminal line by line (/help lists what else can be done there), from a pipe one
turn per line, with MESSAGE one turn. The answer goes to stdout; tool calls, approvals and the trace id go to stderr, except
on a terminal.

One admin works at a time: the lane operate is held meanwhile, heartbeats give way, and whoever comes second is told who is
at work (exit 75), may stand in the queue (--wait) or look on (--watch).

^C cancels the turn and stops what it does; ^D leaves. A call that needs leave is asked for where there is somebody to ask: y
approves exactly the call that is shown, nothing leaves it open, anything else refuses it and is the reason. Elsewhere it
stays open (agent approvals ls), the exit code is 1, and the turn goes on in a process that runs agent serve. The exit code is 1 also
for a turn without an answer: the model stalled, or a limit of tokens, money, time or model calls was reached.`,
		Example: "  agent operate\n  agent operate 'how large are the tables?'\n  agent operate --session ses_… 'and the indexes?' --json",
		Args:    message,
		RunE: func(cmd *cobra.Command, args []string) error {
			if watch && (len(args) > 0 || wait || id != "" || agent != "") {
				return usageError("--watch goes with no message, no --wait, no --agent and no --session")
			}
			if id != "" && threads.CheckID(id) != nil {
				return usageError("--session: %w", threads.ErrInvalid)
			}
			return c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app) error {
				if watch {
					return c.watchOperate(ctx, a)
				}
				return c.operate(ctx, s, a, sessionOf{id, agent, wait}, args)
			})
		},
	}
	cmd.Flags().StringVar(&id, "session", "", "go on with this session")
	cmd.Flags().StringVar(&agent, "agent", "", "talk with this agent instead of the session's or the default one")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait while another admin is at work")
	cmd.Flags().BoolVar(&watch, "watch", false, "follow the admin who is at work, read only, until ^C")
	return cmd
}

// withApp runs a command's work in a process that runs executions itself.
func (c *cli) withApp(ctx context.Context, work func(context.Context, *session, *app) error) error {
	s, err := c.session(ctx)
	if err != nil {
		return err
	}
	defer s.close(ctx)
	if _, err := builtins.Put(ctx, s.pool); err != nil {
		return err
	}
	model, _, stop, err := newModel(ctx, s.config, s.log, models.Retry{})
	if err != nil {
		return err
	}
	defer stop()
	a, err := c.app(s, model)
	if err != nil {
		return err
	}
	return a.beat(ctx, func(ctx context.Context) error { return work(ctx, s, a) })
}

// sessionOf says which session is meant.
type sessionOf struct {
	id, agent string
	wait      bool
}

// operate takes turns in the way that suits where the words come from.
func (c *cli) operate(ctx context.Context, s *session, a *app, which sessionOf, args []string) (err error) {
	admin, err := a.operate.Session(which.id, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, admin.Close(ctx)) }()
	if err := admin.As(ctx, which.agent); err != nil {
		return err
	}
	if err := c.enter(ctx, a, admin, which.wait); err != nil {
		return err
	}
	o := &operator{cli: c, s: s, app: a, admin: admin, left: map[string]string{}}
	switch {
	case len(args) > 0:
		return o.once(ctx, args[0])
	case !c.json && terminal(c.in) && terminal(c.out):
		return o.converse(ctx)
	}
	return o.lines(ctx)
}

// enter takes the lane, and says who has it when it is not free.
func (c *cli) enter(ctx context.Context, a *app, admin *operate.Session, wait bool) error {
	err := admin.Hold(ctx, false)
	busy, ok := errors.AsType[*lanes.BusyError](err)
	if !ok {
		return err
	}
	told := errors.New(a.operate.Explain(ctx, busy))
	if !wait {
		a.operate.NoteSkipped(ctx, admin.ID(), busy)
		return &exitError{exitBusy, hint(told, "wait with --wait, or look on with --watch")}
	}
	c.say("%s; waiting …", printable(told.Error()))
	if err = admin.Hold(ctx, true); errors.Is(err, lanes.ErrBusy) {
		return &exitError{exitBusy, err}
	}
	return err
}

// watchOperate looks on until ctx ends, which is no failure.
func (c *cli) watchOperate(ctx context.Context, a *app) error {
	show := c.shower()
	if err := a.operate.Watch(ctx, show.event); err != nil {
		return err
	}
	if show.failed != nil {
		return fmt.Errorf("print events: %w", show.failed)
	}
	return nil
}
