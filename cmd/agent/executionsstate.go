package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/executions"
)

func (c *cli) executionsStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Count what is pending, running and waiting, with the mean age", Args: args(0, 0, "no arguments"),
		Long: "Count what is pending, running and waiting, with the mean age. In SQL: select * from agent_executions_by_status.",
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			got, err := executions.CountByStatus(cmd.Context(), s.pool)
			if err != nil {
				return err
			}
			if err := c.tellPause(cmd.Context(), s); err != nil {
				return err
			}
			return c.print(listing(got, ""), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, r := range got {
					rows[i] = []string{string(r.Status), fmt.Sprint(r.Count), seconds(r.AvgAgeSeconds)}
				}
				return table(w, "nothing", []string{"STATUS", "COUNT", "MEAN AGE"}, rows)
			})
		}),
	}
}

func (c *cli) executionsWaitingCommand() *cobra.Command {
	var kind string
	var limit int
	cmd := &cobra.Command{
		Use: "waiting", Short: "List what waits, the nearest deadline first", Args: args(0, 0, "no arguments"),
		Long: "List what waits, the nearest deadline first. In SQL: select * from agent_executions_waiting.",
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			return c.listWaiting(cmd, s, kind, false, limit, "nothing waits")
		}),
	}
	wordFlag(cmd.Flags(), &kind, "for", "only this kind",
		"response", "agent", "document", "signature", "test", "event", "delay", "approval", "lane")
	limitFlag(cmd.Flags(), &limit, 50)
	return cmd
}

func (c *cli) executionsStuckCommand() *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use: "stuck", Short: "List what waits although its deadline has passed", Args: args(0, 0, "no arguments"),
		Long: `List what waits although its deadline has passed and that nobody has touched for an hour. There should be nothing: some process
has to run agent serve. In SQL: select * from agent_executions_stuck.`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			return c.listWaiting(cmd, s, "", true, limit, "nothing is stuck")
		}),
	}
	limitFlag(cmd.Flags(), &limit, 50)
	return cmd
}

func (c *cli) listWaiting(cmd *cobra.Command, s *session, kind string, stuck bool, limit int, empty string) error {
	got, err := executions.ListWaiting(cmd.Context(), s.pool, kind, stuck, limit)
	if err != nil {
		return err
	}
	for i := range got {
		got[i] = got[i].Redacted()
	}
	return c.print(listing(got, ""), func(w io.Writer) error {
		rows := make([][]string, len(got))
		for i, r := range got {
			rows[i] = []string{r.ID, r.Flow, r.WaitingFor, clipped(r.WaitingKey, 40), when(r.WaitingUntil), seconds(r.Waited), r.TraceID}
		}
		return table(w, empty, []string{"EXECUTION", "FLOW", "WAITS FOR", "KEY", "UNTIL", "SINCE", "TRACE"}, rows)
	})
}
