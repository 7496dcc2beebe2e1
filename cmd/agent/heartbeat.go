package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
)

func (c *cli) heartbeatCommand() *cobra.Command {
	var agent string
	cmd := &cobra.Command{
		Use:   "heartbeat",
		Short: "Run one heartbeat now",
		Long: `Run one heartbeat in this process now and print its trace. It is recorded as skipped, without an error, while
another heartbeat runs, an admin holds the lane operate, or the agent is paused. If an admin arrives while it runs, it
waits, and a process that runs agent serve or agent dev resumes it.`,
		Args: positionalArgs(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app.App) error {
				acting, err := findAgent(ctx, s, agent, 0)
				if err != nil {
					return err
				}
				if terminal(c.err) {
					c.infof("running a heartbeat …")
				}
				ended, err := a.Engine.RunSync(ctx, heartbeat.SpecOf(acting))
				if held, paused := errors.AsType[*executions.PausedError](err); paused {
					return c.skipHeartbeat(ctx, s, acting.Name, held.Pause)
				}
				if err != nil {
					return err
				}
				return c.reportHeartbeat(ctx, s, ended)
			})
		},
	}
	cmd.Flags().StringVar(&agent, "agent", "", "run it for this agent instead of the default one")
	return cmd
}

// reportHeartbeat prints the trace of a heartbeat. A failed heartbeat is an error.
func (c *cli) reportHeartbeat(ctx context.Context, s *session, x executions.Execution) error {
	ctx = context.WithoutCancel(ctx)
	x = x.Redacted(ctx)
	story, err := activity.TraceOf(ctx, s.Pool, x.TraceID)
	if err != nil {
		return err
	}
	err = c.tryPrint(struct {
		Execution executions.Execution `json:"execution"`
		Trace     activity.Trace       `json:"trace"`
	}{x, story}, func(w io.Writer) error { return c.writeHeartbeat(w, story, x) })
	if err != nil {
		return err
	}
	switch x.Status {
	case executions.Completed:
		return nil
	case executions.Cancelled:
		return &exitError{exitInterrupted, nil}
	case executions.Waiting:
		c.infof("the heartbeat waits for %s; a process that runs `agent serve` or `agent dev` resumes it", waitText(x))
		return nil
	case executions.Running, executions.Pending:
		c.infof("the heartbeat is %s; a process that runs `agent serve` or `agent dev` resumes it", x.Status)
		return nil
	case executions.Failed, executions.Timeout:
	}
	return &tracedError{fmt.Errorf("heartbeat %s: %s", x.Status, postgres.Deref(x.ErrorMessage)), x.TraceID}
}

func waitText(x executions.Execution) string {
	if postgres.Deref(x.WaitingFor) == "lane" && postgres.Deref(x.WaitingKey) == heartbeat.OperateLane {
		return "the admin, holder of the lane " + heartbeat.OperateLane
	}
	return printable(postgres.Deref(x.WaitingFor) + " " + postgres.Deref(x.WaitingKey))
}

// writeHeartbeat prints the trace and the summary of a heartbeat.
func (c *cli) writeHeartbeat(w io.Writer, story activity.Trace, x executions.Execution) error {
	if err := activity.WriteStory(w, story, c.colour()); err != nil {
		return err
	}
	if x.ResultSummary != "" {
		fmt.Fprintf(w, "\n%s\n", printable(x.ResultSummary))
	}
	return nil
}
