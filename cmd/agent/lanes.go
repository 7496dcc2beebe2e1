package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/lanes/lanerun"
	"github.com/lanekeeper/lanekeeper/trace"
)

func (c *cli) lanesCommand() *cobra.Command {
	return group("lanes", "List held lanes, release one, run a command in one",
		c.lanesListCommand(), c.lanesReleaseCommand(), c.lanesRunCommand())
}

func (c *cli) lanesListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List held lanes", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			live, err := lanes.Live(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			return printRows(c, live, "", "no lane is held",
				[]string{"LANE", "HELD BY", "TRACE", "HELD FOR", "TIME LEFT", "TOKEN"}, func(l lanes.LiveLane) []string {
					left := "parked"
					if l.ExpiresIn != nil {
						left = human.Seconds(*l.ExpiresIn)
					}
					return []string{
						l.Lane, l.LockedBy, postgres.Deref(l.TraceID), human.Seconds(l.HeldFor), left,
						fmt.Sprint(l.FencingToken),
					}
				})
		}),
	}
}

func (c *cli) lanesReleaseCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "release LANE", Short: "Release a lane by force",
		Long: `Release a lane from any holder. The holder's fencing token becomes invalid at once, and its fenced
writes are rejected. The break is recorded under the holder's trace with the reason.`,
		Args: positionalArgs(1, 1, "a lane"),
		RunE: c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
			broken, err := lanes.Break(cmd.Context(), s.Pool, args[0], reason)
			if blocked, ok := errors.AsType[*lanes.BlockedError](err); ok {
				return hint(err, "%s", blocked.Hint)
			}
			if err != nil {
				return err
			}
			if id, run := strings.CutPrefix(args[0], "execution:"); run && !broken {
				return hint(fmt.Errorf("%s is an execution, not a lane", args[0]), "agent executions cancel %s ends it", id)
			}
			if !broken {
				return hint(fmt.Errorf("lane %q is not held", args[0]), "see agent lanes ls")
			}
			return c.printf(map[string]any{"lane": args[0], "released": true}, "released %s\n", args[0])
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "released from the command line", "reason for the audit log")
	return cmd
}

func (c *cli) lanesRunCommand() *cobra.Command {
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "run LANE [--ttl 1h] -- CMD…",
		Short: "Run a command while holding a lane, like flock",
		Long: `Run a command while holding a lane, so that processes on all machines take turns. The exit code is the
command's, or 1 if it lost the lane. If the lane is busy, the command does not run, the skip is recorded with the
holder, and the exit code is 75. The lane is renewed while the command runs and released when it ends; a lost lane ends
the command. --ttl is how long the lane outlives a crash of this process.`,
		Example: "  agent lanes run pipeline:prices --ttl 1h -- ./import-prices.sh",
		Args: func(cmd *cobra.Command, given []string) error {
			if cmd.ArgsLenAtDash() == 1 && len(given) > 1 {
				return nil
			}
			return positionalArgs(2, 1, "one lane, --, and a command")(cmd, given)
		},
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			return c.runInLane(cmd, s, args[0], ttl, args[1:])
		}),
	}
	ttlFlag(cmd.Flags(), &ttl, "how long the lane outlives a crash, from 1s to 30d; default 1h or the lane's own")
	return cmd
}

// recordSkipped records work skipped because its lane is busy, with the holder, under a separate trace.
func (s *session) recordSkipped(ctx context.Context, what string, input map[string]any, busy *lanes.BusyError) {
	input["lane"], input["holder"] = busy.Lane, busy.Holder
	_, err := activity.Note(ctx, s.Pool, activity.Entry{
		TraceID: string(trace.New(trace.Operate)), Surface: string(trace.Operate), Agent: admin, Skill: what,
		Input: input, Lane: busy.Lane,
	}, activity.Outcome{Status: activity.Skipped, Output: busy.Error()})
	if err != nil {
		s.log.WarnContext(ctx, "skipped work not recorded", "lane", busy.Lane, "error", err)
	}
}

// runInLane runs the command and returns its exit code. Signals go to the command; the lane stays held until it ends.
func (c *cli) runInLane(cmd *cobra.Command, s *session, lane string, ttl time.Duration, command []string) error {
	listener := postgres.NewListener(postgres.Dialer(s.Sessions()), s.log) // reports a lost lane
	keeper := lanes.NewKeeper(s.Pool, lanes.Options{Listener: listener, Logger: s.log, Disabled: !s.config.LanesEnabled})
	signal.Reset(os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	signals := make(chan os.Signal, 1) // a signal before RunCommand listens must not end the process with the lane held
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)
	background, stop := context.WithCancel(context.WithoutCancel(cmd.Context()))
	var renewing errgroup.Group
	renewing.Go(func() error { return keeper.Run(background) })
	renewing.Go(func() error { return listener.Run(background) })
	var skipped *lanes.BusyError
	code, err := lanerun.RunCommand(cmd.Context(), keeper, lane, ttl, command, lanerun.Stdio{
		In: c.in, Out: c.out, Err: c.err, Log: s.log,
		Skipped: func(ctx context.Context, busy *lanes.BusyError) {
			skipped = busy
			s.recordSkipped(ctx, "run_in_lane", map[string]any{"command": command[0]}, busy)
		},
	})
	stop()
	err = errors.Join(err, renewing.Wait())
	switch {
	case errors.Is(err, lanes.ErrInvalid):
		return err
	case err != nil:
		return &exitError{max(code, exitFailed), err}
	case skipped != nil && c.json: // as text, the log's warning says it
		return &exitError{exitBusy, skipped}
	case code != 0:
		return &exitError{code, nil}
	}
	return nil
}
