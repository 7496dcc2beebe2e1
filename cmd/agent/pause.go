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
	id, err := executions.NoteSkipped(ctx, s.pool, executions.Spec{
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
