package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
)

func (c *cli) executionsStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Count pending, running and waiting executions, with their mean age",
		Args: positionalArgs(0, 0, "no arguments"),
		Long: "Count pending, running and waiting executions, with their mean age. In SQL: select * from " +
			"agent_executions_by_status.",
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			counts, err := executions.CountByStatus(cmd.Context(), s.Pool)
			if err != nil {
				return err
			}
			if err := c.warnPaused(cmd.Context(), s); err != nil {
				return err
			}
			return printRows(c, counts, "", "nothing", []string{"STATUS", "COUNT", "MEAN AGE"},
				func(r executions.StatusCount) []string {
					return []string{string(r.Status), fmt.Sprint(r.Count), human.Seconds(r.AvgAgeSeconds)}
				})
		}),
	}
}

func (c *cli) executionsWaitingCommand() *cobra.Command {
	var kind string
	var limit int
	cmd := &cobra.Command{
		Use: "waiting", Short: "List waiting executions, the nearest deadline first",
		Args: positionalArgs(0, 0, "no arguments"),
		Long: "List waiting executions, the nearest deadline first. In SQL: select * from agent_executions_waiting.",
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			return c.listWaiting(cmd, s, kind, false, limit, "no waiting executions")
		}),
	}
	enumFlag(cmd.Flags(), &kind, "for", "only this kind",
		"response", "agent", "document", "signature", "test", "event", "delay", "approval", "lane")
	limitFlag(cmd.Flags(), &limit, 50)
	return cmd
}

func (c *cli) executionsStuckCommand() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use: "stuck", Short: "List executions waiting past their deadline without an update for an hour",
		Args: positionalArgs(0, 0, "no arguments"),
		Long: `List executions waiting past their deadline without an update for an hour. If there are any, check that agent
serve runs. In SQL: select * from agent_executions_stuck.`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			return c.listWaiting(cmd, s, "", true, limit, "no stuck executions")
		}),
	}
	limitFlag(cmd.Flags(), &limit, 50)
	return cmd
}

func (c *cli) listWaiting(cmd *cobra.Command, s *session, kind string, stuck bool, limit int, empty string) error {
	rows, err := executions.ListWaiting(cmd.Context(), s.Pool, kind, stuck, limit)
	if err != nil {
		return err
	}
	for i := range rows {
		rows[i] = rows[i].Redacted(cmd.Context())
	}
	return printRows(c, rows, "", empty,
		[]string{"EXECUTION", "FLOW", "WAITS FOR", "KEY", "UNTIL", "SINCE", "TRACE"}, func(r executions.WaitingRow) []string {
			return []string{
				r.ID, r.Flow, r.WaitingFor, truncate(r.WaitingKey, 40), formatTime(r.WaitingUntil),
				human.Seconds(r.Waited), r.TraceID,
			}
		})
}
