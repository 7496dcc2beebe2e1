package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/surfaces/heartbeat"
	"github.com/lanekeeper/lanekeeper/trace"
)

func (c *cli) pauseCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "pause --reason WHY", Short: "Pause all autonomous work",
		Args: positionalArgs(0, 0, "no arguments; name the reason with --reason"),
		Long: `Pause all autonomous work in all processes until agent resume. No heartbeat, automation, webhook or flow
starts by itself; running ones stop before their next step. Scheduled times are recorded as skipped; deliveries, events
and messages are stored. agent operate, the chat, agent automations run and agent skills call continue. In SQL: select
pause_agent('why').`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, _ []string, s *session) error {
			pause, err := executions.PauseAll(cmd.Context(), s.Pool, actor(cmd.Context()), reason)
			if err != nil {
				return err
			}
			return c.print(pause, func(w io.Writer) {
				text := pause.String()
				if !pause.Changed {
					text = "already: " + text
				}
				fmt.Fprintf(w, "%s\ntrace %s; `agent resume` ends it\n", printable(text), pause.TraceID)
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "reason, shown while it is paused")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if strings.TrimSpace(reason) == "" {
			return &exitError{exitUsage, helpHint(errors.New("name the reason with --reason"), cmd)}
		}
		return nil
	}
	return cmd
}

func (c *cli) resumeCommand() *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use: "resume", Short: "Resume autonomous work", Args: positionalArgs(0, 0, "no arguments"),
		Long: `End the pause of agent pause. Ready work continues at once; missed scheduled times stay skipped. In SQL: select
resume_agent().`,
		RunE: c.withPromptSession(func(cmd *cobra.Command, _ []string, s *session) error {
			resumed, err := executions.ResumeAll(cmd.Context(), s.Pool, actor(cmd.Context()), reason)
			if err != nil {
				return err
			}
			return c.print(resumed, func(w io.Writer) {
				if !resumed.Changed {
					fmt.Fprintln(w, "the agent is not paused")
					return
				}
				fmt.Fprintf(w, "resumed; it was paused since %s UTC by %s: %s\ntrace %s\n",
					formatTime(*resumed.PausedAt), printable(resumed.PausedBy), printable(resumed.Reason), resumed.TraceID)
			})
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the audit log")
	return cmd
}

// warnPaused prints a note on stderr while the agent is paused.
func (c *cli) warnPaused(ctx context.Context, s *session) error {
	p, err := executions.CurrentPause(ctx, s.Pool)
	if err == nil && p.Paused {
		c.infof("%s; `agent resume` ends it", printable(p.String()))
	}
	return err
}

// skipHeartbeat records a heartbeat skipped by a pause and prints its trace.
func (c *cli) skipHeartbeat(ctx context.Context, s *session, agent string, p executions.Pause) error {
	id, err := executions.RecordSkipped(ctx, s.Pool, executions.Spec{
		Flow: heartbeat.Flow, Surface: trace.Heartbeat, Agent: agent,
	}, p)
	if err != nil {
		return err
	}
	story, err := activity.TraceOf(ctx, s.Pool, string(id))
	if err != nil {
		return err
	}
	return c.tryPrint(struct {
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
