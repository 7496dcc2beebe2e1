package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/trace"
)

func (c *cli) heartbeatCommand() *cobra.Command {
	var agent string
	cmd := &cobra.Command{
		Use:   "heartbeat",
		Short: "Run one heartbeat, now",
		Long: `Run one heartbeat in this process, now, and print its story. When another heartbeat runs, or an admin is at
work, or the agent is paused, it is recorded as skipped, and that is no error. When an admin comes while it runs, it waits, and goes on in
a process that runs agent serve or agent dev.`,
		Args: args(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
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
			acting, err := findAgent(ctx, s, agent, 0)
			if err != nil {
				return err
			}
			spec := heartbeat.SpecOf(acting)
			if terminal(c.err) {
				c.say("running a heartbeat …")
			}
			var ended executions.Execution
			err = a.beat(ctx, func(ctx context.Context) error {
				ended, err = a.engine.RunSync(ctx, spec)
				return err
			})
			if held, paused := errors.AsType[*executions.PausedError](err); paused {
				return c.skipHeartbeat(ctx, s, held.Pause)
			}
			if err != nil {
				return err
			}
			return c.reportHeartbeat(ctx, s, ended)
		},
	}
	cmd.Flags().StringVar(&agent, "agent", "", "of this agent instead of the default one")
	return cmd
}

// reportHeartbeat prints the story of a heartbeat; one that did not end well is a failure.
func (c *cli) reportHeartbeat(ctx context.Context, s *session, x executions.Execution) error {
	ctx = context.WithoutCancel(ctx)
	x = x.Redacted()
	story, err := activity.TraceOf(ctx, s.pool, x.TraceID)
	if err != nil {
		return err
	}
	err = c.print(struct {
		Execution executions.Execution `json:"execution"`
		Trace     activity.Trace       `json:"trace"`
	}{x, story}, func(w io.Writer) error {
		return c.writeHeartbeat(w, story, x)
	})
	if err != nil {
		return err
	}
	switch x.Status {
	case executions.Completed:
		return nil
	case executions.Cancelled:
		return &exitError{exitInterrupted, nil}
	case executions.Waiting:
		c.say("the heartbeat waits for %s; it goes on in a process that runs `agent serve` or `agent dev`", awaited(x))
		return nil
	case executions.Running, executions.Pending:
		c.say("the heartbeat is %s; it goes on in a process that runs `agent serve` or `agent dev`", x.Status)
		return nil
	case executions.Failed, executions.Timeout:
	}
	return &traced{fmt.Errorf("heartbeat %s: %s", x.Status, deref(x.ErrorMessage)), x.TraceID}
}

// awaited says for what a heartbeat waits.
func awaited(x executions.Execution) string {
	if deref(x.WaitingFor) == "lane" && deref(x.WaitingKey) == heartbeat.OperateLane {
		return "the admin, who holds the lane " + heartbeat.OperateLane
	}
	return printable(deref(x.WaitingFor) + " " + deref(x.WaitingKey))
}

// writeHeartbeat shows a heartbeat to a person: its story, and what came of it in a sentence.
func (c *cli) writeHeartbeat(w io.Writer, story activity.Trace, x executions.Execution) error {
	if err := activity.WriteStory(w, story, c.colour()); err != nil {
		return err
	}
	if x.ResultSummary != "" {
		fmt.Fprintf(w, "\n%s\n", printable(x.ResultSummary))
	}
	return nil
}

// deref is the text behind a pointer that may be nil.
func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func (c *cli) pauseCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "pause --reason WHY", Short: "Pause everything the agent does by itself", Args: args(0, 0, "no arguments; say why with --reason"),
		Long: `Pause everything the agent does by itself, in all processes, until agent resume: no heartbeat, automation, webhook or flow
begins, and those that run stop before their next step and go on afterwards. Times that fall due are recorded as skipped;
deliveries, events and messages are kept. agent operate and the chat go on. In SQL: select pause_agent('why').`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := executions.PauseAll(cmd.Context(), s.pool, admin, reason)
			if err != nil {
				return err
			}
			return c.print(got, func(w io.Writer) error {
				said := got.String()
				if !got.Changed {
					said = "it was so already: " + said
				}
				_, err := fmt.Fprintf(w, "%s\ntrace %s; `agent resume` ends it\n", printable(said), got.TraceID)
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for everybody who finds it paused")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if strings.TrimSpace(reason) == "" {
			return &exitError{exitUsage, seeHelp(errors.New("say why with --reason"), cmd)}
		}
		return nil
	}
	return cmd
}

func (c *cli) resumeCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "resume", Short: "Let the agent work by itself again", Args: args(0, 0, "no arguments"),
		Long: `End the pause that agent pause began. What is ready goes on at once; times that fell due meanwhile are not made good. In
SQL: select resume_agent().`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := executions.ResumeAll(cmd.Context(), s.pool, admin, reason)
			if err != nil {
				return err
			}
			return c.print(got, func(w io.Writer) error {
				if !got.Changed {
					_, err := fmt.Fprintln(w, "the agent is not paused")
					return err
				}
				_, err := fmt.Fprintf(w, "resumed; it was paused since %s UTC by %s: %s\ntrace %s\n",
					when(*got.PausedAt), printable(got.PausedBy), printable(got.Reason), got.TraceID)
				return err
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the record")
	return cmd
}

// tellPause says on the side that nothing begins, where somebody looks at what runs.
func (c *cli) tellPause(ctx context.Context, s *session) error {
	p, err := executions.CurrentPause(ctx, s.pool)
	if err == nil && p.Paused {
		c.say("%s; `agent resume` ends it", printable(p.String()))
	}
	return err
}

// skipHeartbeat records a heartbeat that does not begin because of a pause, and prints its story.
func (c *cli) skipHeartbeat(ctx context.Context, s *session, p executions.Pause) error {
	id, err := executions.RecordSkipped(ctx, s.pool, executions.Spec{
		Flow: heartbeat.Flow, Surface: trace.Heartbeat, Agent: s.config.Name,
	}, p)
	if err != nil {
		return err
	}
	story, err := activity.TraceOf(ctx, s.pool, string(id))
	if err != nil {
		return err
	}
	return c.print(struct {
		Skipped string         `json:"skipped"`
		Trace   activity.Trace `json:"trace"`
	}{p.String(), story}, func(w io.Writer) error {
		if err := activity.WriteStory(w, story, c.colour()); err != nil {
			return err
		}
		_, err := fmt.Fprintf(w, "\nskipped: %s; `agent resume` ends that\n", printable(p.String()))
		return err
	})
}
