package main

import (
	"errors"
	"io"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/why"
)

func (c *cli) whyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "why ID | last",
		Short: "Explain a run: its cause, waits and outcome",
		Long: `Explain a run: its causes across traces, actions, waits, lane holders, lost workers, rejected writes, effects
in other traces, and cost. ID is a trace id in any form: hb_01JD…, the ULID alone, or the 32 hex digits of tracing
tools. The id of an execution explains the execution's trace. In SQL: select * from why('hb_01JD…').`,
		Example: "  agent why last\n  agent why last --surface heartbeat\n  agent why hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE --json",
		Args:    positionalArgs(1, 1, "a trace id, or last"),
		RunE: c.withReader(func(cmd *cobra.Command, args []string, s *session) error {
			id, err := traceArgument(cmd.Context(), s, args[0])
			if err != nil {
				return err
			}
			return c.showWhy(cmd, s, id)
		}),
	}
	cmd.AddCommand(c.whyLastCommand())
	return cmd
}

func (c *cli) showWhy(cmd *cobra.Command, s *session, id string) error {
	answer, err := why.Of(cmd.Context(), s.Read, id)
	if errors.Is(err, activity.ErrNotFound) {
		return hint(err, "see agent trace ls")
	}
	if err != nil {
		return err
	}
	return c.tryPrint(answer, func(w io.Writer) error { return why.Write(w, answer, c.colour()) })
}

func (c *cli) whyLastCommand() *cobra.Command {
	var surface string
	cmd := &cobra.Command{
		Use: "last", Short: "Explain the newest run that is no trial of an eval", Args: positionalArgs(0, 0, "no arguments"),
		RunE: c.withReader(func(cmd *cobra.Command, _ []string, s *session) error {
			newest, err := newestTrace(cmd.Context(), s, surface)
			if err != nil {
				return err
			}
			return c.showWhy(cmd, s, newest)
		}),
	}
	surfaceFlag(cmd.Flags(), &surface)
	return cmd
}
